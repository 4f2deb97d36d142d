"""Log-probs of tokens from hidden states, and values before tokens: the one file that shifts by
one.

Axes: B rows, T tokens, C tokens of a chunk or columns of a block, D width, V vocabulary,
P vocabulary padded to blocks, N blocks.

The file has more than 400 lines because its programs share chunks, shift and gradients.
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
    head: Float[Array, "_D V"],
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
        head: output matrix, or tiles of it; cast to the dtype of `hidden` for the product.
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
    num_chunks = _num_chunks(tokens.shape, chunk_tokens)
    targets = jnp.roll(tokens, -1, axis=1)

    def predict(chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        hidden_chunk, targets_chunk = chunk
        return _predict(hidden_chunk, head, targets_chunk, temperature, learns_entropy)

    if shards is not None:
        # As many blocks of the vocabulary, so that as many logits exist at the same time.
        num_blocks = max(num_chunks, -(-hidden.shape[-1] * head.shape[1] // _MAX_BLOCK))
        of_all: tuple[Array, Array] = _predict_sharded(
            hidden, head, targets, temperature, learns_entropy, num_blocks, shards
        )
        logp, entropy = of_all
    else:
        logp, entropy = _in_chunks(num_chunks, predict, (hidden, targets))
    predicted = _is_predicted(segment_ids)
    logp, entropy = (jnp.where(predicted, jnp.roll(x, 1, axis=1), 0.0) for x in (logp, entropy))
    return logp, entropy if learns_entropy else jax.lax.stop_gradient(entropy)


def top_predictions(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    segment_ids: Int[Array, "B T"],
    num_top: int,
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
    """Return the most likely tokens at each place given the tokens before, and their log-probs.

    Entry t is predicted from hidden[t-1]. Where nothing predicts, ids are -1.

    Args:
        hidden: last hidden states.
        head: output matrix.
        segment_ids: sequence of each token in its row; 0: padding.
        num_top: number of tokens; at most the vocabulary's.
        temperature: divides the logits.
        chunk_tokens: tokens of all rows whose logits exist at the same time.
    """

    def predict(chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        logp, ids = jax.lax.top_k(
            jax.nn.log_softmax(_logits(chunk[0], head, temperature)), min(num_top, head.shape[1])
        )
        return ids, logp

    ids, logp = _in_chunks(_num_chunks(segment_ids.shape, chunk_tokens), predict, (hidden,))
    predicted = _is_predicted(segment_ids)[..., None]
    return (
        jnp.where(predicted, jnp.roll(ids, 1, axis=1), -1),
        jnp.where(predicted, jnp.roll(logp, 1, axis=1), 0.0),
    )


def token_divergences(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Any,
    log_scale: Float[Array, "B T"],
    divergence: Callable[[Array, Any, Array], Float[Array, "B C"]],
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
) -> Float[Array, "B T"]:
    """Compute a divergence of the policy's distribution at each place, in chunks.

    Args:
        hidden: last hidden states.
        head: output matrix.
        targets: tree of arrays [B, T, ...].
        log_scale: differentiable, like the hidden states.
        divergence: function of log_softmax [B, C, V], from the hidden state before each token, and
            of targets and log_scale at the tokens. The backward pass computes it again.
        temperature: divides the logits.
        chunk_tokens: tokens of all rows whose logits exist at the same time.
    """

    leaves, structure = jax.tree.flatten((targets, log_scale))

    @jax.checkpoint
    def compare(hidden: Array, *leaves: Array) -> Array:
        log_softmax = jax.nn.log_softmax(_logits(hidden, head, temperature))
        return divergence(log_softmax, *jax.tree.unflatten(structure, leaves))

    (found,) = _in_chunks(
        _num_chunks(hidden.shape, chunk_tokens),
        lambda chunk: (compare(*chunk),),
        (hidden, *(jnp.roll(leaf, -1, axis=1) for leaf in leaves)),
    )
    return jnp.roll(found, 1, axis=1)


def _num_chunks(shape: tuple[int, ...], chunk_tokens: int) -> int:
    num_rows, num_columns = shape[:2]
    columns_per_chunk = min(num_columns, max(1, chunk_tokens // num_rows))
    return -(-num_columns // columns_per_chunk)


def _in_chunks(
    num_chunks: int,
    function: Callable[[tuple[Array, ...]], tuple[Array, ...]],
    arrays: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Map a function over chunks of rows and tokens of arrays, one after another.

    Chunks are cut along columns, never along rows, which the train mesh shards. A chunk takes every
    num_chunks-th column, so that shards of columns have equal shares of each chunk; and chunks are
    even: 100 columns at 80 a chunk become twice 50, not 80 and 20 with 60 of padding.
    """
    if num_chunks == 1:
        return function(arrays)
    num_rows, num_columns = arrays[0].shape[:2]
    columns = -(-num_columns // num_chunks)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, num_chunks * columns - num_columns), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(num_rows, columns, num_chunks, *x.shape[2:]), 2, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(num_rows, -1, *x.shape[3:])[:, :num_columns]

    return tuple(map(join, jax.lax.map(function, tuple(map(cut, arrays)))))


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
    logits = _logits(hidden, head, temperature)
    d_hidden, d_head = _gradients(
        logits, hidden, head, targets, log_norm, entropy, *cotangents, temperature=temperature
    )
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None


def _gradients(
    logits: Float[Array, "B C V"],
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
    """Gradients of hidden states and head, in float32; `entropy` is None if it carries none."""
    log_softmax = logits - log_norm[..., None]
    softmax = jnp.exp(log_softmax)
    d_logits = (jnp.where(_is_target(targets, logits), 1.0, 0.0) - softmax) * (
        d_logp / temperature
    )[..., None]
    if entropy is not None:
        d_logits -= (
            softmax * (log_softmax + entropy[..., None]) * (d_entropy / temperature)[..., None]
        )
    narrow, wide = d_logits.astype(hidden.dtype), logits.dtype
    d_hidden = jnp.einsum(
        "bcv,dv->bcd", narrow, head.astype(hidden.dtype), preferred_element_type=wide
    )
    # The narrower factor first: XLA on CPU transposes the first one, with its producers, in a slow
    # strided loop. In float32, so that chunks accumulate in float32. Flattened, because XLA on CPU
    # has no product over two dimensions in bfloat16 whose result is transposed, as of a tied head.
    rows, d_rows = (each.reshape(-1, each.shape[-1]) for each in (hidden, narrow))
    return d_hidden, jnp.einsum("nd,nv->dv", rows, d_rows, preferred_element_type=wide)


_predict.defvjp(_predict_forward, _predict_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _predict_sharded(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "_D V"],
    targets: Int[Array, "B T"],
    temperature: float,
    learns_entropy: bool,
    num_blocks: int,
    shards: FullySharded,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`_predict` of all tokens, by blocks of the vocabulary.

    In each direction a block of the head is gathered once, and its gradient is complete, and can be
    scattered, after that block: neither the head nor its gradient is ever whole on a device.
    """
    return _predict_sharded_forward(
        hidden, head, targets, temperature, learns_entropy, num_blocks, shards
    )[0]


def _predict_sharded_forward(
    hidden: Array,
    head: Array,
    targets: Array,
    temperature: float,
    learns_entropy: bool,
    num_blocks: int,
    shards: FullySharded,
) -> tuple[tuple[Array, Array], tuple]:
    """With m the largest logit so far: Σ exp(l - m), Σ exp(l - m) (l - m) and the target's logit
    are added up over blocks (arXiv:1805.02867).
    """
    del learns_entropy

    def predict(part: Array, hidden: Array, targets: Array) -> tuple[Array, Array, Array]:
        part, size, starts = _cut_vocabulary(part, num_blocks)
        targets -= shards.first(size)

        def shift(sums: Array, by: Array) -> Array:
            """Sums with a maximum that is higher by so much."""
            total, weighted, target = sums
            return jnp.stack([jnp.exp(-by) * total, jnp.exp(-by) * (weighted - by * total), target])

        def add(carry: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
            top, sums = carry
            block = shards.gather_part(_block(part, start, len(starts)))
            logits = _block_logits(hidden, block, temperature, size - start)
            new_top = jnp.maximum(top, logits.max(axis=-1))
            shifted = logits - new_top[..., None]
            is_target = _is_target(targets - start, logits)
            its = jnp.exp(shifted), jnp.exp(shifted) * shifted, is_target * logits
            sums = shift(sums, new_top - top) + jnp.stack([each.sum(axis=-1) for each in its])
            return (new_top, sums), None

        none = jnp.full(targets.shape, _NO_LOGIT), jnp.zeros((3, *targets.shape))
        (top, sums), _ = jax.lax.scan(add, none, starts)
        of_all = shards.max_across(top)
        total, weighted, target = shards.sum_across(shift(sums, of_all - top))
        log_norm = of_all + jnp.log(total)
        return target - log_norm, jnp.log(total) - weighted / total, log_norm

    logp, entropy, log_norm = shards.run_on_parts(
        predict, head.astype(hidden.dtype), hidden, targets, num_arrays=3, returns_part=False
    )
    return (logp, entropy), (hidden, head, targets, log_norm, entropy)


def _predict_sharded_backward(
    temperature: float,
    learns_entropy: bool,
    num_blocks: int,
    shards: FullySharded,
    saved: tuple,
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, None]:
    hidden, head, targets, log_norm, entropy = saved

    def gradients(part: Array, hidden: Array, targets: Array, *local: Array) -> tuple[Array, Array]:
        part, size, starts = _cut_vocabulary(part, num_blocks)
        targets -= shards.first(size)
        log_norm, entropy, *cotangents = local

        def add(carry: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
            d_part, d_hidden = carry
            block = shards.gather_part(_block(part, start, len(starts)))
            logits = _block_logits(hidden, block, temperature, size - start)
            of_hidden, of_block = _gradients(
                *(logits, hidden, block, targets - start, log_norm),
                *(entropy if learns_entropy else None, *cotangents),
                temperature=temperature,
            )
            mine = shards.scatter_part(of_block)
            d_part = jax.lax.dynamic_update_slice_in_dim(d_part, mine, start, axis=1)
            return (d_part, d_hidden + of_hidden), None

        zeros = jnp.zeros(part.shape), jnp.zeros(hidden.shape)
        (d_part, d_hidden), _ = jax.lax.scan(add, zeros, starts)
        return (
            shards.sum_over_rest(d_part[:, :size]),
            shards.sum_across(d_hidden).astype(hidden.dtype),
        )

    d_head, d_hidden = shards.run_on_parts(
        gradients,
        head.astype(hidden.dtype),
        *(hidden, targets, log_norm, entropy, *cotangents),
        num_arrays=1,
    )
    return d_hidden, d_head.astype(head.dtype), None


_predict_sharded.defvjp(_predict_sharded_forward, _predict_sharded_backward)


def _cut_vocabulary(
    part: Float[Array, "D V"], num_blocks: int
) -> tuple[Float[Array, "D P"], int, Int[Array, " N"]]:
    """Return the part of a head with as many columns as blocks of equal size have, its number of
    columns before, and where each block starts.
    """
    size = part.shape[1]
    columns = -(-size // num_blocks)
    if columns > _LANES:
        columns = -(-columns // _LANES) * _LANES
    num_blocks = -(-size // columns)
    padded = jnp.pad(part, ((0, 0), (0, num_blocks * columns - size)))
    return padded, size, columns * jnp.arange(num_blocks)


def _block(part: Float[Array, "D P"], start: Array, num_blocks: int) -> Float[Array, "D C"]:
    return jax.lax.dynamic_slice_in_dim(part, start, part.shape[1] // num_blocks, axis=1)


def _block_logits(
    hidden: Float[Array, "B T D"],
    block: Float[Array, "D C"],
    temperature: float,
    size: Int[Array, ""],
) -> Float[Array, "B T C"]:
    """Logits of a block, of which the first `size` columns belong to the vocabulary."""
    logits = _logits(hidden, block, temperature)
    columns = jax.lax.broadcasted_iota(size.dtype, (1, 1, logits.shape[-1]), 2)
    return jnp.where(columns < size, logits, _NO_LOGIT)


_LANES = 128
"""Columns that a TPU reads together."""
_MAX_BLOCK = 1 << 27
"""Entries of a block of the head. XLA:TPU of jax 0.10 sums a larger gradient on every device."""
_NO_LOGIT = -1e30
"""Logit of a column that is not in the vocabulary: finite, so that its products with zero are 0."""


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
