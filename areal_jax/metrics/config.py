"""Settings of a run's outputs and health checks."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import ABOVE_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, Bound

METRICS = "metrics.jsonl"
"""File of a run folder with one row per step and evaluation; always written."""


@chz.chz
class MetricsConfig:
    """Optional outputs of a run."""

    tensorboard: bool = chz.field(default=True, doc="TensorBoard events")
    samples: bool = chz.field(
        default=True, doc="samples.jsonl: every trained sample, token by token"
    )
    # Compressing a part takes 12 s for each GiB, for which the end of a run waits.
    samples_part_bytes: int = chz.field(
        validator=Bound("1 to 2^30", lambda value: 1 <= value <= 2**30),
        default=2**28,
        doc="size of samples.jsonl at which its rows are moved to samples.00000.jsonl.gz, in bytes",
    )
    rollouts: bool = chz.field(
        default=True,
        doc="rollouts/: every trained batch, bit for bit, so that the run can be replayed",
    )
    trace: bool = chz.field(default=True, doc="trace.json: a timeline of all threads for Perfetto")
    progress: bool = chz.field(default=True, doc="progress line on the terminal")
    trackers: tuple[Literal["wandb", "trackio", "mlflow"], ...] = chz.field(
        default=(), doc="experiment trackers; each needs the extra of its name"
    )
    project: str = chz.field(default="areal_jax", doc="project of the run at its trackers")


@chz.chz
class HealthConfig:
    """Checks for runs that cannot learn."""

    window_steps: int = chz.field(
        validator=POSITIVE,
        default=10,
        doc="window of a check, in steps; a finding holds over the whole window",
    )
    stop: bool = chz.field(
        default=False,
        doc=(
            "stop at the first finding, with a checkpoint and exit status 1; false: findings are "
            "reported only"
        ),
    )
    # Collapsing entropy reaches 0 within tens of steps, and learning ends there
    # (arXiv:2505.22617).
    min_entropy: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.01,
        doc="entropy below which the policy has collapsed, in nats per token",
    )
    # Trust regions end at ratios of 1.2 to 1.3 for single tokens: a mean of 2 is far outside.
    max_ratio: float = chz.field(
        validator=ABOVE_ONE,
        default=2.0,
        doc="largest healthy mean importance ratio, and inverse of the smallest",
    )
    min_sequence_ess: float = chz.field(
        validator=FRACTION,
        default=0.5,
        doc="smallest healthy effective share of sequences by their importance weights",
    )
    max_lost_share: float = chz.field(
        validator=FRACTION,
        default=0.5,
        doc=(
            "largest healthy share of groups rejected for one reason, and of tokens too stale to "
            "train on"
        ),
    )
