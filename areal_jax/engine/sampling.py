"""Sampling of one token per slot from its logits, by inversion of the cumulative distribution.

A token depends on (seed, sample index, position) and the logits only. Axes: S slots, V vocabulary,
N positions, W tokens of a block of the vocabulary, M blocks or stop tokens, K top tokens, T tokens
of a sequence.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32


def uniforms(
    seeds: UInt32[Array, "S 2"], samples: Int32[Array, "S"], positions: Int32[Array, "S N"]
) -> Float32[Array, "S N"]:
    """Return a number in [0, 1) per slot and position.

    It is uniform(fold_in(fold_in(key(seed), sample), position)).

    Args:
        seeds: High and low word of each request's seed.
        samples: Index of each slot's sample in its request.
        positions: Positions in the sequence.
    """

    def number(seed: Array, sample: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), sample)
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(jax.vmap(number, (None, None, 0)))(seeds, samples, positions)


def sample_tokens(
    logits: Float32[Array, "S V"], uniform: Float32[Array, "S"], temperature: Float32[Array, "S"]
) -> tuple[Int32[Array, "S"], Float32[Array, "S"]]:
    """Sample a token per slot from softmax(logits / temperature).

    The token is the one whose interval of the cumulative distribution contains `uniform`.
    Temperature 0 selects the most likely token (the first of equals), with its log-prob at
    temperature 1. A token of probability 0 (logit -inf) is never sampled.

    Returns:
        Tokens and their log-probs.
    """
    greedy = temperature == 0
    scaled = _scaled(logits, temperature)
    highest = scaled.max(-1, keepdims=True)
    weights = jnp.exp(scaled - highest)
    sampled, total = _invert(weights, uniform)
    # The first maximum as a minimum over indices: XLA's argmax does not vectorise on CPU.
    places = jnp.arange(logits.shape[1], dtype=jnp.int32)
    best = jnp.where(scaled == highest, places, logits.shape[1] - 1).min(-1)
    token = jnp.where(greedy, best, sampled)
    logit = jnp.take_along_axis(scaled - highest, token[:, None], axis=1)[:, 0]
    return token, logit - jnp.log(total)


def keep_most_likely(
    logits: Float32[Array, "S V"],
    temperature: Float32[Array, "S"],
    top_k: Int32[Array, "S"],
    top_p: Float32[Array, "S"],
    min_p: Float32[Array, "S"],
) -> Float32[Array, "S V"]:
    """Set logits to -inf that top-k, min-p or, among the rest, top-p exclude.

    min-p (arXiv:2407.01082) keeps tokens with at least `min_p` times the probability of the most
    likely one. top-p keeps the most likely tokens until their probability reaches `top_p`, the last
    one included. Among equal logits the lower token comes first. top_k 0, top_p 1 and min_p 0
    exclude nothing; at temperature 0 nothing is excluded.
    """
    size = logits.shape[1]
    filtered = temperature > 0
    limit = jnp.where(filtered & (top_k > 0), top_k, size)[:, None]
    mass = jnp.where(filtered, top_p, 1.0)[:, None]
    places = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), logits.shape)
    negative, order = jax.lax.sort((-logits, places), dimension=1, num_keys=1, is_stable=True)
    scaled = -negative / jnp.where(filtered, temperature, 1.0)[:, None]
    lowest = scaled[:, :1] + jnp.log(jnp.where(filtered, min_p, 0.0))[:, None]
    possible = (places < limit) & (scaled >= lowest)
    share = jax.nn.softmax(jnp.where(possible, scaled, -jnp.inf), axis=-1)
    kept = possible & ((jnp.cumsum(share, axis=-1) - share < mass) | (mass >= 1))
    # In the order of the vocabulary again, so that a request without filters samples the same
    # tokens in a batch with filters.
    last = kept.sum(-1, keepdims=True) - 1
    threshold, last_token = (
        -jnp.take_along_axis(negative, last, 1),
        jnp.take_along_axis(order, last, 1),
    )
    return jnp.where(
        (logits > threshold) | ((logits == threshold) & (places <= last_token)), logits, -jnp.inf
    )


def count_tokens(sequences: Int32[Array, "S T"], size: int) -> Int32[Array, "S V"]:
    """Count the occurrences of each token in each sequence; -1 is no token."""
    rows = jnp.arange(len(sequences))[:, None]
    # A negative index would count from the end; an index beyond the end is dropped.
    places = jnp.where(sequences < 0, size, sequences)
    return jnp.zeros((len(sequences), size), jnp.int32).at[rows, places].add(1, mode="drop")


def penalize(
    logits: Float32[Array, "S V"],
    in_prompt: Bool[Array, "S V"],
    sampled: Int32[Array, "S V"],
    presence: Float32[Array, "S"],
    frequency: Float32[Array, "S"],
    repetition: Float32[Array, "S"],
) -> Float32[Array, "S V"]:
    """Return r(l) - presence · [sampled > 0] - frequency · sampled (OpenAI's penalties).

    For tokens in prompt or completion, r(l) is l / repetition for l > 0 and l · repetition
    otherwise (CTRL, arXiv:1909.05858). Penalties of 0, 0 and 1 change no bit.

    Args:
        logits: Logits l.
        in_prompt: Whether the prompt contains the token.
        sampled: Number of occurrences in the completion.
        presence: Presence penalty.
        frequency: Frequency penalty.
        repetition: Repetition penalty.
    """
    factor = repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(in_prompt | (sampled > 0), repeated, logits)
    return logits - presence[:, None] * (sampled > 0) - frequency[:, None] * sampled


def forbid(
    logits: Float32[Array, "S V"], tokens: Int32[Array, "S M"], forbidden: Bool[Array, "S"]
) -> Float32[Array, "S V"]:
    """Set the logits of `tokens` (-1 is no token) to -inf in the slots where `forbidden` is
    true.
    """
    places = jnp.where(forbidden[:, None] & (tokens >= 0), tokens, logits.shape[1])
    return logits.at[jnp.arange(len(logits))[:, None], places].set(-jnp.inf, mode="drop")


def unpack_bits(bits: Int32[Array, "S W"], size: int) -> Bool[Array, "S V"]:
    """Return for each token whether its bit is set: bit v % 32 of word v // 32."""
    each = bits[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1
    return each.reshape(len(bits), -1)[:, :size] > 0


def most_likely(
    logits: Float32[Array, "S V"], temperature: Float32[Array, "S"], count: int
) -> tuple[Int32[Array, "S K"], Float32[Array, "S K"]]:
    """Return the `count` most likely tokens under softmax(logits / temperature) and their
    log-probs.

    Temperature 0 counts as 1. A smaller vocabulary is padded with log-prob -inf.
    """
    scaled = _scaled(logits, temperature)
    values, tokens = jax.lax.top_k(scaled, min(count, logits.shape[1]))
    logp, lacking = (
        values - jax.nn.logsumexp(scaled, axis=-1, keepdims=True),
        ((0, 0), (0, count - values.shape[1])),
    )
    return jnp.pad(tokens, lacking), jnp.pad(logp, lacking, constant_values=-jnp.inf)


def logprobs_among_all(
    logits: Float32[Array, "S V"], temperature: Float32[Array, "S"], tokens: Int32[Array, "S"]
) -> Float32[Array, "S"]:
    """Return the log-prob of a token per slot under softmax(logits / temperature).

    Temperature 0 counts as 1.
    """
    scaled = _scaled(logits, temperature)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)


def _scaled(
    logits: Float32[Array, "S V"], temperature: Float32[Array, "S"]
) -> Float32[Array, "S V"]:
    """Return logits / temperature, of which 0 counts as 1."""
    return logits / jnp.where(temperature == 0, 1.0, temperature)[:, None]


def _invert(
    weights: Float32[Array, "S V"], uniform: Float32[Array, "S"]
) -> tuple[Int32[Array, "S"], Float32[Array, "S"]]:
    """Return the first token at which the cumulative weight exceeds uniform · total, and the total.

    Two levels, blocks and then the tokens of one block: a cumulative sum over a vocabulary of 150k
    tokens in float32 would round away unlikely tokens, and costs more.
    """
    slots, size = weights.shape
    width = 2 ** round(math.log2(size) / 2)
    padded = jnp.pad(weights, ((0, 0), (0, -size % width)))
    by_block = padded.reshape(slots, -1, width)
    blocks = by_block.sum(-1)
    ends = _running_sum(blocks)
    total = ends[:, -1]
    target = uniform * total
    block = _first(ends > target[:, None], blocks > 0)[:, None]
    start = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0), 1), 0.0)
    inside = jnp.take_along_axis(by_block, block[:, :, None], 1)[:, 0]
    place = _first(start + _running_sum(inside) > target[:, None], inside > 0)
    return block[:, 0] * width + place, total


def _running_sum(x: Float[Array, "S W"]) -> Float[Array, "S W"]:
    """Return the inclusive cumulative sum, as one product with a triangular matrix."""
    triangle = jnp.triu(jnp.ones((x.shape[1],) * 2, x.dtype))
    return jnp.matmul(x, triangle, precision=jax.lax.Precision.HIGHEST)


def _first(reached: Bool[Array, "S W"], possible: Bool[Array, "S W"]) -> Int[Array, "S"]:
    """Return the first possible index that is reached; the last possible one if rounding leaves
    none.
    """
    places = jnp.arange(reached.shape[1], dtype=jnp.int32)
    first = jnp.where(reached & possible, places, reached.shape[1]).min(-1)
    return jnp.minimum(first, jnp.where(possible, places, 0).max(-1))
