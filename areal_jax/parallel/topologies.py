"""Compile-only devices: XLA's own compilers for TPUs, GPUs and their networks, on a machine
without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh

from areal_jax.parallel import gpu_topologies
from areal_jax.parallel.torus import has_torus

# Names of slices, and the dimensions of their torus.
_KINDS = {"TPU v5 lite": ("v5e", 2), "TPU v5": ("v5p", 3), "TPU v6 lite": ("v6e", 2)}
_FORM = re.compile(r"(?:([1-9]\d*)x)?(v5e|v5p|v6e):(\d+(?:x\d+)+)")


def compile_only_devices(topology: str) -> list[jax.Device]:
    """Return the devices of TPU slices or GPU nodes: to compile programs for, not to run them.

    Args:
        topology: Slice as in `v5p:8x8x8`, node of GPUs as in `h200:8`, or several of them as in
            `2xv5p:4x4x4`.

    Raises:
        ValueError: There is no such slice or node, or its compiler is not installed.
    """
    if gpu_topologies.FORM.fullmatch(topology):
        return gpu_topologies.compile_only_gpus(topology)
    found = _FORM.fullmatch(topology)
    sizes = [int(size) for size in found[3].split("x")] if found else []
    exist = all(size == 1 or (size and size % 2 == 0) for size in sizes)
    if not (found and exist and len(sizes) <= dict(_KINDS.values())[found[2]]):
        raise ValueError(
            f"expected a TPU slice such as v5e:4x4, v6e:4x4, v5p:4x4x8 or 2xv5p:4x4x4, of sizes "
            f"that are 1 or even, or GPU nodes such as h200:8 or 2xh200:8 "
            f"({', '.join(gpu_topologies.GPU_TARGETS)}), found {topology!r}"
        )
    if find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs libtpu: pip install 'areal-jax[tpu]', in an environment of "
            "its own if this one is for another accelerator"
        )
    num_slices = int(found[1] or 1)
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        return _describe(found[2], sizes, **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"expected a TPU slice, found {topology}: {error}") from None


def on_own_slice(mesh: Mesh) -> Mesh:
    """Return a mesh on a slice of its own, if it is a part of one.

    XLA compiles for all devices of a TPU slice; it ends the process where a mesh has only some of
    them and others have lower numbers. For GPUs it compiles for those of the mesh.

    Raises:
        ValueError: The devices of the mesh are no cuboid of their slice.
    """
    devices = list(mesh.devices.flat)
    if not has_torus(devices) or max(device.id for device in devices) < len(devices):
        return mesh
    coords = np.array([device.coords for device in devices])
    coords -= coords.min(axis=0)
    sizes = tuple(int(size) for size in coords.max(axis=0) + 1)
    shape = "x".join(map(str, sizes))
    if np.prod(sizes) != len(devices):
        raise ValueError(
            f"expected meshes that are cuboids of the slice, found {len(devices)} devices in "
            f"{shape}; change placement.rollout_share to whole rows or layers of the slice"
        )
    name, num_sizes = _KINDS[devices[0].device_kind]
    by_coords = {tuple(each.coords): each for each in _describe(name, sizes[:num_sizes])}
    own = np.empty(len(devices), object)
    own[:] = [by_coords[tuple(place)] for place in coords.tolist()]
    return Mesh(own.reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)


def _describe(name: str, sizes: Sequence[int], **options: Any) -> list[jax.Device]:
    """Return the devices of a slice of hosts with 2 x 2 chips, or fewer where it is narrower."""
    described = get_topology_desc(
        platform="tpu",
        topology_name=f"{name}:{'x'.join(map(str, sizes))}",
        chips_per_host_bounds=[*(1 + (size % 2 == 0) for size in sizes[:2]), 1],
        **options,
    )
    return list(described.devices)
