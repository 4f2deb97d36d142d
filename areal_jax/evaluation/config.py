"""Settings of evaluations during training."""

from __future__ import annotations

import chz

from areal_jax.bounds import NOT_NEGATIVE, POSITIVE


@chz.chz
class EvaluationConfig:
    """When and how to evaluate during training."""

    every_steps: int = chz.field(
        validator=NOT_NEGATIVE,
        default=20,
        doc=(
            "trainer steps between two evaluations, with one before the first step and one after "
            "the last; 0: no evaluations"
        ),
    )
    num_tasks: int | None = chz.field(
        validator=POSITIVE,
        default=256,
        doc="number of tasks per evaluation; none: all of the source",
    )
    samples_per_task: int = chz.field(
        validator=POSITIVE, default=1, doc="samples per task; pass@1 is their mean"
    )
    temperature: float = chz.field(
        validator=NOT_NEGATIVE,
        default=1.0,
        doc="sampling temperature; the paper evaluates RL policies at 1.0",
    )
    pinned: bool = chz.field(
        default=True,
        doc="pin the evaluated version: weight updates wait for the last answer, and training "
        "waits at the staleness limit; false: engines apply weight updates during the evaluation",
    )
