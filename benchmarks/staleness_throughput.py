"""Trained tokens/s by max_staleness, simulated (AReaL, arXiv:2505.24298, figure 5c and table 7).

    python benchmarks/staleness_throughput.py

1.5B, answers of at most 8192 tokens: figure 5c on 128 GPUs with 512 x 16 answers per step, table 7
on 8 GPUs with 64 x 16. Nothing is fitted on these numbers (`papers_cluster.py`). The number of GPUs
of figure 5c is not published, so the curve relative to its value at 0 is compared. Figure 5c is
simulated with a sixteenth of devices and batch. Appends to results/staleness_throughput.jsonl and
plots results/staleness_throughput.png; the result is independent of the machine.

Expected: the curve of figure 5c within 10 %, table 7 within 20 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from matplotlib.figure import Figure
from papers_cluster import FIGURE_5C, FITTED, MEDIAN_OF_8K, TABLE_7, build, measure
from results import FOLDER, append
from rich.console import Console
from rich.table import Table

NAME = "staleness_throughput"
CASES = {"figure 5c": (FIGURE_5C, 128, 512, 4), "table 7": (TABLE_7, 8, 64, 1)}
"""The paper's numbers, number of GPUs, groups per batch, and the divisor of both."""


def label(max_staleness: int | None) -> str:
    return "unbounded" if max_staleness is None else str(max_staleness)


def curve(
    papers: Mapping[int | None, float], num_devices: int, groups: int, shrink: int
) -> dict[str, dict[str, float]]:
    """Simulate thousands of tokens per second by max_staleness, absolute and relative to 0."""
    found, first = dict[str, dict[str, float]](), 0.0
    for eta, paper in papers.items():
        cluster, workload = build(
            "areal",
            "1.5b",
            num_devices,
            8192,
            max_staleness=eta,
            groups_per_batch=groups,
            median_length=MEDIAN_OF_8K,
            shrink=shrink,
        )
        outcome = measure(cluster, workload)
        speed = shrink * outcome.tokens_per_s / 1e3
        first = first or speed
        off_by = (speed / first) / (paper / papers[0]) - 1
        found[label(eta)] = {
            "k_tokens_per_s": speed,
            "papers_k_tokens_per_s": paper,
            "ratio": speed / first,
            "papers_ratio": paper / papers[0],
            "ratio_off_by": off_by,
            "staleness": outcome.staleness,
            "masked": outcome.masked,
        }
    return found


def main() -> None:
    found = {name: curve(*case) for name, case in CASES.items()}
    append(NAME, {"fitted": asdict(FITTED), "median_length": MEDIAN_OF_8K, "curves": found})
    for name, rows in found.items():
        table = Table(
            "max_staleness",
            "k tokens/s",
            "paper's",
            "relative to 0",
            "paper's",
            "off by",
            title=name,
        )
        for eta, row in rows.items():
            table.add_row(
                eta,
                f"{row['k_tokens_per_s']:.1f}",
                f"{row['papers_k_tokens_per_s']:.1f}",
                f"{row['ratio']:.2f}",
                f"{row['papers_ratio']:.2f}",
                f"{row['ratio_off_by']:+.0%}",
            )
        Console().print(table)
    plot(found)


def plot(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    figure = Figure(figsize=(10, 3.8), dpi=120, layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, 2), found.items(), strict=True):
        axes.plot(
            list(rows),
            [row["papers_ratio"] for row in rows.values()],
            marker="s",
            color="#8a8f98",
            label="paper",
        )
        axes.plot(
            list(rows),
            [row["ratio"] for row in rows.values()],
            marker="o",
            color="#2563a8",
            label="simulated",
        )
        axes.set(title=name, xlabel="max_staleness", ylabel="speed relative to 0", ylim=(0, None))
        axes.legend(frameon=False)
    figure.savefig(FOLDER / f"{NAME}.png")


if __name__ == "__main__":
    main()
