"""Rows and checkpoint of a run that is resumed: what is legal, and what is told of the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from areal_jax.metrics.config import METRICS
from areal_jax.metrics.consistency import (
    Result,
    UnusedGroups,
    check_rows,
    format_ranges,
    read_gaps,
    suggest_remedy,
)
from areal_jax.metrics.description import FILE, write_description
from areal_jax.metrics.sinks import SAMPLES

VERSION = 4
STEPS = [
    {"version": version, "time_s": 1.0, "trainer/loss": 0.5, "trainer/samples": 4.0}
    for version in range(6)
]
# Two groups of two samples for each version.
ROWS = [
    {
        "version": version,
        "grade": "wrong",
        "task": ',"group":9,"number":9,',
        "group": 2 * version + group,
        "number": number,
        "x": 0,
    }
    for version in range(6)
    for group in range(2)
    for number in range(2)
]


def write(folder: Path, name: str, rows: Iterable[object]) -> None:
    text = "".join(
        row if isinstance(row, str) else json.dumps(row, separators=(",", ":")) + "\n"
        for row in rows
    )
    (folder / name).write_text(text)


def compared(
    folder: Path, *, writes_samples: bool = True, unused: UnusedGroups | None = None
) -> Result:
    gaps = read_gaps(folder / FILE)
    unused = unused or UnusedGroups()
    return check_rows(
        folder, VERSION, known_gaps=gaps, writes_samples=writes_samples, unused_groups=unused
    )


def test_a_run_that_was_killed_after_its_checkpoint_agrees(tmp_path: Path) -> None:
    late = {"version": 1, "time_s": 1.0, "evaluation/pass@1": 0.5}
    write(tmp_path, METRICS, [*STEPS[:3], late, *STEPS[3:], '{"version":6,"tor'])
    write(tmp_path, SAMPLES, [*ROWS, '{"version":6,"tor'])
    # Groups 8 and later were trained on after the checkpoint.
    assert compared(tmp_path, unused=UnusedGroups([8, 9], 10)) == ([], {METRICS: [], SAMPLES: []})


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([STEPS[0], *STEPS[3:]], "has no rows of versions 1 to 2"),
        (
            [*STEPS[:4], STEPS[2], STEPS[4]],
            "has more than one row of version 2, as if two processes wrote there",
        ),
        ([STEPS[0], "noise\n", *STEPS[1:]], "has an invalid line 2, with rows after it"),
        ([], "has no rows of versions 0 to 3"),
    ],
)
def test_metrics_that_disagree_are_told(steps: list[object], said: str, tmp_path: Path) -> None:
    write(tmp_path, METRICS, steps)
    write(tmp_path, SAMPLES, ROWS)
    assert [fault.text for fault in compared(tmp_path).faults] == [said]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([*ROWS[:4], *ROWS[8:]], ["has no samples of version 1"]),
        (ROWS[:-8][:-1], ["has fewer samples of version 3 than metrics.jsonl counts"]),
        ([*ROWS, ROWS[5]], ["has samples of version 1 twice, as if two processes wrote there"]),
        (
            [*ROWS, ROWS[0] | {"version": 2}],
            ["has samples of version 2 twice, as if two processes wrote there"],
        ),
        ([], ["has no samples of versions 0 to 3"]),
    ],
)
def test_samples_that_disagree_are_told(
    rows: list[object], said: list[str], tmp_path: Path
) -> None:
    write(tmp_path, METRICS, STEPS)
    write(tmp_path, SAMPLES, rows)
    assert [fault.text for fault in compared(tmp_path).faults] == said


def test_samples_of_groups_that_the_checkpoint_still_has_are_told(tmp_path: Path) -> None:
    write(tmp_path, METRICS, STEPS)
    write(tmp_path, SAMPLES, ROWS)
    for unused in (UnusedGroups([7], 10), UnusedGroups([], 7)):
        (fault,) = compared(tmp_path, unused=unused).faults
        assert fault.text == "has samples of version 3 that the checkpoint has not trained on"


def test_samples_may_be_switched_off_and_on_again(tmp_path: Path) -> None:
    write(tmp_path, METRICS, STEPS)
    write(tmp_path, SAMPLES, ROWS[:8])
    off = compared(tmp_path, writes_samples=False)
    assert off == ([], {METRICS: [], SAMPLES: [2, 3]})
    # What is known at one resume is legal at the next, with samples written again from version 4
    # on.
    write_description(tmp_path, "headline", {}, "1 cpu", off.gaps)
    write(tmp_path, SAMPLES, [*ROWS[:8], *ROWS[16:]])
    assert compared(tmp_path).faults == []


def test_files_that_were_moved_away_are_legal_from_then_on(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found == ([], {METRICS: [0, 1, 2, 3], SAMPLES: [0, 1, 2, 3]})
    write_description(tmp_path, "headline", {}, "1 cpu", found.gaps)
    write(tmp_path, METRICS, STEPS[4:])
    write(tmp_path, SAMPLES, ROWS[16:])
    assert compared(tmp_path).faults == []


def test_the_remedy_names_the_file_and_the_newest_checkpoint_that_agrees(tmp_path: Path) -> None:
    write(tmp_path, METRICS, [*STEPS[:2], *STEPS[3:]])
    (fault,) = compared(tmp_path).faults
    reported = f"move {tmp_path / METRICS} away to resume without its rows"
    assert suggest_remedy(tmp_path, fault, VERSION, [VERSION]) == reported
    expected = f"{reported}, or move the checkpoints after version 2 away to resume from that one"
    assert suggest_remedy(tmp_path, fault, VERSION, [1, 2, VERSION]) == expected


def test_ranges_are_short() -> None:
    assert format_ranges([3]) == "version 3"
    assert format_ranges([1, 2, 5]) == "versions 1 to 2, 5"
    assert format_ranges(range(0, 20, 2)) == "versions 0, 2, 4, 6, 8, ..."
