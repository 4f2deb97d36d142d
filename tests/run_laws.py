"""What every finished run must show, whatever it survived."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from areal_jax.metrics import jsonl


def each_task_was_trained_on_once(run: Path, *, num_steps: int, groups: int, samples: int, max_staleness: int) -> None:
    """No step is missing, no task was lost or repeated, and no token is older than it may be."""
    rows = [row for row in jsonl.read(run / "metrics.jsonl") if "trainer/loss" in row]
    assert [row["version"] for row in rows] == list(range(num_steps))
    drawn = list(jsonl.read(run / "samples.jsonl"))
    assert Counter(row["version"] for row in drawn) == dict.fromkeys(range(num_steps), groups * samples)
    of_groups = {row["group"]: row["task"] for row in drawn}
    assert len(of_groups) == num_steps * groups, "a group was trained on twice"
    assert len(set(of_groups.values())) == len(of_groups), "within one epoch a task came twice"
    # Groups are numbered as their tasks are drawn: what is missing below the last one is still under way, not lost.
    last = rows[-1]
    under_way = last["gate/running"] + last["gate/buffered"]
    assert last["gate/started"] == last["gate/accepted"] + last["gate/running"] + last["gate/rejected"]
    assert last["gate/started"] == len(of_groups) + under_way + last["gate/rejected"]
    assert all(
        0 <= row["version"] - version <= max_staleness
        for row in drawn
        for place, version in enumerate(row["versions"])
        if version >= 0 and place not in row["stale"]
    )
