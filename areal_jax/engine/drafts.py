"""Drafts of speculative decoding (arXiv:2211.17192): the tokens that followed the last n-gram
before, in a slot's own sequence or in another sample of its prompt (prompt lookup).

A draft costs no forward of its own, and a wrong one only the place in which it is verified.

Axes: S slots, T tokens of a sequence, N drafts, B recorded sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from areal_jax.models.decoder import Params, Policy

NGRAM_TOKENS = 4
"""Last tokens of a sequence that are compared."""

OTHER_SAMPLES = 7
"""Most other samples of a prompt that are compared: the longest, running or finished. Measured with
the embedded policy, 8 samples of a problem of `aime` and 3 drafts, a step samples 1.18 tokens with
none, 1.24 with one, 1.30 with all."""


class DraftPolicy(NamedTuple):
    """A smaller policy that proposes drafts (`drafting.py`)."""

    policy: Policy
    load: Callable[[Any], Params]
    """Loads its weights, given a sharding for each."""


class DraftState(NamedTuple):
    """Tokens from which drafts are taken."""

    history: Int32[Any, "S T"]
    """Tokens of the sequence that each slot decodes or decoded last; undefined after its end."""
    prompts: Int32[Any, "S"]
    """Checksum of that sequence's prompt: slots with the same one have samples of one prompt."""
    unread: Int32[Any, "S"] | None = None
    """Tokens before the last one, 0 or 1, that the draft policy has not read; None without one."""


def record_sequences(
    state: DraftState,
    slots: Int32[Array, "B"],
    tokens: Int32[Array, "B T"],
    prompts: Int32[Array, "B"],
) -> DraftState:
    """Replace the sequences of slots; those of slots beyond the last are dropped."""
    unread = state.unread
    return DraftState(
        state.history.at[slots].set(tokens, mode="drop"),
        state.prompts.at[slots].set(prompts, mode="drop"),
        None if unread is None else unread.at[slots].set(0, mode="drop"),
    )


def draft_tokens(
    state: DraftState, positions: Int32[Array, "S"], count: int
) -> Int32[Array, "S N"]:
    """Return `count` tokens that may follow each slot's last one.

    They followed the longest match of the last tokens, up to `NGRAM_TOKENS`: in the slot's own
    sequence, or if that is longer, in another sample of its prompt; of equals in one sequence, the
    latest. What follows a match up to the end of the sequence is repeated.

    Args:
        state: Sequences of this device's slots.
        positions: Position of each slot's last token.
        count: Number of drafts N.
    """
    history, (num_slots, size) = state.history, state.history.shape
    own = jnp.arange(num_slots, dtype=jnp.int32)
    is_other = (state.prompts == state.prompts[:, None]) & (own != own[:, None])
    # Length and slot in one number.
    others, _ = jax.lax.top_k(
        jnp.where(is_other, positions * num_slots + own, -1), min(OTHER_SAMPLES, num_slots)
    )
    others = jnp.where(others >= 0, others % num_slots, own[:, None])
    rows = jnp.concatenate([own[:, None], others], axis=1)
    tokens, ends, num_rows = history[rows], positions[rows], rows.shape[1]
    places = jnp.arange(size, dtype=jnp.int32)
    matched, length = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
    for back in range(NGRAM_TOKENS):
        last = jnp.take_along_axis(history, jnp.maximum(positions - back, 0)[:, None], axis=1)
        matched &= (jnp.roll(tokens, back, axis=2) == last[:, None]) & (places >= back)
        length += matched
    # A match ends before the last token of its sequence, so that a token follows it. Length, row
    # and place in one number: the longest, of equals the first row, there the latest.
    rank = num_rows - 1 - jnp.arange(num_rows, dtype=jnp.int32)
    scores = (length * num_rows + rank[:, None]) * size + places
    best = jnp.where(places < ends[:, :, None], scores, 0).max(axis=(1, 2))
    row = num_rows - 1 - best // size % num_rows
    start = (best % size)[:, None]
    source, end = (jnp.take_along_axis(x, row[:, None], axis=1) for x in (rows, ends))
    steps = jnp.arange(count, dtype=jnp.int32) % jnp.maximum(end - start, 1)
    drafts = history.at[source, start + 1 + steps].get(mode="clip")
    # Tokens of images are negative.
    return jnp.maximum(drafts, 0)
