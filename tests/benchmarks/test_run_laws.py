"""A run that violates an invariant is reported with that invariant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_laws import broken_laws

from areal_jax.metrics import names

Rows = list[dict[str, Any]]


def broken(folder: Path, corrupt: Callable[[Rows, Rows], object]) -> list[str]:
    """List violations of a run of 2 steps with 2 groups of 2 samples, and one running group."""
    gate = {"started": 5, "accepted": 4, "rejected": 0, "running": 1, "buffered": 0}
    rows: Rows = [
        {
            "version": version,
            names.REWARD: 1.0,
            **{f"rollout/{name}": count for name, count in gate.items()},
        }
        for version in (0, 1)
    ]
    sampled: Rows = [
        {
            "version": group // 2,
            "group": group,
            "task": f"task-{group}",
            "versions": [-1, 0, 0],
            "stale": [],
        }
        for group in range(4)
        for _ in range(2)
    ]
    corrupt(rows, sampled)
    for name, written in (("metrics", rows), ("samples", sampled)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return broken_laws(folder, num_steps=2, groups=2, samples=2, max_staleness=1)


@pytest.mark.parametrize(
    ("corrupt", "laws"),
    [
        (lambda rows, sampled: None, []),
        (lambda rows, sampled: rows.pop(0), ["no step is missing or repeated"]),
        (lambda rows, sampled: sampled.pop(), ["every step has all its samples"]),
        (
            lambda rows, sampled: [row.update(group=0, task="task-0") for row in sampled[2:4]],
            ["no group is trained on twice"],
        ),
        (
            lambda rows, sampled: [row.update(task="task-0") for row in sampled],
            ["no task is repeated"],
        ),
        (
            lambda rows, sampled: rows[-1].update({"rollout/accepted": 3}),
            ["started groups are running or finished"],
        ),
        (lambda rows, sampled: rows[-1].update({"rollout/buffered": 1}), ["no group is missing"]),
        (lambda rows, sampled: sampled[-1].update(versions=[-1, -1, 2]), ["no token is too old"]),
        (
            lambda rows, sampled: sampled[0].update(version=2, stale=[1, 2]),
            ["every step has all its samples"],
        ),
    ],
)
def test_violated_invariant_is_reported(
    tmp_path: Path, corrupt: Callable[[Rows, Rows], object], laws: list[str]
) -> None:
    found = broken(tmp_path, corrupt)
    assert set(laws) <= set(found) and bool(laws) == bool(found)
