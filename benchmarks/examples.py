"""Learning curve of each example at its defaults: held-out pass@1 and training reward by step.

    python benchmarks/examples.py

Trains the policies that some examples start from, as their docstrings describe, and runs
`areal-train --exp=NAME` for each example. Appends to results/examples.jsonl and plots
results/examples.png. Takes about 20 minutes on two idle CPU cores. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from results import FOLDER, append
from rich.console import Console
from rich.table import Table
from runs import Rows, run_all, steps

from areal_jax.config.experiment import Experiment
from areal_jax.config.load import load_experiment
from areal_jax.metrics import jsonl, names
from areal_jax.reports.plots import BLUE, GREY, ORANGE, as_png, new_figure, plain, title

NAME = "examples"
PREPARED_BY: Mapping[str, tuple[int, tuple[str, ...]] | None] = {
    "multi_turn_math": None,
    "tool_math": (80, ("examples.families=calculations",)),
    "search_agent": (50, ("examples.families=facts",)),
    "countdown": (300, ("examples.families=countdown",)),
    "code": (100, ("examples.families=programs",)),
    "openai_agent": None,
}
"""Steps and settings of prior fine-tuning; None: the example starts from the embedded policy."""

SMOOTHED_STEPS = 5


def run(name: str, folder: Path) -> Rows:
    """Train an example from its initial policy; return its rows of metrics."""
    prepared, settings = PREPARED_BY[name], ()
    if prepared is not None:
        num_steps, changes = prepared
        policy = f"{name}_policy"
        run_all({policy: ("--exp=tiny_tools_sft", *changes)}, folder, num_steps)
        settings = (f"policy.path={folder / policy / 'policy'}",)
    return run_all({name: (f"--exp={name}", *settings)}, folder, load_experiment(name).num_steps)[
        name
    ]


def learning_curve(name: str, rows: Rows) -> dict[str, Any]:
    """Compute pass@1 of every evaluation with its interval, and the reward of every step.

    The reward is scaled to 0 for wrong and 1 for correct answers.
    """
    experiment = load_experiment(name)
    assert isinstance(experiment, Experiment)
    wrong, correct = experiment.rewards.wrong, experiment.rewards.correct
    return {
        "num_problems": experiment.evaluation.num_tasks,
        "pass_at_1": {
            row["version"]: (row[names.PASS_AT_1], row["evaluation/pass@1_stderr"])
            for row in rows
            if names.PASS_AT_1 in row
        },
        "reward": [
            round((row[names.REWARD] - wrong) / (correct - wrong), 4) for row in steps(rows)
        ],
    }


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table("experiment", "problems", "pass@1 after steps", title=NAME)
    for name, of_example in found.items():
        scores = (
            f"{score:.1%} ({version})" for version, (score, _) in of_example["pass_at_1"].items()
        )
        table.add_row(name, str(of_example["num_problems"]), " ".join(scores))
    Console().print(table)


def plot(found: Mapping[str, Mapping[str, Any]]) -> None:
    figure = new_figure(11.0, 5.8)
    for axes, (name, of_example) in zip(
        figure.subplots(2, 3, sharey=True).flat, found.items(), strict=True
    ):
        _plot_example(axes, name, of_example["pass_at_1"], of_example["reward"])
        plain(axes)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle("Measured on two CPU cores, one seed", fontsize=9)
    (FOLDER / f"{NAME}.png").write_bytes(as_png(figure))


def _plot_example(
    axes: Axes, name: str, scores: Mapping[int, tuple[float, float]], reward: Sequence[float]
) -> None:
    title(axes, name)
    smooth = [fmean(reward[max(0, i - SMOOTHED_STEPS + 1) : i + 1]) for i in range(len(reward))]
    axes.plot(
        smooth,
        color=GREY,
        linewidth=1.0,
        label=f"reward in training ({SMOOTHED_STEPS} steps' mean; 0 wrong, 1 right)",
    )
    versions, errors = list(scores), [1.96 * error for _, error in scores.values()]
    axes.errorbar(
        versions,
        [score for score, _ in scores.values()],
        errors,
        color=ORANGE,
        ecolor=BLUE,
        elinewidth=1.0,
        marker="o",
        markersize=4,
        label="held-out pass@1 (95 %)",
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 0.8)
    axes.set_xlabel("trainer steps", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--report", action="store_true", help="run nothing; plot the last row")
    options = parser.parse_args()
    if options.report:
        *_, row = jsonl.read(FOLDER / f"{NAME}.jsonl")
        found = row["examples"]
        for of_example in found.values():
            scores = of_example["pass_at_1"]
            of_example["pass_at_1"] = {int(version): score for version, score in scores.items()}
    else:
        found = {name: learning_curve(name, run(name, options.folder)) for name in PREPARED_BY}
        append(NAME, {"examples": found})
    plot(found)
    show(found)


if __name__ == "__main__":
    main()
