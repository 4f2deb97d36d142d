"""Fleet of simulated engines: routing, weight updates, failures, and completions."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from areal_jax.engine.routing import EngineLoads
from areal_jax.errors import EngineStopped
from areal_jax.records import Completion, Request, StopReason
from areal_jax.sim.costs import DecodeCosts, Step
from areal_jax.sim.engine import (
    EngineBehavior,
    SimulatedEngine,
    SimulatedRequest,
    SimulatedSequence,
)
from areal_jax.sim.lengths import Lengths


class SimulatedFleet:
    """Simulated `protocols.Engine` over several engines; samples go to the least loaded one.

    The lengths of a request depend on its seed only; its tokens are zeros. It has more than 200
    lines because it counts everything that the real engines count.
    """

    def __init__(
        self,
        costs: DecodeCosts,
        lengths: Lengths,
        num_engines: int,
        behavior: EngineBehavior | None = None,
        version: int = 0,
    ) -> None:
        self.costs, self.lengths, self.behavior = costs, lengths, behavior or EngineBehavior()
        self.loop = asyncio.get_running_loop()
        self.kv_tokens = costs.kv_tokens
        if self.kv_tokens < 1:
            raise ValueError(
                f"expected memory for KV caches besides the weights, found {self.kv_tokens:,}"
            )
        self.counts = Counter[str]()
        """tokens, sequences, preempted, failures."""
        self.engines = [
            SimulatedEngine(
                costs,
                self.behavior,
                index,
                version,
                counts=self.counts,
                step=self.step,
                on_finish=self.finish,
            )
            for index in range(num_engines)
        ]
        self._version = version
        self._steps: dict[int, Step] = {}
        self._jobs: dict[str, SimulatedRequest] = {}
        # Unfinished sequences of the engines that are up, by index.
        self._loads = EngineLoads()
        for index in range(num_engines):
            self._loads[index] = 0
        self._changed: set[int] = set()
        """Engines that received sequences since the last iteration of the loop."""
        self._unassigned: list[SimulatedSequence] = []
        """Sequences that wait for any engine to be up."""

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Queue a request; cancelling the future does not free its slots."""
        if request.id in self._jobs:
            raise ValueError(f"request id {request.id!r} is in use by another unfinished request")
        answer: asyncio.Future[list[Completion]] = self.loop.create_future()
        sampled = list[Completion | None](request.resume) or [None] * request.num_samples
        longest = request.sampling.max_new_tokens
        lengths = self.lengths.sample_lengths(random.Random(request.seed), request.num_samples)
        finished: list[Completion | None] = [
            done if done and done.stop_reason != "suspended" else None for done in sampled
        ]
        job = SimulatedRequest(request, answer, finished, finished.count(None))
        self._jobs[request.id] = job
        for sample, (length, done) in enumerate(zip(lengths, sampled, strict=True)):
            if finished[sample] is None:
                stop_reason: StopReason = "stop" if length <= longest else "length"
                length, stamps = min(length, longest), self._stamps_of(done)
                before = min(sum(tokens for _, tokens in stamps), length - 1)
                self._send(SimulatedSequence(job, sample, length, stop_reason, stamps, before))
        self._deliver_if_finished(job)
        return answer

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """Return the tokens of every unfinished request so far."""
        partials = {
            job.request.id: [done or self._completion([], "suspended") for done in job.sampled]
            for job in self._jobs.values()
        }
        for engine in self.engines:
            engine.advance(self.loop.time())
            for sequence in engine.live.values():
                partials[sequence.job.request.id][sequence.sample] = self._completion(
                    engine.stamps(sequence), "suspended"
                )
            for sequence in engine.waiting:
                partials[sequence.job.request.id][sequence.sample] = self._completion(
                    sequence.stamps, "suspended"
                )
            engine.set_timer()
        return {name: tuple(partial) for name, partial in partials.items()}

    def publish(
        self, version: int, arrives_after_s: Sequence[float], stops_for_s: float = 0.0
    ) -> None:
        """Send weights to every engine.

        Args:
            version: of the weights.
            arrives_after_s: delay until they arrive, by engine.
            stops_for_s: stall of each engine before they arrive.
        """
        self._version = version
        now_s = self.loop.time()
        for engine, after_s in zip(self.engines, arrives_after_s, strict=True):
            if stops_for_s:
                self.loop.call_at(now_s + after_s - stops_for_s, self._stall, engine, stops_for_s)
            self.loop.call_at(now_s + after_s, self._arrive, engine, version)

    def fail(self, index: int, repaired_after_s: float) -> None:
        """Fail an engine; its sequences continue elsewhere from their tokens.

        Args:
            index: of the engine.
            repaired_after_s: delay until it is back, with the newest weights.
        """
        if self.engines[index].up:
            self.counts["failures"] += 1
            self.remove(index)
            self.loop.call_later(repaired_after_s, self.add, index)

    def remove(self, index: int) -> None:
        """Take an engine out of use; its sequences continue elsewhere from their tokens."""
        engine = self.engines[index]
        engine.advance(self.loop.time())
        sequences, engine.up = engine.leave(), False
        del self._loads[index]
        engine.set_timer()
        for sequence in sequences:
            self._send(sequence)

    def add(self, index: int) -> None:
        """Take an engine into use again, with the newest weights."""
        engine = self.engines[index]
        engine.advance(self.loop.time())
        engine.up = True
        engine.swap(self._version)
        self._loads[index] = 0
        unassigned, self._unassigned = self._unassigned, []
        for sequence in unassigned:
            self._send(sequence)

    def stop(self, error: BaseException) -> None:
        """Fail every request, as an engine whose loop died."""
        for job in self._jobs.values():
            if not job.answer.done():
                stopped = EngineStopped(f"the simulated engines stopped: {error}")
                stopped.__cause__ = error
                job.answer.set_exception(stopped)
        self._jobs.clear()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all engines by activity."""
        total = defaultdict[str, float](float)
        for engine in self.engines:
            engine.advance(self.loop.time())
            engine.set_timer()
            for cause, seconds in engine.seconds.items():
                total[cause] += seconds
        return dict(total)

    def step(self, num_sequences: int) -> Step:
        """Return the cost of a decode step, cached by number of sequences."""
        found = self._steps.get(num_sequences)
        if found is None:
            found = self._steps[num_sequences] = self.costs.step(num_sequences)
        return found

    def finish(
        self, engine: SimulatedEngine, sequence: SimulatedSequence, stamps: list[tuple[int, int]]
    ) -> None:
        """Record a finished sequence."""
        job = sequence.job
        self._loads[engine.index] -= 1
        self.counts["tokens"] += sequence.length
        self.counts["sequences"] += 1
        job.sampled[sequence.sample] = self._completion(stamps, sequence.stop_reason)
        job.left -= 1
        self._deliver_if_finished(job)

    def _deliver_if_finished(self, job: SimulatedRequest) -> None:
        if not job.left and self._jobs.pop(job.request.id, None) and not job.answer.done():
            job.answer.set_result([done for done in job.sampled if done is not None])

    def _send(self, sequence: SimulatedSequence) -> None:
        index = self._loads.find_least()
        if index is None:
            self._unassigned.append(sequence)
            return
        self.engines[index].waiting.append(sequence)
        self._loads[index] += 1
        if not self._changed:
            self.loop.call_soon(self._settle)
        self._changed.add(index)

    def _settle(self) -> None:
        now_s = self.loop.time()
        for index in sorted(self._changed):
            engine = self.engines[index]
            engine.advance(now_s)
            engine.admit_waiting()
            engine.set_timer()
        self._changed.clear()

    def _stall(self, engine: SimulatedEngine, seconds: float) -> None:
        engine.advance(self.loop.time())
        engine.stop_for(seconds, "transfer")
        engine.set_timer()

    def _arrive(self, engine: SimulatedEngine, version: int) -> None:
        engine.advance(self.loop.time())
        engine.swap(version)
        engine.admit_waiting()
        engine.set_timer()

    def _stamps_of(self, done: Completion | None) -> list[tuple[int, int]]:
        if done is None or not len(done.versions):
            return []
        changes = np.flatnonzero(np.diff(done.versions)) + 1
        parts = zip([0, *changes.tolist()], [*changes.tolist(), len(done.versions)], strict=True)
        return [
            (int(done.versions[start]), (end - start) * self.behavior.tokens_per_entry)
            for start, end in parts
        ]

    def _completion(self, stamps: Sequence[tuple[int, int]], stop_reason: StopReason) -> Completion:
        """Return one entry per tokens_per_entry tokens, rounded up."""
        size, ends, total = self.behavior.tokens_per_entry, [], 0
        for _, tokens in stamps:
            total += tokens
            ends.append(-(-total // size))
        num = ends[-1] if ends else 0
        if len(stamps) == 1:
            versions = np.full(num, stamps[0][0], np.int32)
        else:
            counts = np.diff(np.array([0, *ends]))
            versions = np.repeat(np.array([version for version, _ in stamps], np.int32), counts)
        return Completion(np.zeros(num, np.int32), np.zeros(num, np.float32), versions, stop_reason)
