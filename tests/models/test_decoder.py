import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Sharding
from tiny_policies import cached_hidden, random_params, tiny_policy

from areal_jax.models.attention import Kernel, packed_attention
from areal_jax.models.config import Remat
from areal_jax.models.decoder import MLP, Attend, Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES, put_batch, sharding, shardings

FAMILIES = ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"]
B, T = 2, 12
TOKENS = jax.device_put(np.random.default_rng(1).integers(0, 40, (B, T)).astype(np.int32))
POSITIONS = jax.device_put(np.tile(np.arange(T, dtype=np.int32), (B, 1)))
ONE_SEGMENT = jax.device_put(np.ones((B, T), np.int32))


@partial(jax.jit, static_argnames=("policy", "compute_dtype", "unroll", "remat", "rows"))
def forward(
    policy: Policy,
    params: Params,
    tokens,
    positions,
    segments,
    *,
    compute_dtype=jnp.float32,
    rows=None,
    **how,
):
    attend = (
        packed_attention(segments) if rows is None else held_to(rows, packed_attention(segments))
    )
    return policy.hidden(params, tokens, positions, attend, compute_dtype=compute_dtype, **how)[0]


def held_to(rows: Sharding, inner: Attend) -> Attend:
    """Attend with activations constrained to the sharding of their rows."""

    def attend(q, k, v, cache, window=None, sinks=None):
        q, k, v = jax.lax.with_sharding_constraint((q, k, v), rows)
        out, cache = inner(q, k, v, cache, window, sinks)
        return jax.lax.with_sharding_constraint(out, rows), cache

    return attend


@partial(jax.jit, static_argnames=("policy", "unroll", "remat", "rows"))
def gradient(policy: Policy, params: Params, tokens, positions, segments, **how) -> Params:
    def loss(params):
        hidden = forward(policy, params, tokens, positions, segments, **how)
        logits = hidden @ policy.head(params)
        return -jax.nn.log_softmax(logits)[:, :-1, :].sum() / logits.size

    return jax.grad(loss)(params)


def assert_close(left, right, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), left, right)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.slow
def test_packed_equals_alone(architecture):
    policy = tiny_policy(architecture)
    params = random_params(policy)
    # Row 0 has sequences of 5 and 4 tokens and padding; row 1 has one of 12.
    segments = jnp.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12])
    positions = jnp.array([[*range(5), *range(4), 0, 0, 0], [*range(12)]])
    packed = forward(policy, params, TOKENS, positions, segments)
    for row, start, stop in ((0, 0, 5), (0, 5, 9), (1, 0, 12)):
        n = stop - start
        alone = forward(
            policy,
            params,
            TOKENS[row : row + 1, start:stop],
            jnp.arange(n)[None],
            jnp.ones((1, n), jnp.int32),
        )
        assert_close(packed[row : row + 1, start:stop], alone)
    assert jnp.isfinite(packed).all()


def test_attention_is_causal():
    policy = tiny_policy()
    params = random_params(policy)
    changed = np.array(TOKENS)
    changed[:, 7:] = (changed[:, 7:] + 1) % 40
    before, after = (
        np.asarray(forward(policy, params, tokens, POSITIONS, ONE_SEGMENT))
        for tokens in (TOKENS, changed)
    )
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(axis=-1).all()


@pytest.mark.parametrize(
    ("architecture", "unroll"),
    [*((architecture, False) for architecture in FAMILIES), ("Qwen2ForCausalLM", True)],
)
def test_cached_decode_equals_full_forward(architecture, unroll):
    policy = tiny_policy(architecture)
    params = random_params(policy)
    cached = cached_hidden(policy, params, TOKENS, prompt=5, unroll=unroll)
    assert_close(cached, forward(policy, params, TOKENS, POSITIONS, ONE_SEGMENT))


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen2ForCausalLM",
        pytest.param("DeepseekV3ForCausalLM", marks=pytest.mark.slow),
        pytest.param("Qwen3_5ForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_scan_equals_unrolled_layers(architecture):
    policy = tiny_policy(architecture)
    params = random_params(policy)
    scanned = forward(policy, params, TOKENS, POSITIONS, ONE_SEGMENT)
    if architecture == "Qwen2ForCausalLM":
        assert_close(scanned, forward(policy, params, TOKENS, POSITIONS, ONE_SEGMENT, unroll=True))
    unstacked = jax.jit(policy.unstack)(params)
    assert_close(scanned, forward(policy, unstacked, TOKENS, POSITIONS, ONE_SEGMENT, unroll=True))
    assert policy.unstack(unstacked) is unstacked


@pytest.mark.slow
def test_remat_recomputes_what_it_does_not_save():
    policy = tiny_policy()
    ids = jnp.ones((1, 8), jnp.int32)

    def count(remat: Remat, kernel: Kernel, primitive: str) -> int:
        def loss(params):
            hidden, _, _ = policy.hidden(
                params,
                ids,
                ids,
                packed_attention(ids, kernel),
                compute_dtype=jnp.float32,
                remat=remat,
            )
            return hidden.sum()

        return str(jax.make_jaxpr(jax.grad(loss))(policy.abstract())).count(f" {primitive}[")

    # The kernel runs once forward and twice backward, and forward again if nothing of it is saved.
    assert [
        count(remat, "gpu", "pallas_call") for remat in ("none", "dots", "attention", "full")
    ] == [3, 3, 3, 4]
    # 7 products with weights per layer, each with two in its backward pass; the last one of a layer
    # is never recomputed.
    products = {remat: count(remat, "gpu", "dot_general") for remat in ("none", "dots", "full")}
    assert products["none"] == products["dots"] == products["full"] - 6


@pytest.mark.parametrize(
    ("remat", "unroll"), [("full", True), ("full", False), ("attention", False), ("dots", False)]
)
@pytest.mark.slow
def test_remat_keeps_gradients(remat, unroll):
    policy = tiny_policy()
    params = random_params(policy)
    grads = gradient(policy, params, TOKENS, POSITIONS, ONE_SEGMENT)
    assert_close(
        grads, gradient(policy, params, TOKENS, POSITIONS, ONE_SEGMENT, unroll=unroll, remat=remat)
    )
    assert all(jnp.abs(grad).max() > 1e-6 for grad in jax.tree.leaves(grads))


@pytest.mark.slow
def test_gradients_match_finite_differences():
    policy = tiny_policy("Qwen3ForCausalLM", tie_word_embeddings=True)
    params = random_params(policy)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(B, T, 16)), jnp.float32)

    @jax.jit
    def loss(params):
        return (
            forward(policy, params, TOKENS, POSITIONS, ONE_SEGMENT) * weights
        ).sum() / weights.size

    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(6)
    for i, grad in enumerate(jax.tree.leaves(jax.jit(jax.grad(loss))(params))):
        direction = rng.normal(size=grad.shape).astype(np.float32)
        direction /= np.linalg.norm(direction)
        ahead, behind = (
            loss(
                jax.tree.unflatten(
                    tree, [*leaves[:i], leaves[i] + step * direction, *leaves[i + 1 :]]
                )
            )
            for step in (0.02, -0.02)
        )
        # Central differences: an error of step² in the slope, and of 1e-7 / step from rounding.
        np.testing.assert_allclose(
            (ahead - behind) / 0.04, (grad * direction).sum(), atol=3e-4, rtol=2e-2
        )


def on_eight_devices(
    policy: Policy, params: Params, tensor: int
) -> tuple[Params, Sharding, tuple[jax.Array, ...]]:
    """Make parameters, row sharding, and 8 rows of tokens, positions and segments on a mesh."""
    mesh = make_train_mesh(PlacementConfig(train_tensor=tensor), jax.devices())
    layout = shardings(mesh, policy.axes(), policy.abstract(), TRAIN_RULES)
    batch = (
        np.concatenate([np.roll(TOKENS, i, axis=1) for i in range(4)]),
        np.tile(POSITIONS, (4, 1)),
        np.ones((8, T), np.int32),
    )
    return (
        jax.device_put(params, layout),
        sharding(mesh, ("batch",), (8,), TRAIN_RULES),
        put_batch(mesh, batch, TRAIN_RULES),
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.slow
def test_one_device_equals_eight(tied):
    policy = tiny_policy(tie_word_embeddings=tied)
    params = random_params(policy)
    spread, rows, batch = on_eight_devices(policy, params, tensor=2)
    assert spread["layers"]["attn"]["q"].addressable_shards[0].data.shape == (
        3,
        4,
        2,
        4,
    )  # D over fsdp=4, N over tensor=2
    alone = [np.asarray(array) for array in batch]
    hidden = forward(policy, spread, *batch, rows=rows)
    assert hidden.addressable_shards[0].data.shape == (2, T, 16)
    assert_close(hidden, forward(policy, params, *alone))
    assert_close(gradient(policy, spread, *batch, rows=rows), gradient(policy, params, *alone))


def test_fsdp_gathers_parameters_and_never_activations():
    policy = tiny_policy()
    spread, rows, batch = on_eight_devices(policy, random_params(policy), tensor=1)
    compiled = forward.lower(policy, spread, *batch, rows=rows).compile().as_text()
    # Parameters are gathered; an all-reduce, or a gather of arrays with a token dimension, would be
    # one of activations.
    assert compiled is not None and "all-reduce" not in compiled
    gathers = [
        line.partition(" all-gather(")[0]
        for line in compiled.splitlines()
        if " all-gather(" in line
    ]
    gathered = [dims for line in gathers for dims in re.findall(r"f32\[([\d,]*)", line)]
    assert gathered and not any(str(T) in dims.split(",") for dims in gathered)


def test_tied_head_is_the_embedding_leaf():
    policy = tiny_policy(tie_word_embeddings=True)
    params = random_params(policy)
    assert "head" not in params and "head" not in policy.axes()
    np.testing.assert_array_equal(policy.head(params), params["embed"].T)
    # Its gradient is the sum over both uses, so that a missing one shows.
    through_head = jax.jit(jax.grad(lambda p: (policy.head(p) ** 2).sum()))(params)["embed"]
    np.testing.assert_allclose(through_head, 2 * np.asarray(params["embed"]), rtol=1e-6)


def test_bfloat16_compute_keeps_float32_parameters_and_gradients():
    policy = tiny_policy()
    params = random_params(policy)
    wide = forward(policy, params, TOKENS, POSITIONS, ONE_SEGMENT)
    narrow = forward(policy, params, TOKENS, POSITIONS, ONE_SEGMENT, compute_dtype=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    # bfloat16 has 8 bits: 3 layers differ by a few parts in 256; no difference would mean no cast.
    wide, narrow = np.asarray(wide), np.asarray(narrow).astype(np.float32)
    error = np.abs(wide - narrow).mean() / np.abs(wide).mean()
    assert 1e-4 < error < 0.05
    loss = lambda p: forward(  # noqa: E731
        policy, p, TOKENS, POSITIONS, ONE_SEGMENT, compute_dtype=jnp.bfloat16
    ).sum()
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(jax.grad(loss), params))} == {
        jnp.dtype(jnp.float32)
    }


def test_positions_above_256_differ_in_bfloat16():
    # bfloat16 would round 257 to 256, so that both rows would be equal.
    policy = tiny_policy()
    params = random_params(policy)
    rows = [np.array([[0, position]], np.int32) for position in (256, 257)]
    tokens, segments = np.asarray(TOKENS)[:1, :2], np.ones((1, 2), np.int32)
    near, far = (
        np.asarray(forward(policy, params, tokens, row, segments, compute_dtype=jnp.bfloat16))
        for row in rows
    )
    assert (near[0, 1] != far[0, 1]).any()


def test_init_matches_abstract_and_differs_between_layers():
    policy = tiny_policy()
    params = jax.jit(policy.init)(jax.random.key(0))
    abstract = policy.abstract()
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda s: (s.shape, s.dtype), abstract
    )
    axes = jax.tree.map(len, policy.axes(), is_leaf=lambda node: isinstance(node, tuple))
    assert axes == jax.tree.map(lambda leaf: leaf.ndim, abstract)
    q = np.asarray(params["layers"]["attn"]["q"])
    assert (q[0] != q[1]).mean() > 0.9
    assert q.std() == pytest.approx(16**-0.5, rel=0.1)  # 768 samples: 1 / sqrt(2·768) = 2.6 %


def test_gradients_of_biases_are_summed_over_tokens_in_float32():
    config = tiny_policy("LlamaForCausalLM", mlp_bias=True).config
    x = np.zeros((1, 257, config.hidden_size), jnp.bfloat16)

    @jax.jit
    def summed(x):
        mlp = MLP(config, jax.random.key(0), width=8)
        return nnx.grad(lambda mlp: mlp(x).astype(jnp.float32).sum())(mlp).down_bias[...]

    # One for each token. bfloat16 has no 257.
    assert (np.asarray(summed(x)) == 257).all()


def test_equal_policies_are_one_static_argument():
    traced = []

    @partial(jax.jit, static_argnums=0)
    def f(policy, x):
        traced.append(policy)
        return x

    f(tiny_policy(), 1.0)
    f(tiny_policy(), 2.0)
    assert len(traced) == 1
    f(tiny_policy(rope_theta=5.0), 1.0)
    assert len(traced) == 2
