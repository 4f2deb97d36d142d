"""Compile-only NVIDIA GPUs: XLA's GPU compiler and ptxas on a machine without a GPU."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import NamedTuple

import jax
from jax._src import xla_bridge
from jax.experimental.topologies import get_topology_desc

from areal_jax.parallel.config import GPU_MEMORY_SHARE

FORM = re.compile(r"(?:(\d+)x)?([abh]\d+):(\d+)")

MAX_PER_NODE = 8

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class GpuTarget(NamedTuple):
    """What the compiler has to know of a GPU."""

    kind: str
    """Name that jax gives it."""
    capability: int
    """Major compute capability; the minor one is 0."""
    processors: int
    float_units: int
    """Float32 units of a processor."""
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int
    shared_bytes: int
    """Shared memory of a processor; a block can have 1 KiB less."""


GPU_TARGETS = {
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB",
        *(8, 108, 64, 1.41, 85_100_068_864, 2_039_040_000_000, 40 * 2**20, 164 * 2**10),
    ),
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3",
        *(9, 132, 128, 1.98, 84_942_979_072, 3_352_320_000_000, 50 * 2**20, 228 * 2**10),
    ),
    "h200": GpuTarget(
        "NVIDIA H200",
        *(9, 132, 128, 1.98, 150_109_880_320, 4_800_000_000_000, 60 * 2**20, 228 * 2**10),
    ),
    "b200": GpuTarget(
        "NVIDIA B200",
        *(10, 148, 128, 1.965, 191_514_411_008, 7_672_320_000_000, 132_644_864, 228 * 2**10),
    ),
}
"""SXM modules, by the names of `--compile-for`: what the CUDA driver reports of them, as in XLA's
target configurations (openxla/xla, xla/backends/gpu/target_config/specs). Limits of blocks are
those of NVIDIA's CUDA C++ Programming Guide, table of compute capabilities."""


def compile_only_gpus(topology: str) -> list[jax.Device]:
    """Return the devices of GPU nodes, for which programs can be compiled and not run.

    Args:
        topology: Node as in `h200:8`, or several of them as in `2xh200:8`.

    Raises:
        ValueError: The GPU or number is unknown, or the compiler is not installed.
    """
    found = FORM.fullmatch(topology)
    name = found[2] if found else topology
    if found is None or name not in GPU_TARGETS:
        raise ValueError(f"expected one of {', '.join(GPU_TARGETS)}, found {name!r}")
    nodes, per_node = int(found[1] or 1), int(found[3])
    if not (nodes and 1 <= per_node <= MAX_PER_NODE):
        raise ValueError(
            f"expected nodes of 1 to {MAX_PER_NODE} GPUs, found {topology}; for more devices, take "
            f"several nodes: 2x{name}:{MAX_PER_NODE}"
        )
    if not any(_is_installed(plugin) for plugin in PLUGINS):
        raise ValueError(
            "compiling for GPUs needs jax's CUDA plugin and ptxas: pip install 'areal-jax[gpu]', "
            "in an environment of its own if this one is for another accelerator"
        )
    _prepare_plugin()
    described = get_topology_desc(
        platform="cuda",
        topology=f"1x{nodes}x{per_node}",
        target_config=target_config(GPU_TARGETS[name]),
    )
    return list(described.devices)


def allocatable_bytes(kind: str) -> float | None:
    """Return the bytes that a run can allocate on a GPU; None for other devices."""
    sizes = {target.kind: target.memory_bytes for target in GPU_TARGETS.values()}
    return sizes[kind] * GPU_MEMORY_SHARE if kind in sizes else None


def target_config(target: GpuTarget) -> str:
    """Return XLA's description of a GPU: the text of a stream_executor.GpuTargetConfigProto."""
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {target.shared_bytes - 2**10}
  shared_memory_per_core: {target.shared_bytes}
  core_count: {target.processors}
  fpus_per_core: {target.float_units}
  clock_rate_ghz: {target.clock_ghz}
  memory_bandwidth: {target.memory_bytes_per_s}
  device_memory_size: {target.memory_bytes}
  l2_cache_size: {target.l2_bytes}
  cuda_compute_capability {{
    major: {target.capability}
    feature_extension: {"ACCELERATED_FEATURES" if target.capability >= 9 else "NONE"}
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{target.kind}"
"""


def _is_installed(module: str) -> bool:
    return find_spec("jax_plugins") is not None and find_spec(module) is not None


def _prepare_plugin() -> None:
    """Make jax compile for the platform cuda although no GPU is there.

    jax resolves the platform gpu to the backends that it could start, of which CUDA is none here
    (jax issue 23971). Its plugin asks libraries that need a GPU, such as CUPTI, for their versions,
    and is not registered if one fails. Tried with jax 0.10.2.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    resolve = xla_bridge.canonicalize_platform
    if getattr(resolve, "is_for_compile_only", False):
        return

    def canonicalize_platform(platform: str) -> str:
        return "cuda" if platform in ("gpu", "cuda") else resolve(platform)

    canonicalize_platform.is_for_compile_only = True  # pyright: ignore[reportFunctionMemberAccess]
    xla_bridge.canonicalize_platform = canonicalize_platform
