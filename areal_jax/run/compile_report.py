"""What XLA makes of the programs of a run, as data: memory, operations, collectives and bounds.

Every number is of a compiled program and of the device's data sheet; nothing runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
from jax.sharding import Mesh, use_abstract_mesh

from areal_jax.errors import config_errors
from areal_jax.parallel import hlo
from areal_jax.parallel.compilation import OnProgram, peak_bytes
from areal_jax.parallel.gpu_topologies import allocatable_bytes
from areal_jax.parallel.topologies import on_own_slice
from areal_jax.parallel.torus import part_of
from areal_jax.run.compiled_programs import (
    Job,
    abstract_trainer,
    copy_job,
    engine_jobs,
    exceeded_memory,
    relief_of,
    reward_model_jobs,
    trainer_jobs,
)
from areal_jax.run.plan import Plan
from areal_jax.sim.hardware import Device, device_of_kind

Limit = Literal["compute", "memory", "interconnect"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of a program of one kind along the same axes of the mesh."""

    kind: str
    axes: tuple[str, ...]
    is_asynchronous: bool
    count: int
    """Executions in one run of the program."""
    num_bytes: float
    """Sizes of the whole arrays: gathered, or before they are reduced."""
    sent_s: float
    """Least time by the published rate of the links."""


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What the compiler says of one program, per device."""

    name: str
    compile_s: float
    device: Device
    peak_bytes: int = 0
    """Arguments, results and temporary arrays."""
    beside_bytes: int = 0
    """What the run holds on the device meanwhile."""
    flops: float = 0.0
    num_bytes: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    unknown_loops: int = 0
    unknown_kernels: tuple[str, ...] = ()
    too_large: str = ""
    """The compiler's message where it found no place for the program."""
    model_flops: float = 0.0
    """Operations of the policy itself in training, without recomputation; 0 where it does not
    train."""
    decoded_tokens: int = 0
    """Tokens that a run of the program decodes with all slots active."""
    decode_bytes: float = 0.0
    """Bytes of the weights and of full KV caches, once for each token of a slot."""

    @property
    def fits(self) -> bool:
        return not self.too_large and self.peak_bytes + self.beside_bytes <= (
            self.device.memory_bytes
        )

    @property
    def relief(self) -> str:
        """The settings to change where it does not fit."""
        return relief_of(self.name)

    @property
    def seconds(self) -> dict[Limit, float]:
        """Least time by each limit of the data sheet."""
        return {
            "compute": self.flops / self.device.flops_per_s,
            "memory": self.num_bytes / self.device.bytes_per_s,
            "interconnect": sum(each.sent_s for each in self.traffic),
        }

    @property
    def bound_s(self) -> float:
        """Least time: of what overlaps the longest, and synchronous collectives after it."""
        seconds = self.seconds
        hidden = sum(each.sent_s for each in self.traffic if each.is_asynchronous)
        return max(seconds["compute"], seconds["memory"], hidden) + (
            seconds["interconnect"] - hidden
        )

    @property
    def binds(self) -> Limit:
        """What takes the longest."""
        seconds = self.seconds
        return max(seconds, key=lambda each: seconds[each])

    @property
    def max_mfu(self) -> float:
        """Share of the peak FLOP/s that the policy's own operations reach at the bound."""
        return self.model_flops / self.device.flops_per_s / self.bound_s if self.bound_s else 0.0


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What the compiler says of a run."""

    topology: str
    device_name: str
    devices: str
    train_mesh: Mesh
    rollout_mesh: Mesh | None
    num_engines: int
    programs: list[ProgramReport] = field(default_factory=list)
    left_out: int = 0
    """Smaller programs of the same kinds, which were not compiled."""

    @property
    def fits(self) -> bool:
        return all(each.fits for each in self.programs)


def compile_run(
    plan: Plan,
    topology: str,
    *,
    compiles_all: bool = False,
    is_wanted: Callable[[str], bool] = lambda _: True,
    on_program: OnProgram | None = None,
    on_report: Callable[[ProgramReport], None] = lambda _: None,
) -> CompileReport:
    """Compile the programs of a run on the devices of its plan, and report the result.

    Args:
        plan: Plan of the run, on compile-only devices.
        topology: Name of the devices, for the report.
        compiles_all: Compile every program of the engine, not only the largest of each kind.
        is_wanted: Whether to compile the program of this name.
        on_program: Called before each program.
        on_report: Called with each report.

    Raises:
        ConfigError: the meshes are no cuboids of the slice.
    """
    moves = set(plan.rollout_mesh.devices.flat) != set(plan.train_mesh.devices.flat)
    with config_errors("--compile-for"):
        plan = _on_own_slices(plan)
    kind = plan.train_mesh.devices.flat[0].device_kind
    device_name, device = device_of_kind(kind)
    device = replace(device, memory_bytes=allocatable_bytes(kind) or device.memory_bytes)
    jobs, left_out = list(trainer_jobs(plan, abstract_trainer(plan))), 0
    if plan.decodes:
        jobs.append(copy_job(plan, moves=moves))
        of_engine = [*engine_jobs(plan), *reward_model_jobs(plan)]
        if not compiles_all:
            # Keyed by the verb: of each the last, which is the largest, stays.
            largest = {job.program[0].split()[1]: job for job in of_engine}
            left_out = len(of_engine) - len(largest)
            of_engine = list(largest.values())
        jobs += of_engine
    jobs = [job for job in jobs if is_wanted(job.program[0])]
    report = CompileReport(
        topology=topology,
        device_name=device_name,
        devices=plan.devices,
        train_mesh=plan.train_mesh,
        rollout_mesh=plan.engine.mesh if plan.decodes else None,
        num_engines=len(plan.engines),
        left_out=left_out,
    )
    for number, job in enumerate(jobs, 1):
        if on_program is not None:
            on_program(job.program[0], number, len(jobs))
        report.programs.append(_compile(job, device))
        on_report(report.programs[-1])
    return report


def describe_traffic(work: hlo.Work, mesh: Mesh, device: Device) -> tuple[Traffic, ...]:
    """Sum collectives of the same kind along the same axes of a mesh, the longest first."""
    sums: dict[tuple[str, tuple[str, ...], bool], list[float]] = {}
    places = mesh.devices.reshape(-1)
    for collective, count in work.collectives.items():
        key = (
            collective.kind,
            hlo.mesh_axes(collective.group, mesh.shape),
            collective.is_asynchronous,
        )
        members = places[list(collective.group)] if collective.group else places
        rate = device.link_bytes_per_s
        by_part = Counter(part_of(each) for each in members)
        if len(by_part) > 1:
            # As many rings as members of a part, each through a network card of its own.
            rate = min(rate, device.network_bytes_per_s * min(by_part.values()))
        total = sums.setdefault(key, [0, 0.0, 0.0])
        total[0] += count
        total[1] += count * collective.num_bytes
        total[2] += count * collective.sent_bytes(mesh.size) / rate
    found = (Traffic(*key, int(count), *rest) for key, (count, *rest) in sums.items())
    return tuple(sorted(found, key=lambda each: -each.sent_s))


def _on_own_slices(plan: Plan) -> Plan:
    """Return the plan with each mesh on a slice of its own."""
    engines = tuple(
        plan.make_engine(on_own_slice(each.mesh), each.config) for each in plan.engines[:1]
    )
    return replace(
        plan, train_mesh=on_own_slice(plan.train_mesh), engines=engines * len(plan.engines)
    )


def _compile(job: Job, device: Device) -> ProgramReport:
    name, compile_it = job.program
    start_s = time.perf_counter()
    try:
        # On a single device nothing else tells the kernels for GPUs which one it is.
        with use_abstract_mesh(job.mesh.abstract_mesh):
            compiled = compile_it()
    except jax.errors.JaxRuntimeError as error:
        if (sizes := exceeded_memory(error)) is None:
            raise
        return ProgramReport(
            name=name,
            compile_s=time.perf_counter() - start_s,
            device=device,
            beside_bytes=job.beside_bytes,
            too_large=sizes,
        )
    compile_s = time.perf_counter() - start_s
    program = hlo.Program(compiled.as_text() or "")
    work = program.work(dynamic_trips=job.decode_steps or None)
    return ProgramReport(
        name=name,
        compile_s=compile_s,
        device=device,
        peak_bytes=peak_bytes(compiled),
        beside_bytes=job.beside_bytes,
        flops=work.flops,
        num_bytes=work.num_bytes,
        traffic=describe_traffic(work, job.mesh, device),
        unknown_loops=work.unknown_loops,
        unknown_kernels=tuple(work.unknown_kernels),
        model_flops=job.model_flops,
        decoded_tokens=job.decoded_tokens,
        decode_bytes=job.decode_bytes,
    )
