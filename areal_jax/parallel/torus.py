"""Devices of a mesh by their place in the network: torus of a TPU slice, slices, nodes of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, product

import jax
import numpy as np


def order_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Order devices so that neighbours in the list are neighbours in the network.

    The torus of each slice is walked row by row and back (snake order), its longest axis last to
    advance. The first and the last devices of the list are then contiguous parts of the torus, and
    cuboids where their number is a multiple of a layer. Other devices are ordered by node.
    """
    if not has_torus(devices):
        return sorted(devices, key=lambda device: (device.process_index, device.id))
    coords = np.array([device.coords for device in devices])
    axes: list[int] = np.argsort(-(np.ptp(coords, axis=0) + 1), kind="stable").tolist()
    low: list[int] = coords.min(axis=0).tolist()
    high: list[int] = coords.max(axis=0).tolist()

    def key(device: jax.Device) -> tuple[int, ...]:
        place: Sequence[int] = device.coords
        steps, is_reversed = list[int](), False
        for axis in axes:
            position = place[axis]
            steps.append(high[axis] - position if is_reversed else position - low[axis])
            is_reversed ^= bool((position - low[axis]) % 2)
        return *part_of(device), *steps

    return sorted(devices, key=key)


def arrange(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Arrange devices as a mesh whose last axes, with the most traffic, have the nearest links.

    Only the first axis longer than 1 crosses slices or nodes of GPUs. Within a slice, axes are
    mapped onto those of the torus, which are split where a size does not match.

    Args:
        shape: sizes of the mesh axes, by increasing traffic.
        devices: as many as `shape` asks for, in the order of `order_devices`.

    Raises:
        ValueError: an axis other than the first would cross slices or nodes.
    """
    outer = next((axis for axis, size in enumerate(shape) if size > 1), 0)
    inner = math.prod(shape[outer + 1 :])
    parts = group_by_part(devices)
    if any(len(part) % inner for part in parts):
        counts = ", ".join(str(len(part)) for part in parts)
        sizes = ", ".join(map(str, divisors(math.gcd(*map(len, parts)))))
        raise ValueError(
            f"a mesh of {'x'.join(map(str, shape))} devices has {counts} on its slices or nodes, "
            f"expected multiples of {inner} on each: only the first axis may cross slices or "
            f"nodes; change the number of devices, or the shards of the other axes to a product of "
            f"{sizes}"
        )
    arranged = [
        _arrange_slice((*shape[:outer], len(part) // inner, *shape[outer + 1 :]), part)
        for part in parts
    ]
    return np.concatenate(arranged, axis=outer)


def _arrange_slice(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    cuboid = _as_cuboid(devices) if has_torus(devices) else None
    if cuboid is None:
        return np.array(devices).reshape(shape)
    factors = assign_axes(shape, cuboid.shape)
    # The last mesh axis takes the fastest digits of each torus axis: neighbours.
    split = cuboid.reshape(
        [factor for of_torus in zip(*factors, strict=True) for factor in of_torus]
    )
    by_mesh_axis = np.arange(split.ndim).reshape(cuboid.ndim, len(shape)).T.reshape(-1)
    return split.transpose(by_mesh_axis).reshape(shape)


def assign_axes(shape: Sequence[int], torus: Sequence[int]) -> list[tuple[int, ...]]:
    """Assign mesh axes to torus axes.

    The last mesh axis chooses first: whole torus axes if it can, which may be rings, else the most
    square part. As the products of both are equal, so are their prime factors, and some assignment
    always exists.

    Args:
        shape: sizes of the mesh axes.
        torus: sizes of the torus axes, with the same product.

    Returns:
        By mesh axis, its factor on each torus axis.
    """
    free, factors = list(torus), list[tuple[int, ...]]()
    for size in reversed(shape):
        choices = [
            choice
            for choice in product(*(divisors(length) for length in free))
            if math.prod(choice) == size
        ]
        chosen = min(choices, key=lambda choice: (*_cut(choice, free), choice))
        free = [length // part for length, part in zip(free, chosen, strict=True)]
        factors.append(chosen)
    return factors[::-1]


def _cut(choice: Sequence[int], free: Sequence[int]) -> tuple[int, int]:
    """Return the longest part of a torus axis that is not a whole one, and the number of those."""
    parts = [part for part, length in zip(choice, free, strict=True) if 1 < part < length]
    return max(parts, default=0), len(parts)


def divisors(number: int) -> list[int]:
    """Return all divisors."""
    return [part for part in range(1, number + 1) if number % part == 0]


def _as_cuboid(devices: Sequence[jax.Device]) -> np.ndarray | None:
    """Return the devices by their coordinates; None if they leave holes in their cuboid."""
    coords = np.array([device.coords for device in devices])
    coords -= coords.min(axis=0)
    sizes = coords.max(axis=0) + 1
    if np.prod(sizes) != len(devices):
        return None
    cuboid = np.empty(sizes, object)
    for place, device in zip(coords, devices, strict=True):
        cuboid[tuple(place)] = device
    return cuboid


def has_torus(devices: Sequence[jax.Device]) -> bool:
    """Return whether the devices are those of TPU slices."""
    return devices[0].platform == "tpu"


def is_ring(devices: Sequence[jax.Device]) -> bool:
    """Return whether TPUs are a line, or two beside each other."""
    sizes = np.ptp(np.array([device.coords for device in devices]), axis=0) + 1
    return int(np.prod(sizes)) == len(devices) <= 2 * int(sizes.max())


def group_by_part(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Return devices, in the order of `order_devices`, by what `part_of` says of them."""
    return [list(part) for _, part in groupby(devices, part_of)]


def part_of(device: jax.Device) -> tuple[int, int]:
    """Return the slice of a TPU or the node of a GPU: what fast links join.

    A node is a process of the run; where a platform numbers slices, those of GPUs are nodes, too.
    """
    # Compile-only devices of a single slice and other platforms have no slices.
    of_slice = int(getattr(device, "slice_index", 0))
    return of_slice, device.process_index if is_gpu(device) else 0


def is_gpu(device: jax.Device) -> bool:
    """Return whether a device is a GPU, there or compile-only."""
    return device.platform in ("gpu", "cuda")
