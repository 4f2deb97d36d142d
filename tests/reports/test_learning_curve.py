"""The picture of a run."""

from __future__ import annotations

import pytest

from areal_jax.metrics import names
from areal_jax.reports.learning_curve import plot
from areal_jax.reports.series import Series


@pytest.mark.parametrize(
    "values", [[52_340.0, 135.0, 103.5], [1.9, 1.91, 1.9], [3.0]], ids=["steep", "flat", "one"]
)
@pytest.mark.parametrize(
    "also", [{}, {names.PASS_AT_1: Series([0], [0.5])}], ids=["alone", "with pass@1"]
)
def test_supervised_run_is_plotted_for_any_perplexity(values: list[float], also: dict[str, Series]):
    line = Series(list(range(len(values))), values)
    assert plot({names.LOSS: line, names.PERPLEXITY: line} | also).startswith(b"\x89PNG\r\n")


def test_run_without_metrics_has_a_picture() -> None:
    assert plot({}).startswith(b"\x89PNG\r\n")
