import re
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import lowering_for
from jax.sharding import AxisType

from areal_jax.models.attention import (
    Kernel,
    choose_kernel,
    masked_attention,
    packed_attention,
    sharded_attention,
)
from areal_jax.models.blocked_attention import Visibility, blocked_attention
from areal_jax.models.gpu_packed_attention import gpu_attention
from areal_jax.models.tpu_packed_attention import tpu_attention
from areal_jax.parallel.sharding import TRAIN_RULES


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


compiled_attention = jax.jit(masked_attention)


def test_attention_by_hand():
    # One head of size 1, so sqrt(H) = 1. q = ln 3; keys 0, 1, 1; the mask hides the third.
    # Scores 0 and ln 3, weights 1/4 and 3/4, values 8 and 4: 8/4 + 4·3/4 = 5.
    out = compiled_attention(
        np.full((1, 1, 1, 1), np.log(3.0), np.float32),
        np.array([0.0, 1.0, 1.0], np.float32).reshape(1, 1, 1, 3),
        np.array([8.0, 4.0, 1000.0], np.float32).reshape(1, 1, 3, 1),
        np.array([True, True, False]).reshape(1, 1, 3),
    )
    assert out.item() == pytest.approx(5.0, rel=1e-6)


def test_grouped_query_heads_use_kv_heads_in_order():
    q, k, v = draw(2, 5, 4, 8), draw(2, 2, 8, 7, seed=1), draw(2, 2, 7, 8, seed=2)
    mask = np.random.default_rng(3).random((2, 5, 7)) < 0.7
    mask[:, :, 0] = True
    out = np.asarray(compiled_attention(q, k, v, mask))
    q, k, v = map(np.asarray, (q, k, v))
    for n in range(4):
        # Head n alone with key-value head n // 2, computed by the formula with sqrt(8).
        scores = np.where(mask, q[:, :, n] @ k[:, n // 2] / 8**0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out[:, :, n], weights @ v[:, n // 2], atol=1e-5)


@pytest.mark.slow
def test_query_without_keys_has_finite_gradient():
    q, k, v = draw(1, 2, 2, 4), draw(1, 1, 4, 3, seed=1), draw(1, 1, 3, 4, seed=2)
    mask = jnp.array([[[False] * 3, [True] * 3]])
    loss = lambda q, k, v: (masked_attention(q, k, v, mask) ** 2).sum()  # noqa: E731
    grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(grad).all() for grad in grads)
    np.testing.assert_allclose(
        masked_attention(q, k, v, mask)[0, 0], np.broadcast_to(v[0, 0].mean(0), (2, 4)), atol=1e-6
    )


def test_distant_scores_do_not_overflow():
    q = np.full((1, 1, 1, 1), 1e4, np.float32)
    k, v = np.array([[[[-1e4, 1e4]]]], np.float32), np.array([[[[1.0], [2.0]]]], np.float32)
    assert compiled_attention(q, k, v, np.ones((1, 1, 2), bool)).item() == 2.0


T, WINDOW = 300, 37
# Segments of 100, 130 and 50 tokens, then padding; and one segment of the complete row.
SEGMENTS = jnp.asarray([[1] * 100 + [2] * 130 + [3] * 50 + [0] * 20, [1] * T])
VISIBILITY = Visibility.of_segments(SEGMENTS)
ARRAYS = draw(2, T, 4, 8), draw(2, T, 2, 8, seed=1), draw(2, T, 2, 8, seed=2)

WAYS: dict[str, Callable[..., jax.Array]] = {
    "dense": lambda q, k, v, window: packed_attention(SEGMENTS)(q, k, v, None, window)[0],
    "blocked": lambda q, k, v, window: blocked_attention(q, k, v, VISIBILITY, window),
    "blocked, small blocks": lambda q, k, v, window: blocked_attention(
        q, k, v, VISIBILITY, window, 16
    ),
    "gpu": lambda q, k, v, window: gpu_attention(q, k, v, VISIBILITY, window, interpret=True),
    "tpu": lambda q, k, v, window: tpu_attention(q, k, v, SEGMENTS, window=window, interpret=True),
}


def by_formula(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """Compute attention with the explicit mask: causal, within the segment and the window."""
    behind = jnp.arange(T)[:, None] - jnp.arange(T)
    sees = (behind >= 0) & (behind < (window or T)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    return masked_attention(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), sees)


@cache
def outs_and_gradients(
    attend: Callable[..., jax.Array], window: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    weights = jnp.where((SEGMENTS != 0)[..., None, None], draw(*ARRAYS[0].shape, seed=3), 0.0)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v, window)
        return (weights * out**2).sum(), jnp.where((SEGMENTS != 0)[..., None, None], out, 0.0)

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*ARRAYS)
    return out, gradients


@pytest.mark.parametrize(
    ("way", "window"),
    [(way, w) for way in WAYS for w in (None, WINDOW)],
)
@pytest.mark.slow
def test_every_packed_kernel_matches_the_formula(way: str, window: int | None) -> None:
    out, gradients = outs_and_gradients(WAYS[way], window)
    expected, expected_gradients = outs_and_gradients(by_formula, window)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)


def test_the_gpu_kernel_reads_latents_of_576_numbers() -> None:
    latents, q = draw(1, 40, 1, 576), draw(1, 40, 2, 576, seed=1)

    @jax.jit
    def run(q: jax.Array, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        segments = jnp.asarray([[1] * 25 + [2] * 15])
        out = gpu_attention(q, latents, latents, Visibility.of_segments(segments), interpret=True)
        sees = jnp.tril(segments[:, :, None] == segments[:, None])
        keys, values = latents.transpose(0, 2, 3, 1), latents.swapaxes(1, 2)
        return out, masked_attention(q, keys, values, sees)

    np.testing.assert_allclose(*run(q, latents), atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "kernel"),
    [
        ({"context": 2, "tensor": 2}, "dense"),
        ({"fsdp": 2, "context": 4}, "blocked"),
        ({"tensor": 4}, "blocked"),
    ],
)
@pytest.mark.slow
def test_sharding_rows_and_heads_keeps_attention(mesh: dict[str, int], kernel: Kernel) -> None:
    # Four devices share the heads, so the two key-value heads are repeated.
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1} | mesh
    devices = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 5)
    attend = sharded_attention(SEGMENTS, kernel, devices, TRAIN_RULES)
    out, gradients = outs_and_gradients(
        lambda q, k, v, window: attend(q, k, v, None, window)[0], None
    )
    expected, expected_gradients = outs_and_gradients(by_formula, None)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.slow
def test_accelerators_use_kernels_for_long_rows(platform: str) -> None:
    kernel = choose_kernel(platform, 1024)
    shapes = [jax.ShapeDtypeStruct((1, 1024, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    attend = packed_attention(jnp.ones((1, 1024), jnp.int32), kernel)
    loss = lambda q, k, v: attend(q, k, v, None)[0].astype(jnp.float32).sum()  # noqa: E731
    with lowering_for(platform):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes)
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
    # One kernel forward and two backward: of keys and queries, or of row sums and the rest.
    assert len(re.findall(r"custom_call @(tpu_custom_call|__gpu\$xla\.gpu\.triton)", lowered)) == 3


@pytest.mark.slow
def test_attention_memory_is_linear_in_long_rows() -> None:
    assert [choose_kernel("cpu", tokens) for tokens in (160, 512, 1024)] == [
        "dense",
        "dense",
        "blocked",
    ]

    def temporaries(tokens: int) -> int:
        shapes = [jax.ShapeDtypeStruct((1, tokens, n, 16), jnp.float32) for n in (4, 2, 2)]
        loss = lambda q, k, v, ids: packed_attention(ids, choose_kernel("cpu", tokens))(  # noqa: E731
            q, k, v, None
        )[0].sum()
        ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes, ids).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    sizes = [temporaries(tokens) for tokens in (8192, 16384, 32768)]
    # Twice the tokens, at most twice the bytes. Scores of one head, 32768² in float32, would take 4
    # GiB; this is a hundredth.
    assert sizes[2] <= 2.05 * sizes[1] <= 2.05 * 2.05 * sizes[0] and sizes[2] < 40 * 2**20


def test_bfloat16_attention_has_float32_softmax():
    # 512 equal keys: in bfloat16 the sum of 512 ones would stop growing at 256 and double the
    # result.
    ones = np.ones((1, 1, 512, 1), jnp.bfloat16)
    out = compiled_attention(
        np.ones((1, 1, 1, 1), jnp.bfloat16), ones.swapaxes(2, 3), ones, np.ones((1, 1, 512), bool)
    )
    assert out.dtype == jnp.bfloat16 and out.item() == 1.0


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.slow
def test_blocked_attention_with_sinks_matches_the_formula(window: int | None) -> None:
    sinks, weights = draw(4, seed=4), draw(*ARRAYS[0].shape, seed=3)
    weights = jnp.where((SEGMENTS != 0)[..., None, None], weights, 0.0)
    behind = jnp.arange(T)[:, None] - jnp.arange(T)
    sees = (behind >= 0) & (behind < (window or T)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])

    def formula(q, k, v, sinks):
        # A last key with the score of the sink and the value 0.
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5
        scores = jnp.where(sees[:, None], scores, -jnp.inf)
        last = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        shares = jax.nn.softmax(jnp.concatenate([scores, last], axis=-1))[..., :-1]
        return jnp.einsum("bnts,bsnh->btnh", shares, v)

    def run(attend):
        loss = lambda *arrays: (weights * attend(*arrays) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*ARRAYS, sinks)

    expected = run(formula)
    assert jnp.abs(expected[1][3]).min() > 1e-3
    for attend in (
        lambda q, k, v, s: blocked_attention(q, k, v, VISIBILITY, window, sinks=s),
        lambda q, k, v, s: packed_attention(SEGMENTS)(q, k, v, None, window, s)[0],
    ):
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=5e-5),
            run(attend),
            expected,
        )
