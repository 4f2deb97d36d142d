"""What it costs that evaluations while training goes on are of one version: `evaluation.pinned`
true against false, in turns.

    python benchmarks/pinned_evaluation.py

Runs `python -m areal_jax.train --exp=aime num_steps=40 evaluation.every_steps=10
evaluation.num_tasks=256` so often with each. Counted is the time between the first step and the
last, in which three evaluations go on beside training. Appends to results/pinned_evaluation.jsonl.
About 5 minutes on two idle CPU cores. A run that is finished is not run again.

Expected: less than rounds differ by, 3 per cent: training waits only where rollouts become too
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
    """From the end of the first step to the end of the last."""
    ended = [row["time_s"] for row in steps(rows)]
    return ended[-1] - ended[0]


def spread(rows: Rows) -> float:
    """By how many versions the tokens of an evaluation were newer than asked for, on average."""
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
    parser.add_argument("--every-steps", type=int, default=10, help="between two evaluations")
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
