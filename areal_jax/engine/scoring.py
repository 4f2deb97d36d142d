"""Log-probs of given tokens under the engine's weights.

Axes: B rows, one for each data shard; T tokens; K most likely tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from areal_jax.engine.batch import MAX_TOP_LOGPROBS
from areal_jax.engine.decode_shapes import DecodeShapes
from areal_jax.engine.decode_state import EngineParams
from areal_jax.models.attention import choose_kernel, sharded_attention
from areal_jax.models.delta_rule import sharded_recurrence
from areal_jax.models.moe import sharded_experts
from areal_jax.parallel.sharding import ROLLOUT_RULES
from areal_jax.records import Completion, TopLogprobs
from areal_jax.rl.logprobs import token_logprobs, top_predictions

_CHUNK_TOKENS = 256
"""Tokens whose logits exist at the same time."""


class Scores(NamedTuple):
    """Log-probs of tokens given those before, at temperature 1; 0 at the first token, which nothing
    predicts.
    """

    logp: Float32[Array, "B T"]
    top_tokens: Int32[Array, "B T K"]
    """Most likely tokens at each place; -1 where nothing predicts."""
    top_logp: Float32[Array, "B T K"]


def score(
    shapes: DecodeShapes,
    params: EngineParams,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, "B"],
) -> Scores:
    """Compute the log-probs of the first `counts` tokens of each row; the KV cache is not used."""
    policy, mesh = shapes.policy, shapes.mesh
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (places < counts[:, None]).astype(jnp.int32)
    kernel = choose_kernel(mesh.devices.flat[0].platform, tokens.shape[1])
    positions = places
    if policy.config.vision is not None:
        positions = jnp.repeat(places[..., None], 3, axis=-1)
    hidden, _, _ = policy.hidden(
        params if shapes.is_unrolled else policy.stack(params),
        tokens,
        positions,
        sharded_attention(segments, kernel, mesh, ROLLOUT_RULES),
        compute_dtype=shapes.compute_dtype,
        unroll=shapes.is_unrolled,
        experts=sharded_experts(mesh, ROLLOUT_RULES),
        recur=sharded_recurrence(mesh, ROLLOUT_RULES),
        counted=segments > 0,
    )
    head = policy.head(params)
    logp, _ = token_logprobs(hidden, head, tokens, segments, chunk_tokens=_CHUNK_TOKENS)
    top_tokens, top_logp = top_predictions(
        hidden,
        head,
        segments,
        min(MAX_TOP_LOGPROBS, policy.config.vocab_size),
        chunk_tokens=_CHUNK_TOKENS,
    )
    return Scores(logp, top_tokens, top_logp)


def scored_prompt(
    tokens: Int32[np.ndarray, "N"], scores: Scores, version: int, num_top: int
) -> Completion:
    """Return the scores of the first row as those of sampled tokens.

    Args:
        tokens: prompt.
        scores: scores on the host.
        version: version of the weights.
        num_top: number of most likely tokens.
    """
    all_logp, all_tokens, all_top_logp = (np.asarray(each)[0, : len(tokens)] for each in scores)
    # One value for one token: that of a greedy token is the largest, to the bit.
    is_top = all_tokens == tokens[:, None]
    logp = np.where(is_top.any(1), (all_top_logp * is_top).sum(1), all_logp)
    all_top_logp = np.where(all_tokens < 0, -np.inf, all_top_logp).astype(np.float32)
    top = TopLogprobs(all_tokens[:, :num_top], all_top_logp[:, :num_top])
    versions = np.full(len(tokens), version, np.int32)
    return Completion(tokens, logp.astype(np.float32), versions, "length", top)
