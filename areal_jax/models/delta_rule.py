"""Gated DeltaNet (arXiv:2412.06464): a short causal convolution, and the gated delta rule.

Axes: B rows, T tokens, C tokens of a chunk, M chunks, K key heads, V value heads, G = V / K, H size
of a key, E size of a value, W taps of the convolution.

A state S [H, E] of each value head goes from token to token, with decay a = exp(log_decay) and rate
beta: S = a S + k (beta (v - (a S)ᵀ k))ᵀ, and the output is Sᵀ q.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from areal_jax.models.architecture import LinearAttention
from areal_jax.parallel.sharding import Rules, sharding

CHUNK_TOKENS = 64
"""Tokens whose updates of the state are computed together, as in transformers."""

_NORM_EPS = 1e-6
_HIGHEST = jax.lax.Precision.HIGHEST


class Mixed(NamedTuple):
    """Input of a layer's recurrence, before the convolution."""

    q: Float[Array, "B T K H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T V E"]
    log_decay: Float32[Array, "B T V"]
    """At most 0."""
    beta: Float32[Array, "B T V"]


class Filters(NamedTuple):
    """Taps of the convolution of each channel, the oldest token first."""

    q: Float[Array, "K H W"]
    k: Float[Array, "K H W"]
    v: Float[Array, "V E W"]


class RecurrentState(NamedTuple):
    """State of a layer after a token of each row; also a pytree of shapes or shardings."""

    q: Float[Array, "B W-1 K H"]
    """Last inputs of the convolution, the latest last; zeros before the first token."""
    k: Float[Array, "B W-1 K H"]
    v: Float[Array, "B W-1 V E"]
    memory: Float32[Array, "B V H E"]


def state_shapes(linear: LinearAttention, num_rows: int, dtype: DTypeLike) -> RecurrentState:
    """Return the shapes of a layer's state.

    Args:
        linear: sizes of the layer.
        num_rows: number of rows.
        dtype: dtype of activations, which the convolution keeps.
    """
    K, V = linear.linear_num_key_heads, linear.linear_num_value_heads
    H, E, W = (
        linear.linear_key_head_dim,
        linear.linear_value_head_dim,
        linear.linear_conv_kernel_dim,
    )
    keys, values = (
        jax.ShapeDtypeStruct((num_rows, W - 1, *size), dtype) for size in ((K, H), (V, E))
    )
    memory = jax.ShapeDtypeStruct((num_rows, V, H, E), jnp.float32)
    shapes: list[Any] = [keys, keys, values, memory]
    return RecurrentState(*shapes)


@runtime_checkable
class Recur(Protocol):
    """Recurrence: (inputs, filters, starts [B T], counts [B], state) -> (out [B T V E], state).

    At a token that starts a sequence the state is empty. Only the first `counts` tokens of a row
    change the state; without counts all do. Without a state all rows start empty, and None is
    returned.
    """

    def __call__(
        self,
        inputs: Mixed,
        filters: Filters,
        starts: Array,
        counts: Array | None,
        state: RecurrentState | None,
    ) -> tuple[Array, RecurrentState | None]: ...


def local_recurrence(
    inputs: Mixed,
    filters: Filters,
    starts: Bool[Array, "B T"],
    counts: Int[Array, "B"] | None,
    state: RecurrentState | None,
) -> tuple[Float32[Array, "B T V E"], RecurrentState | None]:
    """Compute the recurrence on one device; see `Recur`."""
    B, T = starts.shape
    places = jnp.arange(T, dtype=jnp.int32)
    # Place of the first token of each token's sequence; before the row if it starts there.
    first = jax.lax.cummax(jnp.where(starts, places, -T - filters.q.shape[2]), axis=1)
    num_last = jnp.full(B, T, jnp.int32) if counts is None else counts.astype(jnp.int32)
    convolved, windows = [], []
    for i, taps in enumerate(filters):
        x, before = inputs[i], None if state is None else state[i]
        y, window = _convolve(x, taps, before, places[None] - first, num_last)
        convolved.append(y)
        windows.append(window)
    G = inputs.v.shape[2] // inputs.q.shape[2]
    q, k = (jnp.repeat(_l2_norm(x), G, axis=2) for x in convolved[:2])
    q, v = q * q.shape[3] ** -0.5, convolved[2]
    log_decay, beta = inputs.log_decay, inputs.beta
    if counts is not None:
        counted = (places < num_last[:, None])[:, :, None]
        log_decay, beta = jnp.where(counted, log_decay, 0), jnp.where(counted, beta, 0)
        starts = starts & counted[:, :, 0]
    memory = (
        jnp.zeros((B, *v.shape[2:3], q.shape[3], v.shape[3])) if state is None else state.memory
    )
    delta_rule = _one_token if T == 1 else _chunked
    out, memory = delta_rule(q, k, v, log_decay, beta, starts, memory)
    q_window, k_window, v_window = windows
    if state is None:
        return out, None
    return out, RecurrentState(q_window, k_window, v_window, memory)


def sharded_recurrence(mesh: Mesh, rules: Rules) -> Recur:
    """Make the recurrence on a mesh; each device computes its own rows and heads.

    If `rules` shard the tokens of a row, they are exchanged for heads, as in attention; if the
    devices do not divide the key heads, each computes all heads of its rows.

    Args:
        mesh: mesh of the policy.
        rules: logical axes to mesh axes.
    """
    if mesh.size == 1:
        return local_recurrence

    def recur(
        inputs: Mixed,
        filters: Filters,
        starts: Array,
        counts: Array | None,
        state: RecurrentState | None,
    ) -> tuple[Array, RecurrentState | None]:
        axes = ("batch", None, "attending_heads")
        rows, _, heads = sharding(mesh, axes, inputs.q.shape, rules).spec
        by_tokens, by_rows = PartitionSpec(rows, None, heads), PartitionSpec(rows)
        states = jax.tree.map(lambda _: by_tokens, state)
        if state is not None:
            states = states._replace(memory=PartitionSpec(rows, heads))
        run = jax.shard_map(
            local_recurrence,
            mesh=mesh,
            in_specs=(
                jax.tree.map(lambda _: by_tokens, inputs),
                jax.tree.map(lambda _: PartitionSpec(heads), filters),
                by_rows,
                None if counts is None else by_rows,
                states,
            ),
            out_specs=(by_tokens, states),
            check_vma=False,  # the solver does not declare over which axes its results vary
        )
        out, state = run(inputs, filters, starts, counts, state)
        how = sharding(mesh, ("batch", "tokens", "kv_heads"), inputs.q.shape, rules).spec
        placed = jax.sharding.NamedSharding(mesh, PartitionSpec(*how))
        return jax.lax.with_sharding_constraint(out, placed), state

    return recur


def _convolve(
    x: Float[Array, "B T N H"],
    taps: Float[Array, "N H W"],
    before: Float[Array, "B W-1 N H"] | None,
    ages: Int[Array, "B T"],
    counts: Int[Array, "B"],
) -> tuple[Float32[Array, "B T N H"], Float[Array, "B W-1 N H"]]:
    """Compute silu of the causal convolution within each sequence, and the next window.

    Args:
        x: inputs.
        taps: taps of each channel.
        before: window before the row; None: zeros.
        ages: number of tokens before each one in its sequence.
        counts: number of tokens of each row after which the next window is taken.
    """
    B, T, *heads = x.shape
    W = taps.shape[2]
    if before is None:
        before = jnp.zeros((B, W - 1, *heads), x.dtype)
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    y = jnp.zeros(x.shape, jnp.float32)
    for lag in range(W):
        past = whole[:, W - 1 - lag : W - 1 - lag + T].astype(jnp.float32)
        past = jnp.where((ages >= lag)[:, :, None, None], past, 0)
        y = y + past * taps[..., W - 1 - lag].astype(jnp.float32)
    window = jax.vmap(lambda row, count: jax.lax.dynamic_slice_in_dim(row, count, W - 1))(
        whole, counts
    )
    # Inputs of an earlier sequence are not part of it.
    last_age = jnp.take_along_axis(ages, jnp.maximum(counts - 1, 0)[:, None], axis=1)
    is_own = (jnp.arange(W - 2, -1, -1) <= last_age) | (counts == 0)[:, None]
    return jax.nn.silu(y), jnp.where(is_own[:, :, None, None], window, 0)


def _l2_norm(x: Float32[Array, "B T K H"]) -> Float32[Array, "B T K H"]:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _NORM_EPS)


def _one_token(
    q: Float32[Array, "B 1 V H"],
    k: Float32[Array, "B 1 V H"],
    v: Float32[Array, "B 1 V E"],
    log_decay: Float32[Array, "B 1 V"],
    beta: Float32[Array, "B 1 V"],
    starts: Bool[Array, "B 1"],
    memory: Float32[Array, "B V H E"],
) -> tuple[Float32[Array, "B 1 V E"], Float32[Array, "B V H E"]]:
    """Compute the delta rule for one token of each row."""
    decay = jnp.where(starts, 0, jnp.exp(log_decay[:, 0]))
    # Not a product with 0, because an unused row may hold any numbers.
    memory = jnp.where(starts[:, :, None, None], 0, memory) * decay[:, :, None, None]
    known = (memory * k[:, 0, :, :, None]).sum(axis=2)
    update = (v[:, 0] - known) * beta[:, 0, :, None]
    memory = memory + k[:, 0, :, :, None] * update[:, :, None]
    return (memory * q[:, 0, :, :, None]).sum(axis=2)[:, None], memory


def _chunked(
    q: Float32[Array, "B T V H"],
    k: Float32[Array, "B T V H"],
    v: Float32[Array, "B T V E"],
    log_decay: Float32[Array, "B T V"],
    beta: Float32[Array, "B T V"],
    starts: Bool[Array, "B T"],
    memory: Float32[Array, "B V H E"],
) -> tuple[Float32[Array, "B T V E"], Float32[Array, "B V H E"]]:
    """Compute the delta rule by chunks (arXiv:2406.06484, section 3.2, with the decay of
    arXiv:2412.06464).

    The updates u of a chunk solve (I + L) u = beta (v - decay k S), where L is the part below the
    diagonal of beta k kᵀ times the decay between the two tokens, and S is the state before the
    chunk. The systems of all chunks are solved at once; only S goes from chunk to chunk. Between
    tokens of different sequences the decay is 0.
    """
    B, T, V, _ = q.shape
    C = min(CHUNK_TOKENS, T)
    M = -(-T // C)

    def by_chunk(x: Array) -> Array:
        """[B T V ..] -> [M B V C ..], filled up with zeros."""
        x = jnp.pad(x, [(0, 0), (0, M * C - T), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(B, M, C, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2)) if x.ndim > 3 else jnp.moveaxis(x, 1, 0)

    q, k, v, log_decay, beta = (by_chunk(x) for x in (q, k, v, log_decay, beta))
    number = jnp.cumsum(by_chunk(starts.astype(jnp.int32)), axis=2)[:, :, None]
    total = jnp.cumsum(log_decay, axis=3)
    sees = jnp.tril(jnp.ones((C, C), bool)) & (number[..., :, None] == number[..., None, :])
    # Masked before the exponential, which would overflow above the diagonal.
    decay = jnp.exp(jnp.where(sees, total[..., :, None] - total[..., None, :], -jnp.inf))
    from_before = jnp.exp(jnp.where(number == 0, total, -jnp.inf))[..., None]
    last = slice(C - 1, C)
    to_end = jnp.exp(jnp.where(number == number[..., last], total[..., last] - total, -jnp.inf))
    product = partial(jnp.einsum, precision=_HIGHEST)
    lower = product("mbvih,mbvjh->mbvij", k * beta[..., None], k) * decay
    sides = jnp.concatenate([v, k * from_before], axis=-1) * beta[..., None]
    # The diagonal is not read.
    solved = jax.scipy.linalg.solve_triangular(lower, sides, lower=True, unit_diagonal=True)
    updates, reads = jnp.split(solved, [v.shape[-1]], axis=-1)
    within = product("mbvih,mbvjh->mbvij", q, k) * decay

    def step(memory: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        updates, reads, within, q, k, kept = chunk
        u = updates - product("bvih,bvhe->bvie", reads, memory)
        out = product("bvih,bvhe->bvie", q, memory) + product("bvij,bvje->bvie", within, u)
        # Not a product with 0, because an unused row may hold any numbers.
        memory = jnp.where(kept == 0, 0, memory) * kept
        return memory + product("bvih,bvie->bvhe", k, u), out

    kept = from_before[..., last, :]
    # A sequence that starts with the row does not read what is in the memory.
    memory = jnp.where(starts[:, 0, None, None, None], 0, memory)
    chunks = (updates, reads, within, q * from_before, k * to_end[..., None], kept)
    memory, out = jax.lax.scan(step, memory, chunks)
    # [M B V C E] -> [B T V E].
    return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, M * C, V, -1)[:, :T], memory
