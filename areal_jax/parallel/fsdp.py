"""Fully sharded parameters: explicit gathers of weights, and gradients that are reduced and
scattered in one step.

Left to itself, the compiler reduces a gradient on every device and then takes each device's part of
it, which is twice the traffic and a whole float32 gradient in memory, unless a later pass happens
to fuse both; and it may gather small parts of a width by an all-reduce of zeros. It also sums
gradients over the copies of the parameters (the axis `data`) in every micro-batch, where once for
an update is enough.

Axes: N devices of the width, B rows, T tokens, I inputs, O outputs, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from areal_jax.parallel.sharding import Rules, abstract, sharding

COPIES = ("data",)
"""Mesh axes over which parameters are repeated."""

MIN_LOOKUP_WIDTH = 32
"""Least width of a part of the embedding in which tokens of other devices are looked up: a TPU
pads it to 128, so that what is looked up takes up to four times the memory of hidden states."""


@dataclass(frozen=True)
class FullySharded:
    """Mesh axes of a matrix that is sharded over the devices that hold other rows and tokens.

    Attributes:
        mesh: The train mesh.
        width: Axes that shard the width of the matrix, all of which shard rows or tokens.
        across: Axes that shard its other dimension (tensor parallelism).
        tokens: Axes of rows and of tokens.
        dim: Dimension of the matrix that is its width.
        copies: Axes of the copies that have tiles of their own in the matrix (`Copies`), so that
            its gradient is not summed over them.
    """

    mesh: Mesh
    width: tuple[str, ...]
    across: tuple[str, ...]
    tokens: tuple[tuple[str, ...], tuple[str, ...]]
    dim: int
    copies: tuple[str, ...] = ()

    def gather(self, w: Float[Array, "_I _O"]) -> Float[Array, "I O"]:
        """Gather the width of a matrix; of tiles, each device that of its copy."""
        return self._on_devices(self.gather_part, (self._of_matrix(),), self._of_matrix(()))(w)

    def gradients(
        self, function: Callable[..., Array], w: Float[Array, "_I _O"], *arguments: Any, wide: int
    ) -> Array:
        """Compute a gradient on each device for its tokens, and sum it over all of them.

        Args:
            function: From the arguments of a device to its part of the gradient of the gathered
                matrix.
            w: The matrix.
            arguments: Arrays by rows and tokens.
            wide: Number of the argument whose last dimension is the matrix's other one.

        Returns:
            The gradient, sharded as the matrix.
        """

        def run(_: Array, *local: Any) -> tuple[Array]:
            return (self.sum_over_rest(self.scatter_part(function(*local))),)

        return self.run_on_parts(run, w, *arguments, wide=wide, num_arrays=0)[0]

    def run_on_parts(
        self,
        function: Callable[..., tuple[Array, ...]],
        w: Float[Array, "_I _O"],
        *arguments: Any,
        num_arrays: int,
        wide: int | None = None,
        returns_part: bool = True,
    ) -> tuple[Array, ...]:
        """Run a function on each device with its part of a matrix.

        Args:
            function: From a part of the matrix and the arguments of a device to arrays by rows and
                tokens, after a part of a matrix if `returns_part`. Calls the methods below.
            w: The matrix.
            arguments: Arrays by rows and tokens.
            num_arrays: Number of arrays by rows and tokens that it returns.
            wide: Number of the argument whose last dimension is the matrix's other one.
            returns_part: Whether its first result is a part of a matrix.
        """
        by_tokens = PartitionSpec(*self.tokens)
        ins = [by_tokens] * len(arguments)
        if wide is not None:
            ins[wide] = PartitionSpec(*self.tokens, self.across)
        parts = (self._of_matrix(),) if returns_part else ()
        out = (*parts, *(by_tokens,) * num_arrays)
        return self._on_devices(function, (self._of_matrix(), *ins), out)(w, *arguments)

    def gather_part(self, part: Array) -> Array:
        """Gather the width of a part, on each device."""
        if not self.width:
            return part
        return jax.lax.all_gather(part, self.width, axis=self.dim, tiled=True)

    def scatter_part(self, whole: Array) -> Array:
        """Sum over the devices of the width, of which each gets its part."""
        if not self.width:
            return whole
        if self.mesh.devices.flat[0].platform == "tpu":
            # XLA:TPU of jax 0.10 would sum the whole where narrow parts are last in memory.
            whole = with_layout_constraint(whole, Layout((self.dim, 1 - self.dim)))
        return jax.lax.psum_scatter(whole, self.width, scatter_dimension=self.dim, tiled=True)

    def gather_tokens(self, tokens: Int[Array, "B T"]) -> Int[Array, "N B T"]:
        """Gather the tokens of the devices of the width, on each device."""
        return tokens[None] if not self.width else jax.lax.all_gather(tokens, self.width)

    def exchange(self, x: Array, split: int, concat: int) -> Array:
        """Exchange equal parts of one dimension among the devices of the width, joined along
        another, on each device.
        """
        return x if not self.width else jax.lax.all_to_all(x, self.width, split, concat, tiled=True)

    def sum_over_rest(self, part: Array) -> Array:
        """Sum a part over the devices of other tokens that have the same part of the width, but not
        over copies with tiles of their own.
        """
        apart = (*self.width, *self.copies)
        rest = tuple(axis for axis in chain(*self.tokens) if axis not in apart)
        return jax.lax.psum(part, rest) if rest else part

    def first(self, size: int) -> Int[Array, ""] | int:
        """Return the place of a device's part of the other dimension.

        Args:
            size: Size of the part.
        """
        return jax.lax.axis_index(self.across) * size if self.across else 0

    def sum_across(self, x: Array) -> Array:
        """Sum over the parts of the other dimension, on each device."""
        return jax.lax.psum(x, self.across) if self.across else x

    def max_across(self, x: Array) -> Array:
        """Return the maximum over the parts of the other dimension, on each device."""
        return jax.lax.pmax(x, self.across) if self.across else x

    def _of_matrix(self, width: tuple[str, ...] | None = None) -> PartitionSpec:
        width = (*self.copies, *self.width) if width is None else width
        return PartitionSpec(*((width, self.across) if self.dim == 0 else (self.across, width)))

    def _on_devices(self, function: Callable[..., Any], ins: Any, out: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=ins,
            out_specs=out,
            check_vma=False,  # gathered arrays are equal on all devices of these axes
        )


def fully_sharded(
    mesh: Mesh,
    axes: tuple[str, str],
    shape: tuple[int, int],
    tokens: tuple[int, int],
    rules: Rules,
    copies: tuple[str, ...] = (),
) -> FullySharded | None:
    """Return how a matrix is sharded over the devices of its tokens; None where it is not, and has
    no tiles either.

    Args:
        mesh: The train mesh.
        axes: Logical axes of its two dimensions, one of which is `embed`.
        shape: Their sizes, without tiles.
        tokens: Number of rows, and of tokens of each.
        rules: Logical axes to mesh axes.
        copies: Axes of copies with tiles of their own.
    """
    dim = axes.index("embed")
    both = _names(sharding(mesh, axes, shape, rules).spec)
    by_tokens = _names(sharding(mesh, ("batch", "tokens"), tokens, rules).spec)
    found = FullySharded(mesh, both[dim], both[1 - dim], by_tokens, dim, copies)
    return found if (found.width or copies) and {*found.width} <= {*chain(*by_tokens)} else None


@dataclass(frozen=True)
class Copies:
    """Tiles of parameters: one for each copy of them on the train mesh, side by side.

    A gradient with respect to tiles is one for each copy, of its own tokens, and takes the memory
    of one gradient on each device. It is summed over copies once, when all tokens have been read.

    Attributes:
        placed: Tree of the shardings of the parameters.
        dims: Tree of the dimensions along which each parameter is tiled; NOT_TILED: it is not, and
            its gradient is summed at once.
    """

    placed: Any
    dims: Any

    def abstract(self, shapes: Any) -> Any:
        """Return the shapes and shardings of the tiles."""

        def tiled(leaf: Any, how: NamedSharding, dim: int) -> Any:
            sizes = list(leaf.shape)
            if dim != NOT_TILED:
                sizes[dim] *= math.prod(how.mesh.shape[axis] for axis in COPIES)
            return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)

        shapes = jax.tree.map(tiled, shapes, self.placed, self.dims)
        return abstract(shapes, jax.tree.map(_tiled, self.placed, self.dims))

    def tile(self, params: Any) -> Any:
        """Return the tiles of parameters. No device reads another one's memory."""

        def tile(leaf: Array, how: NamedSharding, dim: int) -> Array:
            return leaf if dim == NOT_TILED else _per_device(how, _tiled(how, dim))(leaf)

        return jax.tree.map(tile, params, self.placed, self.dims)

    def sum(self, tiles: Any) -> Any:
        """Sum over copies; the result is sharded as the parameters."""

        def add(leaf: Array, how: NamedSharding, dim: int) -> Array:
            if dim == NOT_TILED:
                return leaf
            return _per_device(_tiled(how, dim), how, partial(jax.lax.psum, axis_name=COPIES))(leaf)

        return jax.tree.map(add, tiles, self.placed, self.dims)


NOT_TILED = -1


def untile(tiles: Array, how: NamedSharding, dim: int) -> Array:
    """Return a parameter from its tiles, one after another along a dimension.

    Args:
        tiles: The tiles.
        how: Sharding of the parameter.
        dim: The dimension.
    """
    return _per_device(_tiled(how, dim), how)(tiles)


def _tiled(how: NamedSharding, dim: int) -> NamedSharding:
    """Return the sharding of the tiles of an array."""
    if dim == NOT_TILED:
        return how
    spec = [*how.spec, *[None] * (dim + 1 - len(how.spec))]
    names = spec[dim]
    spec[dim] = (*COPIES, *((names,) if isinstance(names, str) else names or ()))
    return NamedSharding(how.mesh, PartitionSpec(*spec), memory_kind=how.memory_kind)


def _per_device(
    ins: NamedSharding, out: NamedSharding, function: Callable[[Array], Array] = lambda part: part
) -> Callable[[Array], Array]:
    # check_vma=False: copies are equal before they are tiled, and after they are summed.
    return jax.shard_map(
        function, mesh=ins.mesh, in_specs=ins.spec, out_specs=out.spec, check_vma=False
    )


def _names(spec: PartitionSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes of two dimensions."""
    first, second = (
        () if names is None else (names,) if isinstance(names, str) else tuple(names)
        for names in (*spec, None, None)[:2]
    )
    return first, second


@partial(jax.tree_util.register_dataclass, data_fields=("w",), meta_fields=("shards",))
@dataclass(frozen=True)
class ShardedMatrix:
    """A matrix whose products gather it, and whose gradient is reduced and scattered.

    A pytree node.
    """

    w: Any
    shards: FullySharded
    """Its `dim` is that of the matrix flattened to inputs and outputs."""


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def sharded_product(
    x: Float[Array, "B T I"], w: Float[Array, "_I _O"], shards: FullySharded
) -> Float[Array, "B T O"]:
    """Compute x · w in the dtype of x; the gradient of w is summed over tokens in float32."""
    return x @ shards.gather(w.astype(x.dtype))


def _forward(x: Array, w: Array, shards: FullySharded) -> tuple[Array, tuple[Array, Array]]:
    # Not sharded_product itself, in which a rematerialization policy would not find the product.
    return x @ shards.gather(w.astype(x.dtype)), (x, w)


def _backward(shards: FullySharded, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    def gradient(x: Array, dy: Array) -> Array:
        return jnp.einsum("bti,bto->io", x, dy, preferred_element_type=jnp.float32)

    x, w = saved
    dx = jnp.einsum("bto,io->bti", dy, shards.gather(w.astype(dy.dtype)))
    # The input or the output has the dimension that is not the width.
    dw = shards.gradients(gradient, w, x, dy, wide=1 - shards.dim)
    return dx, dw.astype(w.dtype)


sharded_product.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sharded_lookup(
    embed: Float[Array, "V _D"], tokens: Int[Array, "B T"], dtype: DTypeLike, shards: FullySharded
) -> Float[Array, "B T D"]:
    """Return the rows of `tokens`; the gradient of `embed` is summed over tokens in float32.

    Each device looks up its part of the width for the tokens of all, which then exchange them:
    neither `embed` nor its gradient is ever whole on a device. Parts that are too narrow for the
    device's memory are gathered, and their gradient is scattered.
    """
    return _look_up(embed, tokens, dtype, shards)[0]


def _look_up(
    embed: Array, tokens: Array, dtype: DTypeLike, shards: FullySharded
) -> tuple[Array, tuple[Array, Array]]:
    def look_up(part: Array, tokens: Array) -> tuple[Array]:
        if _is_narrow(part):
            part = shards.gather_part(part.astype(dtype))
            return (shards.sum_across(_rows(part, tokens, shards)),)
        rows = _rows(part, shards.gather_tokens(tokens), shards).astype(dtype)
        return (shards.sum_across(shards.exchange(rows, 0, rows.ndim - 1)[0]),)

    (x,) = shards.run_on_parts(look_up, embed, tokens, num_arrays=1, returns_part=False)
    # The leaf is saved for its shape and dtype.
    return x, (embed, tokens)


def _lookup_backward(
    _: DTypeLike, shards: FullySharded, saved: tuple[Array, Array], dx: Array
) -> tuple[Array, None]:
    def gradient(part: Array, tokens: Array, dx: Array) -> tuple[Array]:
        if _is_narrow(part):
            whole = jnp.zeros((part.shape[0], dx.shape[-1]))
            summed = shards.scatter_part(_add_rows(whole, tokens, dx, shards))
        else:
            of_all = shards.exchange(dx[None], dx.ndim, 0)
            summed = _add_rows(jnp.zeros(part.shape), shards.gather_tokens(tokens), of_all, shards)
        return (shards.sum_over_rest(summed),)

    embed, tokens = saved
    (d_embed,) = shards.run_on_parts(gradient, embed, tokens, dx, num_arrays=0)
    return d_embed.astype(embed.dtype), None


sharded_lookup.defvjp(_look_up, _lookup_backward)


def _is_narrow(part: Float[Array, "V D"]) -> bool:
    return part.shape[1] < MIN_LOOKUP_WIDTH


def _rows(part: Float[Array, "V D"], tokens: Int[Array, "*N"], shards: FullySharded) -> Array:
    """Rows of tokens; zeros for those in the vocabulary of other devices."""
    ids = tokens - shards.first(part.shape[0])
    rows = part.at[ids].get(mode="clip")
    if not shards.across:
        return rows
    is_mine = (ids >= 0) & (ids < part.shape[0])
    return jnp.where(is_mine[..., None], rows, 0)


def _add_rows(
    part: Float[Array, "V D"], tokens: Int[Array, "*N"], rows: Array, shards: FullySharded
) -> Float[Array, "V D"]:
    ids = tokens - shards.first(part.shape[0])
    # Negative ids would count from the end.
    ids = jnp.where(ids < 0, part.shape[0], ids)
    return part.at[ids].add(rows.astype(part.dtype), mode="drop")
