"""Attention under a mask, and over sequences packed into rows.

Axes: B rows, T query tokens, S key tokens, N query heads, K key-value heads, G = N / K, H head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.decoder import Attend


def masked_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B K H S"], v: Float[Array, "B K S H"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T N H"]:
    """softmax(q·k / sqrt(H)) · v over the keys where the mask is true; query head n reads key-value head n // G.

    Keys and values come as both products read them, so that a cache kept in these layouts is never transposed.
    The softmax is taken in float32. A query that may see no key gets the mean of all values, never nan."""
    B, T, N, H = q.shape
    K, S = k.shape[1], k.shape[3]
    G = N // K
    q = (q * jnp.asarray(H**-0.5, q.dtype)).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores = jnp.matmul(q, k, preferred_element_type=jnp.float32).reshape(B, K, G, T, S)
    # The lowest finite number instead of -inf: a row without any key would become nan, also in its gradient.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    # A shift changes no softmax, so no gradient flows through it.
    exp = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))).reshape(B, K, G * T, S)
    # Divided after the product: [.., H] numbers instead of [.., S], half the time of a training step's attention on a CPU.
    out = jnp.matmul(exp.astype(v.dtype), v, preferred_element_type=jnp.float32) / exp.sum(axis=-1, keepdims=True)
    return out.astype(q.dtype).reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def packed_attention(segment_ids: Int[Array, "B T"]) -> Attend:
    """Attend causally within each segment of a row; segments never see each other. Takes and returns no cache.

    Segment 0 is padding: it attends to itself, so that its values stay finite."""
    T = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))
    mask = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
    # Queries in blocks, each against the keys up to its own end: nearly half of the products are masked otherwise.
    # At most 16 blocks, since each is compiled on its own.
    block = max(128, -(-T // 16))

    def attend(q: Array, k: Array, v: Array, cache: None, window: int | None = None) -> tuple[Array, None]:
        k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        seen = mask if window is None else mask & ~jnp.tri(T, T, -window, dtype=bool)
        spans = [(start, min(start + block, T)) for start in range(0, T, block)]
        outs = [masked_attention(q[:, i:j], k[..., :j], v[:, :, :j], seen[:, i:j, :j]) for i, j in spans]
        return jnp.concatenate(outs, axis=1), None

    return attend
