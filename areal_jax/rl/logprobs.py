"""Log-probs of tokens from hidden states, and values before tokens: the one file that shifts by
one.

Axes: B rows, T tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.parallel.fsdp import FullySharded


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
    learns_entropy: bool = False,
    shards: FullySharded | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Compute the log-prob of every token given its prefix, and the entropy of its distribution.

    Entry t belongs to token t, predicted from hidden[t-1]. The first token of a segment, which
    nothing predicts, and padding (segment 0) get 0. Softmax and logarithm are in float32.

    Args:
        hidden: last hidden states.
        head: output matrix; cast to the dtype of `hidden` for the product.
        tokens: token ids.
        segment_ids: sequence of each token in its row; 0: padding.
        temperature: divides the logits, as in sampling.
        chunk_tokens: tokens of all rows whose logits exist at the same time. The backward pass
            recomputes them, so that [tokens, vocabulary] never exists in either direction.
        learns_entropy: whether the entropy carries a gradient; else only the log-probs do.
        shards: how `head` is sharded over the devices of other tokens, if it is.

    Returns:
        Log-probs and entropies, in nats.

    Raises:
        ValueError: the temperature is not positive.
    """
    if temperature <= 0.0:
        raise ValueError(
            f"expected a temperature above 0 for log-probs, found {temperature}; set "
            "sampling.temperature above 0"
        )
    num_rows, num_columns = tokens.shape
    columns_per_chunk = min(num_columns, max(1, chunk_tokens // num_rows))
    num_chunks = -(-num_columns // columns_per_chunk)
    targets = jnp.roll(tokens, -1, axis=1)

    def predict(
        hidden_chunk: Float[Array, "B C D"], targets_chunk: Int[Array, "B C"]
    ) -> tuple[Array, Array]:
        return _predict(hidden_chunk, head, targets_chunk, temperature, learns_entropy)

    if shards is not None:
        outs: tuple[Array, Array] = _predict_sharded(
            hidden, head, targets, temperature, learns_entropy, num_chunks, shards
        )
        logp, entropy = outs
    else:
        _, (logp, entropy) = _in_chunks(
            num_chunks, lambda _, chunk: (None, predict(*chunk)), None, (hidden, targets)
        )
    predicted = _is_predicted(segment_ids)
    logp, entropy = (jnp.where(predicted, jnp.roll(x, 1, axis=1), 0.0) for x in (logp, entropy))
    return logp, entropy if learns_entropy else jax.lax.stop_gradient(entropy)


def _in_chunks(
    num_chunks: int,
    function: Callable[[Any, tuple[Array, ...]], tuple[Any, tuple[Array, ...]]],
    carry: Any,
    arrays: tuple[Array, ...],
) -> tuple[Any, tuple[Array, ...]]:
    """Scan over chunks of rows and tokens: `function` of what it carries and a chunk of each array.

    Chunks are cut along columns, never along rows, which the train mesh shards. A chunk takes every
    num_chunks-th column, so that shards of columns have equal shares of each chunk; and chunks are
    even: 100 columns at 80 a chunk become twice 50, not 80 and 20 with 60 of padding.
    """
    if num_chunks == 1:
        return function(carry, arrays)
    num_rows, num_columns = arrays[0].shape[:2]
    columns = -(-num_columns // num_chunks)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, num_chunks * columns - num_columns), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(num_rows, columns, num_chunks, *x.shape[2:]), 2, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(num_rows, -1, *x.shape[3:])[:, :num_columns]

    carry, outs = jax.lax.scan(function, carry, tuple(map(cut, arrays)))
    return carry, tuple(map(join, outs))


def values_before(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Shift values after each token to values before each token.

    Entry t becomes the value of the state in which token t was sampled. The first token of a
    segment and padding get 0.
    """
    return jnp.where(_is_predicted(segment_ids), jnp.roll(values, 1, axis=1), 0.0)


def _is_predicted(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return True where the previous token belongs to the same segment."""
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return jnp.pad(same, ((0, 0), (1, 0)))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _predict(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B C"],
    temperature: float,
    learns_entropy: bool,
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """Log-prob of `targets` and entropy, each from the hidden state at its own position."""
    del learns_entropy  # it changes the gradient only
    logp, entropy, _ = _predict_with_norm(hidden, head, targets, temperature)
    return logp, entropy


def _predict_with_norm(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B C"],
    temperature: float,
) -> tuple[Float[Array, "B C"], Float[Array, "B C"], Float[Array, "B C"]]:
    logits = _logits(hidden, head, temperature)
    log_norm = jax.nn.logsumexp(logits, axis=-1)
    # Compare and sum, not gather: along a sharded vocabulary a gather would copy all logits to
    # every shard.
    logp = jnp.sum(_is_target(targets, logits) * logits, axis=-1) - log_norm
    log_softmax = logits - log_norm[..., None]
    entropy = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
    return logp, entropy, log_norm


def _predict_forward(
    hidden: Array, head: Array, targets: Array, temperature: float, learns_entropy: bool
) -> tuple[tuple[Array, Array], tuple]:
    logp, entropy, log_norm = _predict_with_norm(hidden, head, targets, temperature)
    return (logp, entropy), (hidden, head, targets, log_norm, entropy if learns_entropy else None)


def _predict_backward(
    temperature: float, learns_entropy: bool, saved: tuple, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    """d logp / d logits = [is target] - softmax and d entropy / d logits = -softmax (log softmax +
    entropy), from recomputed logits: the residuals are [tokens], not [tokens, V].
    """
    hidden, head, targets, log_norm, entropy = saved
    d_hidden, d_head = _gradients(
        hidden, head, targets, log_norm, entropy, *cotangents, temperature=temperature
    )
    return d_hidden, d_head.astype(head.dtype), None


def _gradients(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B C"],
    log_norm: Float[Array, "B C"],
    entropy: Float[Array, "B C"] | None,
    d_logp: Float[Array, "B C"],
    d_entropy: Float[Array, "B C"],
    *,
    temperature: float,
) -> tuple[Float[Array, "B C D"], Float[Array, "D V"]]:
    """Gradients of hidden states and head; `entropy` is None if it carries none."""
    logits = _logits(hidden, head, temperature)
    log_softmax = logits - log_norm[..., None]
    softmax = jnp.exp(log_softmax)
    d_logits = (jnp.where(_is_target(targets, logits), 1.0, 0.0) - softmax) * (
        d_logp / temperature
    )[..., None]
    if entropy is not None:
        d_logits -= (
            softmax * (log_softmax + entropy[..., None]) * (d_entropy / temperature)[..., None]
        )
    d_hidden = jnp.einsum("bcv,dv->bcd", d_logits.astype(hidden.dtype), head.astype(hidden.dtype))
    # The narrower factor first: XLA on CPU transposes the first one, with its producers, in a slow
    # strided loop. In float32, so that chunks accumulate in float32.
    d_head = jnp.einsum(
        "bcd,bcv->dv", hidden, d_logits.astype(hidden.dtype), preferred_element_type=logits.dtype
    )
    return d_hidden, d_head


_predict.defvjp(_predict_forward, _predict_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _predict_sharded(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    temperature: float,
    learns_entropy: bool,
    num_chunks: int,
    shards: FullySharded,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`_predict` of all chunks: the head is gathered once in each direction, and its gradient is
    reduced once, after the last chunk.
    """
    return _predict_sharded_forward(
        hidden, head, targets, temperature, learns_entropy, num_chunks, shards
    )[0]


def _predict_sharded_forward(
    hidden: Array,
    head: Array,
    targets: Array,
    temperature: float,
    learns_entropy: bool,
    num_chunks: int,
    shards: FullySharded,
) -> tuple[tuple[Array, Array], tuple]:
    del learns_entropy
    whole = shards.gather(head.astype(hidden.dtype))
    _, (logp, entropy, log_norm) = _in_chunks(
        num_chunks,
        lambda _, chunk: (None, _predict_with_norm(chunk[0], whole, chunk[1], temperature)),
        None,
        (hidden, targets),
    )
    return (logp, entropy), (hidden, head, targets, log_norm, entropy)


def _predict_sharded_backward(
    temperature: float,
    learns_entropy: bool,
    num_chunks: int,
    shards: FullySharded,
    saved: tuple,
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, None]:
    hidden, head, targets, log_norm, entropy = saved

    def gradients(head: Array, *local: Array) -> tuple[Array, Array]:
        def add(d_head: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array]]:
            hidden, targets, log_norm, entropy, *cotangents = chunk
            d_hidden, its = _gradients(
                *(hidden, head, targets - shards.first(head.shape[1]), log_norm),
                *(entropy if learns_entropy else None, *cotangents),
                temperature=temperature,
            )
            return d_head + its, (shards.sum_across(d_hidden),)

        zeros = jnp.zeros(head.shape, log_norm.dtype)
        d_head, (d_hidden,) = _in_chunks(num_chunks, add, zeros, local)
        return d_head, d_hidden

    d_head, d_hidden = shards.gradients(
        gradients,
        head.astype(hidden.dtype),
        *(hidden, targets, log_norm, entropy, *cotangents),
        num_others=1,
    )
    return d_hidden, d_head.astype(head.dtype), None


_predict_sharded.defvjp(_predict_sharded_forward, _predict_sharded_backward)


def _logits(
    hidden: Float[Array, "B C D"], head: Float[Array, "D V"], temperature: float
) -> Float[Array, "B C V"]:
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    return (
        jnp.einsum("bcd,dv->bcv", hidden, head.astype(hidden.dtype), preferred_element_type=dtype)
        / temperature
    )


def _is_target(targets: Int[Array, "B C"], logits: Float[Array, "B C V"]) -> Bool[Array, "B C V"]:
    # An iota of the logits' shape, or zeros to select instead of them, would be hoisted out of the
    # loop over chunks, since it is loop-invariant, and occupy memory while the loop runs.
    return (
        jax.lax.broadcasted_iota(targets.dtype, (1, 1, logits.shape[-1]), 2) == targets[..., None]
    )
