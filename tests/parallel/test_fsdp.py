"""Fully sharded matrices on eight simulated devices: values, gradients and collectives."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel import fsdp
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.fsdp import (
    ShardedMatrix,
    fully_sharded,
    sharded_lookup,
    sharded_product,
)
from areal_jax.parallel.hlo import Program, mesh_axes
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.step import TrainableModel

POLICY = Policy(
    ModelConfig.from_hf(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        },
        source="tests",
    )
)
ROWS, TOKENS, WIDTH, OUTER, VOCAB = 8, 6, 16, 12, 24
PLACEMENTS = (
    pytest.param(PlacementConfig(train_fsdp=8), marks=pytest.mark.slow),
    PlacementConfig(train_fsdp=4),
    pytest.param(PlacementConfig(train_fsdp=4, train_tensor=2), marks=pytest.mark.slow),
    PlacementConfig(train_fsdp=2, train_context=2, train_tensor=2),
)


@pytest.fixture(params=PLACEMENTS, ids=str)
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return make_train_mesh(request.param, jax.devices())


def sample(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def sample_tokens() -> jax.Array:
    tokens = np.random.default_rng(2).integers(0, VOCAB, (ROWS, TOKENS))
    return jax.device_put(tokens.astype(np.int32))


@pytest.mark.parametrize("axes", [("embed", "mlp"), ("mlp", "embed")])
def test_products_and_gradients_are_those_of_whole_matrices(
    mesh: Mesh, axes: tuple[str, str]
) -> None:
    shape = (WIDTH, OUTER) if axes[0] == "embed" else (OUTER, WIDTH)
    shards = fully_sharded(mesh, axes, shape, (ROWS, TOKENS), TRAIN_RULES)
    assert shards is not None
    x, w, dy = (
        sample(0, ROWS, TOKENS, shape[0]),
        sample(1, *shape),
        sample(2, ROWS, TOKENS, shape[1]),
    )

    @jax.jit
    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[Any, ...]:
        y, pull = jax.vjp(lambda x, w: sharded_product(x, w, shards), x, w)
        return y, *pull(dy)

    y, dx, dw = run(x, w, dy)
    x, w, dy = map(np.asarray, (x, w, dy))
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("bto,io->bti", dy, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, np.einsum("bti,bto->io", x, dy), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_narrow", [False, True])
def test_lookups_and_gradients_are_those_of_a_whole_embedding(
    mesh: Mesh, is_narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "MIN_LOOKUP_WIDTH", WIDTH if is_narrow else 1)
    shards = fully_sharded(mesh, ("vocab", "embed"), (VOCAB, WIDTH), (ROWS, TOKENS), TRAIN_RULES)
    assert shards is not None
    embed, dx = sample(0, VOCAB, WIDTH), sample(1, ROWS, TOKENS, WIDTH)
    tokens = sample_tokens()

    @jax.jit
    def run(embed: jax.Array, dx: jax.Array) -> tuple[Any, Any]:
        x, pull = jax.vjp(lambda w: sharded_lookup(w, tokens, jnp.float32, shards), embed)
        return x, pull(dx)[0]

    x, gradient = run(embed, dx)
    np.testing.assert_array_equal(x, np.asarray(embed)[np.asarray(tokens)])
    expected = np.zeros(embed.shape)
    np.add.at(expected, np.asarray(tokens), np.asarray(dx))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


# As many chunks as there are, or one.
@pytest.mark.parametrize(
    ("chunk_tokens", "learns_entropy"),
    [
        (16, True),
        (10_000, False),
        pytest.param(16, False, marks=pytest.mark.slow),
        pytest.param(10_000, True, marks=pytest.mark.slow),
    ],
)
def test_logprobs_with_a_sharded_head_are_those_of_a_whole_one(
    mesh: Mesh, learns_entropy: bool, chunk_tokens: int
) -> None:
    shards = fully_sharded(mesh, ("embed", "vocab"), (WIDTH, VOCAB), (ROWS, TOKENS), TRAIN_RULES)
    assert shards is not None
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        logprob_gradients(chunk_tokens, learns_entropy, shards),
        whole_logprob_gradients(chunk_tokens, learns_entropy),
    )


def logprob_gradients(
    chunk_tokens: int, learns_entropy: bool, shards: fsdp.FullySharded | None
) -> tuple[Any, Any]:
    """Return a sum of log-probs and entropies, and its gradients."""
    hidden, head = sample(0, ROWS, TOKENS, WIDTH), sample(1, WIDTH, VOCAB)
    tokens, weights = sample_tokens(), sample(3, 2, ROWS, TOKENS)

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        outs = token_logprobs(
            hidden,
            head,
            tokens,
            jnp.ones_like(tokens),
            temperature=0.7,
            chunk_tokens=chunk_tokens,
            learns_entropy=learns_entropy,
            shards=shards,
        )
        return (weights * jnp.stack(outs)).sum()

    return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, head))


@cache
def whole_logprob_gradients(chunk_tokens: int, learns_entropy: bool) -> tuple[Any, Any]:
    return logprob_gradients(chunk_tokens, learns_entropy, None)


@cache
def collectives_of(
    placement: PlacementConfig, policy: Policy, program: str = "accumulate"
) -> tuple[Mesh, Counter]:
    mesh = make_train_mesh(placement, jax.devices())
    config = TrainerConfig(
        optimizer=OptimizerConfig(), rows_per_micro_batch=1, logp_chunk_tokens=16, remat="attention"
    )
    model = TrainableModel(
        policy=policy, params=policy.abstract(), mesh=mesh, compute_dtype=jnp.float32, row_tokens=64
    )
    learner = policy_learner(config, model, num_updates=10)
    text = learner.programs.compiled(program).as_text() or ""
    return mesh, Program(text).work().collectives


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_training_scatters_gradients_and_gathers_weights(placement: PlacementConfig) -> None:
    mesh, found = collectives_of(placement, POLICY)
    layers, axes = POLICY.config.num_hidden_layers, {"data", "fsdp", "context"}
    # q, k, v, o, gate, up and down of each layer, the embedding, and each block of the head: a device has 64 tokens,
    # or half of them, and as many blocks as 16 of them have chunks.
    num_blocks = 64 // 16 // mesh.shape["context"]
    scattered = {each: count for each, count in found.items() if each.kind == "reduce-scatter"}
    assert sum(scattered.values()) == 7 * layers + num_blocks + 1
    # Whole float32 gradients of q and o, k and v, gate, up and down, head and embedding: each once.
    sizes = layers * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256) + 2 * 64 * 512
    sent = sum(count * each.num_bytes for each, count in scattered.items())
    assert sent == 4 * sizes // mesh.shape["tensor"]
    # What all-reduces over these axes have left is norms, biases and sums.
    reduced = sum(
        count * each.num_bytes
        for each, count in found.items()
        if each.kind == "all-reduce" and axes & {*mesh_axes(each.group, mesh.shape)}
    )
    assert reduced < 40_000 < 64 * 256 * 4


@pytest.mark.parametrize("fsdp", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_gradients_are_summed_over_copies_once_for_an_update(fsdp: int) -> None:
    placement = PlacementConfig(train_fsdp=fsdp)
    summed = {}
    for program in ("accumulate", "apply"):
        mesh, found = collectives_of(placement, POLICY, program)
        summed[program] = sum(
            count * each.num_bytes
            for each, count in found.items()
            if "data" in mesh_axes(each.group, mesh.shape)
        )
    # The matrices of two layers, embedding and head in float32, of which a device has a part.
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256) + 2 * 64 * 512
    assert summed["apply"] == 4 * matrices // fsdp
    # Gradients of norms and biases, and metrics.
    assert summed["accumulate"] < 10_000


def test_matrices_that_devices_of_tokens_do_not_share_are_left_alone() -> None:
    mesh = make_train_mesh(PlacementConfig(train_fsdp=1), jax.devices())
    assert fully_sharded(mesh, ("embed", "mlp"), (WIDTH, OUTER), (8, TOKENS), TRAIN_RULES) is None
    mesh = make_train_mesh(PlacementConfig(train_fsdp=8), jax.devices())
    assert fully_sharded(mesh, ("embed", "mlp"), (12, OUTER), (8, TOKENS), TRAIN_RULES) is None
    shards = fully_sharded(mesh, ("embed", "mlp"), (WIDTH, OUTER), (8, TOKENS), TRAIN_RULES)
    assert shards is not None
    assert len(jax.tree.leaves(ShardedMatrix(jnp.zeros((WIDTH, OUTER)), shards))) == 1
