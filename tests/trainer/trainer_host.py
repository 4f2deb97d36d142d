"""A trainer of a policy and a critic, and the program of a process that is one of several which
train it.

python trainer_host.py COORDINATOR NUM_PROCESSES PROCESS_ID FOLDER OTHER_CHECKPOINTS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tiny_training import POLICY, batch, critic_params, make_trainer

from areal_jax.checkpoint.recovery import Columns
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.models import hf, lora
from areal_jax.models.config import LoRA, PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.hosts import join
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES, fetch
from areal_jax.records import StepResult
from areal_jax.rl.config import GAE
from areal_jax.run.models import initial_params
from areal_jax.trainer.config import Critic, OptimizerConfig, TrainerConfig
from areal_jax.trainer.ppo import Trainer

OPTIMIZER = OptimizerConfig(learning_rate=1e-2)
CONFIG = TrainerConfig(
    advantages=GAE(gamma=0.9, lam=0.8, normalize=False),
    critic=Critic(optimizer=OPTIMIZER),
    optimizer=OPTIMIZER,
    num_mini_batches=2,
    rows_per_micro_batch=2,
    remat="none",
)
PLACEMENT = PlacementConfig(train_tensor=2)
NUM_STEPS = 3


def make(mesh: Mesh) -> Trainer:
    return make_trainer(CONFIG, mesh, critic=critic_params())


def said(result: StepResult) -> dict[str, float]:
    """What a step found out, apart from how long it took."""
    found = {
        name: value[0] / value[1] if isinstance(value, tuple) else value
        for name, value in result.metrics.items()
    }
    return {name: value for name, value in found.items() if "second" not in name}


def train(trainer: Trainer, folder: Path) -> list[dict[str, float]]:
    """Some steps with a checkpoint after the first; at the end the policy is written, and the whole
    state as numpy."""
    store = CheckpointStore(folder / "checkpoints", keep=1)
    found = []
    for version in range(NUM_STEPS):
        found.append(said(trainer.step(batch(version))))
        if version == 0:
            store.save(1, trainer.state, Columns({"place": 3}, {"tokens": np.arange(3)}))
    hf.save(folder / "policy", POLICY, trainer.params)
    store.close()
    leaves = jax.tree.leaves(fetch(trainer.state))
    if jax.process_index() == 0:
        np.savez(folder / "state.npz", *leaves)
    return found


def write_adapted(mesh: Mesh, folder: Path) -> None:
    """Write a sampled policy's adapter, which has been moved a little, and both merged."""
    policy = Policy(POLICY.config, LoRA(rank=2))
    config = PolicyConfig(random_init=True, lora=policy.lora)
    adapter, base = initial_params(config, policy, Path(), mesh, TRAIN_RULES, jnp.bfloat16, seed=3)
    assert base is not None
    adapter = jax.tree.map(lambda leaf: leaf + 0.5, adapter)
    lora.save(folder / "adapter", policy, adapter, "sampled")
    hf.save(folder / "merged", policy, lora.merge(policy, base, adapter))


def go_on(trainer: Trainer, checkpoints: Path) -> dict[str, float]:
    """What the second step finds, from a checkpoint of the first."""
    state, columns = CheckpointStore(checkpoints, keep=1).restore(1, trainer.let_go())
    assert columns.facts == {"place": 3} and columns.arrays["tokens"].tolist() == [0, 1, 2]
    trainer.restore(state)
    return said(trainer.step(batch(1)))


def main(
    coordinator: str, num_processes: str, process_id: str, folder: str, checkpoints: str
) -> None:
    join(coordinator, int(num_processes), int(process_id), timeout_s=60)
    mesh = make_train_mesh(PLACEMENT, jax.devices())
    write_adapted(mesh, Path(folder))
    trainer = make(mesh)
    found: dict[str, Any] = {
        "steps": train(trainer, Path(folder)),
        "again": go_on(trainer, Path(checkpoints)),
    }
    (Path(folder) / f"found-{process_id}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
