"""Meshes of nodes of GPUs, on the compile-only devices of XLA's CUDA plugin."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes, make_train_mesh
from areal_jax.parallel.topologies import compile_only_devices
from areal_jax.sim.hardware import device_of_kind


def nodes(mesh: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda device: device.process_index)(mesh)


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize(("num_nodes", "per_node"), [(1, 1), (1, 3), (2, 8), (16, 8)])
def test_nodes_have_their_devices(name: str, num_nodes: int, per_node: int) -> None:
    devices = compile_only_devices(f"{num_nodes}x{name}:{per_node}")
    assert [each.process_index for each in devices] == [
        node for node in range(num_nodes) for _ in range(per_node)
    ]
    assert device_of_kind(devices[0].device_kind)[0] == name.upper()


@pytest.mark.parametrize("topology", ["h200:8", "2xh200:8", "4xh100:8", "3xb200:8"])
def test_only_the_first_axis_crosses_nodes(topology: str) -> None:
    devices, num_made = compile_only_devices(topology), 0
    for share, tensor, context in itertools.product((0.25, 0.5, 0.75), (1, 2, 4), (1, 2)):
        placement = PlacementConfig(
            rollout_share=share,
            train_fsdp=1,
            train_context=context,
            train_tensor=tensor,
            rollout_tensor=tensor,
        )
        num_rollout = round(share * len(devices))
        if num_rollout % tensor or (len(devices) - num_rollout) % (tensor * context):
            continue
        train, rollout = make_meshes(placement, devices)
        # The first devices train, the last decode: both are contiguous.
        assert [each.id for each in (*train.devices.flat, *rollout.devices.flat)] == [
            *range(len(devices))
        ]
        for mesh in (train, rollout):
            of_first = nodes(mesh.devices).reshape(mesh.shape["data"], -1)
            assert (of_first == of_first[:, :1]).all()
        num_made += 1
    assert num_made >= 5


def test_axes_that_would_cross_nodes_are_refused_with_the_sizes() -> None:
    placement = PlacementConfig(train_fsdp=2, train_tensor=16)
    with pytest.raises(ValueError, match=r"8, 8, 8, 8 on its .* nodes, .* product of 1, 2, 4, 8"):
        make_train_mesh(placement, compile_only_devices("4xh200:8"))
