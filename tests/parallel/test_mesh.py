import jax
import pytest
from jax.sharding import AxisType

from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes

DEVICES = jax.devices()


@pytest.mark.parametrize(
    ("num_devices", "train", "rollout"),
    # Three quarters, rounded, but at least one device each: 1.5 of 2 would leave none to train.
    [(2, 1, 1), (3, 1, 2), (4, 1, 3), (5, 1, 4), (6, 2, 4), (7, 2, 5), (8, 2, 6)],
)
def test_default_split_is_three_quarters_rollout(num_devices, train, rollout):
    meshes = make_meshes(PlacementConfig(), DEVICES[:num_devices])
    assert (meshes.train.size, meshes.rollout.size) == (train, rollout)
    assert not set(meshes.train.devices.flat) & set(meshes.rollout.devices.flat)


@pytest.mark.parametrize(("share", "rollout"), [(0.25, 2), (0.5, 4), (0.6, 5), ("auto", 6)])
def test_rollout_share_decides_the_split(share, rollout):
    # 0.6 of 8 is 4.8. auto starts with the paper's share.
    meshes = make_meshes(PlacementConfig(rollout_share=share), DEVICES)
    assert (meshes.train.size, meshes.rollout.size) == (8 - rollout, rollout)


def test_one_device_trains_and_decodes():
    meshes = make_meshes(PlacementConfig(rollout_devices=1), DEVICES[3:4])
    assert list(meshes.train.devices.flat) == list(meshes.rollout.devices.flat) == [DEVICES[3]]


def test_all_devices_are_the_default():
    assert make_meshes(PlacementConfig()).train.size == 2


def test_meshes_have_named_auto_axes():
    meshes = make_meshes(
        PlacementConfig(train_devices=4, train_fsdp=1, train_tensor=2, rollout_tensor=2), DEVICES
    )
    sizes = [("data", 2), ("fsdp", 1), ("expert", 1), ("context", 1), ("tensor", 2)]
    assert list(meshes.train.shape.items()) == sizes
    assert dict(meshes.rollout.shape) == {"data": 2, "tensor": 2}
    assert set(meshes.train.axis_types) | set(meshes.rollout.axis_types) == {AxisType.Auto}


def test_default_fsdp_uses_remaining_devices():
    assert dict(
        make_meshes(PlacementConfig(train_devices=6, train_tensor=2), DEVICES).train.shape
    ) == {
        "data": 1,
        "fsdp": 3,
        "expert": 1,
        "context": 1,
        "tensor": 2,
    }


def test_experts_have_their_own_axis():
    placement = PlacementConfig(train_devices=8, rollout_devices=1, train_expert=4)
    mesh = make_meshes(placement, [*DEVICES, DEVICES[0]]).train
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 1}


def test_one_count_decides_the_other_and_idle_devices_are_allowed():
    assert make_meshes(PlacementConfig(train_devices=3), DEVICES).rollout.size == 5
    assert make_meshes(PlacementConfig(rollout_devices=3), DEVICES).train.size == 5
    both = make_meshes(PlacementConfig(train_devices=3, rollout_devices=2), DEVICES)
    assert (both.train.size, both.rollout.size) == (3, 2)


@pytest.mark.parametrize(
    ("placement", "num_devices", "message"),
    [
        (
            PlacementConfig(train_devices=6, rollout_devices=4),
            8,
            "of 8 devices, found 6 to train and 4 to decode",
        ),
        (PlacementConfig(train_devices=8), 8, "found 8 to train and 0 to decode"),
        (PlacementConfig(rollout_share=0.05), 8, "found 8 to train and 0 to decode"),
        (PlacementConfig(rollout_devices=2), 1, "expected no split of 1 device"),
        (PlacementConfig(rollout_share="auto"), 1, "expected no split of 1 device"),
        (
            PlacementConfig(train_tensor=3),
            8,
            "2 train devices are not divisible by placement.train_tensor=3",
        ),
        (
            PlacementConfig(train_devices=4, train_fsdp=3),
            8,
            "4 train devices are not divisible by placement.train_fsdp=3",
        ),
        (
            PlacementConfig(train_devices=4, train_expert=3, train_tensor=2),
            8,
            "train_expert=3 times placement.train_tensor=2",
        ),
        (
            PlacementConfig(rollout_tensor=4),
            8,
            "6 rollout devices are not divisible by placement.rollout_tensor=4",
        ),
    ],
)
def test_impossible_placement_is_refused_with_counts(placement, num_devices, message):
    with pytest.raises(ValueError, match=message):
        make_meshes(placement, DEVICES[:num_devices])
