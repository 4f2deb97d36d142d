"""A trainer whose programs are loaded instead of compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_training import batch, make_trainer, train_mesh

from areal_jax.parallel.executables import ExecutableFolder
from areal_jax.trainer.config import TrainerConfig


@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.slow
def test_loaded_programs_make_the_same_update(tmp_path: Path) -> None:
    digests = []
    folders = [ExecutableFolder(tmp_path), ExecutableFolder(tmp_path)]
    for folder in folders:
        trainer = make_trainer(TrainerConfig(), train_mesh(2, fsdp=2), compiler=folder)
        digests.append(trainer.step(batch()).metrics["params_digest"])
    assert digests[0] == digests[1] != 0
    first, second = ((folder.num_saved, folder.num_loaded) for folder in folders)
    # init, zeros, accumulate, apply and logprobs.
    assert first == (5, 0)
    assert second == (0, 5)
