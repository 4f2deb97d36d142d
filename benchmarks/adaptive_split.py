"""Devices that move between training and decoding (placement.adaptive).

    python benchmarks/adaptive_split.py             # simulated
    python benchmarks/adaptive_split.py --measured  # on eight simulated CPU devices
    python benchmarks/adaptive_split.py --ray       # in processes of Ray
    python benchmarks/adaptive_split.py --chosen    # on three simulated CPU devices

Simulated: Qwen2.5-1.5B on eight H100s, engines of one device, 64 groups of 16 answers a step,
max_staleness 2. From step 20 on, new answers have other lengths. Compared are all static splits,
and a run that starts at the split that is best for the first lengths and moves as
`sim/split_choice.py` chooses, the code of placement.adaptive=true. A move stops the trainer for
5 s, and a split that was not used before is compiled for 60 s beside training. Speed is trained
tokens per second, prompts included, over steps 10 to 20, 20 to 30 and 30 to 40.

Measured: a run of the embedded policy on eight simulated CPU devices, whose devices are moved
before steps 4, 8 and 12 while answers are being generated. Eight devices share the cores of the
machine, so that the speed shows nothing of a split; the row has the seconds of each move, the
requests that moved, and the broken invariants of the run (`run_laws.py`).

Ray: as measured, with trainer hosts and engines of one CPU device. Two trainer hosts and one engine
become one and two before steps 4 and 14, and the reverse before step 9. The cache of compiled
programs is empty at the start, so that the first move compiles those of one trainer host.

Chosen: a run with a tiny policy, two train devices and an engine of two slots, so that the trainer
waits for answers; the run itself chooses its moves. Each engine keeps one of two cores busy, so
that a second engine is faster here, too.

Expected: simulated, from step 30 on at least 95 % of the best static split, three times; chosen,
one move to two engines, after which steps are faster; no broken invariant.
Appends to results/adaptive_split.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from areal_jax.cluster.config import Ray
from areal_jax.models.known import known_shape
from areal_jax.records import Sampling
from areal_jax.rollout.config import RolloutConfig
from areal_jax.rollout.controller import open_gate, run_rollouts
from areal_jax.sim.clock import run
from areal_jax.sim.costs import Rewards
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.fleet import SimulatedFleet
from areal_jax.sim.hardware import known_device
from areal_jax.sim.lengths import LogNormal
from areal_jax.sim.simulation import GradingQueue, Numbered, OneTurn, SimulatedCluster
from areal_jax.sim.split_choice import SplitChooser, StepTimes

NUM_DEVICES, SHIFT_AT, NUM_STEPS = 8, 20, 40
PROMPT_TOKENS, MAX_NEW_TOKENS = 512, 30_000
STALL_S, COMPILE_S = 5.0, 60.0
SHORT, LONG = LogNormal(600, 0.6), LogNormal(9000, 0.8)
SHIFTS = {
    "600 to 9000 tokens": (SHORT, LONG),
    "9000 to 600 tokens": (LONG, SHORT),
    # Moderate; nothing but SIMILAR of sim/split_choice.py was chosen by it.
    "1000 to 4000 tokens": (LogNormal(1000, 0.7), LogNormal(4000, 0.7)),
}
"""Median lengths before and after the shift."""

MOVES = "rollout/split_moves"

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
"""Sizes of a policy whose decode steps are fast to compute."""

CONFIG = RolloutConfig(
    groups_per_batch=64,
    samples_per_group=16,
    max_staleness=2,
    max_running_groups=1 << 12,
    batch_timeout_s=1e9,
)


@dataclass(eq=False)
class ShiftingLengths:
    """Lengths of new answers, which change during the run."""

    present: LogNormal

    def sample_lengths(self, chance: random.Random, num: int) -> list[int]:
        return self.present.sample_lengths(chance, num)


class Step(NamedTuple):
    """A simulated step."""

    end_s: float
    tokens: float
    """Trained tokens, prompts included."""
    rollout: int
    """Number of devices that decode."""


def speed(steps: list[Step], first: int, last: int) -> float:
    """Return the trained tokens per second of steps `first` to `last`."""
    tokens = sum(step.tokens for step in steps[first:last])
    return tokens / (steps[last - 1].end_s - steps[first - 1].end_s)


def simulate(
    rollout: int, shift: tuple[LogNormal, LogNormal], *, adaptive: bool, seed: int = 0
) -> list[Step]:
    """Simulate a run.

    Args:
        rollout: Number of devices that decode at the start.
        shift: Lengths before and after the shift.
        adaptive: Whether devices move.
        seed: Seed of the lengths.
    """
    return run(_simulate(rollout, shift, adaptive, seed))


async def _simulate(
    rollout: int, shift: tuple[LogNormal, LogNormal], adaptive: bool, seed: int
) -> list[Step]:
    cluster = SimulatedCluster(
        known_shape("qwen2.5-1.5b"), known_device("H100"), NUM_DEVICES - 1, train_devices=1
    )
    behavior, lengths = EngineBehavior(tokens_per_entry=64), ShiftingLengths(shift[0])
    fleet = SimulatedFleet(cluster.engine, lengths, NUM_DEVICES - 1, behavior)
    for index in range(rollout, NUM_DEVICES - 1):
        fleet.remove(index)
    gate, buffer = open_gate(CONFIG, 0)
    grader = GradingQueue(Rewards())
    turn = OneTurn(PROMPT_TOKENS, CONFIG.samples_per_group, grader)
    chooser = SplitChooser(NUM_DEVICES, range(1, NUM_DEVICES), rollout)
    clock, steps, compiled_s = asyncio.get_running_loop().time, list[Step](), {rollout: 0.0}
    since_s = busy_s = full_s = waited_s = 0.0
    async with run_rollouts(
        Numbered(),
        fleet,
        turn,
        grader,
        gate,
        buffer,
        CONFIG,
        sampling=Sampling(MAX_NEW_TOKENS),
        seed=seed,
    ):
        for version in range(NUM_STEPS):
            lengths.present = shift[version >= SHIFT_AT]
            sizes = np.array(
                [
                    PROMPT_TOKENS + len(sample.versions) * behavior.tokens_per_entry
                    for group in await buffer.take(CONFIG.groups_per_batch, version)
                    for sample in group.samples
                ],
                np.float64,
            )
            train_devices = NUM_DEVICES - chooser.rollout
            train_s = replace(cluster, train_devices=train_devices).train_s(sizes, 4)
            await asyncio.sleep(train_s)
            move = chooser.choose(NUM_STEPS - version - 1, lambda _: STALL_S) if adaptive else None
            if (
                move is not None
                and compiled_s.setdefault(move.rollout, clock() + COMPILE_S) <= clock()
            ):
                for index in range(move.rollout, chooser.rollout):
                    fleet.remove(index)
                await asyncio.sleep(STALL_S)
                for index in range(chooser.rollout, move.rollout):
                    fleet.add(index)
                chooser.moved(move.rollout)
            fleet.publish(version + 1, cluster.arrivals_s())
            gate.version = version + 1
            now_s, now_busy_s = clock(), fleet.seconds().get("decode", 0.0)
            now_full_s = sum(engine.full_s for engine in fleet.engines)
            elapsed_s, decode_s = now_s - since_s, now_busy_s - busy_s
            chooser.observe(
                StepTimes(
                    train_s=train_s,
                    wait_s=buffer.waited_s - waited_s,
                    elapsed_s=elapsed_s,
                    busy=decode_s / elapsed_s / chooser.rollout,
                    full=(now_full_s - full_s) / decode_s,
                    tokens=float(sizes.sum()),
                )
            )
            since_s, busy_s, full_s, waited_s = now_s, now_busy_s, now_full_s, buffer.waited_s
            steps.append(Step(now_s, float(sizes.sum()), chooser.rollout))
    return steps


def compare(shift: tuple[LogNormal, LogNormal], seed: int = 0) -> dict[str, object]:
    """Compare a run whose devices move with all static splits."""
    static = {
        rollout: simulate(rollout, shift, adaptive=False, seed=seed)
        for rollout in range(1, NUM_DEVICES)
    }

    def best(first: int) -> int:
        return max(static, key=lambda rollout: speed(static[rollout], first, first + 10))

    moving = simulate(best(10), shift, adaptive=True, seed=seed)
    return {
        "best_before": best(10),
        "best_after": best(30),
        "stays_before": speed(static[best(10)], 30, 40) / speed(static[best(30)], 30, 40),
        "share_of_best": {
            f"{first} to {first + 10}": speed(moving, first, first + 10)
            / speed(static[best(30 if first >= 20 else 10)], first, first + 10)
            for first in (10, 20, 30)
        },
        "rollout_devices": [step.rollout for step in moving],
    }


def measure() -> dict[str, object]:
    """Train on eight simulated CPU devices, with moves while answers are being generated."""
    from run_laws import broken_laws

    from areal_jax import loop
    from areal_jax.config.experiment import Experiment
    from areal_jax.config.load import load_experiment
    from areal_jax.run.build import build_run
    from areal_jax.run.make_plan import make_plan
    from areal_jax.run.trainer import rl_trainer

    moves, stalls_s = {4: 6, 8: 2, 12: 4}, dict[str, float]()
    experiment = load_experiment(
        "aime",
        "num_steps=16",
        "tasks.num_tasks=2000",
        "evaluation.every_steps=0",
        "placement.train_devices=4",
        "placement.rollout_devices=4",
        "placement.engines=2",
        "placement.adaptive=true",
        "rollout.groups_per_batch=4",
        "rollout.samples_per_group=4",
        "rollout.max_staleness=2",
        "engine.num_slots=32",
        "engine.max_new_tokens=64",
        "trainer.num_mini_batches=1",
        "health.stop=false",
    )
    assert isinstance(experiment, Experiment)

    async def train(folder: Path) -> dict[str, float]:
        plan = make_plan(experiment)
        async with build_run(plan, folder, resume=False, make_trainer=rl_trainer) as a_run:
            split = a_run.split
            assert split is not None

            async def adapt() -> None:
                rollout = moves.get(a_run.trainer.version)
                if rollout is not None:
                    since, before_s = split.rollout_devices, split.counters()["split_stall_s"]
                    await split.move(rollout, "")
                    stalls_s[f"{since} to {rollout}"] = split.counters()["split_stall_s"] - before_s

            for rollout in {*moves.values()} - {split.rollout_devices}:
                await split.compile(rollout)
            split.adapt = adapt
            await loop.train(a_run, experiment)
            return split.counters()

    with tempfile.TemporaryDirectory() as folder:
        counters = asyncio.run(train(Path(folder)))
        broken = broken_laws(Path(folder), num_steps=16, groups=4, samples=4, max_staleness=2)
    return {"stalls_s": stalls_s, "counters": counters, "broken": broken}


def measure_ray(folder: Path) -> dict[str, object]:
    """Train in processes of Ray, with moves while answers are being generated."""
    # Read when jax and Ray are loaded.
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    os.environ |= Ray().environment_variables(os.environ)
    from run_laws import broken_laws

    from areal_jax import loop
    from areal_jax.cluster.engines import Engines
    from areal_jax.cluster.trainers import Trainers
    from areal_jax.config.experiment import Experiment
    from areal_jax.config.load import load_experiment
    from areal_jax.run.adaptive_hosts import AdaptiveHosts
    from areal_jax.run.build import Run
    from areal_jax.run.cluster import train_on_cluster
    from areal_jax.run.make_plan import make_plan

    moves, found = {4: 2, 9: 1, 14: 2}, dict[str, object]()
    experiment = load_experiment(
        "aime",
        "num_steps=18",
        "tasks.num_tasks=2000",
        "evaluation.every_steps=0",
        "checkpoint.export_hf=false",
        "launch=ray",
        "launch.trainer_hosts=2",
        "launch.rollout_engines=1",
        "launch.report_every_s=0.1",
        "launch.silence_timeout_s=600",
        "placement.adaptive=true",
        "rollout.groups_per_batch=4",
        "rollout.samples_per_group=4",
        "rollout.max_staleness=2",
        "engine.num_slots=16",
        "engine.max_new_tokens=128",
        "trainer.num_mini_batches=1",
        "health.stop=false",
    )
    assert isinstance(experiment, Experiment)

    async def train(a_run: Run[Trainers]) -> None:
        hosts, stalls_s = a_run.hosts, dict[str, float]()
        assert isinstance(hosts, AdaptiveHosts) and isinstance(a_run.engine, Engines)
        counters = hosts.counters

        async def adapt(save: Callable[[], Awaitable[None]]) -> None:
            rollout = moves.get(a_run.trainer.version)
            if rollout is not None:
                while not hosts.is_ready:
                    await asyncio.sleep(0.1)
                before_s = counters()["split_stall_s"]
                await hosts.move(rollout, save, "")
                key = f"{3 - rollout} to {rollout}, before step {a_run.trainer.version}"
                stalls_s[key] = counters()["split_stall_s"] - before_s

        hosts.adapt = adapt
        found["first_start_s"] = hosts.start_s
        await loop.train(a_run, experiment)
        moved = {"requests_moved": float(a_run.engine.num_moved)}
        found.update(stalls_s=stalls_s, counters=counters() | moved)

    plan, run_folder = make_plan(experiment), folder / "run"
    asyncio.run(train_on_cluster(plan, run_folder, train, resume=False, source="aime"))
    broken = broken_laws(run_folder, num_steps=18, groups=4, samples=4, max_staleness=2)
    return {**found, "broken": broken}


def measure_chosen(folder: Path) -> dict[str, object]:
    """Train a run that chooses its moves."""
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    from run_laws import broken_laws

    from areal_jax import loop
    from areal_jax.config.experiment import Experiment
    from areal_jax.config.load import load_experiment
    from areal_jax.data.policy_files import EMBEDDED
    from areal_jax.metrics import jsonl
    from areal_jax.run.build import build_run
    from areal_jax.run.make_plan import make_plan
    from areal_jax.run.trainer import rl_trainer

    shutil.copytree(EMBEDDED, folder / "tiny", ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((EMBEDDED / "config.json").read_text()) | SMALL
    (folder / "tiny" / "config.json").write_text(json.dumps(config))
    (folder / "reward.py").write_text("def parity(task, answer):\n    return len(answer) % 2\n")
    num_steps, run_folder = 200, folder / "run"
    experiment = load_experiment(
        "aime",
        f"num_steps={num_steps}",
        f"policy.path={folder / 'tiny'}",
        "policy.random_init=true",
        "tasks.num_tasks=4000",
        f"rewards.function={folder / 'reward.py'}:parity",
        "evaluation.every_steps=0",
        "checkpoint.export_hf=false",
        "placement.train_devices=2",
        "placement.rollout_devices=1",
        "placement.adaptive=true",
        "rollout.groups_per_batch=4",
        "rollout.samples_per_group=4",
        "rollout.max_staleness=2",
        "engine.num_slots=2",
        "engine.steps_per_dispatch=2",
        "engine.max_new_tokens=256",
        "trainer.num_mini_batches=1",
    )
    assert isinstance(experiment, Experiment)

    async def train() -> None:
        plan = make_plan(experiment)
        async with build_run(plan, run_folder, resume=False, make_trainer=rl_trainer) as a_run:
            await loop.train(a_run, experiment)

    asyncio.run(train())
    rows = [each for each in jsonl.read(run_folder / "metrics.jsonl") if MOVES in each]
    since_s = defaultdict[float, list[float]](list)
    for before, after in pairwise(rows):
        since_s[before[MOVES]].append(after["time_s"] - before["time_s"])
    return {
        "engines": [each["rollout/engines"] for each in rows],
        "median_step_s": {
            f"after {count:g} moves": statistics.median(found) for count, found in since_s.items()
        },
        "stall_s": rows[-1]["rollout/split_stall_s"],
        "broken": broken_laws(
            run_folder, num_steps=num_steps, groups=4, samples=4, max_staleness=2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--chosen", action="store_true")
    options = parser.parse_args()
    is_measured = options.measured or options.ray or options.chosen
    if is_measured and "NPROC" not in os.environ:
        # Read when jax is loaded: simulated devices need as many threads as two meshes have.
        num_devices = 3 if options.chosen else NUM_DEVICES
        flags = f"--xla_force_host_platform_device_count={num_devices}"
        os.environ |= {"NPROC": "16", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        os.execv(sys.executable, [sys.executable, *sys.argv])
    from results import append

    if options.measured:
        append("adaptive_split", {"kind": "measured", **measure()})
        return
    if options.ray:
        with tempfile.TemporaryDirectory() as folder:
            row = measure_ray(Path(folder))
        append("adaptive_split", {"kind": "measured", "launch": "ray", **row})
        return
    if options.chosen:
        with tempfile.TemporaryDirectory() as folder:
            row = measure_chosen(Path(folder))
        append("adaptive_split", {"kind": "measured", "moves": "chosen", **row})
        return
    shifts = {name: compare(shift) for name, shift in SHIFTS.items()}
    append("adaptive_split", {"kind": "simulated", "shifts": shifts})


if __name__ == "__main__":
    main()
