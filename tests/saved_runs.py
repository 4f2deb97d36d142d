"""What runs of the embedded policy leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.recovery import Columns
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config.load import load_experiment, write_config
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.models import hf, lora
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params, Policy
from areal_jax.trainer.state import TrainState


def embedded_params() -> Params:
    policy = Policy(hf.read_config(EMBEDDED))
    on_one = jax.tree.map(
        lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), policy.abstract()
    )
    return hf.load(EMBEDDED, policy, on_one)


def moved() -> Params:
    """Return slightly changed parameters of the embedded policy."""
    noise = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: leaf + 0.02 * noise.normal(size=leaf.shape).astype(np.float32) * leaf.std(),
        embedded_params(),
    )


def adapter() -> tuple[Policy, Params]:
    """Return the embedded policy with an adapter of rank 2, and changed adapter parameters."""
    policy, noise = Policy(hf.read_config(EMBEDDED), LoRA(rank=2)), np.random.default_rng(2)
    return policy, jax.tree.map(
        lambda leaf: jnp.asarray(0.05 * noise.normal(size=leaf.shape), jnp.float32),
        lora.abstract(policy),
    )


def save_run_and_export(folder: Path) -> Path:
    """Save a run with checkpoints of changed parameters of the embedded policy; export `policy`."""
    save_run(folder, moved())
    hf.save(folder / "policy", Policy(hf.read_config(EMBEDDED)), moved(), EMBEDDED)
    return folder


def save_run(folder: Path, params: Any, *settings: str) -> None:
    """Save settings and checkpoints of a run after version 3; in version 2 all parameters are 0."""
    folder.mkdir(exist_ok=True)
    write_config(load_experiment("aime", "name=drift", "seed=7", *settings), folder / "config.json")
    store = CheckpointStore(folder / CHECKPOINTS, keep=2)
    for version in (2, 3):
        reported = jax.tree.map(lambda leaf, version=version: leaf * (version == 3), params)
        store.save(
            version, TrainState(reported, (), np.asarray(version, np.int32)), Columns({}, {})
        )
    store.wait()
    store.close()
