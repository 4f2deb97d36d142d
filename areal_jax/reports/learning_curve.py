"""learning_curve.png: the learning curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import (
    EngFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from areal_jax.metrics import names
from areal_jax.reports.plots import BLUE, GREY, ORANGE, as_png, new_figure, plain, title
from areal_jax.reports.series import Series

PASS_AT_1_TITLE = "pass@1 on the evaluation set (± standard error)"


def plot(series: dict[str, Series]) -> bytes:
    """Plot the learning curve by trainer step as a PNG.

    RL: reward, pass@1, staleness and throughput. Supervised and preference training: loss,
    perplexity or accuracy, pass@1 or the gradient norm, and throughput.
    """
    figure = new_figure(11.0, 6.4)
    (objective, score), (third, speed) = figure.subplots(2, 2)
    pass_at_1 = series.get(names.PASS_AT_1), series.get(names.PASS_AT_1_ERROR)
    if names.REWARD not in series and names.LOSS in series:
        if names.ACCURACY in series:
            _plot_each_step(objective, "loss of the trained pairs", series[names.LOSS])
            _plot_share(score, "accuracy on held-out pairs", series[names.ACCURACY])
        else:
            _plot_each_step(objective, "loss of the trained tokens", series[names.LOSS])
            _plot_perplexity(score, series.get(names.PERPLEXITY))
        if names.PASS_AT_1 in series:
            _plot_share(third, PASS_AT_1_TITLE, *pass_at_1)
        else:
            _plot_each_step(third, "norm of the gradient", series.get(names.GRAD_NORM))
    else:
        _plot_each_step(objective, "reward of the trained samples", series.get(names.REWARD))
        if names.EVAL_REWARD in series:
            _plot_each_step(score, "mean reward on the evaluation set", series[names.EVAL_REWARD])
        else:
            _plot_share(score, PASS_AT_1_TITLE, *pass_at_1)
        _plot_lines(
            third,
            "staleness of trained tokens (versions)",
            [
                ("mean", series.get(names.STALENESS_MEAN), BLUE),
                ("largest", series.get(names.STALENESS_MAX), GREY),
            ],
        )
    _plot_lines(
        speed,
        "tokens per second",
        [
            ("rollout", series.get(names.ROLLOUT_TOKENS_PER_S), ORANGE),
            ("trainer", series.get(names.TRAIN_TOKENS_PER_S), BLUE),
        ],
    )
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    last = max((found.versions[-1] for found in series.values()), default=1)
    for axes in (objective, score, third, speed):
        axes.set_xlim(-0.03 * max(1, last), 1.03 * max(1, last))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain(axes)
    for axes in (third, speed):
        axes.set_xlabel("trainer step", fontsize=9)
    return as_png(figure)


def _plot_each_step(axes: Axes, text: str, line: Series | None) -> None:
    title(axes, text)
    if line is None:
        return _mark_unmeasured(axes)
    window = max(1, len(line.values) // 20)
    (each,) = axes.plot(*line, color=BLUE, linewidth=2, label="each step")
    if window > 1:
        each.set(alpha=0.35, linewidth=1)
        smooth = np.convolve(line.values, np.ones(window) / window, mode="valid")
        axes.plot(
            line.versions[window - 1 :],
            smooth,
            color=BLUE,
            linewidth=2,
            label=f"mean of {window} steps",
        )
        axes.legend(frameon=False, fontsize=9, loc="best")


def _plot_share(axes: Axes, text: str, share: Series | None, error: Series | None = None) -> None:
    title(axes, text)
    if share is None:
        return _mark_unmeasured(axes)
    errors = dict(zip(*error, strict=True)) if error else {}
    bars = [errors.get(version, 0.0) for version in share.versions]
    axes.errorbar(
        *share,
        yerr=bars,
        color=ORANGE,
        marker="o",
        markersize=4,
        linewidth=1.6,
        capsize=3,
        elinewidth=1,
        clip_on=False,
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(
        0, 1.2 * max(value + bar for value, bar in zip(share.values, bars, strict=True)) or 1.0
    )
    _name_ends(axes, share, bars, ".1%")


def _plot_perplexity(axes: Axes, perplexity: Series | None) -> None:
    title(axes, "perplexity of held-out examples")
    if perplexity is None:
        return _mark_unmeasured(axes)
    axes.plot(*perplexity, color=ORANGE, marker="o", markersize=4, linewidth=1.6)
    axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    _name_ends(axes, perplexity, [0.0] * len(perplexity.values), ".4g")


def _name_ends(axes: Axes, line: Series, bars: Sequence[float], form: str) -> None:
    """Annotate the first and the last value."""
    points = list(zip(*line, bars, strict=True))
    for place, side in ((0, "left"), (-1, "right")) if len(points) > 1 else ((0, "left"),):
        version, value, bar = points[place]
        axes.annotate(
            f"{value:{form}}",
            (version, value + bar),
            (-6 if side == "left" else 6, 5),
            textcoords="offset points",
            ha=side,
            fontsize=9,
            fontweight="bold",
            color=ORANGE,
        )


def _plot_lines(axes: Axes, text: str, lines: Sequence[tuple[str, Series | None, str]]) -> None:
    title(axes, text)
    found = [(label, line, color) for label, line, color in lines if line is not None]
    for label, line, color in found:
        axes.plot(*line, color=color, linewidth=1.3, label=label)
    if found:
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
        axes.set_ylim(0, 1.25 * max(max(line.values) for _, line, _ in found) or 1.0)
    else:
        _mark_unmeasured(axes)


def _mark_unmeasured(axes: Axes) -> None:
    axes.text(
        0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=GREY
    )
    axes.set_yticks([])
