import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_policies import random_params, tiny_policy

from areal_jax.models import moe
from areal_jax.models.architecture import ExpertGroups
from areal_jax.models.attention import packed_attention
from areal_jax.models.moe import (
    MoE,
    Routing,
    _choose_in_groups,
    balance_loss,
    local_experts,
    router_metrics,
    sharded_experts,
)
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_rollout_mesh, make_train_mesh
from areal_jax.parallel.sharding import ROLLOUT_RULES, TRAIN_RULES, put_batch, shardings

B, T, D, F, E, K = 8, 6, 8, 6, 4, 2


def draw(*shape: int, seed: int) -> jax.Array:
    numbers = np.random.default_rng(seed).normal(size=shape) / shape[-1] ** 0.5
    return jax.device_put(numbers.astype(np.float32))


def softmax(logits: jax.Array) -> jax.Array:
    exponents = np.exp(np.asarray(logits))
    return jax.device_put(exponents / exponents.sum(axis=-1, keepdims=True))


X, WEIGHTS = draw(B, T, D, seed=0), softmax(draw(B, T, K, seed=1))
GATE, UP, DOWN = draw(E, D, F, seed=2), draw(E, D, F, seed=3), draw(E, F, D, seed=4)
# Two different experts for every token.
CHOSEN = jax.device_put(
    np.argsort(np.random.default_rng(5).random((B, T, E)), axis=-1)[..., :K].astype(np.int32)
)


@jax.jit
def every_expert(x, weights, chosen, gate, up, down):
    """Compute all experts for all tokens, most with weight 0."""
    out = jnp.einsum(
        "btef,efd->bted",
        jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up),
        down,
    )
    return jnp.einsum(
        "bted,bte->btd", out, (jax.nn.one_hot(chosen, len(gate)) * weights[..., None]).sum(axis=2)
    )


def assert_same(experts, *arguments, chosen=CHOSEN):
    """Check that outputs and all gradients are equal."""

    def compared(function):
        def loss(x, weights, gate, up, down):
            out = function(x, weights, chosen, gate, up, down)
            return (out * jnp.cos(jnp.arange(D))).sum(), out

        return jax.jit(jax.grad(loss, argnums=range(5), has_aux=True))(*arguments)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        compared(experts),
        compared(every_expert),
    )


def test_moe_output_is_the_weighted_sum_of_experts():
    assert_same(local_experts, X, WEIGHTS, GATE, UP, DOWN)


def test_no_token_is_dropped_under_extreme_imbalance():
    assert_same(
        local_experts,
        X,
        WEIGHTS,
        GATE,
        UP,
        DOWN,
        chosen=jax.device_put(np.broadcast_to(np.array([2, 0], np.int32), CHOSEN.shape)),
    )


@pytest.mark.slow
def test_local_experts_leave_out_remote_terms():
    halves = (
        local_experts(X, WEIGHTS, CHOSEN, *(w[i : i + 2] for w in (GATE, UP, DOWN)), first=i)
        for i in (0, 2)
    )
    np.testing.assert_allclose(
        sum(halves), every_expert(X, WEIGHTS, CHOSEN, GATE, UP, DOWN), atol=1e-5
    )


@pytest.mark.parametrize(
    ("fsdp", "expert", "tensor"),
    # Three shards do not divide four experts, so that every device has all.
    [(2, 2, 2), (1, 4, 2), (4, 1, 2), (2, 4, 1)],
)
@pytest.mark.slow
def test_expert_parallelism_keeps_output_and_gradient(fsdp, expert, tensor):
    placement = PlacementConfig(train_fsdp=fsdp, train_expert=expert, train_tensor=tensor)
    mesh = make_train_mesh(placement, jax.devices())
    x, weights, chosen = put_batch(mesh, (X, WEIGHTS, CHOSEN), TRAIN_RULES)
    axes = [("experts", "embed", "mlp")] * 2 + [("experts", "mlp", "embed")]
    gate, up, down = jax.device_put(
        [GATE, UP, DOWN], shardings(mesh, axes, [GATE, UP, DOWN], TRAIN_RULES)
    )
    assert gate.addressable_shards[0].data.shape == (E // expert, D // fsdp, F // tensor)
    assert_same(sharded_experts(mesh, TRAIN_RULES), x, weights, gate, up, down, chosen=chosen)


@pytest.mark.parametrize(("data", "tensor"), [(2, 4), (1, 3)])
def test_rollout_mesh_shards_experts_over_tensor(data, tensor):
    # Three shards divide the width of six, but not four experts.
    placement = PlacementConfig(rollout_tensor=tensor)
    mesh = make_rollout_mesh(placement, jax.devices()[: data * tensor])
    (how,) = shardings(mesh, [("experts", "embed", "mlp")], [GATE], ROLLOUT_RULES)
    assert how.shard_shape(GATE.shape) == ((1, D, F) if tensor == 4 else (E, D, F // 3))
    out = jax.jit(sharded_experts(mesh, ROLLOUT_RULES))(X, WEIGHTS, CHOSEN, GATE, UP, DOWN)
    np.testing.assert_allclose(out, every_expert(X, WEIGHTS, CHOSEN, GATE, UP, DOWN), atol=1e-5)


def test_balance_loss_by_hand():
    # Two layers, two experts, one choice a token, four tokens. Choices of expert 0: 3 and 1 of 4,
    # so 1/2 over both layers; its probability sums to 3.2 and 1.2, 4.4 of 8. Loss: 2 · (0.5 · 0.55
    # + 0.5 · 0.45) = 1, as for an even load.
    routing = Routing(jnp.array([[3.0, 1.0], [1.0, 3.0]]), jnp.array([[3.2, 0.8], [1.2, 2.8]]))
    assert balance_loss(routing, jnp.float32(4)) == pytest.approx(1.0)
    # One layer alone: 2 · (0.75 · 0.8 + 0.25 · 0.2) = 1.3.
    first = Routing(routing.chosen[:1], routing.probability[:1])
    assert balance_loss(first, jnp.float32(4)) == pytest.approx(1.3)
    # The busiest of two experts has 3 with a mean of 2; none is idle.
    assert {name: float(value) for name, value in router_metrics(first).items()} == {
        "router_busiest_expert": 1.5,
        "router_idle_experts": 0.0,
    }


def test_experts_are_chosen_by_group_and_bias() -> None:
    # Groups (0, 1), (2, 3), (4, 5). Of token 0 the sums are 1.1, 1.3 and 1.0, so that its two
    # groups hold 0 to 3, of which 0 and 2 are the highest, and not 4. The bias of token 1, which
    # has the same scores, lifts expert 5, and the last group replaces the first.
    scores = jnp.array([0.7, 0.4, 0.8, 0.5, 0.9, 0.1])
    lifted = scores + jnp.array([0, 0, 0, 0, 0, 0.5])
    groups = ExpertGroups(n_group=3, topk_group=2, routed_scaling_factor=1.0)
    chosen = _choose_in_groups(jnp.stack([scores, lifted])[None], groups, 2)
    np.testing.assert_array_equal(chosen, [[[2, 0], [4, 2]]])


@pytest.mark.slow
def test_selection_bias_has_no_gradient_and_no_weight() -> None:
    policy = tiny_policy("DeepseekV3ForCausalLM")
    params = random_params(policy)

    def output(params):
        tokens = jnp.arange(12)[None] % 40
        attend = packed_attention(jnp.ones_like(tokens))
        hidden, _, _ = policy.hidden(params, tokens, tokens, attend, compute_dtype=jnp.float32)
        return hidden.sum()

    run = jax.jit(jax.value_and_grad(output))
    expected, gradient = run(params)
    gradient = jax.device_get(gradient["layers"]["mlp"])
    assert not gradient["selection_bias"].any() and gradient["router"].any()
    # A bias that is equal for all experts changes neither choice nor weights.
    mlp = params["layers"]["mlp"]
    shifted = mlp | {"selection_bias": np.asarray(mlp["selection_bias"]) + np.float32(3.0)}
    moved, _ = run(params | {"layers": params["layers"] | {"mlp": shifted}})
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


@pytest.mark.parametrize("unroll", [False, True])
def test_routing_counts_all_layers_without_padding(unroll):
    policy = tiny_policy("Qwen3MoeForCausalLM")
    params = random_params(policy)
    tokens = np.random.default_rng(1).integers(0, 40, (2, 5)).astype(np.int32)
    segments = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], np.int32)
    positions = np.broadcast_to(np.arange(5, dtype=np.int32), tokens.shape)

    @jax.jit
    def routed(tokens):
        attend = packed_attention(jnp.asarray(segments))
        return policy.hidden(
            params,
            tokens,
            jnp.asarray(positions),
            attend,
            compute_dtype=jnp.float32,
            unroll=unroll,
            counted=jnp.asarray(segments > 0),
        )[2]

    routing = jax.device_get(routed(tokens))
    # Seven tokens with two choices each, whose probabilities sum to one, in each of three layers.
    np.testing.assert_allclose(routing.chosen.sum(axis=1), [14] * 3)
    np.testing.assert_allclose(routing.probability.sum(axis=1), [7] * 3, rtol=1e-6)
    assert len({tuple(of_layer) for of_layer in routing.probability}) == 3
    jax.tree.map(np.testing.assert_array_equal, routed(np.where(segments > 0, tokens, 7)), routing)


def layer_of(**settings: object) -> tuple[MoE, jax.Array]:
    """Make the experts of a layer, and their inputs."""
    config = tiny_policy("Qwen3MoeForCausalLM", **settings).config
    assert config.moe is not None
    return MoE(config, config.moe, jax.random.key(0)), draw(2, 6, config.hidden_size, seed=6)


@pytest.mark.slow
def test_expert_weights_sum_to_one_with_norm_topk_prob():
    # With one expert per token, its weight is 1, or its probability, which is between 1/4 and 1.
    (plain, x), (normalised, _) = (
        layer_of(num_experts_per_tok=1, norm_topk_prob=is_normalised)
        for is_normalised in (False, True)
    )
    share = plain(x, local_experts, None)[0] / normalised(x, local_experts, None)[0]
    assert (share.std(axis=-1) < 1e-5).all()
    assert ((share > 0.25) & (share < 1)).all()


@pytest.mark.slow
def test_router_is_float32_in_every_compute_dtype():
    # Scores of two experts that are equal in bfloat16: those of the second are larger by one part
    # in 1024 if positive.
    layer, x = layer_of(num_experts=2, num_experts_per_tok=1)
    layer.router[...] = draw(16, 1, seed=3) * jnp.array([1.0, 1 + 2**-10])
    x, counted = x.astype(jnp.bfloat16), jnp.ones((2, 6), bool)
    narrow, wide = (
        layer(as_given, local_experts, counted)[1] for as_given in (x, x.astype(jnp.float32))
    )
    assert narrow is not None and wide is not None
    np.testing.assert_array_equal(narrow.chosen, wide.chosen)
    # With a router in bfloat16 all twelve scores would be equal, and every token would choose the
    # first.
    assert narrow.chosen[1] == (x.astype(jnp.float32) @ layer.router[..., 0] > 0).sum() == 7


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_block_products_match_ragged_dot(dtype):
    # Groups of 4, 0 and 8 rows in blocks of 4, and a last block of zero rows.
    is_of_a_group = np.arange(16)[:, None] < 12
    x, dy, w, sizes = (
        np.where(is_of_a_group, draw(16, D, seed=0), 0).astype(dtype),
        np.asarray(draw(16, F, seed=1)).astype(dtype),
        np.asarray(draw(3, D, F, seed=2)).astype(dtype),
        np.array([4, 0, 8], np.int32),
    )

    @jax.jit
    def run(x, dy, w, sizes):
        return (
            moe._by_blocks(x, w, sizes, block=4),
            jax.lax.ragged_dot(x, w, sizes),
            moe._gradient_by_blocks(x, dy, sizes, block=4),
            moe.tpu_gradient(x, dy, sizes, interpret=True),
        )

    blocks, ragged, gradient, of_kernel = jax.device_get(run(x, dy, w, sizes))
    assert blocks.dtype == ragged.dtype == dtype
    np.testing.assert_allclose(
        blocks[:12].astype(float), ragged[:12].astype(float), atol=1e-6, rtol=1e-2
    )
    assert gradient.dtype == of_kernel.dtype == jnp.float32  # not a sum of rounded terms
    np.testing.assert_allclose(gradient, of_kernel, atol=1e-6)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 3), (2, 40)])
def test_expert_output_for_few_and_many_tokens(rows, tokens):
    # From fewer assignments than experts, as in a decode step, to twenty per expert.
    x, weights = draw(rows, tokens, D, seed=0), draw(rows, tokens, K, seed=1)
    chosen = np.argsort(np.random.default_rng(5).random((rows, tokens, E)) ** 4, axis=-1)
    chosen = jax.device_put(chosen[..., :K].astype(np.int32))
    assert_same(local_experts, x, weights, GATE, UP, DOWN, chosen=chosen)


def test_replayed_experts_have_the_routers_weights() -> None:
    # The router's logits are those of x = 1: softmax of 2, 1, 0, -1 is .643914, .236883, .087144,
    # .032059. Experts 0 and 2 without renormalization, and .643914 / (.643914 + .087144) with it.
    for is_normalized, expected in ((False, (0.643914, 0.087144)), (True, (0.880797, 0.119203))):
        layer, _ = layer_of(norm_topk_prob=is_normalized)
        router, x = np.zeros((16, 4), np.float32), np.zeros((1, 2, 16), np.float32)
        router[0], x[:, :, 0] = (2.0, 1.0, 0.0, -1.0), 1.0
        layer.router[...] = jax.device_put(router)
        # The second token is routed by the router.
        replay = np.array([[[0, 2], [255, 255]]], np.uint8)

        @jax.jit
        def run(x, replay, layer=layer):
            given: list[tuple[jax.Array, ...]] = []

            def experts(x, *routed, **_):
                given.append(routed[:2])
                return x

            _, routing = layer(x, experts, jnp.ones((1, 2), bool), replay, records=True)
            return given, routing

        ((weights, chosen),), routing = run(x, replay)
        np.testing.assert_allclose(weights[0, 0], expected, atol=1e-6)
        np.testing.assert_array_equal(chosen, [[[0, 2], [0, 1]]])
        assert routing is not None and routing.ids is not None
        np.testing.assert_array_equal(routing.ids, chosen)
        # The load-balance loss reads the router's own choices.
        np.testing.assert_array_equal(routing.chosen, [2, 2, 0, 0])
