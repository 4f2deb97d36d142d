"""Metrics are read once, and reduced without hiding an extreme."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.metrics import names
from areal_jax.metrics.table import describe
from areal_jax.reports.lines import Lines
from areal_jax.reports.sections import sections
from areal_jax.reports.series import (
    OTHER_S,
    STEP_S,
    TOKEN_ESS,
    WAITING_S,
    WAITING_SHARE,
    MetricSeries,
    Series,
    collect,
    reduce,
)
from areal_jax.reports.summary import bottleneck, summarize


def metrics(rows: list[dict]) -> MetricSeries:
    found = MetricSeries()
    for row in rows:
        found.add(row)
    return found


def test_lines_are_read_once_and_torn_ones_when_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    lines = Lines(path)
    assert list(lines.read()) == [] and not lines.is_replaced()
    path.write_bytes(b"one\ntwo\nthr")
    assert list(lines.read()) == [(0, b"one\n"), (4, b"two\n")]
    path.write_bytes(b"one\ntwo\nthree\n")
    assert list(lines.read()) == [(8, b"three\n")]
    assert list(lines.read()) == []


@pytest.mark.parametrize("is_replaced", [True, False])
def test_file_that_a_resumed_run_cut_is_read_again(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    lines = Lines(path)
    assert not lines.is_replaced()
    assert len(list(lines.read())) == 2
    if is_replaced:
        # Longer than what was read, but another file.
        (tmp_path / "copy").write_bytes(b"one\nTWO\nthree\n")
        (tmp_path / "copy").replace(path)
    else:
        path.write_bytes(b"one\n")
    assert lines.is_replaced()
    assert next(iter(lines.read())) == (0, b"one\n")
    assert not lines.is_replaced()


def test_rows_of_one_version_are_joined_and_nan_is_omitted() -> None:
    rows = [
        {"version": 0, "time_s": 5.0, "a": 1.0},
        {"version": 1, "a": None},
        {"version": 2, "a": 3.0},
        {"version": 0, "b": 7.0},
        # An evaluation that was repeated, and one of an older version that ended late.
        {"version": 2, "b": 8.0},
        {"version": 2, "b": 9.0},
        {"version": 1, "b": 6.0},
    ]
    assert collect(rows) == {
        "a": Series([0, 2], [1.0, 3.0]),
        "b": Series([0, 1, 2], [7.0, 6.0, 9.0]),
    }


def test_short_line_keeps_every_point() -> None:
    versions, values = np.arange(5), np.arange(5.0)
    found = reduce(versions, values, 5)
    assert found.versions is versions and found.means is values and found.lows is None


@given(
    st.lists(st.integers(0, 5000), min_size=20, max_size=300, unique=True),
    st.integers(4, 16),
    st.integers(0, 2**31),
)
def test_reduced_line_keeps_sum_extremes_and_end(chosen: list[int], points: int, seed: int) -> None:
    versions = np.array(sorted(chosen), np.int64)
    values = np.random.default_rng(seed).normal(size=len(versions))
    found = reduce(versions, values, points)
    assert found.lows is not None and found.highs is not None
    assert len(found.versions) <= points
    assert found.versions[-1] == versions[-1]
    assert found.lows.min() == values.min() and found.highs.max() == values.max()
    counts = np.diff(np.searchsorted(versions, found.versions, side="right"), prepend=0)
    np.testing.assert_allclose((found.means * counts).sum(), values.sum(), atol=1e-9)


def test_points_stay_when_rows_are_added() -> None:
    values = np.random.default_rng(0).normal(size=1000)
    before = reduce(np.arange(900), values[:900], 128)
    after = reduce(np.arange(1000), values, 128)
    complete = len(before.versions) - 1
    assert np.array_equal(before.means[:complete], after.means[:complete])


def test_page_holds_metrics_with_the_same_versions_as_one_frame() -> None:
    found = metrics(
        [{"version": v, "trainer/a": float(v), "trainer/b": -float(v)} for v in range(4)]
        + [{"version": 3, "evaluation/c": 0.5}]
    )
    second, first = found.encode()
    assert np.frombuffer(base64.b64decode(first["versions"]), "<i4").tolist() == [0, 1, 2, 3]
    assert list(first["columns"]) == ["trainer/a", "trainer/b"]
    (column,) = first["columns"]["trainer/b"]
    assert np.frombuffer(base64.b64decode(column), "<f4").tolist() == [0.0, -1.0, -2.0, -3.0]
    assert list(second["columns"]) == ["evaluation/c"]
    # Four steps in two points: means, smallest and largest values.
    reduced = found.encode(max_points=2)[1]["columns"]["trainer/a"]
    assert [np.frombuffer(base64.b64decode(column), "<f4").tolist() for column in reduced] == [
        [0.5, 2.5],
        [0.0, 2.0],
        [1.0, 3.0],
    ]


def test_time_of_a_step_is_divided_without_rest() -> None:
    row = {
        "trainer/seconds_step": 5.0,
        "trainer/seconds_packing": 0.5,
        "trainer/seconds_update": 4.0,
        "weights/publish_s": 0.25,
        "trainer/behave_weight": 1.0,
        "trainer/behave_weight_squared": 1.25,
    }
    found = metrics(
        [
            {"version": 0, "time_s": 100.0, "rollout/batch_wait_s": 3.0, **row},
            {"version": 1, "time_s": 110.0, "rollout/batch_wait_s": 6.0, **row},
            # A resumed run counts from 0, and the time between two processes is no step's.
            {"version": 2, "time_s": 900.0, "rollout/batch_wait_s": 1.0, **row},
        ]
    )
    # Of 10 s the trainer waited 3, stepped 5, published 0.25; of the step 0.5 are unmeasured.
    expected = {STEP_S: 10.0, WAITING_S: 3.0, OTHER_S: 1.75 + 0.5, WAITING_SHARE: 0.3}
    assert {name: found.series(name) for name in expected} == {
        name: Series([1], [value]) for name, value in expected.items()
    }
    assert found.series(TOKEN_ESS) == Series([0, 1, 2], [0.8] * 3)


def test_supervised_run_is_summarised_by_its_loss() -> None:
    def summary(**series: list[float]) -> list[tuple[str, str]]:
        columns = series.items()
        length = max(len(values) for values in series.values())
        return summarize(
            metrics(
                [
                    {
                        "version": v,
                        **{name: values[v] for name, values in columns if v < len(values)},
                    }
                    for v in range(length)
                ]
            )
        )

    assert summarize(MetricSeries()) == []
    loss = {names.LOSS: [3.0, 2.0, 1.0]}
    assert summary(**loss) == [("loss, first and last tenth", "3 → 1")]
    assert summary(**loss, **{names.REWARD: [-5.0, 5.0]}) == [
        ("reward, first and last tenth", "-5 → 5")
    ]
    assert summary(**loss, **{names.PERPLEXITY: [52_340.0, 103.5]})[1] == (
        "perplexity, first and last",
        "5.234e+04 → 103.5",
    )


@pytest.mark.parametrize(
    ("waits", "words"),
    [(0.0, "training limits"), (6.0, "generation limits"), (3.0, "keep pace")],
)
def test_bottleneck_is_named(waits: float, words: str) -> None:
    rows = [
        {"version": v, "time_s": 10.0 * v, "trainer/x": 0.0, "rollout/batch_wait_s": waits * v}
        for v in range(5)
    ]
    assert words in bottleneck(metrics(rows))
    assert f"waited {waits / 10:.0%}" in bottleneck(metrics(rows))


def test_charts_show_documented_metrics() -> None:
    shown = {
        name
        for charts in sections().values()
        for chart in charts
        for line in chart["lines"]
        for name in (line["metric"], line["spread"])
        if name and "*" not in name
    }
    derived = {STEP_S, WAITING_S, OTHER_S, WAITING_SHARE, TOKEN_ESS}
    assert shown - describe(shown).keys() == derived
