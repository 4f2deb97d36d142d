"""What a run writes besides metrics.jsonl, which it always writes."""

from __future__ import annotations

import chz

from areal_jax.bounds import ABOVE_ONE, FRACTION, NOT_NEGATIVE, POSITIVE

METRICS = "metrics.jsonl"
"""Name under which a run folder keeps a row of numbers for every step and evaluation."""


@chz.chz
class MetricsConfig:
    tensorboard: bool = chz.field(default=True, doc="write TensorBoard events")
    samples: bool = chz.field(
        default=True, doc="write samples.jsonl: every trained sample, token by token"
    )
    trace: bool = chz.field(default=True, doc="write trace.json: who did what when, for Perfetto")
    progress: bool = chz.field(default=True, doc="show a progress line on the terminal")


@chz.chz
class HealthConfig:
    """Checks for a run that cannot learn."""

    window_steps: int = chz.field(
        validator=POSITIVE,
        default=10,
        doc="consecutive steps that a check looks at; a finding holds over all of them",
    )
    stop: bool = chz.field(
        default=False,
        doc=(
            "end the run at the first finding, with a checkpoint and exit status 1; false: "
            "report findings only"
        ),
    )
    # Entropy that collapses goes to 0 within tens of steps, and learning ends there
    # (arXiv:2505.22617).
    min_entropy: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.01,
        doc="mean entropy of the policy, in nats per token, below which it has collapsed",
    )
    # Trust regions end at ratios of 1.2 to 1.3 for single tokens: a mean of 2 is far outside of
    # any.
    max_ratio: float = chz.field(
        validator=ABOVE_ONE,
        default=2.0,
        doc="largest mean importance ratio, and inverse of the smallest, that is in range",
    )
    max_lost_share: float = chz.field(
        validator=FRACTION,
        default=0.5,
        doc=(
            "share of groups that may be rejected for one reason, and of tokens too stale to be "
            "trained on"
        ),
    )
