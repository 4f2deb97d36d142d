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
TABLE = jnp.asarray(rng.permutation(P)[: B * MOST].reshape(B, MOST), jnp.int32)
KEYS, VALUES = (
    jnp.asarray(rng.normal(size=(B, max(LENGTHS), K, H)), jnp.float32) for _ in range(2)
)


def pages(dtype: str = "float32") -> Pages:
    """Write the first tokens of three sequences into pages, in two parts."""
    # Earlier content must not be read.
    shape = (K, P, PAGE, H)
    waste, scales = (
        jnp.full(shape, 100, dtype),
        None if dtype == "float32" else jnp.ones(shape[:-1]),
    )
    empty = Pages(waste, waste, scales, scales)
    lengths = jnp.asarray(LENGTHS)
    first = jnp.minimum(lengths, 33)
    begun = write_pages(empty, KEYS, VALUES, TABLE, jnp.zeros(B, jnp.int32), first)
    k, v = (
        jnp.stack([jnp.roll(row, -int(n), 0) for row, n in zip(x, first, strict=True)])
        for x in (KEYS, VALUES)
    )
    return write_pages(begun, k, v, TABLE, first, lengths - first)


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
    q = jnp.asarray(rng.normal(size=(B, new, N, H)), jnp.float32)
    starts = jnp.asarray(LENGTHS, jnp.int32) - new
    # The first sequence has a single token: of seven queries, the first six have no position.
    rows = slice(None) if new == 1 else slice(1, None)
    out = attend_to_pages(q, pages(), TABLE, starts, window)
    np.testing.assert_allclose(out[rows], by_formula(q, window)[rows], atol=2e-6)


@pytest.mark.parametrize("window", [None, 50])
def test_gpu_paged_kernel_matches_the_formula(window: int | None):
    q = jnp.asarray(rng.normal(size=(B, 1, N, H)), jnp.float32)
    out = gpu_paged_attention(
        q[:, 0], *pages(), TABLE, jnp.asarray(LENGTHS), window=window, interpret=True
    )
    np.testing.assert_allclose(out, by_formula(q, window)[:, 0], atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_gpu_paged_kernel_reads_heads_in_pieces(dtype: str):
    # 32 + 16, and 64 + 32 + 16.
    for size in (48, 112):
        q = jnp.asarray(rng.normal(size=(B, N, size)), jnp.float32)
        keys, values = (
            jnp.asarray(rng.normal(size=(K, P, PAGE, size)), jnp.float32) for _ in range(2)
        )
        of_keys, of_values = (
            (x, None) if dtype == "float32" else quantize(x, dtype) for x in (keys, values)
        )
        cache = Pages(of_keys[0], of_values[0], of_keys[1], of_values[1])
        lengths = jnp.asarray(LENGTHS)
        out = gpu_paged_attention(q, *cache, TABLE, lengths, interpret=True)
        plain = attend_to_pages(q[:, None], cache, TABLE, lengths - 1)[:, 0]
        np.testing.assert_allclose(out, plain, atol=1e-5)


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
    q = jnp.asarray(rng.normal(size=(B, 1, N, H)), jnp.float32)
    plain = attend_to_pages(q, narrow, TABLE, jnp.asarray(LENGTHS) - 1)
    assert float(jnp.abs(plain - by_formula(q, None)).mean()) < most
    kernel = gpu_paged_attention(q[:, 0], *narrow, TABLE, jnp.asarray(LENGTHS), interpret=True)
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
    waste = jnp.full(shape, 100, dtype)
    scales = jnp.ones(shape[:-1]) if narrow else None
    empty = Pages(waste, None, scales) if is_latent else Pages(waste, waste, scales, scales)
    lengths, sinks = jnp.asarray(LENGTHS), jnp.asarray(rng.normal(size=N), jnp.float32)
    stored = write_pages(
        empty, KEYS, None if is_latent else VALUES, TABLE, jnp.zeros(B, jnp.int32), lengths
    )
    q = jnp.asarray(rng.normal(size=(B, 1, N, H)), jnp.float32)
    expected = attend_to_pages(q, stored, TABLE, lengths - 1, window, sinks)
    found = tpu_paged_attention(
        q[:, 0],
        *stored,
        TABLE,
        lengths,
        window=window,
        sinks=sinks,
        interpret=pltpu.InterpretParams(),
    )
    np.testing.assert_allclose(found[:, None], expected, atol=2e-6)


@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_paged_kernels_read_several_new_tokens_as_rows(kernel: str) -> None:
    shape = (K, P, PAGE, H if kernel == "gpu" else tpu.padded_head_dim(H))
    empty = Pages(jnp.full(shape, 100.0), jnp.full(shape, 100.0))
    stored = write_pages(empty, KEYS, VALUES, TABLE, jnp.zeros(B, jnp.int32), jnp.asarray(LENGTHS))
    q = jnp.asarray(rng.normal(size=(B, 3, N, H)), jnp.float32)
    starts = jnp.asarray([0, 67, 297], jnp.int32)
    expected = attend_to_pages(q, stored, TABLE, starts, 50)
    attend = gpu_paged_attention if kernel == "gpu" else tpu_paged_attention
    interpret = True if kernel == "gpu" else pltpu.InterpretParams()
    found = attend_as_rows(partial(attend, interpret=interpret), q, stored, TABLE, starts, 50)
    # The first sequence has a single token.
    np.testing.assert_allclose(found[0, :1], expected[0, :1], atol=1e-5)
    np.testing.assert_allclose(found[1:], expected[1:], atol=1e-5)
    # The pages of the last sequence end after 320 tokens.
    beyond = attend_as_rows(partial(attend, interpret=interpret), q, stored, TABLE, starts + 21, 50)
    assert bool(jnp.isfinite(beyond).all())


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.slow
def test_paged_kernels_with_sinks_match_the_formula(window: int | None) -> None:
    q = jnp.asarray(rng.normal(size=(B, 1, N, H)), jnp.float32)
    sinks, lengths = jnp.asarray(rng.normal(size=N), jnp.float32), jnp.asarray(LENGTHS)
    # A sink with score s divides by exp(s) more: the softmax without it, times a share.
    ages = lengths[:, None] - 1 - jnp.arange(KEYS.shape[1])
    mask = (ages >= 0) & (ages < (window or 10**6))
    scores = jnp.einsum("bnh,bsnh->bns", q[:, 0], jnp.repeat(KEYS, N // K, axis=2)) / H**0.5
    total = jax.nn.logsumexp(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    expected = by_formula(q, window) * jax.nn.sigmoid(total - sinks)[:, None, :, None]
    plain = attend_to_pages(q, pages(), TABLE, lengths - 1, window, sinks)
    np.testing.assert_allclose(plain, expected, atol=1e-5)
    kernel = gpu_paged_attention(
        q[:, 0], *pages(), TABLE, lengths, window=window, sinks=sinks, interpret=True
    )
    np.testing.assert_allclose(kernel[:, None], expected, atol=1e-5)
