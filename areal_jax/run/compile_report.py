"""What XLA makes of the programs of a run, as data: memory, operations, collectives and bounds.

Every number is of a compiled program and of the device's data sheet; nothing runs.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
from jax.sharding import Mesh

from areal_jax.config.experiment import Experiment
from areal_jax.engine.decode import DecodeEngine
from areal_jax.errors import config_errors
from areal_jax.models.architecture import ModelConfig
from areal_jax.parallel import hlo
from areal_jax.parallel.compilation import OnProgram, Program, peak_bytes
from areal_jax.parallel.gpu_topologies import allocatable_bytes
from areal_jax.parallel.sharding import bytes_per_device
from areal_jax.parallel.topologies import on_own_slice
from areal_jax.parallel.torus import part_of
from areal_jax.run.plan import Plan
from areal_jax.run.trainer import abstract_weights, example_trainer, rl_trainer
from areal_jax.sim.hardware import Device, device_of_kind
from areal_jax.trainer.memory_estimate import frozen_bytes
from areal_jax.trainer.versions import Versions
from areal_jax.weights.local import weight_copy

Limit = Literal["compute", "memory", "interconnect"]

_SHARDS = "raise placement.train_fsdp or placement.train_tensor, or take more devices"
_PREFILL = (
    "lower engine.prefill_chunk_tokens or engine.kv_tokens, or raise placement.rollout_tensor"
)
RELIEFS = {
    "accumulate": "set trainer.remat=full, lower trainer.row_tokens, "
    "trainer.rows_per_micro_batch or trainer.logp_chunk_tokens, or raise placement.train_fsdp, "
    "train_context or train_tensor",
    "apply": f"set trainer.optimizer.offload=true, or {_SHARDS}",
    "prefill": _PREFILL,
    "extend": _PREFILL,
    "engine": "lower engine.num_slots, engine.max_new_tokens or engine.kv_tokens, or raise "
    "placement.rollout_tensor",
    "": _SHARDS,
}
"""Settings to change where a program does not fit, by a word of its name."""


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
        return next(text for word, text in RELIEFS.items() if word in self.name)

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


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A program to compile, and what it is measured by."""

    program: Program
    mesh: Mesh
    beside_bytes: int = 0
    model_flops: float = 0.0
    decode_steps: int = 0
    """Steps of a dispatch with all slots active; 0 where nothing is decoded."""
    decoded_tokens: int = 0
    decode_bytes: float = 0.0


def compile_run(
    plan: Plan,
    topology: str,
    *,
    compiles_all: bool = False,
    on_program: OnProgram | None = None,
    on_report: Callable[[ProgramReport], None] = lambda _: None,
) -> CompileReport:
    """Compile the programs of a run on the devices of its plan, and report the result.

    Args:
        plan: Plan of the run, on compile-only devices.
        topology: Name of the devices, for the report.
        compiles_all: Compile every program of the engine, not only the largest of each kind.
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
    jobs, left_out = list(_trainer_jobs(plan)), 0
    if plan.decodes:
        jobs.append(_copy_job(plan, moves=moves))
        of_engine = list(_engine_jobs(plan))
        if not compiles_all:
            # Keyed by the verb: of each the last, which is the largest, stays.
            largest = {job.program[0].split()[1]: job for job in of_engine}
            left_out = len(of_engine) - len(largest)
            of_engine = list(largest.values())
        jobs += of_engine
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


def training_flops(model: ModelConfig, rows: int, row_tokens: int) -> float:
    """Operations of a forward and a backward pass over full rows of one sequence each, without
    recomputation: 3 (2 P T + 4 A T² / 2) for each row.
    """
    pairs = row_tokens**2 / 2
    return 3.0 * rows * (2 * model.matmul_params * row_tokens + 4 * model.attention_width * pairs)


def _on_own_slices(plan: Plan) -> Plan:
    """Return the plan with each mesh on a slice of its own."""
    engines = tuple(
        DecodeEngine(
            each.policy,
            on_own_slice(each.mesh),
            each.config,
            each.compute_dtype,
            compiler=plan.compiler,
        )
        for each in plan.engines[:1]
    )
    return replace(
        plan, train_mesh=on_own_slice(plan.train_mesh), engines=engines * len(plan.engines)
    )


def _trainer_jobs(plan: Plan) -> Iterator[_Job]:
    params, base = abstract_weights(plan)
    make = rl_trainer if isinstance(plan.experiment, Experiment) else example_trainer
    trainer: Versions = make(plan, params, base)
    state = trainer.state
    sizes = {
        "params": _bytes(state.params),
        "opt_state": _bytes(state.opt_state),
        "critic": 0 if state.critic is None else _bytes(state.critic),
    }
    sizes["frozen"] = sum(
        0 if spec.offload else frozen_bytes(spec.policy, plan.train_mesh, plan.compute_dtype)
        for spec in plan.frozen_models
    )
    config, mesh = plan.experiment.trainer, plan.train_mesh
    rows = config.rows_per_micro_batch * math.prod(
        mesh.shape[axis] for axis in ("data", "fsdp", "expert")
    )
    for name, compile_it in trainer.list_programs():
        verb = name.split()[-1]
        takes = {"init": {"params"}, "apply": {"params", "opt_state"}}.get(verb, {"params"})
        if name.startswith("critic "):
            takes = {"critic"}
        elif name.startswith(("frozen ", "reference ")):
            takes = {"frozen"}
        flops = training_flops(plan.policy.config, rows, plan.row_tokens) / mesh.size
        yield _Job(
            program=(f"trainer {name}", compile_it),
            mesh=mesh,
            beside_bytes=sum(size for part, size in sizes.items() if part not in takes)
            - (sizes["opt_state"] if verb == "init" else 0),
            model_flops=flops if name == "accumulate" else 0.0,
        )


def _copy_job(plan: Plan, *, moves: bool) -> _Job:
    params, _ = abstract_weights(plan)
    engine, mesh = plan.engine, plan.train_mesh
    copy = weight_copy(engine.layout, engine.param_shardings, mesh, moves=moves, on_device=True)
    return _Job(program=("weights copy", lambda: copy.lower(params).compile()), mesh=mesh)


def _engine_jobs(plan: Plan) -> Iterator[_Job]:
    engine = plan.engine
    weights = bytes_per_device(
        engine.shapes.params, jax.tree.map(lambda leaf: leaf.sharding, engine.shapes.params)
    )
    config = engine.config
    for name, compile_it in engine.list_programs():
        decodes = name.startswith("generate")
        yield _Job(
            program=(f"engine {name}", compile_it),
            mesh=engine.mesh,
            # An update brings the next weights while these decode.
            beside_bytes=0 if name in ("init", "same_weights") else weights,
            decode_steps=config.steps_per_dispatch if decodes else 0,
            decoded_tokens=config.num_slots * config.steps_per_dispatch if decodes else 0,
            decode_bytes=config.steps_per_dispatch * (weights + engine.kv_bytes())
            if decodes
            else 0.0,
        )


def _compile(job: _Job, device: Device) -> ProgramReport:
    name, compile_it = job.program
    start_s = time.perf_counter()
    try:
        compiled = compile_it()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sizes = re.findall(r"\b(\d[\d.]*[KMG])\b", str(error))
        return ProgramReport(
            name=name,
            compile_s=time.perf_counter() - start_s,
            device=device,
            beside_bytes=job.beside_bytes,
            too_large=f"{sizes[0]} of {sizes[1]} by XLA" if len(sizes) > 1 else "by XLA",
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


def _bytes(tree: object) -> int:
    """Bytes per device of a tree of shapes with shardings, without those in host memory."""
    leaves = [
        leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind in (None, "device")
    ]
    return bytes_per_device(leaves, [leaf.sharding for leaf in leaves])
