"""Two meshes: one that trains, one that decodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from areal_jax.parallel.config import PlacementConfig

PAPERS_SHARE = 3 / 4
"""Of the devices, that decode (AReaL, arXiv:2505.24298, section 7.1)."""


class Meshes(NamedTuple):
    """Disjoint where there are several devices; with one device both lie on it."""

    train: Mesh
    """Axes data, fsdp, expert, context, tensor."""
    rollout: Mesh
    """Axes data, tensor."""


def make_meshes(placement: PlacementConfig, devices: Sequence[jax.Device] | None = None) -> Meshes:
    """Cut the devices (all by default) into a train mesh and a rollout mesh.

    Raises ValueError with the counts where the devices do not suffice or do not divide."""
    devices = jax.devices() if devices is None else devices
    num_train, num_rollout = _split(placement, len(devices))
    train = make_train_mesh(placement, devices[:num_train])
    return Meshes(train, make_rollout_mesh(placement, devices[-num_rollout:]))


def make_train_mesh(placement: PlacementConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Cut the devices for training, all of them. ValueError with the counts where they do not
    divide."""
    given = {
        "fsdp": placement.train_fsdp or 1,
        "expert": placement.train_expert,
        "context": placement.train_context,
        "tensor": placement.train_tensor,
    }
    left, rest = divmod(len(devices), math.prod(given.values()))
    if rest:
        knobs = " times ".join(
            f"placement.train_{axis}={size}" for axis, size in given.items() if size > 1
        )
        raise ValueError(f"{len(devices)} train devices do not divide by {knobs}")
    axes = {"data": left} | given if placement.train_fsdp else {"data": 1} | given | {"fsdp": left}
    return _mesh(axes, devices)


def make_rollout_mesh(placement: PlacementConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Cut the devices for decoding, all of them. ValueError with the counts where they do not
    divide."""
    left, rest = divmod(len(devices), placement.rollout_tensor)
    if rest:
        raise ValueError(
            f"{len(devices)} rollout devices do not divide by "
            f"placement.rollout_tensor={placement.rollout_tensor}"
        )
    return _mesh({"data": left, "tensor": placement.rollout_tensor}, devices)


def engine_meshes(rollout: Mesh, num_engines: int) -> list[Mesh]:
    """The rollout mesh cut along its data axis into meshes of like size, for engines of their own.

    Raises ValueError with the counts where it does not divide."""
    if rollout.shape["data"] % num_engines:
        raise ValueError(
            f"the rollout mesh has {rollout.shape['data']} shards of slots, which "
            f"placement.engines={num_engines} does not "
            "divide; change it, placement.rollout_devices or placement.rollout_tensor"
        )
    parts = rollout.devices.reshape(num_engines, -1, rollout.shape["tensor"])
    return [Mesh(part, rollout.axis_names, axis_types=rollout.axis_types) for part in parts]


def compute_dtype(name: Literal["auto", "float32", "bfloat16"], mesh: Mesh) -> jnp.dtype:
    """In which precision a policy is computed on a mesh; auto: float32 on CPUs, bfloat16
    elsewhere."""
    auto = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name.replace("auto", auto))


def _split(placement: PlacementConfig, num_devices: int) -> tuple[int, int]:
    """How many devices train, and how many decode."""
    rollout, share, train = (
        placement.rollout_devices,
        placement.rollout_share,
        placement.train_devices,
    )
    if num_devices == 1:
        if (rollout or 1) != 1 or (train or 1) != 1 or share is not None:
            raise ValueError(
                "there is 1 device, which trains and decodes; came "
                f"placement.train_devices={train}, "
                f"placement.rollout_devices={rollout}, placement.rollout_share={share}: leave "
                "all unset"
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
            "expected at least one device each for training and decoding, and no more than the "
            f"{num_devices} there are; "
            f"came {train} to train and {rollout} to decode: change placement.train_devices, "
            "placement.rollout_devices or "
            "placement.rollout_share"
        )
    return train, rollout


def _mesh(axes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    # jax's own default, Explicit, turns with_sharding_constraint into an assertion.
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), devices=devices
    )
