"""Matrices to which `add_update` applies the low-rank updates that `lora.attach` put beside them
(LoRA, arXiv:2106.09685): of one adapter, or of several in one batch.

Pytree nodes in the place of a matrix; their leaves are arrays, or properties of arrays such as
shardings. Axes: B rows of a batch, T tokens, A adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.tree_util.register_dataclass, data_fields=("w", "a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class Adapted:
    """A matrix with the update of one adapter: x · w + scale · (x · a) · b; of experts, the
    matrices of all of them, with their number as the leading dimension of each.
    """

    w: Any
    a: Any
    """[inputs of w, rank]."""
    b: Any
    """[rank, outputs of w]."""
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w.shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedRows:
    """A matrix with an update of its own for each row: gradients are those of the rows."""

    w: Any
    a: Any
    """[B, inputs of w, rank]."""
    b: Any
    """[B, rank, outputs of w]."""
    scale: Any
    """[B]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdapterStack:
    """A matrix with the updates of several adapters, of which each row has one.

    The update is computed for one adapter after the other, by the same code for all rows, so that a
    row's bits depend neither on other adapters nor on the place of its own.
    """

    w: Any
    a: Any
    """[A, inputs of w, rank]."""
    b: Any
    """[A, rank, outputs of w]."""
    scale: Any
    """[A]."""
    rows: Any = None
    """Adapter of each row, [B]; None before `assign_rows`."""
    active: Any = None
    """Adapters that rows have, and -1 in the rest, [A]."""


AnyAdapted: TypeAlias = Adapted | AdaptedRows | AdapterStack
Update: TypeAlias = Callable[[Array, Array, Array, Any], Array]
"""Update of a batch, given its inputs, both factors of an adapter, and the scale."""


def assign_rows(params: Any, rows: Any, is_used: Any) -> Any:
    """Assign an adapter to each row of a batch, where the parameters have an `AdapterStack`.

    Args:
        params: parameters of the decoder.
        rows: adapter of each row, [B].
        is_used: rows whose result is read, [B]; others have any.
    """

    def is_stack(node: Any) -> bool:
        return isinstance(node, AdapterStack)

    def assign(node: Any) -> Any:
        if not is_stack(node):
            return node
        numbers = jnp.arange(len(node.scale), dtype=jnp.int32)
        has_rows = ((rows == numbers[:, None]) & is_used).any(1)
        first = jnp.argsort(~has_rows, stable=True).astype(jnp.int32)
        active = jnp.where(numbers < has_rows.sum(), first, -1)
        return AdapterStack(node.w, node.a, node.b, node.scale, rows, active)

    return jax.tree.map(assign, params, is_leaf=is_stack)


def add_update(
    base: Float[Array, "B T ..."], x: Float[Array, "B T ..."], w: AnyAdapted, update: Update
) -> Float[Array, "B T ..."]:
    """Add the update of each row's adapter to `base`, the product of `x` with the matrix alone."""
    if isinstance(w, Adapted):
        return base + update(x, w.a, w.b, w.scale)
    if isinstance(w, AdaptedRows):

        def update_row(x: Array, a: Array, b: Array, scale: Array) -> Array:
            return update(x[None], a, b, scale.astype(x.dtype))[0]

        return base + jax.vmap(update_row)(x, w.a, w.b, w.scale)

    def add(i: Array, y: Array) -> Array:
        number = w.active[i]
        a, b, scale = (
            jax.lax.dynamic_index_in_dim(each, number, keepdims=False)
            for each in (w.a, w.b, w.scale)
        )
        is_own = (w.rows == number).reshape(-1, *[1] * (y.ndim - 1))
        # Not a product with a mask: an adapter with infinite numbers must not change other rows.
        return jnp.where(is_own, y + update(x, a, b, scale.astype(x.dtype)), y)

    return jax.lax.fori_loop(0, (w.active >= 0).sum(), add, base)
