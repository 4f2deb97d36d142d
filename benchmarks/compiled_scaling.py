"""Strong scaling of 1.5B, 7B and 32B on 64 to 512 accelerators: compiled, then simulated.

    python benchmarks/compiled_scaling.py --compile=v5p [--only='7b 32']
    XLA_FLAGS=--xla_gpu_autotune_level=0 python benchmarks/compiled_scaling.py --compile=h200
    python benchmarks/compiled_scaling.py                             # simulate the stored rows

The first two commands compile `accumulate` for rows of 16k and 32k tokens, `apply`, and the largest
`generate` of each policy with XLA's own compiler, for devices that are not there (extras `tpu`,
`gpu`). They append a row for each program to results/compiled_scaling.jsonl: peak memory,
operations, bytes and collectives. The third gives their least times by the data sheet to the
simulator (the real gate, buffer and controller under a simulated clock) in place of fitted shares,
for the best of some splits, and appends a row for each curve; results/compiled_scaling.png has
the paper's beside them (AReaL, arXiv:2505.24298, figure 4, 64 to 512 H800). Nothing is measured.

Assumptions
- Devices reach the peaks of their data sheets: products, memory, and links where nothing overlaps
  with them. Real programs do not; every speed is an upper bound, its scaling less so.
- Parameters are cut over the same number of devices at every size and repeated over the others, so
  that the compiled program of few copies is that of many; of its collectives only those between
  copies grow, by (n - 1) / n. Train devices are at least two copies and a multiple of half a copy,
  of whose program with half the shards the time is taken to be the same.
- A micro-batch is one packed row of the context's length on each device, and takes the compiled
  time even if it is not full: rows count as full of one sequence, whose attention is the longest.
- The pass for the proximal log-probs takes the forward pass's share of the operations of
  `accumulate`. An update takes the compiled time of `apply`, which sums gradients over copies.
- A decode step takes the compiled time of all slots, whether they run or not, and reads the cached
  tokens at the memory's bandwidth. The program of 32k serves for 16k, too. Host and launch take
  `step_s` for each dispatch of EngineConfig.steps_per_dispatch steps, prefill 45 % of the peak.
- Cluster and batch are divided by up to 16, so that batches differ more than whole ones do.
- Lengths and batches are the paper's (papers_cluster.py): 512 prompts x 16 answers, four
  mini-batches, max_staleness 8 (32B: 4). Weights travel over the network, not over the links of a
  slice. Answers are graded by 256 workers in 50 ms. A step has 2 s that do not shrink.

Expected: from 64 to 512 TPU v5p, 7B at 32k keeps 86 % of linear scaling with 272 devices to train,
and less where a mini-batch needs one micro-batch more. Compiling 7B at 32k takes 160 s of one CPU
core for v5p and 24 s for H200.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from areal_jax.cluster.environment import COMPILE_ONLY, set_variables

if __name__ == "__main__":
    # jax reads its flags when it is first imported.
    set_variables(COMPILE_ONLY, "jax")

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from papers_cluster import (
    ETA,
    FIGURE_4,
    MAX_PROMPT,
    MEDIAN_LENGTH,
    MINI_BATCHES,
    SIGMA,
    label_axes,
    measure,
)
from results import FOLDER, append

from areal_jax.config.experiment import Experiment
from areal_jax.engine.config import EngineConfig
from areal_jax.models.known import known_shape
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.topologies import compile_only_devices
from areal_jax.run.compile_report import ProgramReport, Traffic, compile_run
from areal_jax.run.make_plan import make_shape_plan
from areal_jax.run.plan import Plan
from areal_jax.sim.costs import EngineCosts, Step
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.hardware import DEVICES
from areal_jax.sim.lengths import LogNormal
from areal_jax.sim.simulation import SimulatedCluster, Workload
from areal_jax.trainer.config import TrainerConfig

NAME = "compiled_scaling"
DEVICE_TYPES = {"v5p": "TPU v5p", "h100": "H100", "h200": "H200"}
TOPOLOGIES = {"v5p": "v5p:4x4x4", "h100": "8xh100:8", "h200": "8xh200:8"}
"""Slices and nodes whose programs are compiled: half of them trains."""
SIZES = (64, 128, 256, 512)
CONTEXTS = (16, 32)


class Engine(NamedTuple):
    """Devices of an engine, and slots of each of its devices."""

    devices: int
    slots: int


ENGINES = {"1.5b": Engine(1, 512), "7b": Engine(1, 256), "32b": Engine(4, 64)}
GROUPS = 512
"""Prompts of a batch, with 16 answers each."""
PROGRAMS = ("trainer accumulate", "trainer apply", "engine generate")
NUM_SIMULATED = 4
"""Splits that are simulated: those with the fastest slower side."""


def make_plan(model: str, context: int, topology: str) -> Plan:
    """Plan a run on half of a slice or of some nodes, without weights, with the least remat whose
    forecast fits.
    """
    devices, engine = compile_only_devices(topology), ENGINES[model]
    shape, device = shape_of(model), DEVICES[DEVICE_TYPES[device_name(topology)]]
    half = len(devices) // 2
    plans = (
        make_shape_plan(
            Experiment(
                name=model,
                num_steps=1000,
                engine=EngineConfig(
                    num_slots=half * engine.slots,
                    max_prompt_tokens=MAX_PROMPT,
                    max_new_tokens=1024 * context - MAX_PROMPT,
                ),
                trainer=TrainerConfig(rows_per_micro_batch=1, remat=remat),
                placement=PlacementConfig(
                    train_devices=half, rollout_devices=half, rollout_tensor=engine.devices
                ),
            ),
            shape,
            devices,
        )
        for remat in ("attention", "full")
    )
    first, last = plans
    fits = sum(first.train_bytes().values()) <= device.memory_bytes
    return first if fits and first.train_mesh.shape == last.train_mesh.shape else last


def shape_of(model: str) -> Any:
    return known_shape(f"r1-distill-qwen-{model}")


def device_name(topology: str) -> str:
    return next(name for name, of in TOPOLOGIES.items() if of == topology)


def compile_programs(name: str, only: str, programs: Sequence[str]) -> None:
    """Compile programs of all policies and contexts, and store a row of each."""
    for (model, context), _ in FIGURE_4.items():
        if not f"{model} {context}".startswith(only):
            continue
        plan = make_plan(model, context, TOPOLOGIES[name])
        # The longest page table serves for all contexts.
        skipped = () if context == max(CONTEXTS) else ("engine generate",)
        wanted = tuple(each for each in programs if each not in skipped)

        def store(report: ProgramReport, plan: Plan = plan, context: int = context) -> None:
            row = describe(report)
            row |= {"model": plan.experiment.name, "context": context, "device": name}
            row |= {
                "topology": TOPOLOGIES[name],
                "remat": plan.experiment.trainer.remat,
                "train_mesh": dict(plan.train_mesh.shape),
                "forecast_bytes": dict(plan.train_bytes()),
                "kv_bytes": plan.engine.kv_bytes(),
                "kv_tokens": (
                    plan.engine.config.kv_tokens
                    or plan.engine.config.num_slots * plan.engine.config.max_tokens
                )
                * ENGINES[plan.experiment.name].devices
                // plan.rollout_mesh.size,
                "steps_per_dispatch": plan.engine.config.steps_per_dispatch,
            }
            append(NAME, row)

        compile_run(
            plan,
            TOPOLOGIES[name],
            is_wanted=lambda program, wanted=wanted: program.startswith(wanted),
            on_report=store,
        )


def describe(report: ProgramReport) -> dict[str, object]:
    """Return a report as a row; `read` is the inverse."""
    kept = ("name", "compile_s", "peak_bytes", "beside_bytes", "flops", "num_bytes", "too_large")
    kept += ("model_flops", "decoded_tokens", "decode_bytes")
    bounds = {"seconds": report.seconds, "bound_s": report.bound_s, "binds": report.binds}
    return {
        **{name: getattr(report, name) for name in kept},
        **bounds,
        "max_mfu": report.max_mfu,
        "traffic": [asdict(each) for each in report.traffic],
    }


@dataclass(frozen=True)
class Programs:
    """Compiled figures of a policy and a context on a type of device."""

    accumulate: Mapping[str, Any]
    apply: Mapping[str, Any]
    generate: Mapping[str, Any]
    """Of the longest context."""

    @property
    def shards(self) -> int:
        """Devices of a copy of the trained parameters."""
        return math.prod(
            size for axis, size in self.accumulate["train_mesh"].items() if axis != "data"
        )

    def micro_batch_s(self, num_devices: int) -> float:
        """Return the least time of a micro-batch on so many train devices."""
        return self._least_s(self.accumulate, num_devices)

    def update_s(self, num_devices: int) -> float:
        """Return the least time of an update's sum over copies and optimizer."""
        return self._least_s(self.apply, num_devices)

    def _least_s(self, row: Mapping[str, Any], num_devices: int) -> float:
        compiled, copies = row["train_mesh"]["data"], num_devices // self.shards
        grown = (1 - 1 / copies) / (1 - 1 / compiled)
        traffic = tuple(
            Traffic(**each | {"sent_s": each["sent_s"] * (grown if "data" in each["axes"] else 1)})
            for each in row["traffic"]
        )
        report = ProgramReport(
            name=row["name"],
            compile_s=0.0,
            device=DEVICES[DEVICE_TYPES[row["device"]]],
            flops=row["flops"],
            num_bytes=row["num_bytes"],
            traffic=traffic,
        )
        return report.bound_s

    @property
    def forward_share(self) -> float:
        """Share of the forward pass in the operations of a micro-batch."""
        return self.accumulate["model_flops"] / 3 / self.accumulate["flops"]


@dataclass(frozen=True)
class CompiledEngine(EngineCosts):
    """An engine with the compiled times of its programs."""

    generate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kv_tokens(self) -> int:
        return self.generate["kv_tokens"]

    def step(self, num_sequences: int) -> Step:
        """Return the cost of a decode step, in which all slots are computed."""
        row = self.generate
        of_caches = row["kv_bytes"] / self.device.bytes_per_s
        steps = row["steps_per_dispatch"]
        fixed_s = row["bound_s"] / steps - of_caches + self.efficiency.step_s / steps
        return Step(fixed_s, of_caches / self.kv_tokens)


@dataclass(frozen=True)
class CompiledCluster(SimulatedCluster):
    """A cluster whose stages take the compiled times; `shrink` divides devices and batch."""

    programs: Programs | None = None
    shrink: int = 1

    @property
    def engine(self) -> CompiledEngine:
        assert self.programs is not None
        return CompiledEngine(
            self.model,
            self.device,
            self.devices_per_engine,
            self.efficiency,
            generate=self.programs.generate,
        )

    def train_s(self, lengths: Float[np.ndarray, "N"], num_mini_batches: int) -> float:
        """Return the time of a trainer step: whole micro-batches, passes and updates."""
        programs, devices = self.programs, self.train_devices * self.shrink
        assert programs is not None
        rows = self.shrink * lengths.sum() / (1024 * programs.accumulate["context"])
        micro_batch_s = programs.micro_batch_s(devices)
        update_s = num_mini_batches * math.ceil(rows / num_mini_batches / devices) * micro_batch_s
        pass_s = math.ceil(rows / devices) * micro_batch_s * programs.forward_share
        apply_s = num_mini_batches * programs.update_s(devices)
        return float(update_s + pass_s + apply_s + self.efficiency.update_s)


def build(programs: Programs, train: int, rollout: int) -> tuple[CompiledCluster, Workload]:
    """Build a split of devices, shrunk to the same part of engines, devices and groups."""
    model, context = programs.accumulate["model"], programs.accumulate["context"]
    engine, eta = ENGINES[model], ETA[model]
    # At least 32 groups remain.
    shrink = math.gcd(rollout // engine.devices, train, 16)
    groups = GROUPS // shrink
    cluster = CompiledCluster(
        shape_of(model),
        DEVICES[DEVICE_TYPES[programs.accumulate["device"]]],
        rollout // shrink,
        train // shrink,
        engine.devices,
        behavior=EngineBehavior(
            engine.slots * engine.devices,
            "keep",
            steps_per_dispatch=programs.generate["steps_per_dispatch"],
            tokens_per_entry=64,
        ),
        programs=programs,
        shrink=shrink,
    )
    workload = Workload(
        LogNormal(MEDIAN_LENGTH, SIGMA),
        1024 * context - MAX_PROMPT,
        groups_per_batch=groups,
        max_staleness=eta,
        max_running_groups=(eta - 1) * groups,
    )
    return cluster, workload


def balanced_tokens_per_s(cluster: CompiledCluster, workload: Workload) -> float:
    """Return the speed of the slower side if neither waits, without a simulation."""
    sampled = workload.lengths.sample_lengths(random.Random(0), GROUPS * 16)
    lengths = np.minimum(sampled, workload.max_new_tokens).astype(float)
    # Batches differ: 2 % more than the average must not need another micro-batch.
    batch = 1.02 * (lengths[: len(lengths) // cluster.shrink] + workload.prompt_tokens)
    train_s = cluster.train_s(batch, workload.num_mini_batches)
    # A running sequence has half of its length on average, of which long ones have more.
    cached = workload.prompt_tokens + (lengths**2).mean() / lengths.mean() / 2
    engine = cluster.engine
    running = min(cluster.behavior.num_slots, 0.9 * engine.kv_tokens / cached)
    step = engine.step(int(running))
    decoded_per_s = running / (step.fixed_s + step.context_s * running * cached)
    return cluster.shrink * min(
        lengths.sum() / cluster.shrink / train_s, cluster.num_engines * decoded_per_s
    )


def simulate_best(programs: Programs, num_devices: int) -> dict[str, float]:
    """Simulate the most promising splits of a number of devices, and return the best."""
    unit = max(programs.shards // 2, num_devices // 32)
    splits = [
        build(programs, train, num_devices - train)
        for train in range(2 * programs.shards, num_devices, unit)
        if 0.25 <= train / num_devices <= 0.75
    ]
    splits.sort(key=lambda split: -balanced_tokens_per_s(*split))
    found: list[dict[str, float]] = []
    for cluster, workload in splits[:NUM_SIMULATED]:
        outcome, train = measure(cluster, workload), cluster.train_devices * cluster.shrink
        found.append(
            {
                "train_devices": train,
                "tokens_per_s": cluster.shrink * outcome.trained_per_s,
                "step_s": outcome.step_s,
                "train_s": outcome.train_s,
                "trainer_waits": outcome.trainer_waits,
                "staleness": outcome.staleness,
                "micro_batch_s": programs.micro_batch_s(train),
                "engines_idle": outcome.shares.get("idle", 0.0),
            }
        )
    best = max(found, key=lambda each: each["tokens_per_s"])
    row = programs.accumulate
    print(f"{row['model']}, {row['context']}k, {num_devices} {row['device']}: {best}", flush=True)
    return best


def stored_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{NAME}.jsonl").read_text().splitlines()]


def read_programs() -> Iterator[tuple[str, Programs]]:
    """Yield the stored programs with the name of their curve, the latest of each."""
    rows: dict[tuple[str, str, int, str], Mapping[str, Any]] = {}
    for row in stored_rows():
        if "name" in row:
            verb = row["name"].split()[1]
            rows[row["device"], row["model"], row["context"], verb] = row
    for (device, model, context, verb), row in rows.items():
        generate = rows.get((device, model, max(CONTEXTS), "generate"))
        apply = rows.get((device, model, context, "apply"))
        if verb == "accumulate" and generate is not None and apply is not None:
            yield f"{model}, {context}k, {device}", Programs(row, apply, generate)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", choices=TOPOLOGIES)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument(
        "--only",
        default="",
        help="beginning of the name, such as '7b 32' (a curve: '7b, 32k, v5p')",
    )
    arguments = parser.parse_args()
    if arguments.compile:
        compile_programs(arguments.compile, arguments.only, arguments.programs)
        return
    first, last = min(SIZES), max(SIZES)
    for name, programs in read_programs():
        if not name.startswith(arguments.only):
            continue
        points = {num: simulate_best(programs, num) for num in SIZES}
        gain = points[last]["tokens_per_s"] / points[first]["tokens_per_s"]
        row = {"label": "compiled and simulated", "curve": name, "points": points}
        append(NAME, row | {"efficiency": gain / (last / first)})
    plot({row["curve"]: row["points"] for row in stored_rows() if "curve" in row})


def plot(curves: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Plot the curves that are stored, by their names."""
    panels = {
        key: papers
        for key, papers in FIGURE_4.items()
        if any(name.startswith("{}, {}k,".format(*key)) for name in curves)
    }
    width = max(6, 4 * len(panels))
    figure = Figure(figsize=(width, 4), dpi=120, layout="constrained")
    figure.suptitle(
        "Compiled and simulated upper bounds (lines); squares: figure 4 of the paper\non H800, "
        f"x {MINI_BATCHES} mini-batches",
        fontsize=9,
    )
    colours = {"v5p": "#c2410c", "h100": "#2563a8", "h200": "#15803d"}
    grid = figure.subplots(1, len(panels), squeeze=False).flat
    for axes, ((model, context), papers) in zip(grid, panels.items(), strict=True):
        shown = {num: MINI_BATCHES * speed for num, (speed, _) in papers.items() if num >= SIZES[0]}
        axes.plot(
            list(shown),
            list(shown.values()),
            marker="s",
            linestyle="none",
            markerfacecolor="none",
            color="black",
            label="paper, H800",
        )
        for device, colour in colours.items():
            curve = curves.get(f"{model}, {context}k, {device}")
            if curve is None:
                continue
            speeds = [each["tokens_per_s"] / 1e3 for each in curve.values()]
            axes.plot(SIZES, speeds, marker="o", color=colour, label=f"this project, {device}")
            ideal = [speeds[0] * num / SIZES[0] for num in SIZES]
            axes.plot(SIZES, ideal, color=colour, linestyle=":")
        title = f"{model}, {context}k context"
        label_axes(axes, SIZES, title=title, xlabel="devices (dotted: linear)")
    figure.savefig(FOLDER / f"{NAME}.png")


if __name__ == "__main__":
    main()
