from __future__ import annotations

import pytest

from areal_jax.records import Weights, WeightSource
from areal_jax.weights.fixed import Fixed


def test_fixed_weights_are_the_newest_for_ever() -> None:
    weights = Weights(3, {"w": 1.0})
    source: WeightSource = Fixed(weights)
    assert source.newest(2) is weights
    assert source.newest(3) is None
    assert source.wait(3, 0.0) is weights
    with pytest.raises(TimeoutError, match="fixed at version 3, asked for version 4"):
        source.wait(4, 1000.0)
