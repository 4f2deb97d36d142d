"""Meshes of real slice shapes, on the compile-only devices of libtpu."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import numpy as np
import pytest
from jax.experimental.topologies import get_topology_desc

from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes, make_train_mesh
from areal_jax.parallel.topologies import on_own_slice
from areal_jax.parallel.torus import arrange, order_devices

SLICES = (
    *("v5e:2x2", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:16x16"),
    *("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:8x8", "v6e:8x16", "v6e:16x16"),
    *("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8", "v5p:8x8x8"),
)
SHARDS = (1, 2, 4, 8)


@cache
def devices_of(topology: str, num_slices: int = 1) -> list[jax.Device]:
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    return list(get_topology_desc(platform="tpu", topology_name=topology, **options).devices)


def volume(devices: np.ndarray) -> int:
    """Chips in the smallest cuboid around some devices."""
    coords = np.array([device.coords for device in devices.flat])
    return int(np.prod(np.ptp(coords, axis=0) + 1))


@pytest.mark.parametrize("topology", SLICES)
def test_neighbours_in_order_are_neighbours_in_the_torus(topology: str) -> None:
    ordered = order_devices(devices_of(topology))
    hops = [
        np.abs(np.subtract(one.coords, other.coords)).sum()
        for one, other in itertools.pairwise(ordered)
    ]
    assert set(hops) == {1}


@pytest.mark.parametrize("topology", SLICES)
def test_every_placement_makes_meshes_of_contiguous_parts(topology: str) -> None:
    devices, num_made = devices_of(topology), 0
    for share, (expert, context, tensor) in itertools.product(
        (0.25, 0.5, 0.75), itertools.product(SHARDS, repeat=3)
    ):
        num_train = len(devices) - round(share * len(devices))
        if num_train % (expert * context * tensor) or (len(devices) - num_train) % tensor:
            continue
        placement = PlacementConfig(
            rollout_share=share,
            train_expert=expert,
            train_context=context,
            train_tensor=tensor,
            rollout_tensor=tensor,
        )
        train, rollout = make_meshes(placement, devices)
        assert {*train.devices.flat}.isdisjoint(rollout.devices.flat)
        assert train.size + rollout.size == len(devices)
        # A tensor group fills its cuboid: its devices are as near as they can be.
        for mesh in (train, rollout):
            groups = mesh.devices.reshape(-1, mesh.shape["tensor"])
            assert max(volume(group) for group in groups) == mesh.shape["tensor"]
        num_made += 1
    assert num_made >= 3


def test_only_the_first_axis_crosses_slices() -> None:
    devices = order_devices(devices_of("v5p:4x4x4", num_slices=4))
    mesh = arrange((4, 8, 1, 2, 4), devices)
    slices = np.vectorize(lambda device: device.slice_index)(mesh)
    assert (slices == np.arange(4).reshape(4, 1, 1, 1, 1)).all()


def test_axes_that_would_cross_slices_are_refused_with_the_sizes() -> None:
    placement = PlacementConfig(train_fsdp=4, train_context=4, train_tensor=8)
    with pytest.raises(
        ValueError, match="64, 64, 64, 64 on its slices or nodes, expected multiples of 128"
    ):
        make_train_mesh(placement, devices_of("v5p:4x4x4", num_slices=4))


@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4", "v6e:2x2", "v5p:2x2x2"])
def test_parts_of_a_slice_get_slices_of_their_own(topology: str) -> None:
    devices = devices_of(topology)
    for mesh in make_meshes(PlacementConfig(rollout_share=0.5), devices):
        own = on_own_slice(mesh)
        assert own.shape == mesh.shape
        assert sorted(device.id for device in own.devices.flat) == list(range(mesh.size))
        # Each device has the neighbours that it had.
        ours, theirs = (
            np.array([device.coords for device in each.devices.flat]) for each in (own, mesh)
        )
        assert len(np.unique(theirs - ours, axis=0)) == 1


def test_parts_that_are_no_cuboids_are_refused() -> None:
    mesh = make_meshes(PlacementConfig(rollout_share=0.75), devices_of("v5e:2x2")).rollout
    with pytest.raises(ValueError, match="3 devices in 2x2x1; change"):
        on_own_slice(mesh)
