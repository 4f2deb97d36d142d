"""What a run's metrics say in a few words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from areal_jax.metrics import names
from areal_jax.reports.series import WAITING_SHARE, MetricSeries

RECENT_STEPS = 20


def summarize(metrics: MetricSeries) -> list[tuple[str, str]]:
    """Return the headline figures as labels and texts."""
    return list(_summary(metrics))


def _summary(metrics: MetricSeries) -> Iterator[tuple[str, str]]:
    for label, name in (("reward", names.REWARD), ("loss", names.LOSS)):
        if line := metrics.series(name):
            tenth = max(1, len(line.values) // 10)
            first, last = np.mean(line.values[:tenth]), np.mean(line.values[-tenth:])
            yield f"{label}, first and last tenth", f"{first:.3g} → {last:.3g}"
            break
    for label, name, form in (
        ("perplexity", names.PERPLEXITY, ".4g"),
        ("accuracy", names.ACCURACY, ".1%"),
        ("pass@1", names.PASS_AT_1, ".1%"),
        ("evaluation reward", names.EVAL_REWARD, ".4g"),
    ):
        if line := metrics.series(name):
            first, last = line.values[0], line.values[-1]
            yield f"{label}, first and last", f"{first:{form}} → {last:{form}}"
    if staleness := metrics.series(names.STALENESS_MAX):
        yield "largest staleness", f"{max(staleness.values):g}"


def bottleneck(metrics: MetricSeries) -> str:
    """Return a sentence on who waits for whom in the latest steps; empty if nobody can wait."""
    waiting = metrics.series(WAITING_SHARE)
    if waiting is None:
        return ""
    recent = waiting.values[-RECENT_STEPS:]
    share = float(np.mean(recent))
    found = (
        f"In the last {len(recent)} steps the trainer waited {share:.0%} of the time for rollouts"
    )
    if share > 0.5:
        return f"{found}: generation limits the speed; give it more devices or slots."
    if share < 0.1:
        return f"{found}: training limits the speed; give it more devices."
    return f"{found}: generation and training keep pace."
