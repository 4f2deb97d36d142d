"""The report of a run: learning_curve.png and a self-contained HTML page.

Both are made from the files in the run's folder, at any time, also during the run.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

from areal_jax.metrics import description, health, names
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.files import write_atomically
from areal_jax.metrics.jsonl import read
from areal_jax.metrics.pages import BLUE, GREY, ORANGE, as_png, new_figure, plain, title, write_page
from areal_jax.metrics.sinks import SAMPLES

REPORT = "report.html"
LEARNING_CURVE = "learning_curve.png"
SHOWN_PER_GRADE = 2
PASS_AT_1_TITLE = "pass@1 on the evaluation set (± standard error)"

_SAMPLE_HEAD = re.compile(
    rb'\{"version":(\d+),"grade":"(\w+)","stop_reason":"(\w+)","num_versions":(\d+),'
)


class Series(NamedTuple):
    """Values of one metric, ordered by version."""

    versions: list[int]
    values: list[float]


class Samples(NamedTuple):
    """Summary of samples.jsonl."""

    grades: Counter[str]
    stop_reasons: Counter[str]
    shown: list[dict[str, Any]]
    """A few rows to show."""


def write_report(run_folder: Path) -> Path:
    """Write learning_curve.png and report.html into the run's folder; return the page's path.

    They are made from metrics.jsonl and, if they exist, samples.jsonl and run.json.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    path = run_folder / METRICS
    if not path.exists():
        raise FileNotFoundError(f"{path} expected, found none; name the folder of a run")
    series = collect(read(path))
    picture = plot(series)
    write_atomically(run_folder / LEARNING_CURVE, picture)
    facts = run_folder / description.FILE
    run = json.loads(facts.read_text()) if facts.exists() else {}
    return write_page(
        run_folder / REPORT,
        Path(__file__).with_name("report.html.jinja"),
        headline=run.get("headline", "areal_jax run"),
        summary=summarize(series),
        findings=list(findings(series)),
        picture=picture,
        picture_of="The learning curve by trainer step",
        run=run,
        series=dict(sorted(series.items())),
        samples=survey(run_folder / SAMPLES),
        hue=lambda version: (
            round(version * 137.508) % 360
        ),  # the golden angle, so that neighbouring versions differ and colours repeat late
    )


def collect(rows: Iterable[dict[str, Any]]) -> dict[str, Series]:
    """Collect series by name; null values, which were nan, are omitted."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("version", "time_s") and value is not None:
                points.setdefault(name, []).append((row["version"], value))
    ordered = {name: sorted(found, key=lambda point: point[0]) for name, found in points.items()}
    return {
        name: Series([v for v, _ in found], [x for _, x in found])
        for name, found in ordered.items()
    }


def summarize(series: dict[str, Series]) -> list[tuple[str, str]]:
    """Return the headline facts as labels and texts."""
    facts: list[tuple[str, str]] = []
    for label, name in (("reward", names.REWARD), ("loss", names.LOSS)):
        if line := series.get(name):
            tenth = max(1, len(line.values) // 10)
            first, last = np.mean(line.values[:tenth]), np.mean(line.values[-tenth:])
            facts += [
                ("steps", f"{line.versions[-1] + 1}"),
                (f"{label}, first and last tenth", f"{first:.3g} → {last:.3g}"),
            ]
            break
    if perplexity := series.get(names.PERPLEXITY):
        facts.append(
            (
                "perplexity, first and last",
                f"{perplexity.values[0]:.4g} → {perplexity.values[-1]:.4g}",
            )
        )
    for label, name in (("accuracy", names.ACCURACY), ("pass@1", names.PASS_AT_1)):
        if line := series.get(name):
            facts.append(
                (f"{label}, first and last", f"{line.values[0]:.1%} → {line.values[-1]:.1%}")
            )
    if rewards := series.get(names.EVAL_REWARD):
        facts.append(
            (
                "evaluation reward, first and last",
                f"{rewards.values[0]:.4g} → {rewards.values[-1]:.4g}",
            )
        )
    if staleness := series.get(names.STALENESS_MAX):
        facts.append(("largest staleness", f"{max(staleness.values):g}"))
    return facts


class Finding(NamedTuple):
    """A finding of a health check."""

    check: health.Check
    first: int
    """First step of the finding."""
    num_steps: int
    """Number of steps with the finding."""
    is_active: bool
    """Whether the last step has the finding."""


def findings(series: dict[str, Series]) -> Iterator[Finding]:
    """Yield the findings of all steps, active ones first."""
    found = [
        (name.removeprefix(health.PREFIX), line)
        for name, line in series.items()
        if name.startswith(health.PREFIX)
    ]
    held = [(name, line) for name, line in found if any(line.values)]
    for name, line in sorted(held, key=lambda each: not each[1].values[-1]):
        first = next(version for version, value in zip(*line, strict=True) if value)
        yield Finding(
            health.check_named(name), first, sum(map(bool, line.values)), bool(line.values[-1])
        )


def survey(path: Path) -> Samples:
    """Count grades and stop reasons, and pick the samples of each grade with most versions."""
    grades, stop_reasons = Counter[str](), Counter[str]()
    picked: dict[str, list[tuple[int, int, bytes]]] = {}
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                head = _SAMPLE_HEAD.match(line)
                if head is None or not line.endswith(b"}\n"):
                    continue
                grade = head[2].decode()
                grades[grade] += 1
                stop_reasons[head[3].decode()] += 1
                best = picked.setdefault(grade, [])
                best.append((int(head[4]), int(head[1]), line))
                best.sort(reverse=True)
                del best[SHOWN_PER_GRADE:]
    shown = [json.loads(line) for grade, _ in grades.most_common() for _, _, line in picked[grade]]
    return Samples(grades, stop_reasons, shown)


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
