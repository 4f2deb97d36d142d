"""The gated delta rule: chunks against single tokens, packed sequences, states between calls."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.architecture import LinearAttention
from areal_jax.models.delta_rule import (
    CHUNK_TOKENS,
    Filters,
    Mixed,
    RecurrentState,
    local_recurrence,
    state_shapes,
)

K, V, H, E, W = 2, 4, 3, 5, 4
LENGTH = 2 * CHUNK_TOKENS + 21


def sampled(length: int = LENGTH, seed: int = 0) -> tuple[Mixed, Filters]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    inputs = (
        normal(1, length, K, H),
        normal(1, length, K, H),
        normal(1, length, V, E),
        -np.exp(normal(1, length, V)),
        1 / (1 + np.exp(-normal(1, length, V))),
    )
    filters = normal(K, H, W), normal(K, H, W), normal(V, E, W)
    return Mixed(*jax.device_put(inputs)), Filters(*jax.device_put(filters))


def recurrence_in_numpy(inputs: Mixed, filters: Filters) -> np.ndarray:
    """Compute the formula token by token, in float64."""
    q, k, v, log_decay, beta = (np.asarray(x[0], np.float64) for x in inputs)

    def convolved(x: np.ndarray, taps: jax.Array) -> np.ndarray:
        y = np.zeros_like(x)
        for t in range(len(x)):
            for lag in range(min(W, t + 1)):
                y[t] += x[t - lag] * np.asarray(taps)[..., W - 1 - lag]
        return y / (1 + np.exp(-y))

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    q, k, v = convolved(q, filters.q), convolved(k, filters.k), convolved(v, filters.v)
    q, k = (np.repeat(unit(x), V // K, axis=1) for x in (q, k))
    state, outs = np.zeros((V, H, E)), []
    for t in range(len(v)):
        state = state * np.exp(log_decay[t])[:, None, None]
        update = beta[t][:, None] * (v[t] - np.einsum("vhe,vh->ve", state, k[t]))
        state = state + k[t][:, :, None] * update[:, None]
        outs.append(np.einsum("vhe,vh->ve", state, q[t]) / np.sqrt(H))
    return np.stack(outs)[None]


def empty_state() -> RecurrentState:
    shapes = state_shapes(LinearAttention(W, H, E, K, V, (0,)), 1, jnp.float32)
    # What another sequence has left there.
    return jax.device_put(jax.tree.map(lambda leaf: np.full(leaf.shape, 7, leaf.dtype), shapes))


def part_of(inputs: Mixed, start: int, end: int) -> Mixed:
    return Mixed(*jax.device_put([np.asarray(x)[:, start:end] for x in inputs]))


@jax.jit
def run(inputs, filters, starts, counts=None, state=None):
    return local_recurrence(inputs, filters, starts, counts, state)


def first_of(length: int, *places: int) -> jax.Array:
    is_first = np.zeros((1, length), bool)
    is_first[0, list(places)] = True
    return jax.device_put(is_first)


def test_chunks_match_the_formula() -> None:
    inputs, filters = sampled()
    out, state = run(inputs, filters, first_of(LENGTH, 0))
    assert state is None
    np.testing.assert_allclose(out, recurrence_in_numpy(inputs, filters), atol=2e-5)


def test_packed_sequences_do_not_see_each_other() -> None:
    inputs, filters = sampled()
    # Shorter than the convolution, within a chunk, and over several chunks.
    ends = (0, 2, 30, LENGTH)
    out, _ = run(inputs, filters, first_of(LENGTH, *ends[:-1]))
    for start, end in pairwise(ends):
        alone = recurrence_in_numpy(part_of(inputs, start, end), filters)
        np.testing.assert_allclose(np.asarray(out)[:, start:end], alone, atol=2e-5)


def test_state_after_padded_parts_and_tokens_continues_the_row() -> None:
    inputs, filters = sampled()
    expected, state = recurrence_in_numpy(inputs, filters), empty_state()
    outs, at = [], 0
    # A part with padding, which is shorter than the convolution; a longer one; and single tokens.
    for length, count in ((8, 2), (96, 90), (1, 1), (1, 1)):
        starts = first_of(length, *([0] if at == 0 else []))
        part = part_of(inputs, at, at + length)
        out, state = run(part, filters, starts, np.array([count], np.int32), state)
        outs.append(np.asarray(out)[:, :count])
        at += count
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected[:, :at], atol=2e-5)
    # A row without tokens keeps its state.
    _, same = run(part_of(inputs, 0, 8), filters, first_of(8), np.array([0], np.int32), state)
    jax.tree.map(np.testing.assert_array_equal, same, state)


@pytest.mark.slow
def test_gradient_of_chunks_is_that_of_single_tokens() -> None:
    inputs, filters = sampled(CHUNK_TOKENS + 6)
    starts = first_of(CHUNK_TOKENS + 6, 0, 9)

    def by_token(inputs: Mixed) -> jax.Array:
        def step(state, each):
            token, start = each
            out, state = local_recurrence(
                jax.tree.map(lambda x: x[:, None], token), filters, start[:, None], None, state
            )
            return state, out[:, 0]

        columns = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, starts))
        return jnp.moveaxis(jax.lax.scan(step, empty_state(), columns)[1], 0, 1)

    def loss(function, inputs):
        return (jnp.sin(function(inputs)) ** 2).sum()

    whole = jax.jit(jax.grad(partial(loss, lambda x: run(x, filters, starts)[0])))(inputs)
    tokens = jax.jit(jax.grad(partial(loss, by_token)))(inputs)
    jax.tree.map(partial(np.testing.assert_allclose, atol=5e-5), whole, tokens)
