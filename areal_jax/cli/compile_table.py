"""`--compile-for=TOPOLOGY`: compile the programs of a run for devices that are not there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import chz
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from areal_jax.cli.arguments import fail
from areal_jax.cluster.environment import prepare, prepare_compile_only
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.errors import config_errors
from areal_jax.metrics.progress import ProgressDisplay, format_duration
from areal_jax.parallel.config import PlacementConfig

if TYPE_CHECKING:
    from areal_jax.models.architecture import ModelConfig
    from areal_jax.run.compile_report import CompileReport, ProgramReport
    from areal_jax.run.plan import Plan

_GIB = 2**30


def compile_for(
    experiment: AnyExperiment,
    topology: str,
    *,
    model: ModelConfig | None = None,
    draft: ModelConfig | None = None,
    compiles_all: bool = False,
    executables: Path | None = None,
) -> int:
    """Compile the programs of an experiment for a topology, and print the table.

    Args:
        experiment: settings of the run.
        topology: see `topologies.compile_only_devices`.
        model: shape of the policy, of a plan without weights, data and tokenizer; None: what the
            experiment names.
        draft: shape of its draft policy.
        compiles_all: every program of the engine, not only the largest of each kind.
        executables: folder to save the compiled programs in.

    Returns:
        Exit status: 1 where a program does not fit the devices' memory.

    Raises:
        ConfigError: there is no such topology, or no compiler for it, or the experiment does not
            fit it.
    """
    # jax reads its flags when it is first imported.
    prepare_compile_only(topology)
    prepare(PlacementConfig())
    from areal_jax.parallel.compilation import compile_lowered
    from areal_jax.parallel.executables import ExecutableFolder
    from areal_jax.parallel.topologies import compile_only_devices
    from areal_jax.run.make_plan import make_plan, make_shape_plan

    with config_errors("--compile-for"):
        devices = compile_only_devices(topology)
    placement = chz.replace(experiment.placement, simulated_devices=None)
    compiler = compile_lowered if executables is None else ExecutableFolder(executables)
    experiment = chz.replace(experiment, placement=placement)
    if model is None or not isinstance(experiment, Experiment):
        plan = make_plan(experiment, devices, compiler)
    else:
        plan = make_shape_plan(experiment, model, devices, compiler, draft)
    report = _compile_with_progress(plan, experiment.name, topology, compiles_all)
    console = Console(highlight=False)
    status = show_report(report, console)
    if isinstance(compiler, ExecutableFolder):
        console.print(compiler.summary())
    return status


def _compile_with_progress(
    plan: Plan, name: str, topology: str, compiles_all: bool
) -> CompileReport:
    from areal_jax.run.compile_report import compile_run

    start_s = time.monotonic()
    progress = ProgressDisplay(f"compiling {name} for {topology}: {plan.devices}", 0)
    done = total = 0

    def show(report: ProgramReport) -> None:
        elapsed_s = time.monotonic() - start_s
        progress.say(
            f"compiled {done} of {total}: {report.name} in {format_duration(report.compile_s)}; "
            f"{format_duration(elapsed_s)} elapsed, "
            f"about {format_duration(elapsed_s / done * (total - done))} left"
        )

    try:
        with progress.stage("compiling") as stage:

            def begin(program: str, number: int, of: int) -> None:
                nonlocal done, total
                done, total = number, of
                stage.compiles("", program, number, of)

            return compile_run(
                plan, topology, compiles_all=compiles_all, on_program=begin, on_report=show
            )
    finally:
        progress.close()


def show_report(report: CompileReport, console: Console) -> int:
    """Print a report; the exit status, 1 where a program does not fit."""
    console.print(f"{report.topology}: {report.devices}")
    for table in (_memory(report), _bounds(report), _collectives(report)):
        if table.rows:
            # As wide as its figures: rich cuts them to the width of the terminal, or 80 columns.
            wide = console.options.update(max_width=1000)
            table.width = Measurement.get(console, wide, table).maximum
            console.print(table, crop=False)
    for line in _notes(report):
        console.print(escape(line), soft_wrap=True)
    too_large = [each for each in report.programs if not each.fits]
    for each in too_large:
        sizes = each.too_large or (
            f"{_gib(each.peak_bytes)} and {_gib(each.beside_bytes)} beside it, of "
            f"{_gib(each.device.memory_bytes)} GiB"
        )
        console.print(f"{each.name} does not fit ({sizes}): {each.relief}", soft_wrap=True)
    if too_large:
        return fail(f"{len(too_large)} of {len(report.programs)} programs do not fit", 1)
    return 0


def _memory(report: CompileReport) -> Table:
    table = _table("memory (compiled), GiB on each device", ("program", "compile"))
    for name in ("peak", "held beside", "has"):
        table.add_column(name, justify="right")
    for each in report.programs:
        peak = "too large" if each.too_large else _gib(each.peak_bytes)
        table.add_row(
            each.name,
            format_duration(each.compile_s),
            peak if each.fits else f"[red]{peak}[/red]",
            _gib(each.beside_bytes),
            _gib(each.device.memory_bytes),
        )
    return table


def _bounds(report: CompileReport) -> Table:
    title = f"least time (compiled, by the data sheet of {report.device_name}), ms"
    table = _table(title, ("program", "binds"))
    for name in ("TFLOP", "compute", "GB", "memory", "links", "bound"):
        table.add_column(name, justify="right")
    for each in report.programs:
        if each.bound_s:
            compute_s, memory_s, links_s = each.seconds.values()
            numbers = (
                *(each.flops / 1e12, 1e3 * compute_s, each.num_bytes / 1e9, 1e3 * memory_s),
                *(1e3 * links_s, 1e3 * each.bound_s),
            )
            table.add_row(each.name, each.binds, *map(_number, numbers))
    return table


def _collectives(report: CompileReport) -> Table:
    table = _table("collectives (compiled) of one run", ("program", "kind", "axes"))
    for name in ("count", "GB", "ms"):
        table.add_column(name, justify="right")
    table.add_column("overlaps")
    for program in report.programs:
        for each in program.traffic:
            table.add_row(
                program.name,
                each.kind,
                " ".join(each.axes),
                f"{each.count:,}",
                _number(each.num_bytes / 1e9),
                _number(1e3 * each.sent_s),
                "yes" if each.is_asynchronous else "no",
            )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _notes(report: CompileReport) -> list[str]:
    lines = [f"train mesh: {_shape(report.train_mesh.shape)}"]
    if report.rollout_mesh is not None:
        lines.append(f"each of {report.num_engines} engines: {_shape(report.rollout_mesh.shape)}")
    for each in report.programs:
        if each.model_flops and each.bound_s:
            lines.append(
                f"training: at most {each.max_mfu:.0%} MFU (compiled, {each.binds} binds): the "
                f"policy's {each.model_flops / 1e12:.3g} TFLOP of a micro-batch in "
                f"{_number(1e3 * each.bound_s)} ms"
            )
        if each.decoded_tokens and each.bound_s:
            ideal_s = each.decode_bytes / each.device.bytes_per_s
            lines.append(
                f"decoding: at most {each.decoded_tokens / each.bound_s:,.0f} tokens/s an engine "
                f"with full KV caches (compiled); {each.decoded_tokens / ideal_s:,.0f} if weights "
                "and caches were all that is read"
            )
        if each.unknown_loops:
            lines.append(f"{each.name}: {each.unknown_loops} loops of unknown length, counted once")
        if each.unknown_kernels:
            lines.append(
                f"{each.name}: operations of {', '.join(each.unknown_kernels)} are not counted"
            )
    if report.left_out:
        lines.append(
            f"{report.left_out} smaller engine programs are not compiled here; --compile-all does"
        )
    return lines


def _shape(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in shape.items())


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f}"


def _number(value: float) -> str:
    """Three digits; at least 0.01."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else "<0.01"
