"""Names of slices for which programs can be compiled."""

from __future__ import annotations

import pytest

from areal_jax.parallel.topologies import compile_only_devices


@pytest.mark.parametrize("name", ["h100:8", "h200:8", "b200:8", "2xh100:8"])
def test_gpus_are_refused_with_what_to_do_instead(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"GPUs .* is not supported; pip install .*on_hardware\.sh"
    ):
        compile_only_devices(name)
