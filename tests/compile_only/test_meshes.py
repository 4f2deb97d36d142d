"""Meshes of real slice shapes, on the compile-only devices of libtpu."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import numpy as np
import pytest
from jax.experimental.topologies import get_topology_desc

from areal_jax.config.experiment import Experiment
from areal_jax.engine.config import EngineConfig
from areal_jax.models.known import known_shape
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import finer_meshes, make_meshes, make_train_mesh
from areal_jax.parallel.topologies import on_own_slice
from areal_jax.parallel.torus import arrange, order_devices, part_of
from areal_jax.run.make_plan import make_shape_plan
from areal_jax.run.plan import Plan
from areal_jax.trainer.config import TrainerConfig

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


@pytest.mark.parametrize(
    ("topology", "num_slices", "placement", "data_and_fsdp"),
    [
        # Sixteen devices of a slice, or all of one that is a ring: XLA:TPU then scatters gradients.
        ("v5p:8x8x8", 1, PlacementConfig(), [(32, 16), (16, 32), (8, 64), (4, 128), (2, 256)]),
        ("v5e:2x2", 1, PlacementConfig(), []),
        ("v6e:2x4", 1, PlacementConfig(), []),
        # Half of the slice, if it is no ring.
        ("v5p:2x2x2", 1, PlacementConfig(), [(2, 4)]),
        ("v5e:4x4", 1, PlacementConfig(), [(2, 8)]),
        ("v5e:4x4", 1, PlacementConfig(train_tensor=4), []),
        # Experts and tokens of a row cut parameters too.
        ("v5p:4x4x4", 1, PlacementConfig(train_context=2, train_expert=2), [(4, 4), (2, 8)]),
        # Between slices there is only data parallelism, while the parameters fit.
        ("v6e:4x4", 4, PlacementConfig(), [(8, 8), (4, 16)]),
        ("v5p:4x4x4", 2, PlacementConfig(), [(8, 16), (4, 32), (2, 64)]),
    ],
)
def test_parameters_are_cut_within_a_slice_and_repeated_over_the_others(
    topology: str,
    num_slices: int,
    placement: PlacementConfig,
    data_and_fsdp: list[tuple[int, int]],
) -> None:
    devices = devices_of(topology, num_slices)
    mesh = make_train_mesh(placement, devices)
    meshes = list(finer_meshes(mesh))
    inner = placement.train_context * placement.train_expert * placement.train_tensor
    found = [(each.shape["data"], each.shape["fsdp"]) for each in meshes]
    assert found == [*data_and_fsdp, (1, len(devices) // inner)]
    assert (meshes[0].devices == mesh.devices).all()
    for each in meshes[:-1]:
        copies = each.devices.reshape(each.shape["data"], -1)
        assert all(len({part_of(device) for device in copy}) == 1 for copy in copies)
        assert max(volume(copy) for copy in copies) == copies.shape[1]


def test_parameters_that_do_not_fit_are_cut_over_more_devices() -> None:
    def plan(model: str, train_fsdp: int | None = None) -> Plan:
        experiment = Experiment(
            name=model,
            num_steps=1,
            engine=EngineConfig(num_slots=64, max_prompt_tokens=1024, max_new_tokens=7168),
            trainer=TrainerConfig(rows_per_micro_batch=1, remat="full"),
            placement=PlacementConfig(train_devices=64, rollout_devices=64, train_fsdp=train_fsdp),
        )
        return make_shape_plan(experiment, known_shape(model), devices_of("v6e:8x16"))

    def num_bytes(model: str, fsdp: int) -> int:
        found = plan(model, train_fsdp=fsdp)
        assert found.train_mesh.shape["fsdp"] == fsdp
        return sum(found.train_bytes().values())

    small, large = "qwen2.5-7b", "qwen2.5-32b"
    has = 32e9
    assert num_bytes(small, 16) <= has
    assert plan(small).train_mesh.shape["fsdp"] == 16
    assert num_bytes(large, 64) <= has < num_bytes(large, 32) < num_bytes(large, 16)
    assert plan(large).train_mesh.shape["fsdp"] == 64


@pytest.mark.parametrize("draft_policy", ["", "qwen2.5-0.5b"])
def test_a_plan_of_a_shape_has_kv_caches_that_fit(draft_policy: str) -> None:
    engine = EngineConfig(
        num_slots=2048,
        max_prompt_tokens=1024,
        max_new_tokens=15360,
        draft_tokens=1,
        draft_policy=draft_policy,
    )
    placement = PlacementConfig(train_devices=8, rollout_devices=8)
    experiment = Experiment(name="x", num_steps=1, engine=engine, placement=placement)
    model = known_shape("qwen2.5-1.5b")
    draft = known_shape(draft_policy) if draft_policy else None
    found = make_shape_plan(experiment, model, devices_of("v6e:4x4"), draft=draft).engine
    # Beside two versions of the weights, in bfloat16, of 31.25 GiB, and those of the draft policy.
    assert (found.draft_bytes() > 2**29) == (draft is not None)
    taken = found.kv_bytes() + 2 * 2 * model.num_params + found.draft_bytes()
    assert 0.75 * 2**35 < taken < 0.9 * 2**35


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
