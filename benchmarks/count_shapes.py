"""Held-out accuracy of the example that reads images: three seeds of `count_shapes`.

    python benchmarks/count_shapes.py [--seeds=0,1,2]

Runs `areal-train --exp=count_shapes` at its defaults for each seed. Appends a row for each to
results/count_shapes.jsonl: pass@1 on 512 held-out pictures of every evaluation, and the time of the
run up to its last step. Finished runs are not repeated. Two processor minutes a seed.

Expected: pass@1 rises by 0.2 or more within 10 minutes in every seed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from results import append
from runs import run_all, steps

from areal_jax.config.load import load_experiment
from areal_jax.metrics import names

NAME = "count_shapes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, with commas")
    given = parser.parse_args()
    num_steps = load_experiment(NAME).num_steps
    for seed in given.seeds.split(","):
        run = f"seed_{seed}"
        rows = run_all({run: (f"--exp={NAME}", f"seed={seed}")}, given.folder, num_steps)[run]
        scores = {row["version"]: row[names.PASS_AT_1] for row in rows if names.PASS_AT_1 in row}
        values = list(scores.values())
        append(
            NAME,
            {
                "seed": int(seed),
                "pass_at_1": scores,
                "gain": round(values[-1] - values[0], 4),
                "minutes": round((steps(rows)[-1]["time_s"] - rows[0]["time_s"]) / 60, 2),
                "load_average": os.getloadavg()[1],
            },
        )


if __name__ == "__main__":
    main()
