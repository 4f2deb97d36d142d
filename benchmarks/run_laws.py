"""Invariants of every finished run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from runs import read, steps

from areal_jax.metrics.sample_parts import SampleParts
from areal_jax.metrics.sinks import SAMPLES


def broken_laws(
    run: Path, *, num_steps: int, groups: int, samples: int, max_staleness: int
) -> list[str]:
    """List the violated invariants of a run of less than an epoch.

    No step is missing, no task is skipped or repeated, and no token is too old.

    Args:
        groups: groups per batch.
        samples: samples per group.
    """
    rows = steps(read(run))
    sampled = [json.loads(row) for _, row in SampleParts(run / SAMPLES).read()]
    of_groups = {row["group"]: row["task"] for row in sampled}
    # Groups are numbered in the order of their tasks: missing ones below the last one are still
    # running.
    gate = {
        name: rows[-1][f"rollout/{name}"]
        for name in ("started", "accepted", "rejected", "running", "buffered")
    }
    is_kept = {
        "no step is missing or repeated": [row["version"] for row in rows]
        == list(range(num_steps)),
        "every step has all its samples": Counter(row["version"] for row in sampled)
        == dict.fromkeys(range(num_steps), groups * samples),
        "no group is trained on twice": len(of_groups) == num_steps * groups,
        "no task is repeated": len(set(of_groups.values())) == len(of_groups),
        "started groups are running or finished": gate["started"]
        == gate["running"] + gate["accepted"] + gate["rejected"],
        "no group is missing": gate["started"]
        == len(of_groups) + gate["running"] + gate["buffered"] + gate["rejected"],
        "no token is too old": all(
            0 <= row["version"] - version <= max_staleness
            for row in sampled
            for place, version in enumerate(row["versions"])
            if version >= 0 and place not in row["stale"]
        ),
    }
    return [law for law, kept in is_kept.items() if not kept]
