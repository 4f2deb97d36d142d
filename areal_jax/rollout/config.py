"""Batch shape and staleness."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import FRACTION, NOT_NEGATIVE, POSITIVE


@chz.chz
class RolloutConfig:
    groups_per_batch: int = chz.field(
        validator=POSITIVE, default=16, doc="groups (prompts) in one trainer step"
    )
    samples_per_group: int = chz.field(
        validator=POSITIVE, default=8, doc="answers sampled for each prompt"
    )
    max_staleness: int | None = chz.field(
        validator=NOT_NEGATIVE,
        default=4,
        doc="eta: versions a trained token may lag behind; 0: synchronous; none: unbounded",
    )
    max_staleness_of_code: int | Literal["same"] | None = chz.field(
        validator=NOT_NEGATIVE,
        default="same",
        doc=(
            "eta of tasks whose answers are programs, which the paper's authors allow to lag "
            "further; same: max_staleness"
        ),
    )
    max_running_groups: int = chz.field(
        validator=POSITIVE, default=64, doc="groups under way at the same time"
    )
    success_rate_above: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc="train only on groups in which more than this share of answers is correct, and start "
        "others in place of the rest "
        "(DAPO: 0; AReaL v0.3: 0.05); none: on all",
    )
    success_rate_below: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc=(
            "likewise where less than this share is correct (DAPO: 1; AReaL v0.3: 0.95); none: "
            "on all"
        ),
    )
    batch_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=1800.0,
        doc="the trainer waits at most this long for a batch, then says what it waited for",
    )

    def staleness_of_kind(self) -> dict[str, int | None]:
        """Max_staleness of the kinds of tasks that have their own."""
        return {} if self.max_staleness_of_code == "same" else {"code": self.max_staleness_of_code}
