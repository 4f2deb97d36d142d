"""A mixture of experts in the place of an MLP: each token goes to its k best experts, and none is
ever dropped.

Axes: B rows, T tokens, M tokens of all rows, R = M · k places at experts, D width, E experts, F
    width of an expert, L layers.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from areal_jax.models.architecture import ModelConfig, MoEConfig
from areal_jax.parallel.sharding import Rules, sharding

ROUTER = "router"
"""Name of the parameter that stays float32 whatever a policy computes in."""


class Routing(NamedTuple):
    """Where a layer's tokens went, or stacked those of all layers: sums over the tokens that were
    counted."""

    chosen: Float[Array, "*L E"]
    """Tokens that have the expert among their k."""
    probability: Float[Array, "*L E"]
    """The router's probabilities of the expert."""


@runtime_checkable
class Experts(Protocol):
    """experts(x [B T D], weights [B T k], chosen [B T k], gate [E D F], up [E D F], down [E F D])
    -> [B T D]: the weighted sum of the outputs of each token's experts."""

    def __call__(
        self, x: Array, weights: Array, chosen: Array, gate: Array, up: Array, down: Array, /
    ) -> Array: ...


class MoE(nnx.Module):
    """Σ over a token's k experts of weight · down(silu(gate(x)) · up(x)) (Qwen3-MoE,
    arXiv:2505.09388).

    The router's weights, its product and its softmax are float32 in engine and trainer alike,
    whatever they compute in, and of equal probabilities the expert of the lower number goes first:
    given the same x, both choose the same experts, unless two are as near as the order of a float32
    sum. What is left to differ is the rounding of x itself, which the objective corrects for as it
    does for dense policies: the engine's log-probability of a token is the one with which it was
    sampled."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, key: PRNGKeyArray):
        self.moe = moe
        D, E, F = config.hidden_size, moe.num_experts, moe.moe_intermediate_size
        router_key, gate_key, up_key, down_key = jax.random.split(key, 4)
        self.router = _sampled(router_key, (D, E), ("embed", "experts"))
        self.expert_gate = _sampled(gate_key, (E, D, F), ("experts", "embed", "mlp"))
        self.expert_up = _sampled(up_key, (E, D, F), ("experts", "embed", "mlp"))
        self.expert_down = _sampled(down_key, (E, F, D), ("experts", "mlp", "embed"))

    def __call__(
        self, x: Float[Array, "B T D"], experts: Experts, counted: Bool[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Args: counted: tokens whose routing is summed; None sums none."""
        logits = jnp.matmul(
            x.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        probabilities = jax.nn.softmax(logits)
        weights, chosen = jax.lax.top_k(probabilities, self.moe.num_experts_per_tok)
        if self.moe.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        weights = weights.astype(x.dtype)
        y = experts(
            x, weights, chosen, self.expert_gate[...], self.expert_up[...], self.expert_down[...]
        )
        if counted is None:
            return y, None
        mask = counted[..., None].astype(jnp.float32)
        hits = jax.nn.one_hot(chosen, self.moe.num_experts).sum(axis=2) * mask
        return y, Routing(hits.sum(axis=(0, 1)), (probabilities * mask).sum(axis=(0, 1)))


def balance_loss(routing: Routing, num_tokens: Float[Array, ""]) -> Float[Array, ""]:
    """E · Σ_e (mean over layers and tokens of choices of e) · (mean of the probability of e); k
    where all experts get alike.

    Switch Transformer, arXiv:2101.03961, equations 4 to 6, with the mean over all layers as
    `load_balancing_loss_func` of transformers takes it. Args: num_tokens: tokens that were counted;
    of none the loss is 0."""
    L, E = routing.chosen.shape
    rows = jnp.maximum(num_tokens, 1) * L
    return E * jnp.sum(routing.chosen.sum(axis=0) / rows * (routing.probability.sum(axis=0) / rows))


def router_metrics(routing: Routing) -> dict[str, Float[Array, ""]]:
    """How uneven the load is: tokens of a layer's busiest expert over the mean of its experts, and
    the share of experts that no token chose; both means over layers, 1 and 0 at best."""
    busiest = routing.chosen.max(axis=1) / jnp.maximum(routing.chosen.mean(axis=1), 1e-9)
    return {
        "router_busiest_expert": busiest.mean(),
        "router_idle_experts": (routing.chosen == 0).mean(),
    }


def local_experts(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T k"],
    chosen: Int[Array, "B T k"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    *,
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "B T D"]:
    """The experts that are here, of number `first` and on; what other experts would add is left
    out."""
    E, (B, T, k) = len(gate), chosen.shape
    num_places = B * T * k
    # Rows of an expert begin at a multiple of a block that is about as long as the mean expert has
    # places: what remains empty is at most as much again, however uneven the load, and a product by
    # blocks reads each matrix a few times at most.
    block = 1 << (max(num_places // E, 1).bit_length() - 1)
    num_rows = block * (num_places // block + (E if block > 1 else 0))
    number = chosen.reshape(-1) - first
    is_here = (number >= 0) & (number < E)
    number = jnp.where(is_here, number, E)
    sizes = jnp.bincount(number, length=E)
    padded = -(-sizes // block) * block
    order = jnp.argsort(number, stable=True)
    before, row_before = (
        jnp.append(jnp.cumsum(counts) - counts, num_rows) for counts in (sizes, padded)
    )
    rank = (
        jnp.zeros_like(order).at[order].set(jnp.arange(num_places), unique_indices=True)
        - before[number]
    )
    # Places at experts elsewhere get rows beyond the end, each its own.
    row = jnp.where(is_here, row_before[number] + rank, num_rows + jnp.arange(num_places))
    token = (
        jnp.full(num_rows, B * T)
        .at[row]
        .set(jnp.arange(num_places) // k, mode="drop", unique_indices=True)
    )
    rows = x.reshape(B * T, -1).at[token].get(mode="fill", fill_value=0)
    inner = jax.nn.silu(_product(rows, gate, padded, block)) * _product(rows, up, padded, block)
    out = _product(inner, down, padded, block)
    # Back in the order of tokens: a gather, where adding up would depend on the order of a scatter.
    out = out.at[row].get(mode="fill", fill_value=0).reshape(B, T, k, -1)
    return jnp.einsum("btkd,btk->btd", out, weights, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


def sharded_experts(mesh: Mesh, rules: Rules) -> Experts:
    """Experts cut over the mesh as `rules` cut their parameters, tokens as they cut rows.

    Devices that share rows but not experts gather each other's tokens, compute what their own
    experts add, and hand each its sum back. With more than a few choices a token nearly every token
    goes nearly everywhere, so that sending each only where it is wanted would save little, and this
    way shapes are fixed without a limit beyond which tokens are dropped."""

    def experts(
        x: Array, weights: Array, chosen: Array, gate: Array, up: Array, down: Array
    ) -> Array:
        tokens = sharding(mesh, ("batch", "tokens", None), x.shape, rules).spec
        wide = sharding(mesh, ("experts", None, "mlp"), gate.shape, rules).spec
        over = (*_names(wide[0]), *_names(wide[2]))
        shared = tuple(name for name in _names(tokens[0]) if name in over)

        in_specs = (*(tokens,) * 3, wide, wide, PartitionSpec(wide[0], wide[2]))

        # Unchecked, because a gradient rule of our own does not say over which axes its result is
        # summed; shard_map sums it.
        @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=tokens, check_vma=False)
        def on_each(
            x: Array, weights: Array, chosen: Array, gate: Array, up: Array, down: Array
        ) -> Array:
            if shared:
                x, weights, chosen = (
                    jax.lax.all_gather(array, shared, tiled=True) for array in (x, weights, chosen)
                )
            first = jax.lax.axis_index(_names(wide[0])) * len(gate) if _names(wide[0]) else 0
            y = local_experts(x, weights, chosen, gate, up, down, first=first)
            y = jax.lax.psum(y, tuple(name for name in over if name not in shared))
            return jax.lax.psum_scatter(y, shared, tiled=True) if shared else y

        # Times one, which the compiler drops: a gradient that is added to in place must not reach
        # into an unchecked shard_map, which since jax 0.12 refuses to add to it.
        return on_each(x, weights, chosen, gate * 1, up * 1, down * 1)

    return experts


def _sampled(key: PRNGKeyArray, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param[Array]:
    return nnx.Param(shape[-2] ** -0.5 * jax.random.normal(key, shape, jnp.float32), axes=axes)


def _names(cut: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (cut,) if isinstance(cut, str) else cut or ()


def _grouped(
    x: Float[Array, "R I"], w: Float[Array, "E I O"], sizes: Int[Array, "E"], block: int
) -> Float[Array, "R O"]:
    """x · w[e] in the dtype of x, e being the group of the row: the first sizes[0] rows are of
    group 0, and so on, each size a multiple of `block`. Rows behind all groups have no meaning. The
    gradient of w is summed in float32."""
    # Only TPUs have a kernel behind ragged_dot. Elsewhere XLA multiplies every row by every group's
    # matrix and masks: on a CPU, 512 tokens at 8 of 32 experts took 13 times as long as by blocks,
    # and 7 times the memory.
    by_blocks = partial(_by_blocks, block=block)
    return jax.lax.platform_dependent(
        x, w.astype(x.dtype), sizes, tpu=jax.lax.ragged_dot, default=by_blocks
    )


_product = jax.custom_vjp(_grouped, nondiff_argnums=(3,))


def _product_forward(
    x: Array, w: Array, sizes: Array, block: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _product(x, w, sizes, block), (x, w, sizes)


def _product_backward(
    block: int, saved: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array, None]:
    x, w, sizes = saved
    dx = _product(dy, w.swapaxes(1, 2), sizes, block)
    by_blocks = partial(_gradient_by_blocks, block=block)
    dw = jax.lax.platform_dependent(x, dy, sizes, tpu=_ragged_gradient, default=by_blocks)
    return dx, dw.astype(w.dtype), None


_product.defvjp(_product_forward, _product_backward)


def _by_blocks(x: Array, w: Array, sizes: Array, *, block: int) -> Array:
    blocks = x.reshape(-1, block, x.shape[-1])
    return jnp.einsum("nbi,nio->nbo", blocks, w[_groups(sizes, block, len(blocks))]).reshape(
        len(x), -1
    )


def _gradient_by_blocks(x: Array, dy: Array, sizes: Array, *, block: int) -> Array:
    x, dy = (array.reshape(-1, block, array.shape[-1]) for array in (x, dy))
    of_blocks = jnp.einsum("nbi,nbo->nio", x, dy, preferred_element_type=jnp.float32)
    return jax.ops.segment_sum(
        of_blocks, _groups(sizes, block, len(x)), len(sizes), indices_are_sorted=True
    )


def _groups(sizes: Array, block: int, num_blocks: int) -> Array:
    """The group of each block; for those behind all groups, whose rows are zero, the last one."""
    ends = jnp.cumsum(sizes) // block
    return jnp.minimum(jnp.searchsorted(ends, jnp.arange(num_blocks), side="right"), len(sizes) - 1)


def _ragged_gradient(x: Array, dy: Array, sizes: Array) -> Array:
    by_rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x, dy, sizes, by_rows, preferred_element_type=jnp.float32)
