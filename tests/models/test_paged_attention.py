"""Paged attention of every kernel against the formula."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import lowering_for
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from areal_jax.models import tpu_paged_attention as tpu
from areal_jax.models.attention import masked_attention
from areal_jax.models.paged_attention import (
    Pages,
    attend_as_rows,
    attend_to_pages,
    choose_paged_kernel,
    quantize,
    read_pages,
    write_pages,
)
from areal_jax.models.paged_kernels import gpu_paged_attention
from areal_jax.models.tpu_paged_attention import tpu_paged_attention

B, N, K, H, P, PAGE, MOST = 3, 4, 2, 16, 64, 16, 20
LENGTHS = (1, 70, 300)
rng = np.random.default_rng(0)
TABLE = jax.device_put(rng.permutation(P)[: B * MOST].reshape(B, MOST).astype(np.int32))


def draw(*shape: int) -> Array:
    return jax.device_put(rng.normal(size=shape).astype(np.float32))


def numbers(*values: int) -> Array:
    return jax.device_put(np.array(values, np.int32))


KEYS, VALUES = (draw(B, max(LENGTHS), K, H) for _ in range(2))
ENDS = numbers(*LENGTHS)
LASTS = numbers(*(length - 1 for length in LENGTHS))
plain_attention = jax.jit(attend_to_pages, static_argnames="window")
gpu_attention = jax.jit(partial(gpu_paged_attention, interpret=True), static_argnames="window")


@partial(jax.jit, static_argnames="dtype")
def pages(dtype: str = "float32") -> Pages:
    """Write the first tokens of three sequences into pages, in two parts."""
    # Earlier content must not be read.
    shape = (K, P, PAGE, H)
    waste, scales = (
        jnp.full(shape, 100, dtype),
        None if dtype == "float32" else jnp.ones(shape[:-1]),
    )
    empty = Pages(waste, waste, scales, scales)
    lengths, first = np.array(LENGTHS, np.int32), np.minimum(np.array(LENGTHS, np.int32), 33)
    begun = write_pages(empty, KEYS, VALUES, TABLE, jnp.zeros(B, jnp.int32), jnp.asarray(first))
    k, v = (
        jnp.stack([jnp.roll(row, -int(n), 0) for row, n in zip(x, first, strict=True)])
        for x in (KEYS, VALUES)
    )
    return write_pages(begun, k, v, TABLE, jnp.asarray(first), jnp.asarray(lengths - first))


@partial(jax.jit, static_argnums=1)
def by_formula(q: Array, window: int | None) -> Array:
    """Compute attention of the last tokens of every sequence by the formula."""
    ends = jnp.asarray(LENGTHS)[:, None] - q.shape[1] + jnp.arange(q.shape[1])
    ages = ends[:, :, None] - jnp.arange(KEYS.shape[1])
    mask = (ages >= 0) & (ages < (window or 10**6))
    return masked_attention(q, KEYS.transpose(0, 2, 3, 1), VALUES.swapaxes(1, 2), mask)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.slow
def test_plain_paged_attention_matches_the_formula(new: int, window: int | None):
    q, starts = draw(B, new, N, H), numbers(*(length - new for length in LENGTHS))
    # The first sequence has a single token: of seven queries, the first six have no position.
    rows = slice(None) if new == 1 else slice(1, None)
    out = np.asarray(plain_attention(q, pages(), TABLE, starts, window=window))
    np.testing.assert_allclose(out[rows], np.asarray(by_formula(q, window))[rows], atol=2e-6)


@pytest.mark.parametrize("window", [None, 50])
def test_gpu_paged_kernel_matches_the_formula(window: int | None):
    q = draw(B, 1, N, H)
    out = gpu_attention(q[:, 0], *pages(), TABLE, ENDS, window=window)
    np.testing.assert_allclose(out, by_formula(q, window)[:, 0], atol=2e-6)


# 32 + 16, and 64 + 32 + 16.
@pytest.mark.parametrize(("dtype", "size"), [("float32", 48), ("int8", 112)])
def test_gpu_paged_kernel_reads_heads_in_pieces(dtype: str, size: int):
    @jax.jit
    def run(q: Array, keys: Array, values: Array) -> tuple[Array, Array]:
        of_keys, of_values = (
            (x, None) if dtype == "float32" else quantize(x, dtype) for x in (keys, values)
        )
        cache = Pages(of_keys[0], of_values[0], of_keys[1], of_values[1])
        plain = attend_to_pages(q[:, None], cache, TABLE, LASTS)[:, 0]
        return gpu_paged_attention(q, *cache, TABLE, ENDS, interpret=True), plain

    q, keys, values = draw(B, N, size), draw(K, P, PAGE, size), draw(K, P, PAGE, size)
    np.testing.assert_allclose(*run(q, keys, values), atol=1e-5)


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.01), ("float8_e4m3fn", 0.05)])
@pytest.mark.slow
def test_quantized_pages_bound_the_error_by_the_largest_number(dtype: str, most: float):
    narrow = pages(dtype)
    for row, length in enumerate(LENGTHS):
        for x, read in zip(
            (KEYS, VALUES), read_pages(narrow, TABLE[row], jnp.float32), strict=True
        ):
            exact, found = x[row, :length].swapaxes(0, 1), read[:, :length]
            largest = jnp.abs(exact).max(axis=-1, keepdims=True)
            # int8: half a step of 1/127. float8 with three mantissa bits: half a step of 1/8,
            # relative to the number.
            assert float((jnp.abs(found - exact) / largest).max()) <= (
                0.5 / 127 + 1e-6 if dtype == "int8" else 1 / 16
            )
    q = draw(B, 1, N, H)
    plain = plain_attention(q, narrow, TABLE, LASTS)
    assert float(jnp.abs(plain - by_formula(q, None)).mean()) < most
    kernel = gpu_attention(q[:, 0], *narrow, TABLE, ENDS)
    np.testing.assert_allclose(kernel, plain[:, 0], atol=1e-5)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_use_paged_kernels(platform: str):
    size = 80 if platform == "cuda" else 128
    assert choose_paged_kernel(platform, size, 16) == ("gpu" if platform == "cuda" else "tpu")
    q, page = (
        jax.ShapeDtypeStruct((8, 12, size), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 64, 16, size), jnp.bfloat16),
    )
    narrow, scale = (
        jax.ShapeDtypeStruct(page.shape, jnp.int8),
        jax.ShapeDtypeStruct(page.shape[:-1], jnp.float32),
    )
    table, lengths = jax.ShapeDtypeStruct((8, 30), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    attend = gpu_paged_attention if platform == "cuda" else tpu_paged_attention
    kernel = lambda q, k, v, ks, vs, table, n: attend(  # noqa: E731
        q, k, v, ks, vs, table, n, window=100
    )
    calls = [
        (kernel, (q, page, page, None, None, table, lengths)),
        (kernel, (q, narrow, narrow, scale, scale, table, lengths)),
    ]
    for function, shapes in calls:
        with lowering_for(platform):
            traced = jax.jit(function).trace(*shapes)
            lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert (
            len(re.findall(r"custom_call @(tpu_custom_call|__gpu\$xla\.gpu\.triton)", lowered)) == 1
        )


def test_unsupported_sizes_use_the_plain_path():
    assert choose_paged_kernel("cpu", 128, 16) == "plain"
    assert choose_paged_kernel("cuda", 72, 16) == "plain"
    assert choose_paged_kernel("cuda", 128, 24) == "plain"
    assert choose_paged_kernel("cuda", 128, 16, is_latent=True) == "plain"
    assert choose_paged_kernel("tpu", 128, 12) == "plain"
    assert choose_paged_kernel("tpu", 80, 16, is_latent=True) == "tpu"


@pytest.mark.parametrize(
    ("dtype", "window", "is_latent"),
    [
        pytest.param("float32", None, False, marks=pytest.mark.slow),
        ("int8", 50, False),
        pytest.param("float8_e4m3fn", None, True, marks=pytest.mark.slow),
    ],
)
def test_tpu_paged_kernel_matches_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, dtype: str, window: int | None, is_latent: bool
) -> None:
    # Blocks of four pages: of the longest row, several; between rows, the next one's is copied.
    monkeypatch.setattr(tpu, "BLOCK_NUMBERS", 4 * K * PAGE * tpu.LANES)
    shape, narrow = (K, P, PAGE, tpu.padded_head_dim(H)), dtype != "float32"
    waste = jax.device_put(np.full(shape, 100, jnp.dtype(dtype)))
    scales = jax.device_put(np.ones(shape[:-1], np.float32)) if narrow else None
    empty = Pages(waste, None, scales) if is_latent else Pages(waste, waste, scales, scales)

    @jax.jit
    def run(empty: Pages, q: Array, sinks: Array) -> tuple[Array, Array]:
        stored = write_pages(
            empty, KEYS, None if is_latent else VALUES, TABLE, jnp.zeros(B, jnp.int32), ENDS
        )
        found = tpu_paged_attention(
            q[:, 0],
            *stored,
            TABLE,
            ENDS,
            window=window,
            sinks=sinks,
            interpret=pltpu.InterpretParams(),
        )
        return found[:, None], attend_to_pages(q, stored, TABLE, LASTS, window, sinks)

    np.testing.assert_allclose(*run(empty, draw(B, 1, N, H), draw(N)), atol=2e-6)


@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_paged_kernels_read_several_new_tokens_as_rows(kernel: str) -> None:
    shape = (K, P, PAGE, H if kernel == "gpu" else tpu.padded_head_dim(H))
    attend = gpu_paged_attention if kernel == "gpu" else tpu_paged_attention
    interpret = True if kernel == "gpu" else pltpu.InterpretParams()

    @jax.jit
    def run(q: Array, starts: Array) -> tuple[Array, Array]:
        empty = Pages(jnp.full(shape, 100.0), jnp.full(shape, 100.0))
        stored = write_pages(empty, KEYS, VALUES, TABLE, jnp.zeros(B, jnp.int32), ENDS)
        found = attend_as_rows(partial(attend, interpret=interpret), q, stored, TABLE, starts, 50)
        return found, attend_to_pages(q, stored, TABLE, starts, 50)

    q = draw(B, 3, N, H)
    found, expected = jax.device_get(run(q, numbers(0, 67, 297)))
    # The first sequence has a single token.
    np.testing.assert_allclose(found[0, :1], expected[0, :1], atol=1e-5)
    np.testing.assert_allclose(found[1:], expected[1:], atol=1e-5)
    # The pages of the last sequence end after 320 tokens.
    beyond, _ = run(q, numbers(21, 88, 318))
    assert np.isfinite(np.asarray(beyond)).all()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.slow
def test_paged_kernels_with_sinks_match_the_formula(window: int | None) -> None:
    q, sinks, lengths = draw(B, 1, N, H), draw(N), ENDS
    # A sink with score s divides by exp(s) more: the softmax without it, times a share.
    ages = lengths[:, None] - 1 - jnp.arange(KEYS.shape[1])
    mask = (ages >= 0) & (ages < (window or 10**6))
    scores = jnp.einsum("bnh,bsnh->bns", q[:, 0], jnp.repeat(KEYS, N // K, axis=2)) / H**0.5
    total = jax.nn.logsumexp(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    expected = by_formula(q, window) * jax.nn.sigmoid(total - sinks)[:, None, :, None]
    plain = plain_attention(q, pages(), TABLE, LASTS, window=window, sinks=sinks)
    np.testing.assert_allclose(plain, expected, atol=1e-5)
    kernel = gpu_attention(q[:, 0], *pages(), TABLE, lengths, window=window, sinks=sinks)
    np.testing.assert_allclose(kernel[:, None], expected, atol=1e-5)
