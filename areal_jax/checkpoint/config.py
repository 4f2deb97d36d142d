"""Settings of checkpoints."""

from __future__ import annotations

import chz

from areal_jax.bounds import NOT_NEGATIVE, POSITIVE

CHECKPOINTS = "checkpoints"
"""Name of the checkpoint folder in a run folder."""

POLICY = "policy"
"""Name of the folder with the trained policy in a run folder."""


@chz.chz
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every_steps: int = chz.field(
        validator=NOT_NEGATIVE,
        default=20,
        doc="trainer steps between checkpoints; 0: only at the end and on Ctrl-C",
    )
    keep: int = chz.field(validator=POSITIVE, default=2, doc="number of newest checkpoints to keep")
    export_hf: bool = chz.field(
        default=True,
        doc="export of the final policy as a Hugging Face folder, with a LoRA adapter merged",
    )
