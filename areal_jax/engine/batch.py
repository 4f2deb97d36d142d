"""Records that cross between the host and the decode programs, in numpy only.

Axes: S slots, n `engine.tokens_per_dispatch`, A top logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Shaped

from areal_jax.records import Sampling

MAX_STOP_TOKENS = 8
"""Maximum number of stop tokens per request; they are compared on the device."""

MAX_TOP_LOGPROBS = 20
"""Maximum number of top logprobs per token that one request may ask for: OpenAI's limit."""


class SamplingMode(IntEnum):
    """Processing of logits before sampling. Each mode includes those before it and is slower."""

    PLAIN = 0
    FILTERED = 1
    """top-k, top-p and min-p, which sort the vocabulary."""
    SHAPED = 2
    """Penalties, which count every slot's tokens; forbidden stop tokens; top logprobs."""


SLOT = np.dtype(
    [
        ("token", np.int32),  # last of the sequence, the input of the next step
        ("position", np.int32),  # its position, which is the number of cached tokens
        ("remaining", np.int32),  # tokens it may still sample
        ("active", np.int32),  # 0 samples nothing
        ("seed", np.uint32, 2),  # high and low word of the request's seed
        ("sample", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("num_prompt_tokens", np.int32),
        ("rope_offset", np.int32),  # added to the position for RoPE, after images
        ("stops_from", np.int32),  # position from which on a stop token may be sampled
        ("stop_tokens", np.int32, MAX_STOP_TOKENS),  # filled up with -1
        ("adapter", np.int32),  # in an engine with several
    ]
)
"""State of one slot. All fields are four bytes wide: slots travel as one integer array."""


class ChunkImages(NamedTuple):
    """Images among the tokens of a chunk. Axes: T tokens, N of images, K features, E width."""

    positions: Int32[np.ndarray, "T 3"]
    """Time, row and column of every token, for RoPE."""
    features: Shaped[np.ndarray, "N K E"] | None
    """Embeddings of the tokens of images, and what is added after the first layers; None: there
    are none."""


class PrefillChunk(NamedTuple):
    """Tokens of a sequence whose keys and values are to be computed."""

    tokens: Int32[np.ndarray, "_"]
    """At most `engine.prefill_chunk_tokens`."""
    start: int
    """Number of tokens before them, whose pages are filled."""
    pages: Sequence[int]
    """Pages of the sequence up to the last of these tokens."""
    shard: int = 0
    """Data shard of the pages."""
    before: Int32[np.ndarray, "_"] = np.zeros(0, np.int32)
    """The tokens before them."""
    slot: int | None = None
    """Slot with the recurrent state after the tokens before them; it gets the one after them."""
    images: ChunkImages | None = None
    """Present if there are images among them or before them, whose tokens are negative."""
    adapter: int = 0
    """Adapter that computes them, in an engine with several."""


class TokenMasks(NamedTuple):
    """Tokens that slots may sample in a dispatch. Axes: W words of 32 tokens.

    A slot with a grammar samples one token only: which tokens may follow then depends on it.
    """

    bits: Int32[Any, "S W"]
    """Bit v % 32 of word v // 32 says whether a slot may sample token v."""
    num_tokens: Int32[Any, "S"]
    """Most tokens that each slot samples."""
    unmasked: Bool[Any, "S"]
    """Whether log-probs of a slot are those among all tokens."""


class DecodeOutput(NamedTuple):
    """Output of one dispatch, on the host."""

    tokens: Int32[np.ndarray, "n S"]
    """-1 where a slot sampled nothing."""
    logp: Float32[np.ndarray, "n S"]
    counts: Int32[np.ndarray, "S"]
    """Number of tokens that each slot sampled: its first ones."""
    active: Bool[np.ndarray, "S"]
    """Slots that continue."""
    stopped: Bool[np.ndarray, "S"]
    """Slots that ended with one of their stop tokens."""
    last: Int32[np.ndarray, "S"]
    """Last token of each slot's sequence."""
    top_logprobs: tuple[Int32[np.ndarray, "n A S"], Float32[np.ndarray, "n A S"]] | None = None
    """Top tokens and their log-probs, of a shaped dispatch."""
    experts: Shaped[np.ndarray, "n S L k"] | None = None
    """Experts of the input of each step, if they are recorded; undefined where a slot sampled
    nothing."""
    drafts: tuple[Int32[np.ndarray, "S"], Int32[np.ndarray, "S"]] | None = None
    """With `engine.draft_tokens`: steps in which each slot sampled, and the drafts it verified."""


def empty_slots(num_slots: int) -> Shaped[np.ndarray, "S"]:
    """`SLOT` records that sample nothing."""
    slots = np.zeros(num_slots, SLOT)
    slots["temperature"] = slots["top_p"] = slots["repetition_penalty"] = 1
    slots["stop_tokens"] = -1
    return slots


def sampling_mode(sampling: Sampling) -> SamplingMode:
    """Select the cheapest mode that supports the sampling parameters of a request."""
    if sampling.min_new_tokens > 0 or sampling.num_top_logprobs > 0 or is_penalized(sampling):
        return SamplingMode.SHAPED
    # The most likely token is the same with filters and without.
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return SamplingMode.FILTERED if filters and sampling.temperature > 0 else SamplingMode.PLAIN


def is_penalized(sampling: Sampling) -> bool:
    """Return whether sampling depends on the tokens so far."""
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    return penalties != (0, 0, 1)
