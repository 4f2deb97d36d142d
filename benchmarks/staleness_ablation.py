"""What staleness costs a policy, and what it brings: decoupled against plain PPO (AReaL,
arXiv:2505.24298, table 2, figure 5).

    python benchmarks/staleness_ablation.py

Trains the embedded policy on its generated problems with max_staleness 0, 1, 2, 4, 8, 16 and
unbounded, with both objectives and several seeds, each run by `python -m areal_jax.train` in a
process of its own; then pass@1 on 512 held-out problems. The decoupled objective is used as the
authors' code uses it: tokens whose weight proximal/behave is above 5 leave the loss. Rate, batch
and updates per step are such that staleness tells: twice the updates of `--exp=aime`, and a rate
that does not fall.

Effective throughput, tokens trained per second, is measured by shorter runs of its own, the values
of max_staleness in turns, with nothing else on the machine. Where decoding and training share their
device, as on a CPU, running ahead saves only the waiting of one for the other.

A run that is finished is not run again, so that the script can be stopped and started. Appends to
results/staleness_ablation.jsonl and draws results/staleness_ablation.png. About an hour on two idle
CPU cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from results import FOLDER, append
from rich.console import Console
from rich.table import Table
from runs import Rows, pass_at_1, run_all, steps

from areal_jax.metrics import names

NAME = "staleness_ablation"
STALENESS = (0, 1, 2, 4, 8, 16, None)
SETTINGS = (
    *("rollout.groups_per_batch=16", "rollout.samples_per_group=8", "trainer.num_mini_batches=4"),
    *("trainer.optimizer.learning_rate=2e-4", "trainer.optimizer.schedule=constant"),
    *("checkpoint.export_hf=false", "metrics.trace=false"),
)
OBJECTIVES = {
    "decoupled": (
        "trainer.loss=DecoupledPPO",
        "trainer.loss.importance_weighting=Masked",
        "trainer.loss.importance_weighting.cap=5",
    ),
    "plain": ("trainer.loss=PPO",),
}
FIRST_TIMED_STEP = 5
"""Before it, buffer and caches fill."""


class Case(NamedTuple):
    """One run."""

    objective: str
    max_staleness: int | None
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective}-{'unbounded' if self.max_staleness is None else self.max_staleness}-{self.seed}"

    @property
    def settings(self) -> tuple[str, ...]:
        eta = "none" if self.max_staleness is None else str(self.max_staleness)
        return (
            *SETTINGS,
            *OBJECTIVES[self.objective],
            f"rollout.max_staleness={eta}",
            f"seed={self.seed}",
        )


def run(cases: Sequence[Case], folder: Path, num_steps: int, *settings: str) -> dict[Case, Rows]:
    """The rows of every case, run now where it has not been."""
    by_name = run_all(
        {case.name: ("--exp=aime", *case.settings, *settings) for case in cases}, folder, num_steps
    )
    return {case: by_name[case.name] for case in cases}


def learning(rows: Mapping[Case, Rows]) -> list[dict[str, Any]]:
    """Of every case, what the policy came to be and how."""
    return [
        {
            **case._asdict(),
            "pass_at_1": pass_at_1(of_case)[-1],
            "reward": [round(row[names.REWARD], 3) for row in steps(of_case)],
            "staleness": fmean(
                row[names.STALENESS_MEAN] for row in steps(of_case)[FIRST_TIMED_STEP:]
            ),
            "clip_fraction": fmean(
                row["trainer/clip_fraction"] for row in steps(of_case)[FIRST_TIMED_STEP:]
            ),
        }
        for case, of_case in rows.items()
    ]


def throughput(rows: Rows) -> float:
    """Tokens trained per second of wall-clock time."""
    timed = steps(rows)[FIRST_TIMED_STEP:]
    return sum(row["trainer/tokens_trained"] for row in timed[1:]) / (
        timed[-1]["time_s"] - timed[0]["time_s"]
    )


def label(max_staleness: int | None) -> str:
    return "unbounded" if max_staleness is None else str(max_staleness)


def summary(
    found: Sequence[Mapping[str, Any]], objective: str, max_staleness: int | None
) -> tuple[float, float]:
    """Mean of pass@1 over seeds, and its standard error."""
    scores = [
        row["pass_at_1"]
        for row in found
        if row["objective"] == objective and row["max_staleness"] == max_staleness
    ]
    return fmean(scores), stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0


def show(found: Sequence[Mapping[str, Any]], speed: Mapping[str, float]) -> None:
    table = Table(
        "max_staleness",
        *(f"{objective}: pass@1, %" for objective in OBJECTIVES),
        "tokens trained/s",
        title=NAME,
    )
    for eta in STALENESS:
        scores = [summary(found, objective, eta) for objective in OBJECTIVES]
        table.add_row(
            label(eta),
            *(f"{mean:.1%} ± {error:.1%}" for mean, error in scores),
            f"{speed.get(label(eta), 0):,.0f}",
        )
    Console().print(table)


def plot(found: Sequence[Mapping[str, Any]], speed: Mapping[str, float]) -> None:
    figure = Figure(figsize=(12, 7), layout="constrained")
    (first, second), (third, fourth) = figure.subplots(2, 2)
    shades = ("black", "tab:purple", "tab:blue", "tab:green", "tab:orange", "tab:red", "tab:brown")
    colours = dict(zip(STALENESS, shades, strict=True))
    for axes, objective in zip((first, second), OBJECTIVES, strict=True):
        for eta in STALENESS:
            curves = [
                row["reward"]
                for row in found
                if row["objective"] == objective and row["max_staleness"] == eta
            ]
            mean = [fmean(values) for values in zip(*curves, strict=True)]
            smooth = [fmean(mean[max(0, i - 4) : i + 1]) for i in range(len(mean))]
            axes.plot(smooth, color=colours[eta], label=f"η {label(eta)}")
        axes.set(title=f"{objective} PPO", xlabel="trainer step", ylabel="reward (5 steps' mean)")
        axes.grid(alpha=0.3)
    first.sharey(second)
    first.legend(fontsize=8, ncols=2)
    places = range(len(STALENESS))
    for shift, objective in ((-0.08, "decoupled"), (0.08, "plain")):
        means, errors = zip(*(summary(found, objective, eta) for eta in STALENESS), strict=True)
        third.errorbar(
            [x + shift for x in places], means, errors, fmt="o", capsize=3, label=f"{objective} PPO"
        )
    third.axhline(
        summary(found, "decoupled", 0)[0],
        color="grey",
        linestyle=":",
        label="synchronous, decoupled",
    )
    third.set(title="held-out pass@1 after the last step", xlabel="max_staleness η", ylim=(0, None))
    third.legend(fontsize=8)
    fourth.bar(
        list(places),
        [speed.get(label(eta), 0.0) for eta in STALENESS],
        color=[colours[eta] for eta in STALENESS],
    )
    fourth.set(
        title="effective throughput", xlabel="max_staleness η", ylabel="tokens trained per second"
    )
    for axes in (third, fourth):
        axes.set_xticks(list(places), [label(eta) for eta in STALENESS])
        axes.grid(alpha=0.3, axis="y")
    figure.savefig(FOLDER / f"{NAME}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--steps", type=int, default=60, help="trainer steps of a run that learns")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--timed-steps", type=int, default=25, help="trainer steps of a run that is timed"
    )
    parser.add_argument("--rounds", type=int, default=2, help="timed runs of every max_staleness")
    parser.add_argument(
        "--only", choices=("learning", "throughput"), help="run these, and report nothing"
    )
    options = parser.parse_args()
    rows, timed = {}, {}
    if options.only != "throughput":
        cases = [
            Case(objective, eta, seed)
            for seed in options.seeds
            for eta in STALENESS
            for objective in OBJECTIVES
        ]
        rows = run(cases, options.folder, options.steps, f"evaluation.every_steps={options.steps}")
    if options.only != "learning":
        cases = [
            Case("decoupled", eta, seed) for seed in range(options.rounds) for eta in STALENESS
        ]
        timed = run(
            cases, options.folder / "timed", options.timed_steps, "evaluation.every_steps=0"
        )
    if options.only is None:
        found = learning(rows)
        speed = {
            label(eta): fmean(
                throughput(timed[case]) for case in timed if case.max_staleness == eta
            )
            for eta in STALENESS
        }
        append(
            NAME,
            {
                "settings": SETTINGS,
                "objectives": OBJECTIVES,
                "runs": found,
                "tokens_trained_per_s": speed,
            },
        )
        plot(found, speed)
        show(found, speed)


if __name__ == "__main__":
    main()
