"""Effect of staleness on learning: decoupled against plain PPO (AReaL, arXiv:2505.24298, table 2).

    python benchmarks/staleness_ablation.py                    # run what is missing, then report
    python benchmarks/staleness_ablation.py --panel=main       # one panel
    python benchmarks/staleness_ablation.py --report           # table and figure of the stored rows

Trains the embedded policy on its generated problems, each run by `areal-train` in a
process of its own, with a constant learning rate, batches of 16 groups of 8 and 4 mini-batches, and
evaluates pass@1 on 512 held-out problems every 10 steps. The score of a run is the mean of its last
three evaluations, because a single one has a standard error of 2.2 points.

- Panel `main`: learning rate 3e-5, at which one step moves the policy as little as the paper's
  steps do, with max_staleness 0, 4, 8, 16 and unbounded.
- Panel `rates`: 1e-4 and 2e-4 with max_staleness 0 and 16. At these rates the policy runs through
  most of its learning curve within 16 steps.
- Panel `candidates`: algorithms that are to keep the synchronous score, at all three rates with
  max_staleness 16 and unbounded.

Decoupled PPO is used as in the authors' code: tokens with a weight proximal/behave above 5 are
masked. Every run appends one row to results/staleness_ablation.jsonl; runs that have a row are not
repeated, so that the script can be stopped at any time and started again. Draws
results/staleness_ablation.png. About four and a half hours on two idle CPU cores.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from results import FOLDER, append
from rich.console import Console
from rich.table import Table
from runs import Rows, pass_at_1, run_all, steps

from areal_jax.metrics import jsonl

NAME = "staleness_ablation"
SETTINGS = (
    *("rollout.groups_per_batch=16", "rollout.samples_per_group=8", "trainer.num_mini_batches=4"),
    *("trainer.optimizer.schedule=constant", "evaluation.every_steps=10"),
    *("checkpoint.export_hf=false", "checkpoint.every_steps=0"),
    *("metrics.trace=false", "metrics.samples=false", "metrics.tensorboard=false"),
)
OBJECTIVES = {
    "decoupled": (
        "trainer.loss=DecoupledPPO",
        "trainer.loss.importance_weighting=Masked",
        "trainer.loss.importance_weighting.cap=5",
    ),
    "plain": ("trainer.loss=PPO",),
}
CANDIDATES = {
    "double_clip": (*OBJECTIVES["decoupled"], "trainer.loss.behave_clip=2"),
    "vcpo": (
        *(*OBJECTIVES["decoupled"], "trainer.loss.behave_clip=2"),
        "trainer.optimizer.ess_exponent=0.5",
    ),
    "adaptive": (
        *(*OBJECTIVES["decoupled"], "trainer.loss.behave_clip=2"),
        "rollout.min_sequence_ess=0.9",
    ),
    "vcpo_baseline": ("algorithm=vcpo",),
    "icepop": ("algorithm=icepop",),
    "m2po_clip": ("algorithm=m2po_clip",),
    "sequence_rejection": (
        *(*OBJECTIVES["decoupled"], "trainer.loss.rejection.sequence_min=0.5"),
        "trainer.loss.rejection.sequence_max=2",
    ),
    "adaptive_95": (*OBJECTIVES["decoupled"], "rollout.min_sequence_ess=0.95"),
    "adaptive_98": (*OBJECTIVES["decoupled"], "rollout.min_sequence_ess=0.98"),
    "areal_adaptive": ("algorithm=areal_adaptive",),
}
"""Algorithms that are to keep synchronous pass@1 at every staleness and learning rate."""
PANELS = {
    "main": (OBJECTIVES, (3e-5,), (0, 4, 8, 16, None)),
    "rates": (OBJECTIVES, (1e-4, 2e-4), (0, 16)),
    "candidates": (CANDIDATES, (3e-5, 1e-4, 2e-4), (16, None)),
}
"""Objectives, learning rates and bounds on staleness of each panel."""

FIRST_COUNTED_STEP = 20
"""Step from which staleness and ratios are averaged: before it, the buffer fills."""


class Case(NamedTuple):
    """One run."""

    objective: str
    learning_rate: float
    max_staleness: int | None
    seed: int

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return (
            f"{self.objective}-{self.learning_rate:g}-{label(self.max_staleness)}-seed{self.seed}"
        )

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides of the experiment `aime`."""
        eta = "none" if self.max_staleness is None else str(self.max_staleness)
        return (
            *SETTINGS,
            *(OBJECTIVES | CANDIDATES)[self.objective],
            f"trainer.optimizer.learning_rate={self.learning_rate:g}",
            f"rollout.max_staleness={eta}",
            f"seed={self.seed}",
        )


def label(max_staleness: int | None) -> str:
    """Return the text for a bound."""
    return "unbounded" if max_staleness is None else str(max_staleness)


def cases_of(panels: Sequence[str], seeds: Sequence[int]) -> Iterator[Case]:
    """Yield the runs of panels, seed by seed, so that a stop leaves whole seeds."""
    for seed in seeds:
        for panel in panels:
            objectives, rates, bounds = PANELS[panel]
            for rate in rates:
                for eta in bounds:
                    yield from (Case(objective, rate, eta, seed) for objective in objectives)


def stored(num_steps: int) -> dict[Case, dict[str, Any]]:
    """Return the stored rows of runs with this number of steps."""
    path = FOLDER / f"{NAME}.jsonl"
    rows = jsonl.read(path) if path.exists() else ()
    return {
        Case(*(row[name] for name in Case._fields)): row
        for row in rows
        if "objective" in row and row["num_steps"] == num_steps
    }


def describe(rows: Rows) -> dict[str, Any]:
    """Return the figures of a finished run."""
    scores, of_steps = pass_at_1(rows), steps(rows)[FIRST_COUNTED_STEP:]

    def mean(name: str) -> float:
        return fmean(row[name] for row in of_steps)

    return {
        "pass_at_1": fmean(scores[-3:]),
        "evaluations": scores,
        "staleness": mean("trainer/staleness"),
        "log_ratio_rms": mean("trainer/log_ratio_rms"),
        "sequence_ess": mean("trainer/sequence_ess"),
        "behave_weight_p99": mean("trainer/behave_weight_p99"),
        # A policy gradient without a clip has none.
        "clip_fraction": mean(clip) if (clip := "trainer/clip_fraction") in of_steps[0] else None,
    }


def run_missing(cases: Sequence[Case], folder: Path, num_steps: int) -> None:
    """Run the cases that have no row, and store a row of each."""
    missing = [case for case in cases if case not in stored(num_steps)]
    for number, case in enumerate(missing):
        print(f"run {number + 1} of {len(missing)}: {case.name}", flush=True)
        shutil.rmtree(folder / case.name, ignore_errors=True)  # a run that was stopped
        rows = run_all({case.name: ("--exp=aime", *case.settings)}, folder, num_steps)[case.name]
        append(
            NAME,
            {**case._asdict(), "num_steps": num_steps, "settings": SETTINGS, **describe(rows)},
        )


def score(
    found: Mapping[Case, Mapping[str, Any]], objective: str, rate: float, eta: int | None
) -> tuple[float, float, int]:
    """Return the mean of pass@1 over seeds, its standard error and the number of seeds."""
    scores = [row["pass_at_1"] for case, row in found.items() if case[:3] == (objective, rate, eta)]
    if not scores:
        return float("nan"), 0.0, 0
    return (
        fmean(scores),
        stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0,
        len(scores),
    )


def average(
    found: Mapping[Case, Mapping[str, Any]],
    rate: float,
    eta: int | None,
    name: str,
    objective: str = "decoupled",
) -> float:
    """Return the mean of a figure over the runs of a cell."""
    values = [row[name] for case, row in found.items() if case[:3] == (objective, rate, eta)]
    return fmean(values) if values else float("nan")


def show(found: Mapping[Case, Mapping[str, Any]]) -> None:
    """Print the table of the panels, and that of the candidates."""
    table = Table(
        *("learning rate", "max_staleness"),
        *(f"{objective}: pass@1" for objective in OBJECTIVES),
        *("seeds", "mean staleness", "log-ratio rms", "sequence ESS"),
        title=NAME,
    )
    for objectives, rates, bounds in PANELS.values():
        for rate in rates if objectives is OBJECTIVES else ():
            for eta in bounds:
                scores = [score(found, objective, rate, eta) for objective in OBJECTIVES]
                table.add_row(
                    *(f"{rate:g}", label(eta)),
                    *(f"{mean:.1%} ± {error:.1%}" for mean, error, _ in scores),
                    "/".join(str(number) for *_, number in scores),
                    f"{average(found, rate, eta, 'staleness'):.1f}",
                    f"{average(found, rate, eta, 'log_ratio_rms'):.3f}",
                    f"{average(found, rate, eta, 'sequence_ess'):.2f}",
                )
    Console(width=130).print(table)
    table = Table(
        "learning rate", "max_staleness", *CANDIDATES, title="candidates: pass@1, staleness"
    )
    _, rates, bounds = PANELS["candidates"]
    for rate in rates:
        for eta in bounds:
            cells = [f"{rate:g}", label(eta)]
            for candidate in CANDIDATES:
                mean, error, number = score(found, candidate, rate, eta)
                age = average(found, rate, eta, "staleness", candidate)
                cells.append(
                    f"{mean:.1%} ± {error:.1%} ({number} seeds), {age:.1f}" if number else ""
                )
            table.add_row(*cells)
    Console(width=130).print(table)


def plot(found: Mapping[Case, Mapping[str, Any]]) -> None:
    """Draw pass@1 by staleness: the main panel, and the two higher rates."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    panels = [
        (rate, bounds)
        for objectives, rates, bounds in PANELS.values()
        if objectives is OBJECTIVES
        for rate in rates
    ]
    for axes, (rate, bounds) in zip(
        figure.subplots(1, len(panels), sharey=True), panels, strict=True
    ):
        places = range(len(bounds))
        for shift, objective in ((-0.06, "decoupled"), (0.06, "plain")):
            scores = [score(found, objective, rate, eta) for eta in bounds]
            axes.errorbar(
                [x + shift for x in places],
                [mean for mean, *_ in scores],
                [error for _, error, _ in scores],
                fmt="o-",
                capsize=3,
                label=f"{objective} PPO",
            )
        axes.set(title=f"learning rate {rate:g}", xlabel="max_staleness η")
        axes.set_xticks(list(places), [label(eta) for eta in bounds])
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("held-out pass@1, mean of the last three evaluations")
    figure.suptitle(
        "Measured on two CPU cores: embedded policy, mean and standard error over seeds"
    )
    figure.savefig(FOLDER / f"{NAME}.png", dpi=110)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="run folders")
    parser.add_argument("--steps", type=int, default=100, help="trainer steps of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--panel", choices=PANELS, help="run this panel only")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.report:
        panels = [options.panel] if options.panel else list(PANELS)
        run_missing(list(cases_of(panels, options.seeds)), options.folder, options.steps)
    found = stored(options.steps)
    plot(found)
    show(found)


if __name__ == "__main__":
    main()
