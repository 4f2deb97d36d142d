"""The tables of `--compile-for`."""

import io

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from areal_jax.cli.compile_table import show_report
from areal_jax.run.compile_report import CompileReport, ProgramReport, Traffic
from areal_jax.sim.hardware import device_of_kind


def test_figures_are_whole_in_a_narrow_terminal() -> None:
    name, device = device_of_kind("TPU v5p")
    program = ProgramReport(
        name="engine prefill 256 2048",
        compile_s=45.0,
        device=device,
        peak_bytes=int(59.74 * 2**30),
        flops=26.6e12,
        num_bytes=29.6e9,
        traffic=(Traffic("reduce-scatter", ("data", "fsdp"), True, 1228, 28.5e9, 0.0892),),
    )
    report = CompileReport(
        topology="v5p:8x8x8",
        device_name=name,
        devices="256 + 256 TPU v5",
        train_mesh=Mesh(np.array(jax.devices()[:1]), "data"),
        rollout_mesh=None,
        num_engines=0,
        programs=[program],
    )
    shown = io.StringIO()
    assert show_report(report, Console(file=shown, width=40)) == 0
    rows = [line.split() for line in shown.getvalue().splitlines() if program.name in line]
    assert [row[4:] for row in rows] == [
        ["0:45", "59.74", "0.00", "88.48"],
        ["interconnect", "26.6", "58", "29.6", "10.7", "89.2", "89.2"],
        ["reduce-scatter", "data", "fsdp", "1,228", "28.5", "89.2", "yes"],
    ]
