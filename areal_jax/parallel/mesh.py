"""Train mesh and rollout mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.torus import arrange, order_devices

PAPERS_SHARE = 3 / 4
"""Share of rollout devices (AReaL, arXiv:2505.24298, section 7.1)."""


class Meshes(NamedTuple):
    """Train mesh and rollout mesh: disjoint, but a single device is in both."""

    train: Mesh
    """Axes data, fsdp, expert, context, tensor."""
    rollout: Mesh
    """Axes data, tensor."""


def make_meshes(placement: PlacementConfig, devices: Sequence[jax.Device] | None = None) -> Meshes:
    """Split devices into a train mesh and a rollout mesh, each a contiguous part of the network.

    Args:
        placement: settings of the meshes.
        devices: devices to split; None for all.

    Raises:
        ValueError: there are too few devices, or their number is not divisible by the shards.
    """
    devices = order_devices(jax.devices() if devices is None else devices)
    num_train, num_rollout = _split(placement, len(devices))
    train = make_train_mesh(placement, devices[:num_train])
    return Meshes(train, make_rollout_mesh(placement, devices[-num_rollout:]))


def make_train_mesh(placement: PlacementConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Make a train mesh of all these devices.

    Raises:
        ValueError: the number of devices is not divisible by the shards.
    """
    shards = {
        "fsdp": placement.train_fsdp or 1,
        "expert": placement.train_expert,
        "context": placement.train_context,
        "tensor": placement.train_tensor,
    }
    others, rest = divmod(len(devices), math.prod(shards.values()))
    if rest:
        settings = " times ".join(
            f"placement.train_{axis}={size}" for axis, size in shards.items() if size > 1
        )
        raise ValueError(f"{len(devices)} train devices are not divisible by {settings}")
    if placement.train_fsdp:
        axes = {"data": others} | shards
    else:
        axes = {"data": 1} | shards | {"fsdp": others}
    return _make_mesh(axes, devices)


def make_rollout_mesh(placement: PlacementConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Make a rollout mesh of all these devices.

    Raises:
        ValueError: the number of devices is not divisible by the shards.
    """
    others, rest = divmod(len(devices), placement.rollout_tensor)
    if rest:
        raise ValueError(
            f"{len(devices)} rollout devices are not divisible by "
            f"placement.rollout_tensor={placement.rollout_tensor}"
        )
    axes = {"data": others, "tensor": placement.rollout_tensor}
    return _make_mesh(axes, devices)


def engine_meshes(rollout: Mesh, num_engines: int) -> list[Mesh]:
    """Split the rollout mesh along its data axis into meshes of equal size, one per engine.

    Raises:
        ValueError: the data axis is not divisible by the number of engines.
    """
    if rollout.shape["data"] % num_engines:
        raise ValueError(
            f"the rollout mesh's {rollout.shape['data']} shards of slots are not divisible by "
            f"placement.engines={num_engines}; change placement.engines, "
            "placement.rollout_devices or placement.rollout_tensor"
        )
    parts = rollout.devices.reshape(num_engines, -1, rollout.shape["tensor"])
    return [Mesh(part, rollout.axis_names, axis_types=rollout.axis_types) for part in parts]


def compute_dtype(name: Literal["auto", "float32", "bfloat16"], mesh: Mesh) -> jnp.dtype:
    """Return the compute dtype of a policy on a mesh; auto: float32 on CPUs, else bfloat16."""
    auto = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name.replace("auto", auto))


def _split(placement: PlacementConfig, num_devices: int) -> tuple[int, int]:
    """Decide how many devices train, and how many decode."""
    rollout, share, train = (
        placement.rollout_devices,
        placement.rollout_share,
        placement.train_devices,
    )
    if num_devices == 1:
        if (rollout or 1) != 1 or (train or 1) != 1 or share is not None:
            raise ValueError(
                "expected no split of 1 device, which trains and decodes, found "
                f"placement.train_devices={train}, placement.rollout_devices={rollout}, "
                f"placement.rollout_share={share}; leave all unset"
            )
        return 1, 1
    if isinstance(share, int | float):
        rollout = round(num_devices * share)
    elif rollout is None:
        papers = min(max(round(num_devices * PAPERS_SHARE), 1), num_devices - 1)
        rollout = papers if train is None else num_devices - train
    if train is None:
        train = num_devices - rollout
    if train < 1 or rollout < 1 or train + rollout > num_devices:
        raise ValueError(
            "expected at least one device each for training and decoding, of "
            f"{num_devices} devices, found {train} to train and {rollout} to decode; change "
            "placement.train_devices, placement.rollout_devices or placement.rollout_share"
        )
    return train, rollout


def _make_mesh(axes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    # With jax's default, Explicit, with_sharding_constraint would be an assertion.
    types = (AxisType.Auto,) * len(axes)
    arranged = arrange(tuple(axes.values()), order_devices(devices))
    return Mesh(arranged, tuple(axes), axis_types=types)
