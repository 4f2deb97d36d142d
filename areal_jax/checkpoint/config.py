"""When checkpoints are taken and how many are kept."""

from __future__ import annotations

import chz

CHECKPOINTS = "checkpoints"
"""Name under which a run folder keeps them."""


@chz.chz
class CheckpointConfig:
    every_steps: int = chz.field(
        default=20, doc="trainer steps between two checkpoints; 0: only at the end and on Ctrl-C"
    )
    keep: int = chz.field(default=2, doc="newest checkpoints kept")
    export_hf: bool = chz.field(
        default=True,
        doc=(
            "write the final policy as a Hugging Face folder; of a LoRA run, with the adapter "
            "merged into it"
        ),
    )
