"""One table per mesh from logical axes to mesh axes, and what follows from it: shardings,
placement, bytes."""

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
"""Logical axis to the mesh axes that cut it; none: every device holds it whole."""

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
    "experts": ("expert",),
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
    "rank": (),
    "batch": ("data",),
    "slots": ("data",),
    "pages": ("data",),
    "tokens": (),
}


def sharding(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules
) -> NamedSharding:
    """How an array of this shape lies on the mesh; `axes` names its leading dimensions, None or
    nothing is not cut.

    An axis of the mesh cuts the first dimension that asks for it. A dimension that the mesh does
    not divide evenly is not cut at all, so that small policies run on any mesh. Raises ValueError
    naming an axis that `rules` does not know, and more axes than dimensions."""
    if len(axes) > len(shape):
        raise ValueError(f"axes {axes} name more dimensions than there are in shape {shape}")
    cuts: list[tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=False):
        taken = {name for cut in cuts for name in cut or ()}
        cuts.append(_cut(mesh, axis, size, rules, taken))
    return NamedSharding(mesh, PartitionSpec(*cuts))


def shardings(mesh: Mesh, axes: Any, shapes: Any, rules: Rules) -> Any:
    """`sharding` for every leaf: `axes` is a tree of tuples of names, `shapes` a like tree of
    arrays or ShapeDtypeStructs."""
    return jax.tree.map(
        lambda names, leaf: sharding(mesh, names, leaf.shape, rules), axes, shapes, is_leaf=_is_axes
    )


def specs(mesh: Mesh, axes: tuple[str | None, ...], tree: Any, rules: Rules) -> Any:
    """How every leaf of a tree lies whose leaves all have these leading axes, for `on_shards`."""
    return jax.tree.map(lambda leaf: sharding(mesh, axes, leaf.shape, rules).spec, tree)


def on_shards(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` of what each device holds; on one device the function itself."""
    if mesh.size == 1:
        return function
    # Kernels do not say over which axes their results vary.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def put(tree: Any, placed: Any) -> Any:
    """Move a tree of host arrays, the same in every process, to where a like tree of shardings
    says."""
    if jax.process_count() == 1:
        return jax.device_put(tree, placed)
    # Of several processes each moves what its devices hold; device_put would first let all of them
    # compare what they have.
    return jax.tree.map(
        lambda leaf, how: jax.make_array_from_callback(leaf.shape, how, leaf.__getitem__),
        tree,
        placed,
    )


def put_copy(tree: Any, placed: Any) -> Any:
    """A tree of arrays from wherever they lie, copied, so that the memory of the copy may be given
    away."""
    if jax.process_count() == 1:
        return jax.device_put(tree, placed, may_alias=False)

    def copied(leaf: Any, how: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.jit(jnp.copy, out_shardings=how)(leaf)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, how, lambda index: np.array(whole[index]))

    return jax.tree.map(copied, tree, placed)


def fetch(tree: Any) -> Any:
    """A tree of arrays as numpy, whole in every process; all that share the arrays call it
    alike."""
    if jax.process_count() > 1:
        tree = jax.tree.map(_everywhere, tree)
    return jax.device_get(tree)


def put_batch(mesh: Mesh, batch: Any, rules: Rules) -> Any:
    """Move a tree of host arrays to the mesh, each cut along its first two dimensions as `batch`
    and `tokens` are."""
    return put(batch, jax.tree.map(lambda leaf: batch_sharding(mesh, leaf.shape, rules), batch))


def batch_sharding(mesh: Mesh, shape: tuple[int, ...], rules: Rules) -> NamedSharding:
    """How an array whose first dimensions are rows and tokens, or rows alone, lies on the mesh."""
    return sharding(mesh, ("batch", "tokens")[: len(shape)], shape, rules)


def num_shards(mesh: Mesh, axis: str, rules: Rules) -> int:
    """Into how many parts the mesh cuts a logical axis that it divides evenly."""
    return math.prod(mesh.shape[name] for name in rules[axis])


def bytes_per_device(shapes: Any, placed: Any) -> int:
    """Bytes that each device holds of arrays or ShapeDtypeStructs laid out by `placed`, a like tree
    of shardings."""
    sizes = jax.tree.map(
        lambda leaf, how: math.prod(how.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        shapes,
        placed,
    )
    return sum(jax.tree.leaves(sizes))


def _cut(
    mesh: Mesh, axis: str | None, size: int, rules: Rules, taken: Set[str]
) -> tuple[str, ...] | None:
    if axis is None:
        return None
    if axis not in rules:
        raise ValueError(f"logical axis {axis!r} has no rule; known are {', '.join(rules)}")
    # An axis of one device cuts nothing.
    names = tuple(name for name in rules[axis] if name not in taken and mesh.shape[name] > 1)
    return names if names and size % math.prod(mesh.shape[name] for name in names) == 0 else None


def _everywhere(leaf: Any) -> Any:
    """Copied to every device, where this process does not reach all of it."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    if not isinstance(leaf.sharding, NamedSharding):
        raise TypeError(f"expected an array that lies on a mesh, came one with {leaf.sharding}")
    return _whole_on(leaf.sharding.mesh)(leaf)


@cache
def _whole_on(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)
