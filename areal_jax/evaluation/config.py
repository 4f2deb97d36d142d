"""Evaluation while training goes on."""

from __future__ import annotations

import chz

from areal_jax.bounds import NOT_NEGATIVE, POSITIVE


@chz.chz
class EvaluationConfig:
    every_steps: int = chz.field(
        validator=NOT_NEGATIVE,
        default=20,
        doc=(
            "trainer steps between two evaluations, one before the first and one after the last; "
            "0: none"
        ),
    )
    num_tasks: int | None = chz.field(
        validator=POSITIVE, default=256, doc="problems in each evaluation; none: all of the source"
    )
    samples_per_task: int = chz.field(
        validator=POSITIVE, default=1, doc="answers sampled for each problem; pass@1 is their mean"
    )
    temperature: float = chz.field(
        validator=NOT_NEGATIVE, default=1.0, doc="the paper evaluates RL policies at 1.0"
    )
    pinned: bool = chz.field(
        default=True,
        doc="while training goes on, every token is of the version that is evaluated: no newer "
        "weights reach the engine until "
        "the last answer, and training waits where rollouts become too stale meanwhile; false: "
        "newer weights are taken as ever",
    )
