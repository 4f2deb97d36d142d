"""Settings of batch shape, staleness and group filtering."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import FRACTION, NOT_NEGATIVE, POSITIVE


@chz.chz
class RolloutConfig:
    """Settings of the rollout controller."""

    groups_per_batch: int = chz.field(
        validator=POSITIVE, default=16, doc="groups (prompts) per trainer step"
    )
    samples_per_group: int = chz.field(
        validator=POSITIVE, default=8, doc="samples per group (answers per prompt)"
    )
    max_staleness: int | None = chz.field(
        validator=NOT_NEGATIVE,
        default=4,
        doc="maximum staleness eta of trained tokens, in versions; 0: synchronous; none: unbounded",
    )
    max_staleness_of_code: int | Literal["same"] | None = chz.field(
        validator=NOT_NEGATIVE,
        default="same",
        doc=(
            "maximum staleness of code tasks, for which the paper's authors allow more; same: "
            "max_staleness"
        ),
    )
    min_sequence_ess: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc="adaptive staleness: effective share of sequences (trainer/sequence_ess) below which "
        "the bound on staleness is lowered; above the middle between it and 1 the bound, which "
        "starts at 0, rises by one version a step, up to max_staleness; none: a fixed bound",
    )
    max_running_groups: int = chz.field(
        validator=POSITIVE, default=64, doc="maximum number of concurrent groups"
    )
    success_rate_above: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc="exclusive lower bound on a trained group's share of correct answers; groups outside "
        "are rejected and replaced (dynamic sampling; DAPO: 0, AReaL v0.3: 0.05); none: no bound",
    )
    success_rate_below: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc=(
            "exclusive upper bound on a trained group's share of correct answers (DAPO: 1, AReaL "
            "v0.3: 0.95); none: no bound"
        ),
    )
    batch_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=1800.0,
        doc="limit on the trainer's wait for one batch, in seconds; then the run fails",
    )

    def staleness_of_kind(self) -> dict[str, int | None]:
        """Return max_staleness of the kinds of tasks that have their own."""
        return {} if self.max_staleness_of_code == "same" else {"code": self.max_staleness_of_code}
