"""Consistency of rows and checkpoint of a resumed run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from areal_jax.metrics.config import METRICS
from areal_jax.metrics.consistency import (
    ConsistencyResult,
    UnusedGroups,
    check_rows,
    format_ranges,
    read_gaps,
    suggest_remedy,
)
from areal_jax.metrics.description import FILE, write_description
from areal_jax.metrics.sample_parts import close_part, closed_parts, compress_parts
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


def check(
    folder: Path, *, writes_samples: bool = True, unused: UnusedGroups | None = None
) -> ConsistencyResult:
    gaps = read_gaps(folder / FILE)
    unused = unused or UnusedGroups()
    return check_rows(
        folder, VERSION, known_gaps=gaps, writes_samples=writes_samples, unused_groups=unused
    )


def test_killed_run_is_consistent_with_its_checkpoint(tmp_path: Path) -> None:
    late = {"version": 1, "time_s": 1.0, "evaluation/pass@1": 0.5}
    write(tmp_path, METRICS, [*STEPS[:3], late, *STEPS[3:], '{"version":6,"tor'])
    write(tmp_path, SAMPLES, [*ROWS, '{"version":6,"tor'])
    # Groups 8 and later were trained on after the checkpoint.
    assert check(tmp_path, unused=UnusedGroups([8, 9], 10)) == ([], {METRICS: [], SAMPLES: []})


@pytest.mark.parametrize(
    ("steps", "faults"),
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
def test_inconsistent_metrics_are_reported(
    steps: list[object], faults: str, tmp_path: Path
) -> None:
    write(tmp_path, METRICS, steps)
    write(tmp_path, SAMPLES, ROWS)
    assert [fault.text for fault in check(tmp_path).faults] == [faults]


@pytest.mark.parametrize(
    ("rows", "faults"),
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
def test_inconsistent_samples_are_reported(
    rows: list[object], faults: list[str], tmp_path: Path
) -> None:
    write(tmp_path, METRICS, STEPS)
    write(tmp_path, SAMPLES, rows)
    assert [fault.text for fault in check(tmp_path).faults] == faults


def test_samples_in_closed_parts_are_checked(tmp_path: Path) -> None:
    write(tmp_path, METRICS, STEPS)
    for versions in (range(2), range(2, 3), range(3, 6)):
        write(tmp_path, SAMPLES, [row for row in ROWS if row["version"] in versions])
        if 5 not in versions:
            close_part(tmp_path / SAMPLES)
    list(compress_parts(tmp_path / SAMPLES))
    assert check(tmp_path).faults == []
    first, second = closed_parts(tmp_path / SAMPLES)
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    damaged, lost = check(tmp_path).faults
    expected = (
        f"cannot be read: {second}: expected {len(data)} bytes or more, found {len(data) - 1}"
    )
    assert damaged.text.startswith(expected) and damaged.version == 1
    assert lost.text == "has no samples of versions 2 to 3"
    away = suggest_remedy(tmp_path, damaged, VERSION, [])
    assert away == f"move {tmp_path}/samples*.jsonl* away to resume without its rows"
    first.unlink()
    assert "expected samples.00000.jsonl.gz before" in check(tmp_path).faults[0].text


def test_samples_of_untrained_groups_are_reported(tmp_path: Path) -> None:
    write(tmp_path, METRICS, STEPS)
    write(tmp_path, SAMPLES, ROWS)
    for unused in (UnusedGroups([7], 10), UnusedGroups([], 7)):
        (fault,) = check(tmp_path, unused=unused).faults
        assert fault.text == "has samples of version 3 that the checkpoint has not trained on"


def test_samples_may_be_disabled_and_enabled_again(tmp_path: Path) -> None:
    write(tmp_path, METRICS, STEPS)
    write(tmp_path, SAMPLES, ROWS[:8])
    off = check(tmp_path, writes_samples=False)
    assert off == ([], {METRICS: [], SAMPLES: [2, 3]})
    # What is known at one resume is legal at the next, with samples written again from version 4
    # on.
    write_description(tmp_path, "headline", {}, "1 cpu", off.gaps)
    write(tmp_path, SAMPLES, [*ROWS[:8], *ROWS[16:]])
    assert check(tmp_path).faults == []


def test_moved_files_become_known_gaps(tmp_path: Path) -> None:
    found = check(tmp_path)
    assert found == ([], {METRICS: [0, 1, 2, 3], SAMPLES: [0, 1, 2, 3]})
    write_description(tmp_path, "headline", {}, "1 cpu", found.gaps)
    write(tmp_path, METRICS, STEPS[4:])
    write(tmp_path, SAMPLES, ROWS[16:])
    assert check(tmp_path).faults == []


def test_remedy_names_the_file_and_the_newest_usable_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, METRICS, [*STEPS[:2], *STEPS[3:]])
    (fault,) = check(tmp_path).faults
    away = f"move {tmp_path / METRICS} away to resume without its rows"
    assert suggest_remedy(tmp_path, fault, VERSION, [VERSION]) == away
    expected = f"{away}, or move the checkpoints after version 2 away to resume from that one"
    assert suggest_remedy(tmp_path, fault, VERSION, [1, 2, VERSION]) == expected


def test_ranges_are_short() -> None:
    assert format_ranges([3]) == "version 3"
    assert format_ranges([1, 2, 5]) == "versions 1 to 2, 5"
    assert format_ranges(range(0, 20, 2)) == "versions 0, 2, 4, 6, 8, ..."
