"""Simulation of a cluster: the real gate, buffer and controller with simulated devices.

The body of `loop.train` under the simulated clock. Decoding, grading and training take the times of
`costs`; groups are admitted, counted and buffered by the code of a real run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int32

from areal_jax.models.architecture import ModelConfig
from areal_jax.protocols import Generate, Grader
from areal_jax.records import NO_VERSION, Group, Message, RewardResult, Sample, Sampling, Task
from areal_jax.rollout.config import RolloutConfig
from areal_jax.rollout.controller import Rollouts, open_gate, run_rollouts
from areal_jax.sim.clock import run
from areal_jax.sim.costs import (
    DecodeCosts,
    Efficiency,
    EngineCosts,
    EvenSplit,
    PackedSchedule,
    Rewards,
    TrainerCosts,
)
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.fleet import SimulatedFleet
from areal_jax.sim.hardware import Device
from areal_jax.sim.lengths import Lengths


@dataclass(frozen=True)
class Staged:
    """Weights reach engines one after another over the network while they decode."""

    latency_s: float = 0.5


@dataclass(frozen=True)
class Barrier:
    """Trainer and engines stall until all weights are written and read, as through shared files."""

    bytes_per_s: float = 5e9
    latency_s: float = 2.0
    notice_s: float = 0.0
    """Delay until engines start to read; they decode meanwhile, as far as staleness permits."""


@dataclass(frozen=True)
class Failures:
    """Engines die independently, at exponentially distributed times."""

    mean_time_between_s: float
    repair_s: float = 120.0


@dataclass(frozen=True)
class Workload:
    """Batch shape, lengths and staleness; defaults are the paper's recipe (AReaL, table 3)."""

    lengths: Lengths
    max_new_tokens: int
    prompt_tokens: int = 200
    groups_per_batch: int = 512
    samples_per_group: int = 16
    max_staleness: int | None = 4
    max_running_groups: int = 512
    num_mini_batches: int = 4


@runtime_checkable
class Stages(Protocol):
    """Stage times of a run: from data sheets or measured."""

    @property
    def engine(self) -> DecodeCosts: ...
    @property
    def num_engines(self) -> int: ...
    @property
    def behavior(self) -> EngineBehavior: ...
    @property
    def rewards(self) -> Rewards: ...
    @property
    def failures(self) -> Failures | None: ...
    @property
    def stall_s(self) -> float:
        """Time that trainer and engines stall at a weight update."""
        ...

    def arrivals_s(self) -> list[float]:
        """Return the seconds until weights that are published now reach each engine."""
        ...

    def train_s(self, lengths: Float[np.ndarray, "N"], num_mini_batches: int) -> float:
        """Return the time of a trainer step on sequences of these lengths, prompts included."""
        ...


@dataclass(frozen=True)
class SimulatedCluster:
    """Devices by task, with data-sheet costs.

    A synchronous system may use the same devices for both tasks in turns.
    """

    model: ModelConfig
    device: Device
    rollout_devices: int
    train_devices: int
    devices_per_engine: int = 1
    train_layout: PackedSchedule | EvenSplit = field(default_factory=PackedSchedule)
    efficiency: Efficiency = field(default_factory=Efficiency)
    behavior: EngineBehavior = field(default_factory=EngineBehavior)
    transfer: Staged | Barrier = field(default_factory=Staged)
    rewards: Rewards = field(default_factory=Rewards)
    failures: Failures | None = None

    @property
    def engine(self) -> EngineCosts:
        return EngineCosts(self.model, self.device, self.devices_per_engine, self.efficiency)

    @property
    def num_engines(self) -> int:
        return self.rollout_devices // self.devices_per_engine

    def train_s(self, lengths: Float[np.ndarray, "N"], num_mini_batches: int) -> float:
        """Return the time of a trainer step; see `TrainerCosts.train_s`."""
        trainer = TrainerCosts(
            self.model,
            self.device,
            self.train_devices,
            self.efficiency,
            num_mini_batches=num_mini_batches,
            layout=self.train_layout,
        )
        return trainer.train_s(lengths)

    def arrivals_s(self) -> list[float]:
        """Return arrivals over the network, or all at the end of the barrier."""
        if isinstance(self.transfer, Barrier):
            return [self.transfer.notice_s + self.stall_s] * self.num_engines
        network = self.device.network_bytes_per_s * self.efficiency.network
        own_s = self.engine.weight_bytes / (self.devices_per_engine * network)
        # Limited by the trainers' sending or by the engine's receiving bandwidth.
        sent_s = self.engine.weight_bytes / (self.train_devices * network)
        return [
            self.transfer.latency_s + max(own_s, (index + 1) * sent_s)
            for index in range(self.num_engines)
        ]

    @property
    def stall_s(self) -> float:
        """Stall of the trainer while it writes, and of engines while they read."""
        if isinstance(self.transfer, Barrier):
            return self.transfer.latency_s + self.engine.weight_bytes / self.transfer.bytes_per_s
        return 0.0


@dataclass(frozen=True)
class Outcome:
    """Result of a simulated run, without its first steps."""

    tokens_per_s: float
    """Completion tokens of the batches: the paper's effective throughput."""
    step_s: float
    """Mean time from one batch to the next."""
    train_s: float
    """Mean time of the trainer's work in it."""
    shares: Mapping[str, float]
    """Shares of engine time: decode, prefill, recompute, swap, transfer, idle, down."""
    staleness: float
    """Mean age of a trained token, in versions."""
    masked: float
    """Share of tokens older than max_staleness, which are not trained on."""
    mean_length: float
    seconds: float
    """Simulated seconds in total."""
    counts: Mapping[str, float]
    """Counts of fleet and controller."""

    @property
    def trained_per_s(self) -> float:
        """Trained tokens per second, without those that are too old."""
        return self.tokens_per_s * (1 - self.masked)

    @property
    def trainer_waits(self) -> float:
        """Share of the time in which the trainer waits."""
        return 1 - self.train_s / self.step_s


def simulate(
    stages: Stages, workload: Workload, num_steps: int = 8, first_counted: int = 2, seed: int = 0
) -> Outcome:
    """Simulate `num_steps` steps and measure those from `first_counted` on."""
    return run(_simulate(stages, workload, num_steps, first_counted, seed))


async def _simulate(
    stages: Stages, workload: Workload, num_steps: int, first_counted: int, seed: int
) -> Outcome:
    fleet = SimulatedFleet(stages.engine, workload.lengths, stages.num_engines, stages.behavior)
    config = RolloutConfig(
        groups_per_batch=workload.groups_per_batch,
        samples_per_group=workload.samples_per_group,
        max_staleness=workload.max_staleness,
        max_running_groups=workload.max_running_groups,
        batch_timeout_s=1e9,
    )
    gate, buffer = open_gate(config, 0)
    grader = GradingQueue(stages.rewards)
    turn = OneTurn(workload.prompt_tokens, workload.samples_per_group, grader)
    sampling = Sampling(workload.max_new_tokens)
    clock, taken = asyncio.get_running_loop().time, list[_Batch]()
    breaking = _break(fleet, stages.failures, seed) if stages.failures else None
    breakage = asyncio.create_task(breaking) if breaking else None
    begin_s, spent = 0.0, dict[str, float]()
    async with run_rollouts(
        Numbered(), fleet, turn, grader, gate, buffer, config, sampling=sampling, seed=seed
    ) as rollouts:
        for version in range(num_steps):
            if version == first_counted:
                begin_s, spent = clock(), fleet.seconds()
            groups = await buffer.take(config.groups_per_batch, version)
            batch = _count(groups, version, workload, stages.behavior.tokens_per_entry)
            batch.train_s = stages.train_s(batch.lengths, workload.num_mini_batches)
            taken.append(batch)
            await asyncio.sleep(batch.train_s)
            fleet.publish(version + 1, stages.arrivals_s(), stages.stall_s)
            await asyncio.sleep(stages.stall_s)
            gate.version = version + 1
        outcome = _outcome(taken[first_counted:], begin_s, fleet, spent, rollouts)
    if breakage:
        breakage.cancel()
    return outcome


@dataclass
class _Batch:
    tokens: float
    """Tokens that the policy sampled."""
    lengths: Float[np.ndarray, "N"]
    """Lengths of the samples with their prompts."""
    staleness: float
    """Summed over tokens."""
    masked: float
    """Tokens."""
    train_s: float = 0.0


def _count(
    groups: Sequence[Group], version: int, workload: Workload, tokens_per_entry: int
) -> _Batch:
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.versions) for sample in samples], np.float64) * tokens_per_entry
    ages = version - np.concatenate([sample.versions for sample in samples])
    eta = np.inf if workload.max_staleness is None else workload.max_staleness
    return _Batch(
        tokens=float(lengths.sum()),
        lengths=lengths + workload.prompt_tokens,
        staleness=float(ages.sum() * tokens_per_entry),
        masked=float((ages > eta).sum() * tokens_per_entry),
    )


def _outcome(
    taken: Sequence[_Batch],
    begin_s: float,
    fleet: SimulatedFleet,
    spent_before: Mapping[str, float],
    rollouts: Rollouts,
) -> Outcome:
    end_s, tokens = fleet.loop.time(), sum(batch.tokens for batch in taken)
    spent = {
        cause: seconds - spent_before.get(cause, 0.0) for cause, seconds in fleet.seconds().items()
    }
    total = sum(spent.values())
    return Outcome(
        tokens_per_s=tokens / (end_s - begin_s),
        step_s=(end_s - begin_s) / len(taken),
        train_s=sum(batch.train_s for batch in taken) / len(taken),
        shares={cause: seconds / total for cause, seconds in sorted(spent.items())},
        staleness=sum(batch.staleness for batch in taken) / tokens,
        masked=sum(batch.masked for batch in taken) / tokens,
        mean_length=tokens / sum(len(batch.lengths) for batch in taken),
        seconds=end_s,
        counts={
            name: float(number) for name, number in {**fleet.counts, **rollouts.counters()}.items()
        },
    )


async def _break(fleet: SimulatedFleet, failures: Failures, seed: int) -> None:
    """Fail random engines until cancelled.

    The minimum of n exponential times has 1/n of their mean.
    """
    chance = random.Random(f"{seed}/failures")
    while True:
        await asyncio.sleep(chance.expovariate(len(fleet.engines) / failures.mean_time_between_s))
        fleet.fail(chance.randrange(len(fleet.engines)), failures.repair_s)


class Numbered:
    """Endless tasks 0, 1, 2, ..."""

    def __init__(self) -> None:
        self._place = 0

    def __next__(self) -> Task:
        self._place += 1
        return Task(str(self._place - 1), (Message("user", ""),), "")

    def state(self) -> Mapping[str, int]:
        return {"place": self._place}


class GradingQueue:
    """Reward workers with one first-in, first-out queue."""

    def __init__(self, rewards: Rewards) -> None:
        self._grading_s = rewards.grading_s
        self._free_at_s = [0.0] * rewards.num_workers
        heapify(self._free_at_s)

    async def graded(self, num: int) -> None:
        """Wait until `num` answers are graded, with a single timer for all of them."""
        now_s = done_s = asyncio.get_running_loop().time()
        for _ in range(num):
            done_s = max(now_s, self._free_at_s[0]) + self._grading_s
            heapreplace(self._free_at_s, done_s)
        await asyncio.sleep(done_s - now_s)

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        await self.graded(1)
        return RewardResult("correct")


@dataclass(frozen=True, eq=False)
class OneTurn:
    """A single-turn workflow whose samples hold completions without prompts."""

    prompt_tokens: int
    samples_per_group: int
    queue: GradingQueue

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        prompt: Int32[np.ndarray, "P"] = np.zeros(self.prompt_tokens, np.int32)
        completions = await generate(prompt, self.samples_per_group)
        await self.queue.graded(len(completions))
        return tuple(
            Sample(
                completion.tokens,
                completion.versions != NO_VERSION,
                completion.logp,
                completion.versions,
                0.0,
                "correct",
                completion.stop_reason,
            )
            for completion in completions
        )
