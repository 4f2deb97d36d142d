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
    """The embedded policy's parameters, a little moved."""
    noise = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: leaf + 0.02 * noise.normal(size=leaf.shape).astype(np.float32) * leaf.std(),
        embedded_params(),
    )


def adapter() -> tuple[Policy, Params]:
    """The embedded policy with an adapter of rank 2, and one that has moved."""
    policy, noise = Policy(hf.read_config(EMBEDDED), LoRA(rank=2)), np.random.default_rng(2)
    return policy, jax.tree.map(
        lambda leaf: jnp.asarray(0.05 * noise.normal(size=leaf.shape), jnp.float32),
        lora.abstract(policy),
    )


def save_run_and_export(folder: Path) -> Path:
    """A run whose checkpoints hold the embedded policy, a little moved, as full parameters; and its
    export, in `policy`.
    """
    save_run(folder, moved())
    hf.save(folder / "policy", Policy(hf.read_config(EMBEDDED)), moved(), EMBEDDED)
    return folder


def save_run(folder: Path, params: Any, *settings: str) -> None:
    """What a run leaves after version 3: its settings, and checkpoints of what it trains. Of
    version 2 all are zeros.
    """
    folder.mkdir(exist_ok=True)
    write_config(
        load_experiment("aime", ["name=drift", "seed=7", *settings]), folder / "config.json"
    )
    store = CheckpointStore(folder / CHECKPOINTS, keep=2)
    for version in (2, 3):
        reported = jax.tree.map(lambda leaf, version=version: leaf * (version == 3), params)
        store.save(
            version, TrainState(reported, (), np.asarray(version, np.int32)), Columns({}, {})
        )
    store.wait()
    store.close()
