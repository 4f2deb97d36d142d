"""placement.adaptive: devices move between training and decoding while a run runs.

A move gives the devices of whole engines to the trainer, or takes them from it. It happens between
two steps. The requests of engines that leave continue on the others from their last token, and
engines that join get the version that is published after the move. The programs of a split are
compiled before the move, in a thread beside training, and are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz

from areal_jax.config.experiment import Experiment
from areal_jax.errors import ConfigError
from areal_jax.run.compiled_programs import abstract_trainer, refusing_what_does_not_fit
from areal_jax.run.local_engines import LocalEngines
from areal_jax.run.make_plan import make_plan
from areal_jax.run.plan import Plan, possible_splits, split_at
from areal_jax.run.recording import TRAINER, Recording
from areal_jax.run.split_meter import SplitMeter, describe_reason
from areal_jax.threads import run_in_thread
from areal_jax.trainer.ppo import Trainer

CLOSE_TIMEOUT_S = 60.0
"""Longest wait for the program that is being compiled when the run ends."""


@dataclass
class _Split:
    """A split whose programs are compiled."""

    plan: Plan
    trainer: Trainer
    """Of shapes alone, unless the run trains there."""
    copy: Callable[[Any], Any]
    """Program that copies parameters from its train mesh."""
    compile_s: float


class AdaptiveSplit:
    """Measures the steps of a run, and moves engines' devices where the planner forecasts a gain.

    Used from the asyncio thread.
    """

    def __init__(
        self, plan: Plan, trainer: Trainer, engines: LocalEngines, recording: Recording
    ) -> None:
        """
        Args:
            plan: Plan of the run; its engines are running.
            trainer: Trainer of the run.
            engines: Engines of the run.
            recording: Receives one line for each move.
        """
        assert isinstance(plan.experiment, Experiment)
        self._plan, self._trainer = plan, trainer
        self._engines, self._recording = engines, recording
        self._num_steps = plan.experiment.num_steps
        self._engine_devices = plan.engine.mesh.size
        self._devices = [*plan.train_mesh.devices.flat, *plan.rollout_mesh.devices.flat]
        self._meter = SplitMeter(len(self._devices), possible_splits(plan), plan.rollout_mesh.size)
        self._chooser = self._meter.chooser
        # By number of rollout devices; all but the present one, whose programs the run has.
        self._compiled = dict[int, _Split]()
        # By engine number: the compiled programs of engines that have run.
        self._programs = dict(enumerate(plan.engines[::-1]))
        # Compiles one split at a time. Started by `adapt`, ended by `close`.
        self._compiling: asyncio.Task[None] | None = None

    @property
    def rollout_devices(self) -> int:
        """Number of devices that decode."""
        return self._chooser.rollout

    def observe(self, row: Mapping[str, float]) -> dict[str, float]:
        """Measure a step by its row of metrics; return those of `counters`."""
        self._meter.observe(row, self._engines.fleet.num_engines)
        return self.counters()

    def counters(self) -> dict[str, float]:
        """Return the engines, and counts since the start of this process."""
        fleet = self._engines.fleet
        return {
            "engines": float(fleet.num_engines),
            "requests_moved": float(fleet.num_moved),
            **self._meter.counters(),
        }

    async def adapt(self) -> None:
        """Move to the best split if its programs are compiled; else begin to compile them."""
        if self._compiling is not None:
            if not self._compiling.done():
                return
            self._compiling.result()
            self._compiling = None
        move = self._chooser.choose(self._num_steps - self._trainer.version, self._cost_s)
        if move is None:
            return
        if move.rollout in self._compiled:
            await self.move(move.rollout, describe_reason(move))
        else:
            self._compiling = asyncio.create_task(
                self.compile(move.rollout), name=f"compiling for {move.rollout} rollout devices"
            )

    async def compile(self, rollout: int) -> None:
        """Compile the programs of a split, unless that was done; a split that is impossible is not
        chosen again.
        """
        if rollout in self._compiled:
            return
        try:
            self._compiled[rollout] = await run_in_thread(
                partial(self._compile, rollout), "compile a split"
            )
        except ConfigError as refusal:
            self._chooser.splits.discard(rollout)
            self._recording.say(
                f"placement.adaptive: {rollout} rollout devices are impossible: {refusal}"
            )

    async def move(self, rollout: int, reason: str) -> None:
        """Move to a split that is compiled, between two steps.

        Args:
            reason: shown with the measured seconds of the move.
        """
        start_s, split = time.perf_counter(), self._compiled.pop(rollout)
        before, trainer, fleet = self._chooser.rollout, self._trainer, self._engines.fleet
        num_engines = rollout // self._engine_devices
        with self._recording.span(TRAINER, f"move to {rollout} rollout devices"):
            for number in range(num_engines, fleet.num_engines):
                await self._engines.remove_engine(number)
            await run_in_thread(partial(trainer.exchange_meshes, split.trainer), "move")
            split.copy = self._engines.weight_channel.change_source(split.copy)
            joining = range(fleet.num_engines, num_engines)
            engines = [self._programs[number] for number in joining]
            completions = await run_in_thread(
                partial(self._engines.completions, engines, split.plan.train_mesh, trainer.base),
                "frozen weights",
            )
            for place, number in enumerate(joining):
                complete = None if completions is None else completions[place]
                self._engines.add_engine(number, engines[place], complete)
        self._plan, split.plan = split.plan, self._plan
        self._compiled[before] = split
        self._meter.moved(rollout, time.perf_counter() - start_s)
        self._recording.say(
            f"placement.adaptive: {before} -> {rollout} of {len(self._devices)} devices decode, "
            f"before step {trainer.version}; {reason}the move took {self._meter.stall_s:.2g} s"
        )

    async def close(self) -> None:
        """Wait for a compilation that is under way."""
        if self._compiling is not None:
            await asyncio.wait([self._compiling], timeout=CLOSE_TIMEOUT_S)

    def _cost_s(self, rollout: int) -> float:
        """Return the measured seconds of the last move, or, for the first one, of compiling."""
        return self._meter.stall_s or (
            self._compiled[rollout].compile_s if rollout in self._compiled else 0.0
        )

    def _compile(self, rollout: int) -> _Split:
        start_s, num_engines = time.perf_counter(), rollout // self._engine_devices
        experiment = split_at(self._plan, rollout, len(self._devices) - rollout)
        placement = chz.replace(experiment.placement, engines=num_engines)
        plan = make_plan(
            chz.replace(experiment, placement=placement), self._devices, self._plan.compiler
        )
        trainer = abstract_trainer(plan)
        assert isinstance(trainer, Trainer)
        # An engine has the same devices in all splits.
        for number, engine in enumerate(plan.engines[::-1]):
            if number not in self._programs:
                engine.warm_up()
                self._programs[number] = engine
        with refusing_what_does_not_fit(plan, trainer):
            trainer.warm_up()
        copy = self._engines.weight_channel.compile_copy(plan.train_mesh, trainer.params)
        return _Split(plan, trainer, copy, time.perf_counter() - start_s)
