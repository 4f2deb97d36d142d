"""Training hours, synchronous versus asynchronous, simulated (AReaL, arXiv:2505.24298, table 1).

    python benchmarks/end_to_end.py

The real gate, buffer and controller run under a simulated clock; `papers_cluster.py` documents the
fitted constants, none of which is fitted on these numbers. The second table changes the paper's
system into this project step by step, with a quarter of the devices and the batch. Appends to
results/end_to_end.jsonl and plots results/end_to_end.png; the result is independent of the machine.

Expected: all four ratios within 15 % of the paper's. Hours of the two rows on mathematics within
26 %; those of 14B and 32B, trained on programming, are at most half of the paper's with the
completion lengths of mathematics.
"""

from __future__ import annotations

from dataclasses import asdict

from matplotlib.figure import Figure
from papers_cluster import FITTED, MEDIAN_LENGTH, SIGMA, TABLE_1, gains, table_1
from results import FOLDER, append
from rich.console import Console
from rich.table import Table

from areal_jax.sim.lengths import LogNormal, capped_mean

NAME = "end_to_end"
SHRINK = 4


def main() -> None:
    rows, causes = {}, {}
    for model, paper in TABLE_1.items():
        synchronous, areal = table_1(model)
        speeds = gains(model, paper.num_devices, 27_648, SHRINK)
        # By tokens, because batches of different systems differ in length by chance.
        tokens = paper.num_steps * 512 * 16 * capped_mean(LogNormal(MEDIAN_LENGTH, SIGMA), 27_648)
        hours = {name: tokens / speed / 3600 for name, speed in speeds.items()}
        ratio = synchronous.step_s / areal.step_s
        rows[model] = {
            "gpus": paper.num_devices,
            "synchronous_h": synchronous.step_s * paper.num_steps / 3600,
            "asynchronous_h": areal.step_s * paper.num_steps / 3600,
            "ratio": ratio,
            "papers_synchronous_h": paper.synchronous_h,
            "papers_asynchronous_h": paper.areal_h,
            "papers_ratio": paper.synchronous_h / paper.areal_h,
            "ratio_off_by": ratio / (paper.synchronous_h / paper.areal_h) - 1,
            "engine_time": areal.shares,
            "trainer_waits": areal.trainer_waits,
        }
        causes[model] = hours
    append(
        NAME, {"fitted": asdict(FITTED), "shrink": SHRINK, "rows": rows, "hours_by_cause": causes}
    )
    show(rows, causes)
    plot(rows, causes)


def show(rows: dict[str, dict[str, float]], causes: dict[str, dict[str, float]]) -> None:
    table = Table(
        "model",
        "GPUs",
        "synchronous, h",
        "asynchronous, h",
        "ratio",
        "paper's",
        "off by",
        title=NAME,
    )
    for model, row in rows.items():
        table.add_row(
            model,
            str(row["gpus"]),
            f"{row['synchronous_h']:.1f} (paper {row['papers_synchronous_h']:.1f})",
            f"{row['asynchronous_h']:.1f} (paper {row['papers_asynchronous_h']:.1f})",
            f"{row['ratio']:.2f}",
            f"{row['papers_ratio']:.2f}",
            f"{row['ratio_off_by']:+.0%}",
        )
    gained = Table("hours, cumulative", *causes)
    for name in next(iter(causes.values())):
        gained.add_row(name, *(f"{hours[name]:.1f}" for hours in causes.values()))
    Console(width=160).print(table, gained)


def plot(rows: dict[str, dict[str, float]], causes: dict[str, dict[str, float]]) -> None:
    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    places = range(len(rows))
    left.bar(
        [x - 0.2 for x in places],
        [row["papers_ratio"] for row in rows.values()],
        0.4,
        label="paper",
        color="#8a8f98",
    )
    left.bar(
        [x + 0.2 for x in places],
        [row["ratio"] for row in rows.values()],
        0.4,
        label="simulated",
        color="#2563a8",
    )
    left.set_xticks(list(places), [f"{model}, {row['gpus']} GPUs" for model, row in rows.items()])
    left.set(title="synchronous / asynchronous hours (table 1)")
    left.legend(frameon=False)
    names = list(next(iter(causes.values())))
    for number, name in enumerate(names):
        first = [hours[names[0]] for hours in causes.values()]
        speed = [before / hours[name] for before, hours in zip(first, causes.values(), strict=True)]
        right.bar([x + (number - 2.5) * 0.15 for x in places], speed, 0.15, label=name)
    right.set_xticks(list(places), list(causes))
    right.set(title="speed-up over the paper's system, cumulative", ylim=(0, 3.2))
    right.legend(frameon=False, fontsize=7, loc="upper center", ncols=2)
    figure.savefig(FOLDER / f"{NAME}.png")


if __name__ == "__main__":
    main()
