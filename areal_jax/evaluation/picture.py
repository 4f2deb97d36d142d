"""results.png: the results of an evaluation as a picture."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

from areal_jax.evaluation.results import Results
from areal_jax.reports.plots import BLUE, GREY, ORANGE, as_png, new_figure, plain, title

MAX_FAMILIES = 24
"""Families in the picture, those with most problems; the table has all."""


def plot(results: Results) -> bytes:
    """Plot scores by number of samples, lengths, shares of correct answers and families as a
    PNG.
    """
    if results.mean_reward is not None:
        figure = new_figure(5.5, 3.2)
        lengths = figure.subplots()
        _plot_lengths(lengths, results)
        plain(lengths)
        return as_png(figure)
    figure = new_figure(11.0, 6.4)
    (by_k, lengths), (shares, families) = figure.subplots(2, 2)
    _plot_by_k(by_k, results)
    _plot_lengths(lengths, results)
    _plot_shares(shares, results)
    _plot_families(families, results)
    for axes in (by_k, lengths, shares, families):
        plain(axes)
    return as_png(figure)


def _plot_by_k(axes: Axes, results: Results) -> None:
    title(axes, "score of k samples (95 %)")
    lines = [("pass@k", results.pass_at, BLUE), ("maj@k", results.majority_at or {}, ORANGE)]
    for label, estimates, color in lines:
        if not estimates:
            continue
        values = [estimate.value for estimate in estimates.values()]
        low, high = zip(*(estimate.interval_95 for estimate in estimates.values()), strict=True)
        axes.plot(
            list(estimates),
            values,
            color=color,
            marker="o",
            markersize=4,
            linewidth=1.6,
            label=label,
        )
        axes.fill_between(list(estimates), low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(results.pass_at)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("k", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _plot_lengths(axes: Axes, results: Results) -> None:
    title(axes, "tokens of an answer")
    found = results.tokens
    widths = [right - left for left, right in zip(found.edges, found.edges[1:], strict=False)]
    axes.bar(
        found.edges[:-1],
        found.counts,
        widths,
        align="edge",
        color=BLUE,
        edgecolor="white",
        linewidth=0.6,
    )
    axes.axvline(found.mean, color=ORANGE, linewidth=1.6, label=f"mean {found.mean:,.0f}")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.set_ylabel("answers", fontsize=9)


def _plot_shares(axes: Axes, results: Results) -> None:
    title(axes, "problems by share of correct answers")
    shares = sorted(
        problem.num_correct / problem.num_samples
        for problem in results.problems
        if problem.num_samples
    )
    axes.step(range(1, len(shares) + 1), shares[::-1], where="mid", color=BLUE, linewidth=1.6)
    axes.fill_between(
        range(1, len(shares) + 1), shares[::-1], step="mid", color=BLUE, alpha=0.15, linewidth=0
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("problems, easiest first", fontsize=9)


def _plot_families(axes: Axes, results: Results) -> None:
    title(axes, "pass@1 by family (95 %)")
    largest = sorted(results.families.items(), key=lambda item: -item[1].num_tasks)[:MAX_FAMILIES]
    scored = [(name, family.pass_at_1) for name, family in largest if family.pass_at_1 is not None]
    found = sorted(scored, key=lambda item: item[1].value)
    for row, (_, score) in enumerate(found):
        value, (low, high) = score.value, score.interval_95
        axes.plot([low, high], [row, row], color=GREY, linewidth=1.4)
        axes.plot([value], [row], color=ORANGE, marker="o", markersize=4)
    axes.set_yticks(range(len(found)), [name or "all" for name, _ in found])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(-0.02, 1.02)
