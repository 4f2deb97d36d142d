"""A bound on staleness that follows how far the data is from the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping

from areal_jax.rollout.config import RolloutConfig
from areal_jax.rollout.gate import Gate


def adapt_limit(
    gate: Gate, config: RolloutConfig, metrics: Mapping[str, float | tuple[float, float]]
) -> None:
    """Lower or raise the limit of a gate after a step, if `rollout.min_sequence_ess` is set.

    With log-ratios that grow in proportion to the staleness s, the effective share of sequences
    falls as exp(-c s²). A share E below the minimum M thus asks for s sqrt(ln M / ln E). A share
    above (1 + M) / 2 raises the limit by one version. A batch that is older than the limit was
    started under an earlier one, and lowers nothing.

    Args:
        gate: gate of the run.
        config: its settings.
        metrics: the trainer's metrics of the step.
    """
    ess, staleness = (_value(metrics, name) for name in ("sequence_ess", "staleness"))
    lowest = config.min_sequence_ess
    if lowest is None or ess is None or staleness is None:
        return
    bound = gate.limit if gate.limit is not None else config.max_staleness
    if ess < lowest and (bound is None or staleness <= bound + 0.5):
        share = math.sqrt(math.log(lowest) / math.log(max(ess, 1e-6)))
        gate.limit = max(0, math.floor(staleness * share))
    elif ess > (1 + lowest) / 2 and gate.limit is not None:
        raised = gate.limit + 1
        gate.limit = None if config.max_staleness == raised else raised


def _value(metrics: Mapping[str, float | tuple[float, float]], name: str) -> float | None:
    """Return a metric, divided by its weight; None if it is absent."""
    match metrics.get(name):
        case (total, weight):
            return total / weight if weight else None
        case value:
            return value
