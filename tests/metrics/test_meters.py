"""Meters keep sums and weights separate."""

import math

import numpy as np
import pytest

from areal_jax.metrics.meters import Meters


def test_means_divide_last_and_are_independent_of_cuts():
    parts = Meters()
    parts.update({"loss": (6.0, 3.0)})  # mean 2 of 3 tokens
    parts.update({"loss": (1.0, 1.0)})  # mean 1 of 1 token
    assert parts.flatten() == {"loss": 1.75}  # 7 / 4, and not (2 + 1) / 2


def test_merge_equals_adding_later_readings():
    earlier, later = Meters(), Meters()
    for meters, factor in ((earlier, 1.0), (later, 2.0)):
        meters.mean("mean", 3 * factor, factor)
        meters.mean("one reading", factor)
        meters.count("count")
        meters.count("tokens", 10 * factor)
        meters.gauge("gauge", factor)
        meters.maximum("largest", -factor)
    earlier.merge(later)
    # mean: (3 + 6) / (1 + 2); one reading: (1 + 2) / 2; tokens: 10 + 20
    expected = {
        "mean": 3.0,
        "one reading": 1.5,
        "count": 2.0,
        "tokens": 30.0,
        "gauge": 2.0,
        "largest": -1.0,
    }
    assert earlier.flatten() == expected


def test_update_accepts_arrays_and_a_prefix():
    meters = Meters()
    meters.update(
        {"loss": (np.float32(3), np.array(2)), "rate": np.float32(0.5)}, prefix="trainer/"
    )
    assert meters.flatten() == {"trainer/loss": 1.5, "trainer/rate": 0.5}


def test_empty_means_are_omitted_and_nan_persists():
    meters = Meters()
    meters.mean("nothing", 0.0, 0.0)
    for value in (1.0, float("nan"), 2.0):
        meters.maximum("largest", value)
    assert [(name, math.isnan(value)) for name, value in meters.flatten().items()] == [
        ("largest", True)
    ]


def test_one_name_has_one_kind_of_meter():
    meters = Meters()
    meters.update({"loss": (1.0, 1.0)})
    with pytest.raises(
        ValueError, match="loss: expected one kind of meter, found Mean and as Gauge"
    ):
        meters.update({"loss": 1.0})


def test_metrics_is_the_inverse_of_update() -> None:
    meters, again = Meters(), Meters()
    meters.update({"loss": (1.0, 4.0), "rate": 0.5})
    meters.update({"loss": (2.0, 2.0)})
    assert meters.metrics() == {"loss": (3.0, 6.0), "rate": 0.5}
    again.update(meters.metrics())
    assert again.flatten() == meters.flatten() == {"loss": 0.5, "rate": 0.5}
