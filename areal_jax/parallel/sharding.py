"""Logical axes to mesh axes, one table per mesh; shardings, transfers and array sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules: TypeAlias = Mapping[str, tuple[str, ...]]
"""Mesh axes that shard each logical axis; empty: the axis is replicated."""

TRAIN_RULES: Rules = {
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp", "expert", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "attending_heads": ("tensor", "context"),
    "head_dim": (),
    "mlp": ("tensor",),
    "rank": (),
    "patch": (),
    "experts": ("expert",),
    # On TPUs as `experts`, see `_mesh_axes`.
    "expert_matrices": ("expert", "fsdp", "context"),
    "batch": ("data", "fsdp", "expert"),
    "tokens": ("context",),
}

ROLLOUT_RULES: Rules = {
    "layers": (),
    "vocab": ("tensor",),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "attending_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "experts": ("tensor",),
    "expert_matrices": ("tensor",),
    "rank": (),
    "patch": (),
    "batch": ("data",),
    "slots": ("data",),
    "pages": ("data",),
    "tokens": (),
}


def sharding(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules
) -> NamedSharding:
    """Make the sharding of an array.

    A mesh axis shards the first dimension that uses it. A dimension that is not divisible by its
    shards is replicated, so that small policies run on any mesh; `expert_matrices` are sharded over
    the first of their mesh axes that divide them, and on TPUs over those of `experts`.

    Args:
        mesh: mesh of the array.
        axes: logical axes of the leading dimensions; None, or no axis: replicated.
        shape: shape of the array.
        rules: logical axes to mesh axes.

    Raises:
        ValueError: a logical axis has no rule, or there are more axes than dimensions.
    """
    if len(axes) > len(shape):
        raise ValueError(f"expected at most {len(shape)} axes for shape {shape}, found axes {axes}")
    dimensions: list[tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=False):
        used = {name for dimension in dimensions for name in dimension or ()}
        dimensions.append(_mesh_axes(mesh, axis, size, rules, used))
    return NamedSharding(mesh, PartitionSpec(*dimensions))


def shardings(mesh: Mesh, axes: Any, shapes: Any, rules: Rules) -> Any:
    """Make the `sharding` of every leaf.

    Args:
        mesh: mesh of the arrays.
        axes: tree with the logical axes of every leaf, as tuples.
        shapes: tree of arrays or ShapeDtypeStructs with the same structure; several arrays may be
            in the place of one.
        rules: logical axes to mesh axes.
    """

    def place(names: tuple[str | None, ...], node: Any) -> Any:
        return jax.tree.map(lambda leaf: sharding(mesh, names, leaf.shape, rules), node)

    return jax.tree.map(place, axes, shapes, is_leaf=is_axes)


def specs(mesh: Mesh, axes: tuple[str | None, ...], tree: Any, rules: Rules) -> Any:
    """Make the PartitionSpec of every leaf, for `on_shards`; all leaves have these leading axes."""
    return jax.tree.map(lambda leaf: sharding(mesh, axes, leaf.shape, rules).spec, tree)


def on_shards(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Apply a function to the shards of each device (shard_map), or directly on one device."""
    if mesh.size == 1:
        return function
    # Kernels do not declare over which axes their results vary.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def put(tree: Any, placed: Any) -> Any:
    """Move host arrays, which are the same in every process, to devices.

    Args:
        tree: tree of arrays.
        placed: tree of shardings with the same structure.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, placed)
    # Each process moves the shards of its devices; device_put would first compare the arrays of all
    # processes.
    return jax.tree.map(
        lambda leaf, how: jax.make_array_from_callback(leaf.shape, how, leaf.__getitem__),
        tree,
        placed,
    )


def put_copy(tree: Any, placed: Any) -> Any:
    """Copy arrays from host or devices to devices; the copy does not alias, so it may be donated.

    Args:
        tree: tree of arrays.
        placed: tree of shardings with the same structure.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, placed, may_alias=False)

    def copy(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
        array = np.asarray(leaf)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: np.array(array[index])
        )

    return jax.tree.map(copy, tree, placed)


Moved = dict[tuple[int, NamedSharding], tuple[jax.Array, jax.Array]]
"""Arrays that have been moved and their copies, by identity and new sharding."""


def move(tree: Any, placed: Any, moved: Moved) -> Any:
    """Copy arrays to another mesh; one that several trees share is copied once.

    Args:
        tree: tree of arrays.
        placed: tree of shardings with the same structure.
        moved: arrays that have been moved, to which these are added.
    """

    def move_leaf(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        key = id(leaf), sharding
        if key not in moved:
            moved[key] = leaf, put_copy(leaf, sharding)
        return moved[key][1]

    return jax.tree.map(move_leaf, tree, placed)


def fetch(tree: Any) -> Any:
    """Convert arrays to numpy, complete in every process; all their processes must call this."""
    if jax.process_count() > 1:
        tree = jax.tree.map(_replicate, tree)
    return jax.device_get(tree)


def put_batch(mesh: Mesh, batch: Any, rules: Rules) -> Any:
    """Move host arrays to the mesh, sharded by rows and tokens as their first two dimensions."""
    return put(batch, jax.tree.map(lambda leaf: batch_sharding(mesh, leaf.shape, rules), batch))


def batch_sharding(mesh: Mesh, shape: tuple[int, ...], rules: Rules) -> NamedSharding:
    """Make the sharding of an array with rows and tokens, or rows alone, as first dimensions."""
    return sharding(mesh, ("batch", "tokens")[: len(shape)], shape, rules)


def num_shards(mesh: Mesh, axis: str, rules: Rules) -> int:
    """Return the number of shards of a logical axis whose size is divisible by it."""
    return math.prod(mesh.shape[name] for name in rules[axis])


def abstract(shapes: Any, shardings: Any) -> Any:
    """Return a tree of ShapeDtypeStructs with shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def shardings_of(tree: Any) -> Any:
    """Return the sharding of every leaf, of arrays or shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def is_abstract(tree: Any) -> bool:
    """Return whether a tree consists of shapes, as programs are compiled from."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def bytes_per_device(shapes: Any, placed: Any) -> int:
    """Compute the bytes per device of sharded arrays.

    Args:
        shapes: tree of arrays or ShapeDtypeStructs.
        placed: tree of shardings with the same structure.
    """
    sizes = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        shapes,
        placed,
    )
    return sum(jax.tree.leaves(sizes))


def _mesh_axes(
    mesh: Mesh, axis: str | None, size: int, rules: Rules, used: Set[str]
) -> tuple[str, ...] | None:
    if axis is None:
        return None
    if axis not in rules:
        raise ValueError(f"expected a logical axis of {', '.join(rules)}, found {axis!r}")
    # XLA for GPUs gathers parts of a width only after it has copied all layers into another layout;
    # XLA for TPUs copies all layers of frozen experts unless it gathers parts of a width.
    if axis == "expert_matrices" and mesh.devices.flat[0].platform == "tpu":
        axis = "experts"
    # A mesh axis of one device shards nothing.
    names = tuple(name for name in rules[axis] if name not in used and mesh.shape[name] > 1)
    while names and size % math.prod(mesh.shape[name] for name in names):
        names = names[:-1] if axis == "expert_matrices" else ()
    return names or None


def _replicate(leaf: Any) -> Any:
    """Replicate an array over all devices, if this process does not have all of it."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    if not isinstance(leaf.sharding, NamedSharding):
        raise TypeError(f"expected an array on a mesh, found one with {leaf.sharding}")
    return _replicate_on(leaf.sharding.mesh)(leaf)


@cache
def _replicate_on(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, PartitionSpec()))


def is_axes(node: object) -> bool:
    """Return whether a node of a tree is the logical axes of one array."""
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)
