"""Ahead-of-time compilation of the programs of a trainer or an engine, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

Program = tuple[str, Callable[[], jax.stages.Compiled]]
"""Name of a program, and what compiles it, or returns it where it is compiled already."""

OnProgram = Callable[[str, int, int], None]
"""Receives the name of the program that is compiled next, its number from 1, and their number."""


Compiler = Callable[[jax.stages.Lowered, Mesh], jax.stages.Compiled]
"""Compiles a lowered program for the devices of a mesh, or finds it compiled."""


BY_FUSION: dict[str, str | bool] = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}
"""Options of XLA:TPU with which all-gathers overlap with products; without them none does. MaxText
sets the same for its runs with fully sharded parameters."""

ON_SPARSE_CORES: dict[str, str | bool] = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
}
"""Options with which reduce-scatters, and on v6e all-gathers too, overlap with products. From jax
0.11 on XLA:TPU refuses the fusion of all-gathers on other TPUs than v5e."""


def compile_lowered(lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """Compile a program: the default `Compiler`."""
    return lowered.compile(compiler_options=compiler_options(mesh) or None)


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Return the options with which programs are compiled for the devices of a mesh."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return {}
    is_fused = device.device_kind == "TPU v5 lite" or jax.__version_info__ < (0, 11)
    return BY_FUSION if is_fused else ON_SPARSE_CORES


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the most memory that a program uses on each device, with arguments and results.

    XLA's own figure. The sum of the sizes of arguments, results and temporary memory is no
    substitute: on TPUs it was up to a quarter above what XLA's allocation of buffers takes. Gaps
    between buffers are not counted, about 2 %.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.peak_memory_in_bytes


def compile_programs(programs: Sequence[Program], on_program: OnProgram | None) -> None:
    """Compile programs in order."""
    for number, (name, compile_it) in enumerate(programs, 1):
        if on_program is not None:
            on_program(name, number, len(programs))
        compile_it()
