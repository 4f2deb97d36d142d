from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.parallel.sharding import (
    ROLLOUT_RULES,
    TRAIN_RULES,
    bytes_per_device,
    num_shards,
    put_batch,
    sharding,
    shardings,
)

# data=1, fsdp=2, tensor=2 to train; data=2, tensor=2 to decode.
MESHES = make_meshes(PlacementConfig(train_devices=4, train_tensor=2, rollout_tensor=2))
AXES = {"q": ("layers", "embed", "heads", "head_dim"), "layers": [("embed",), ()]}
SHAPES = {
    "q": jax.ShapeDtypeStruct((3, 8, 4, 2), jnp.float32),
    "layers": [jax.ShapeDtypeStruct((8,), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)],
}


def test_rules_decide_parameter_shardings():
    trained = shardings(MESHES.train, AXES, SHAPES, TRAIN_RULES)
    assert trained["q"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert trained["layers"][0].spec == PartitionSpec("fsdp")
    assert trained["layers"][1].spec == PartitionSpec()
    decoded = shardings(MESHES.rollout, AXES, SHAPES, ROLLOUT_RULES)
    assert decoded["q"].spec == PartitionSpec(None, None, "tensor", None)
    assert decoded["q"].mesh == MESHES.rollout


def test_indivisible_dimensions_are_replicated():
    # 3 heads are not divisible by 2 devices; the width of 8 is.
    assert sharding(MESHES.train, ("embed", "heads"), (8, 3), TRAIN_RULES).spec == PartitionSpec(
        "fsdp", None
    )


def test_batch_is_sharded_over_data_and_fsdp():
    class Batch(NamedTuple):
        tokens: Any
        weights: Any

    mesh = make_meshes(PlacementConfig(train_devices=6, train_fsdp=3)).train  # data=2, fsdp=3
    batch = put_batch(mesh, Batch(np.arange(12).reshape(6, 2), np.ones(6)), TRAIN_RULES)
    assert isinstance(batch, Batch)
    assert batch.tokens.sharding.spec == PartitionSpec(("data", "fsdp"), None)
    assert batch.weights.sharding.spec == PartitionSpec(("data", "fsdp"))
    assert [shard.data.tolist() for shard in batch.tokens.addressable_shards] == [
        [[i, i + 1]] for i in range(0, 12, 2)
    ]
    assert batch.weights.addressable_shards[0].data.shape == (1,)


def test_rows_are_sharded_over_context() -> None:
    mesh = make_meshes(PlacementConfig(train_devices=4, train_context=2)).train  # fsdp=2, context=2
    batch = put_batch(mesh, np.arange(8).reshape(2, 4), TRAIN_RULES)
    assert [shard.data.tolist() for shard in batch.addressable_shards] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
        [[6, 7]],
    ]
    assert num_shards(mesh, "attending_heads", TRAIN_RULES) == 2  # tensor 1 x context 2


def test_experts_are_sharded_over_the_expert_axis():
    placement = PlacementConfig(
        train_devices=8, rollout_devices=1, train_fsdp=2, train_expert=2, train_tensor=2
    )
    mesh = make_meshes(placement, [*jax.devices(), jax.devices()[0]]).train
    experts = sharding(mesh, ("layers", "experts", "embed", "mlp"), (3, 4, 8, 6), TRAIN_RULES)
    assert experts.spec == PartitionSpec(None, "expert", "fsdp", "tensor")
    # Parameters without experts are sharded over both axes, like the batch.
    assert sharding(mesh, ("embed", "mlp"), (8, 6), TRAIN_RULES).spec == PartitionSpec(
        ("fsdp", "expert"), "tensor"
    )
    assert sharding(mesh, ("batch",), (4,), TRAIN_RULES).spec == PartitionSpec(("fsdp", "expert"))


def test_expert_matrices_are_sharded_by_experts_as_far_as_these_divide():
    placement = PlacementConfig(train_devices=8, rollout_devices=1, train_fsdp=4, train_expert=2)
    mesh = make_meshes(placement, [*jax.devices(), jax.devices()[0]]).train
    axes = ("expert_matrices", "embed", "mlp")

    def spec(num_experts: int) -> PartitionSpec:
        return sharding(mesh, axes, (num_experts, 16, 6), TRAIN_RULES).spec

    assert spec(8) == PartitionSpec(("expert", "fsdp"), None, None)
    # The axes that do not divide the experts shard their widths.
    assert spec(6) == PartitionSpec("expert", "fsdp", None)
    assert spec(5) == PartitionSpec(None, ("fsdp", "expert"), None)


def test_unknown_and_surplus_axes_are_refused():
    with pytest.raises(
        ValueError, match=r"expected a logical axis of layers, vocab.*, found 'widht'"
    ):
        sharding(MESHES.train, ("widht",), (8,), TRAIN_RULES)
    with pytest.raises(
        ValueError, match=r"at most 1 axes for shape \(8,\), found axes \('embed', 'heads'\)"
    ):
        sharding(MESHES.train, ("embed", "heads"), (8,), TRAIN_RULES)


def test_bytes_per_device_match_addressable_shards():
    # q: 3·8·4·2 float32 over 4 devices: 192. The width: 8 bfloat16 over 2: 8. The scalar: 4.
    layout = shardings(MESHES.train, AXES, SHAPES, TRAIN_RULES)
    assert bytes_per_device(SHAPES, layout) == 192 + 8 + 4
    placed = jax.device_put(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), SHAPES), layout)
    num_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert bytes_per_device(placed, layout) == num_bytes
