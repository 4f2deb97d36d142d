"""Speed-up by interruptible generation, simulated (AReaL, arXiv:2505.24298, figure 6b).

    python benchmarks/interruption.py

24 GPUs decode the paper's batches of 512 x 16 answers; training is never the bottleneck. The figure
does not give its context length: 16k is assumed, whose tokens per second are within a fifth of the
figure's. Without interruption, an engine updates its weights after all running requests have ended,
and admits none before; with it, weights are updated between two tokens, with caches recomputed or
kept.

Constants are those of `papers_cluster.py`, not fitted on this figure. Devices and batch are a
quarter of the paper's. Appends to results/interruption.jsonl and plots results/interruption.png;
the result is independent of the machine.

Expected: interruption gains 10 % (1.5B) and 5 % (7B), with kept caches 15 % and 10 %; the paper
reports 12 % and 17 %. With a context of 32k, whose answers are longer, it would be 24 % and 18 %
with recomputed caches.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Literal

from matplotlib.figure import Figure
from papers_cluster import FIGURE_6B, FITTED, build
from results import FOLDER, append
from rich.console import Console
from rich.table import Table

from areal_jax.sim.simulation import Staged, simulate

NAME = "interruption"
HABITS: tuple[Literal["drain", "recompute", "keep"], ...] = ("drain", "recompute", "keep")


SHRINK = 4


def speeds(model: str) -> dict[str, float]:
    """Simulate thousands of tokens per second by behavior at a weight update."""
    cluster, workload = build("areal", model, 32, 15_360, max_staleness=4, shrink=SHRINK)
    found = {}
    for on_update in HABITS:
        changed = replace(
            cluster,
            train_devices=96,
            transfer=Staged(),
            behavior=replace(cluster.behavior, on_update=on_update),
        )
        found[on_update] = (
            SHRINK * simulate(changed, workload, num_steps=15, first_counted=3).tokens_per_s / 1e3
        )
    return found


def main() -> None:
    found = {model: speeds(model) for model in FIGURE_6B}
    papers = {
        model: interrupted / drained - 1 for model, (drained, interrupted) in FIGURE_6B.items()
    }
    gained = {
        model: {habit: of[habit] / of["drain"] - 1 for habit in HABITS[1:]}
        for model, of in found.items()
    }
    append(
        NAME,
        {
            "fitted": asdict(FITTED),
            "k_tokens_per_s": found,
            "papers_k_tokens_per_s": FIGURE_6B,
            "gained": gained,
            "papers_gain": papers,
        },
    )
    table = Table(
        "model",
        *(f"{habit}, k tokens/s" for habit in HABITS),
        "rebuilt",
        "kept",
        "paper's",
        title=NAME,
    )
    for model, of in found.items():
        gains = [*gained[model].values(), papers[model]]
        table.add_row(
            model, *(f"{of[habit]:.1f}" for habit in HABITS), *(f"{gain:+.0%}" for gain in gains)
        )
    Console(width=120).print(table)
    figure = Figure(figsize=(6, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    kinds = {"paper": papers}
    kinds |= {
        f"simulated, caches {reported}": {model: of[habit] for model, of in gained.items()}
        for habit, reported in zip(HABITS[1:], ("rebuilt", "kept"), strict=True)
    }
    for number, (name, bars) in enumerate(kinds.items()):
        axes.bar(
            [x + 0.25 * (number - 1) for x in range(len(bars))],
            [100 * gain for gain in bars.values()],
            0.25,
            label=name,
        )
    axes.set_xticks(range(len(found)), list(found))
    axes.set(title="speed-up by interruption", ylabel="%")
    axes.legend(frameon=False)
    figure.savefig(FOLDER / f"{NAME}.png")


if __name__ == "__main__":
    main()
