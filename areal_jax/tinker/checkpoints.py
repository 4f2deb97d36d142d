"""Files of trained models: PEFT or Hugging Face folders, with Adam's state beside.

The same folders are checkpoints that clients name, weights for sampling, and snapshots.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from areal_jax.models import hf, lora
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import fetch, put
from areal_jax.tinker.programs import ModelState, TrainingPrograms

OPTIMIZER = "optimizer_state.safetensors"


def save(
    folder: Path, policy: Policy, state: ModelState, base: str, *, with_optimizer: bool
) -> int:
    """Write a folder, which appears when it is complete and replaces an earlier one.

    Args:
        folder: folder to write.
        policy: the policy, with its adapter's settings.
        state: parameters and optimizer state.
        base: name of the base policy, for PEFT.
        with_optimizer: write the optimizer state too.

    Returns:
        Size in bytes.
    """
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if policy.lora:
        lora.save(temporary, policy, state.params, base)
    else:
        hf.save(temporary, policy, state.params)
    if with_optimizer:
        hf.write_tensors(_by_name(fetch(state.opt_state)), temporary / OPTIMIZER)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)
    else:
        temporary.rename(folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def load_params(folder: Path, policy: Policy, shardings: Any) -> Params:
    """Read the trained parameters of a folder onto a mesh.

    Raises:
        ValueError: the folder does not fit the policy.
    """
    return (lora if policy.lora else hf).load(folder, policy, shardings)


def load(folder: Path, programs: TrainingPrograms, *, with_optimizer: bool) -> ModelState:
    """Read a folder onto the train mesh.

    Args:
        folder: the folder.
        programs: programs of the policy.
        with_optimizer: read the optimizer state; otherwise it is empty.

    Raises:
        ValueError: the folder does not fit the policy, or has no optimizer state.
    """
    params = load_params(folder, programs.policy, programs.shardings.params)
    state = programs.with_fresh_optimizer(params)
    if not with_optimizer:
        return state
    if not (folder / OPTIMIZER).is_file():
        raise ValueError(f"{folder.name}: expected weights with optimizer state, found none")
    with hf.open_weights(folder / OPTIMIZER) as file:
        stored = {
            name: file.get_tensor(name).reshape(leaf.shape)
            for name, leaf in _by_name(state.opt_state).items()
        }
    leaves, structure = jax.tree.flatten(state.opt_state)
    host: optax.OptState = structure.unflatten(
        stored[name] for name, _ in zip(_by_name(state.opt_state), leaves, strict=True)
    )
    return ModelState(params, put(host, programs.shardings.opt_state))


def _by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, in order."""
    found = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    # safetensors has no arrays without dimensions in contiguous memory of their own.
    return {
        name: np.atleast_1d(np.ascontiguousarray(leaf)) if isinstance(leaf, np.ndarray) else leaf
        for name, leaf in found.items()
    }
