"""Cost of evaluations pinned to one version: `evaluation.pinned` true versus false, in turns.

    python benchmarks/pinned_evaluation.py

Runs `areal-train --exp=aime num_steps=40 evaluation.every_steps=10
evaluation.num_tasks=256` equally often with each value. Measures the time between the first and the
last step, during which three evaluations run. Appends to results/pinned_evaluation.jsonl. Takes
about 5 minutes on two idle CPU cores. Finished runs are not repeated.

Expected: a cost below the variation between rounds, 3 %; training waits only if rollouts become too
stale before the last answer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from results import append
from runs import Rows, run_all, steps

from areal_jax.metrics import names

NAME = "pinned_evaluation"


def seconds(rows: Rows) -> float:
    """Return the time from the end of the first step to the end of the last."""
    ended = [row["time_s"] for row in steps(rows)]
    return ended[-1] - ended[0]


def spread(rows: Rows) -> float:
    """Compute the mean number of versions by which tokens were newer than the evaluated version."""
    found = [
        row["evaluation/newest_version"] - row["version"] for row in rows if names.PASS_AT_1 in row
    ]
    return fmean(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--every-steps", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    options = parser.parse_args()
    settings = (
        "--exp=aime",
        f"evaluation.every_steps={options.every_steps}",
        "evaluation.num_tasks=256",
    )
    runs = {
        f"{pinned}-{turn}": (*settings, f"evaluation.pinned={pinned}")
        for turn in range(options.rounds)
        for pinned in ("true", "false")
    }
    found = run_all(runs, options.folder, options.steps)
    reported = {
        pinned: {
            "seconds": [
                round(seconds(found[f"{pinned}-{turn}"]), 1) for turn in range(options.rounds)
            ],
            "newer versions": fmean(
                spread(found[f"{pinned}-{turn}"]) for turn in range(options.rounds)
            ),
        }
        for pinned in ("true", "false")
    }
    took = {
        pinned: fmean(seconds(found[f"{pinned}-{turn}"]) for turn in range(options.rounds))
        for pinned in ("true", "false")
    }
    append(
        NAME,
        {
            "settings": settings,
            "num_steps": options.steps,
            "pinned": reported,
            "cost": took["true"] / took["false"] - 1,
        },
    )


if __name__ == "__main__":
    main()
