"""Collectives of training and decoding, in programs that XLA:TPU compiles for slices.

Small widths, few layers, a small vocabulary and short rows. Each matrix still has more bytes than
what may be exchanged besides.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.models.decoder import Policy
from areal_jax.models.known import known_shape
from areal_jax.parallel import hlo
from areal_jax.parallel.compilation import ON_SPARSE_CORES, compile_lowered, compiler_options
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.fsdp import fully_sharded, sharded_lookup
from areal_jax.parallel.mesh import make_rollout_mesh, make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES, sharding
from areal_jax.parallel.topologies import compile_only_devices
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.state import trained
from areal_jax.trainer.step import Learner, TrainableModel

MODEL = replace(
    known_shape("qwen2.5-1.5b"),
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
)
NUM_LAYERS = MODEL.num_hidden_layers
# q and o, k and v, gate, up and down. The embedding is the head, too.
LAYER = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 512
EMBEDDING = 1024 * 512


@cache
def learner(topology: str, tensor: int) -> Learner:
    mesh = make_train_mesh(PlacementConfig(train_tensor=tensor), compile_only_devices(topology))
    policy = Policy(MODEL)
    model = TrainableModel(
        policy=policy,
        params=trained(policy).abstract,
        mesh=mesh,
        compute_dtype=jnp.bfloat16,
        row_tokens=256,
    )
    return policy_learner(TrainerConfig(rows_per_micro_batch=1), model, num_updates=10)


def collectives(
    compiled: jax.stages.Compiled, mesh: Mesh
) -> dict[tuple[str, tuple[str, ...]], list[hlo.Collective]]:
    """Return every execution of a collective, by kind and mesh axes."""
    found: dict[tuple[str, tuple[str, ...]], list[hlo.Collective]] = {}
    work = hlo.Program(compiled.as_text() or "").work(dynamic_trips=1)
    for each, count in work.collectives.items():
        key = each.kind, hlo.mesh_axes(each.group, mesh.shape)
        found.setdefault(key, []).extend([each] * count)
    return found


def total(executed: list[hlo.Collective]) -> int:
    return sum(each.num_bytes for each in executed)


@pytest.mark.parametrize(
    ("topology", "tensor", "data", "fsdp"),
    [
        ("v5e:2x2", 1, 1, 4),
        ("v5p:2x2x2", 1, 2, 4),
        ("v6e:2x4", 2, 1, 4),
    ],
)
def test_weights_are_gathered_and_gradients_scattered(
    topology: str, tensor: int, data: int, fsdp: int
) -> None:
    programs, mesh = learner(topology, tensor).programs, learner(topology, tensor).mesh
    assert (mesh.shape["data"], mesh.shape["fsdp"], mesh.shape["tensor"]) == (data, fsdp, tensor)
    found = collectives(programs.compiled("accumulate"), mesh)
    gathered, scattered = found["all-gather", ("fsdp",)], found["reduce-scatter", ("fsdp",)]
    # In bfloat16: the matrices of layers once in the forward and once in the backward pass, the head
    # once. In float32: each gradient once.
    weights = 2 * (2 * NUM_LAYERS * LAYER + EMBEDDING) / tensor
    gradients = 4 * (NUM_LAYERS * LAYER + EMBEDDING) / tensor
    assert weights <= total(gathered) <= 1.03 * weights
    assert gradients <= total(scattered) <= 1.03 * gradients
    # No matrix is reduced on every device, or summed over copies: only gradients of norms and
    # biases, and metrics.
    assert (
        sum(
            total(of)
            for (kind, axes), of in found.items()
            if kind == "all-reduce" and {"data", "fsdp"} & {*axes}
        )
        < 2**16
    )
    overlapping = [gathered]
    if compiler_options(mesh) is ON_SPARSE_CORES:
        overlapping = [gathered, scattered] if topology.startswith("v6e") else [scattered]
    for each in overlapping:
        assert sum(of.is_asynchronous for of in each) >= 6 * NUM_LAYERS


@pytest.mark.parametrize(("topology", "fsdp"), [("v6e:2x4", 8), ("v5p:4x4x2", 16)])
def test_a_tied_embedding_with_narrow_parts_is_never_whole(topology: str, fsdp: int) -> None:
    mesh = make_train_mesh(PlacementConfig(train_fsdp=fsdp), compile_only_devices(topology))
    vocab, width = MODEL.vocab_size, MODEL.hidden_size
    assert mesh.shape["fsdp"] == fsdp and width // fsdp % 128 != 0
    rows = (mesh.size, 1024)
    lookup, head = (
        fully_sharded(mesh, axes, shape, rows, TRAIN_RULES)
        for axes, shape in (
            (("vocab", "embed"), (vocab, width)),
            (("embed", "vocab"), (width, vocab)),
        )
    )
    assert lookup and head

    def add_gradient(so_far: jax.Array, embed: jax.Array, tokens: jax.Array) -> jax.Array:
        def loss(embed: jax.Array) -> jax.Array:
            hidden: jax.Array = sharded_lookup(embed, tokens, jnp.bfloat16, lookup)
            logp, _ = token_logprobs(
                *(hidden, embed.T, tokens, jnp.ones_like(tokens)),
                chunk_tokens=mesh.size * 128,
                shards=head,
            )
            return logp.sum()

        return so_far + jax.grad(loss)(embed)

    embed, tokens = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, axes, shape, TRAIN_RULES))
        for axes, shape, dtype in (
            (("vocab", "embed"), (vocab, width), jnp.float32),
            (("batch", "tokens"), rows, jnp.int32),
        )
    )
    program = jax.jit(add_gradient, donate_argnums=0, out_shardings=embed.sharding)
    found = collectives(compile_lowered(program.lower(embed, embed, tokens), mesh), mesh)
    # Eight blocks of the head. Hidden states and their gradient change places with tokens.
    assert [of.num_bytes for of in found["reduce-scatter", ("fsdp",)]] == [4 * EMBEDDING // 8] * 8
    assert total(found["all-to-all", ("fsdp",)]) == 2 * 2 * 1024 * width
    assert total(found.get(("all-reduce", ("fsdp",)), [])) < 2**10


def test_gradients_are_summed_over_copies_once_for_an_update() -> None:
    trainer = learner("v5p:2x2x2", 1)
    found = collectives(trainer.programs.compiled("apply"), trainer.mesh)
    # The parts of all matrices, in float32; the embedding's two gradients have been added.
    assert total(found.pop(("all-reduce", ("data",)))) == 4 * (NUM_LAYERS * LAYER + EMBEDDING) // 4
    assert sum(map(total, found.values())) < 2**10


def test_an_update_exchanges_no_weights() -> None:
    found = collectives(
        learner("v5e:2x2", 1).programs.compiled("apply"), learner("v5e:2x2", 1).mesh
    )
    # The gradient's norm, the digest and sums of metrics.
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(map(total, found.values())) < 2**10


def test_sums_over_slices_are_counted() -> None:
    mesh = make_train_mesh(PlacementConfig(), compile_only_devices("2xv5e:2x2"))
    assert (mesh.shape["data"], mesh.shape["fsdp"]) == (2, 4)
    added = jax.shard_map(
        lambda x: jax.lax.psum(jnp.sin(x), "data"),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    placed = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.float32, sharding=placed)
    found = collectives(compile_lowered(jax.jit(added).lower(x), mesh), mesh)
    assert found == {
        ("all-reduce", ("data",)): [hlo.Collective("all-reduce", 4 * 2**20, (0, 4), False)]
    }


def test_decoding_adds_activations_and_exchanges_no_weights() -> None:
    mesh = make_rollout_mesh(PlacementConfig(rollout_tensor=2), compile_only_devices("v5e:2x2"))
    config = EngineConfig(num_slots=16, max_prompt_tokens=64, max_new_tokens=64)
    engine = DecodeEngine(Policy(MODEL), mesh, config, jnp.bfloat16)
    *_, (_, compile_it) = (each for each in engine.list_programs() if "generate" in each[0])
    found = collectives(compile_it(), mesh)
    # In a step: after the embedding, and after attention and MLP of each layer, the hidden states
    # of a device's 8 slots in bfloat16; their logits in float32; the end of the loop.
    states = found.pop(("all-reduce", ("tensor",)))
    assert [each.num_bytes for each in states] == (1 + 2 * NUM_LAYERS) * [8 * 512 * 2]
    assert sum(map(total, found.values())) <= 8 * 1024 * 4 + 4
