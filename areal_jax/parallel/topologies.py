"""Compile-only devices: XLA's own compilers for TPUs, GPUs and their networks, on a machine
without them.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

import jax
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh

from areal_jax.parallel import gpu_topologies
from areal_jax.parallel.torus import has_torus

_FORM = re.compile(r"(?:(\d+)x)?(v\d[a-z]*:\d+(?:x\d+)+)")


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
    if not (found := _FORM.fullmatch(topology)):
        raise ValueError(
            f"expected a TPU slice such as v5e:4x4, v6e:4x4, v5p:4x4x8 or 2xv5p:4x4x4, or GPU "
            f"nodes such as h200:8 or 2xh200:8 ({', '.join(gpu_topologies.GPU_TARGETS)}), found "
            f"{topology!r}"
        )
    if find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs libtpu: pip install 'areal-jax[tpu]', in an environment of "
            "its own if this one is for another accelerator"
        )
    num_slices = int(found[1] or 1)
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        described = get_topology_desc(platform="tpu", topology_name=found[2], **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"expected a TPU slice, found {topology}: {error}") from None
    return list(described.devices)


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
    name = _NAMES[devices[0].device_kind]
    dims = sizes if name == "v5p" else sizes[:2]
    described = get_topology_desc(
        platform="tpu",
        topology_name=f"{name}:{'x'.join(map(str, dims))}",
        chips_per_host_bounds=[
            2 if size % 2 == 0 and axis < 2 else 1 for axis, size in enumerate(sizes)
        ],
    )
    by_coords = {tuple(device.coords): device for device in described.devices}
    own = np.empty(len(devices), object)
    own[:] = [by_coords[tuple(place)] for place in coords.tolist()]
    return Mesh(own.reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)


_NAMES = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
