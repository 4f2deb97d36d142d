"""Train mesh and rollout mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.torus import arrange, divisors, group_by_part, is_ring, order_devices

PAPERS_SHARE = 3 / 4
"""Share of rollout devices (AReaL, arXiv:2505.24298, section 7.1)."""

MAX_SHARDS = 16
"""Shards of parameters on a TPU slice, if they fit its memory. XLA:TPU reduces and scatters the
gradients of matrices over 16 devices of every slice; over 64, and over a whole slice that is no
ring, it reduces them whole on each device, with twice the traffic."""


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

    Without placement.train_fsdp, parameters are cut as `finer_meshes` says if they fit.

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
    mesh = _make_mesh({"data": others, **shards}, devices)
    return mesh if placement.train_fsdp else next(finer_meshes(mesh))


def finer_meshes(mesh: Mesh) -> Iterator[Mesh]:
    """Yield train meshes of the same devices and shards but for the axes data and fsdp, by
    decreasing speed and memory.

    The first is for parameters that fit. Parameters are cut within a slice of TPUs or a node of
    GPUs, and repeated over the others (hybrid sharding); only the last mesh has no data axis. On
    CPUs it is the only one.

    Args:
        mesh: train mesh with any sizes of these two axes.
    """
    devices, sizes = order_devices(mesh.devices.reshape(-1).tolist()), dict(mesh.shape)
    groups = sizes.pop("data") * sizes.pop("fsdp")
    inner, cut = math.prod(sizes.values()), sizes["expert"] * sizes["context"]
    parts = group_by_part(devices)
    near = math.gcd(groups, *(max(1, len(part) // inner) for part in parts))
    most = near
    if devices[0].platform == "cpu" or near == 1:
        most = near = groups
    elif devices[0].platform == "tpu":
        most = max(1, MAX_SHARDS // cut)
        if any(near * cut == len(part) and not is_ring(part) for part in parts):
            most = min(most, near // 2)
    fastest = max(size for size in divisors(near) if size <= most)
    for fsdp in sorted({groups, *(size for size in divisors(near) if size >= fastest)}):
        yield _make_mesh({"data": groups // fsdp, "fsdp": fsdp, **sizes}, devices)


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

    Engines share a single CPU device: the products of a decode step are too small for several
    cores, so that each engine keeps one busy.

    Raises:
        ValueError: the data axis is not divisible by the number of engines.
    """
    if rollout.size == 1 and rollout.devices.flat[0].platform == "cpu":
        return [rollout] * num_engines
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
