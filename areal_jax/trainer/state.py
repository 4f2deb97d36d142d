"""The trainer's state that checkpoints hold, and its sharding on the train mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Int32

from areal_jax.models import lora
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import TRAIN_RULES, shardings


class CriticState(NamedTuple):
    """State of the critic: as `TrainState`."""

    params: Params
    opt_state: optax.OptState


class TrainState(NamedTuple):
    """A pytree of arrays: everything that training resumes from."""

    params: Params
    """Trained parameters: the adapter if the policy has one, else all. float32, sharded over the
    train mesh."""
    opt_state: optax.OptState
    """Optimizer state in float32, with moments sharded like the parameters and a count of updates.
    """
    version: Int32[np.ndarray, ""]
    """Number of trainer steps so far."""
    critic: CriticState | None = None
    """None without a critic."""


HOST_MEMORY = "pinned_host"
"""Kind of host memory that devices can access, as jax names it."""


class StateShardings(NamedTuple):
    """Shardings of parameters and optimizer state on the train mesh."""

    params: Any
    opt_state: Any


class Trained(NamedTuple):
    """Shapes and logical axes of the trained parameters."""

    abstract: Params
    axes: Any


def trained(policy: Policy) -> Trained:
    """Return the trained parameters: the adapter if the policy has one, else all."""
    return (
        Trained(lora.abstract(policy), lora.axes(policy))
        if policy.lora
        else Trained(policy.abstract(), policy.axes())
    )


def frozen(policy: Policy, compute_dtype: DTypeLike) -> Params:
    """Return the shapes of the frozen parameters in the compute dtype: those under an adapter, else
    none.
    """
    return policy.abstract(compute_dtype) if policy.lora else {}


def frozen_shardings(policy: Policy, mesh: Mesh) -> Params:
    """Return the shardings of the frozen parameters on the train mesh."""
    return shardings(mesh, policy.axes(), policy.abstract(), TRAIN_RULES) if policy.lora else {}


def require_host_memory(mesh: Mesh, setting: str) -> None:
    """Check that the devices can access host memory.

    Args:
        mesh: The mesh.
        setting: Setting that needs it, for the message.

    Raises:
        ValueError: They cannot.
    """
    device = mesh.local_devices[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"{setting}=true: expected devices with memory of kind {HOST_MEMORY}, found "
            f"{device.device_kind} with {', '.join(sorted(kinds))}; set {setting}=false"
        )


def in_host_memory(placed: Any) -> Any:
    """Return a tree of shardings with all leaves in host memory."""
    return jax.tree.map(lambda how: how.with_memory_kind(HOST_MEMORY), placed)


def state_shardings(
    policy: Policy, mesh: Mesh, optimizer: optax.GradientTransformation, *, offload: bool = False
) -> StateShardings:
    """Return the shardings of parameters and optimizer state.

    Moments are sharded like their parameters, with `offload` in host memory; counts are replicated.

    Raises:
        ValueError: The devices cannot access host memory.
    """
    if offload:
        require_host_memory(mesh, "trainer.optimizer.offload")
    abstract, axes = trained(policy)
    params = shardings(mesh, axes, abstract, TRAIN_RULES)
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, how: how,
        jax.eval_shape(optimizer.init, abstract),
        in_host_memory(params) if offload else params,
        transform_non_params=lambda _: everywhere,
    )
    return StateShardings(params, opt_state)
