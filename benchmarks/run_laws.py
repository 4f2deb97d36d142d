"""What every finished run must show, whatever it survived."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from runs import read, steps

from areal_jax.metrics import jsonl


def broken_laws(
    run: Path, *, num_steps: int, groups: int, samples: int, max_staleness: int
) -> list[str]:
    """Which laws a run of less than an epoch has broken, in words: no step is missing, no task was
    lost or repeated, and no token is older than it may be.

    Args: groups: of a batch. samples: of a group.
    """
    rows, sampled = steps(read(run)), list(jsonl.read(run / "samples.jsonl"))
    of_groups = {row["group"]: row["task"] for row in sampled}
    # Groups are numbered as their tasks are sampled: what is missing below the last one is still
    # under way, not lost.
    gate = {
        name: rows[-1][f"rollout/{name}"]
        for name in ("started", "accepted", "rejected", "running", "buffered")
    }
    is_kept = {
        "every step was made once": [row["version"] for row in rows] == list(range(num_steps)),
        "every step has its samples": Counter(row["version"] for row in sampled)
        == dict.fromkeys(range(num_steps), groups * samples),
        "no group was trained on twice": len(of_groups) == num_steps * groups,
        "no task came twice": len(set(of_groups.values())) == len(of_groups),
        "what was started is running or has ended": gate["started"]
        == gate["running"] + gate["accepted"] + gate["rejected"],
        "no group was lost": gate["started"]
        == len(of_groups) + gate["running"] + gate["buffered"] + gate["rejected"],
        "no token is too old": all(
            0 <= row["version"] - version <= max_staleness
            for row in sampled
            for place, version in enumerate(row["versions"])
            if version >= 0 and place not in row["stale"]
        ),
    }
    return [law for law, kept in is_kept.items() if not kept]
