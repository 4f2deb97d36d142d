"""What a checkpoint of the trainer holds, and how it lies on the train mesh."""

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
    """What the critic resumes from, as a `TrainState` holds it of the policy."""

    params: Params
    opt_state: optax.OptState


class TrainState(NamedTuple):
    """A pytree of arrays: all that training resumes from."""

    params: Params
    """What is trained: the adapter of a policy that has one, else all parameters. float32, sharded
    over the train mesh."""
    opt_state: optax.OptState
    """float32, its moments sharded as the parameters; counts the updates made."""
    version: Int32[np.ndarray, ""]
    """Trainer steps that the parameters have seen."""
    critic: CriticState | None = None
    """None where none is asked; its leaves are then none either."""


HOST_MEMORY = "pinned_host"
"""The host's memory that devices reach by themselves, as jax names it."""


class StateShardings(NamedTuple):
    """How parameters and optimizer state lie on the train mesh."""

    params: Any
    opt_state: Any


class Trained(NamedTuple):
    """Shapes and logical axes of what the optimizer changes."""

    abstract: Params
    axes: Any


def trained(policy: Policy) -> Trained:
    """The adapter of a policy that has one, else all of its parameters."""
    return (
        Trained(lora.abstract(policy), lora.axes(policy))
        if policy.lora
        else Trained(policy.abstract(), policy.axes())
    )


def frozen(policy: Policy, compute_dtype: DTypeLike) -> Params:
    """Shapes of what the optimizer leaves alone, as it is computed with: all parameters beside an
    adapter, else nothing."""
    return policy.abstract(compute_dtype) if policy.lora else {}


def frozen_shardings(policy: Policy, mesh: Mesh) -> Params:
    """How what is frozen lies on the train mesh."""
    return shardings(mesh, policy.axes(), policy.abstract(), TRAIN_RULES) if policy.lora else {}


def require_host_memory(mesh: Mesh, setting: str) -> None:
    """ValueError, naming the setting that asks for it, where the devices cannot reach the memory of
    the host."""
    device = mesh.local_devices[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"{setting}=true needs memory of kind {HOST_MEMORY}, and {device.device_kind} has only "
            f"{', '.join(sorted(kinds))}; set it to false"
        )


def in_host_memory(placed: Any) -> Any:
    """A tree of shardings, each in the memory of the host."""
    return jax.tree.map(lambda how: how.with_memory_kind(HOST_MEMORY), placed)


def state_shardings(
    policy: Policy, mesh: Mesh, optimizer: optax.GradientTransformation, *, offload: bool = False
) -> StateShardings:
    """Moments lie as their parameters do, and with `offload` in the memory of the host; counts are
    on every device.

    Raises ValueError where the devices cannot reach such memory."""
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
