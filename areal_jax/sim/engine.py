"""Simulated engines: they answer requests in the time of a cost model, under the loop's clock.

A decode step samples a token of every running sequence. Between two changes of the running set its
time grows linearly with the cached tokens, so that many steps are one event: s steps of N sequences
with L cached tokens take

    s · (fixed + context · L) + context · N · s² / 2

seconds, and the next sequence to end is the top of a heap. Prefill and weight swaps stop decoding
for their duration.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil, inf, sqrt
from typing import Literal

import numpy as np

from areal_jax.errors import EngineStopped
from areal_jax.records import Completion, Request, StopReason
from areal_jax.sim.costs import DecodeCosts, Step
from areal_jax.sim.lengths import Lengths

ASSIGNED_UP_TO = 0.9
"""Cache utilization up to which sequences are admitted; full caches preempt down to it."""

_TINY = 1e-6
"""Of a step."""


@dataclass(frozen=True)
class EngineBehavior:
    """Scheduling of simulated engines."""

    num_slots: int = 256
    on_update: Literal["recompute", "keep", "drain"] = "recompute"
    """`drain`: no interruption; a swap waits for all running sequences, and admits none before."""
    shares_prompts: bool = True
    """True if the samples of a request share the prefill of its prompt."""
    steps_per_dispatch: int = 1
    """A finished sequence keeps its slot to the end of its dispatch of that many steps."""
    tokens_per_entry: int = 1
    """Tokens per entry of the simulated completions, to save memory."""


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    answer: asyncio.Future[list[Completion]]
    sampled: list[Completion | None]
    """By sample; None until it is finished."""
    left: int
    prefilled: tuple[int, int] = (-1, -1)
    """Engine and version that hold the prompt."""


@dataclass(slots=True, eq=False)
class _Sequence:
    job: _Job
    sample: int
    length: int
    """Final number of tokens."""
    stop_reason: StopReason
    stamps: list[tuple[int, int]]
    """Version and number of tokens sampled before the current slot."""
    sampled: int
    """All tokens of the stamps."""
    assigned_at: float = 0.0
    """Step count of the engine when the slot was assigned."""


class _Engine:
    """One engine: running sequences and a queue."""

    def __init__(self, fleet: Fleet, index: int, version: int) -> None:
        self.fleet, self.index, self.version = fleet, index, version
        self.up = True
        self.held_back: int | None = None
        """Version that waits for the running sequences to end."""
        self.load = 0
        """Running and waiting sequences."""
        self.waiting: deque[_Sequence] = deque()
        self.live: dict[int, _Sequence] = {}
        """Running sequences in order of admission."""
        self.context = 0.0
        """Tokens in the caches."""
        self.steps = 0.0
        """Decode steps since the beginning; they need not be whole between two events."""
        self.as_of_s = 0.0
        """Time of this state."""
        self.stopped_until_s = 0.0
        self.seconds = defaultdict[str, float](float)
        """Time by activity: decode, prefill, recompute, swap, idle, down."""
        self.history: list[tuple[float, int]] = [(0.0, version)]
        """First step of each version."""
        self._ends: list[tuple[float, int]] = []
        self._assigned = 0
        self._timer: asyncio.TimerHandle | None = None

    def advance(self, now_s: float) -> None:
        """Advance the state to `now_s`, before which no sequence ends and no cache fills up."""
        free_s = max(self.as_of_s, min(self.stopped_until_s, now_s))
        elapsed_s = now_s - free_s
        if elapsed_s > 0:
            if self.live:
                step, num = self._step(), len(self.live)
                first_s, growth_s = (
                    step.fixed_s + step.context_s * self.context,
                    step.context_s * num,
                )
                # The inverse of first · s + growth · s² / 2, in the form that stays exact where
                # growth is tiny.
                steps = (
                    2 * elapsed_s / (first_s + sqrt(first_s * first_s + 2 * growth_s * elapsed_s))
                )
                self.steps += steps
                self.context += num * steps
                self.seconds["decode"] += elapsed_s
            else:
                self.seconds["idle" if self.up else "down"] += elapsed_s
        self.as_of_s = now_s

    def stop_for(self, seconds: float, cause: str) -> None:
        """Stop decoding for `seconds`, after the current stop if there is one."""
        self.stopped_until_s = max(self.stopped_until_s, self.as_of_s) + seconds
        self.seconds[cause] += seconds

    def swap(self, version: int) -> None:
        """Switch to these weights if they are newer."""
        if not self.up or version <= self.version:
            return
        if self.live and self.fleet.behavior.on_update == "drain":
            self.held_back = version
            return
        self.held_back = None
        self.version = version
        self.history.append((self.steps, version))
        self.stop_for(self.fleet.costs.copy_s, "swap")
        if self.live and self.fleet.behavior.on_update == "recompute":
            lengths = (
                len(each.job.request.prompt_tokens) + self._length(each)
                for each in self.live.values()
            )
            pairs = sum(length**2 for length in lengths) / 2
            self.stop_for(self.fleet.costs.recompute_s(self.context, pairs), "recompute")

    def admit_waiting(self) -> None:
        behavior, room = self.fleet.behavior, ASSIGNED_UP_TO * self.fleet.kv_tokens
        while (
            self.up
            and self.held_back is None
            and self.waiting
            and len(self.live) < behavior.num_slots
        ):
            sequence = self.waiting[0]
            request = sequence.job.request
            tokens = float(len(request.prompt_tokens) + sequence.sampled)
            if request.min_version > self.version or (self.live and self.context + tokens > room):
                return
            self.waiting.popleft()
            held = (self.index, self.version)
            if sequence.sampled or not behavior.shares_prompts or sequence.job.prefilled != held:
                self.stop_for(self.fleet.costs.prefill_s(tokens, tokens**2 / 2), "prefill")
                sequence.job.prefilled = held
            sequence.assigned_at = self.steps
            self.context += tokens
            self._assigned += 1
            self.live[self._assigned] = sequence
            dispatches = ceil((sequence.length - sequence.sampled) / behavior.steps_per_dispatch)
            heappush(
                self._ends, (self.steps + dispatches * behavior.steps_per_dispatch, self._assigned)
            )

    def set_timer(self) -> None:
        """Set the timer to the end of the next sequence or to full caches."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][1] not in self.live:
            heappop(self._ends)
        if not self.live:
            return
        num, step = len(self.live), self._step()
        until_full = (self.fleet.kv_tokens - self.context) / num if num > 1 else inf
        steps = max(0.0, min(self._ends[0][0] - self.steps, until_full))
        seconds = (
            steps * (step.fixed_s + step.context_s * self.context)
            + step.context_s * num * steps * steps / 2
        )
        at_s = max(self.as_of_s, self.stopped_until_s) + seconds
        self._timer = self.fleet.loop.call_at(at_s, self._wake)

    def leave(self) -> list[_Sequence]:
        """Remove and return all sequences with their tokens."""
        left = [self._free_slot(number) for number in list(self.live)] + list(self.waiting)
        self.held_back = None
        self.waiting.clear()
        self.load = 0
        return left

    def stamps(self, sequence: _Sequence) -> list[tuple[int, int]]:
        """Return versions and token counts of a running sequence."""
        return [*sequence.stamps, *self._new_stamps(sequence, self._length(sequence))]

    def _step(self) -> Step:
        return self.fleet.step(len(self.live))

    def _cached(self, sequence: _Sequence) -> float:
        """Return the cached tokens of a sequence."""
        return (
            len(sequence.job.request.prompt_tokens)
            + sequence.sampled
            + self.steps
            - sequence.assigned_at
        )

    def _length(self, sequence: _Sequence) -> int:
        """Return the number of tokens of a running sequence."""
        return min(
            sequence.length, sequence.sampled + int(self.steps - sequence.assigned_at + _TINY)
        )

    def _new_stamps(self, sequence: _Sequence, sampled: int) -> list[tuple[int, int]]:
        """Return versions and token counts since the slot was assigned."""
        found, left = list[tuple[int, int]](), sampled - sequence.sampled
        for since, version in reversed(self.history):
            # A swap happens between two steps: the current token has the older version.
            before = min(left, max(0, ceil(since - sequence.assigned_at - _TINY)))
            if left > before:
                found.append((version, left - before))
            left = before
            if not left:
                break
        return found[::-1]

    def _wake(self) -> None:
        self._timer = None
        now_s = self.fleet.loop.time()
        self.advance(now_s)
        while self._ends and self._ends[0][0] <= self.steps + _TINY:
            number = heappop(self._ends)[1]
            if number in self.live:
                sequence = self.live.pop(number)
                self.context -= self._cached(sequence)
                self.fleet.finish(
                    self, sequence, [*sequence.stamps, *self._new_stamps(sequence, sequence.length)]
                )
        if self.context >= self.fleet.kv_tokens - 1:
            while len(self.live) > 1 and self.context > ASSIGNED_UP_TO * self.fleet.kv_tokens:
                self.waiting.appendleft(self._free_slot(next(reversed(self.live))))
                self.fleet.counts["preempted"] += 1
        if self.held_back is not None:
            self.swap(self.held_back)
        self.admit_waiting()
        self.set_timer()

    def _free_slot(self, number: int) -> _Sequence:
        sequence = self.live.pop(number)
        sampled = self._length(sequence)
        self.context -= self._cached(sequence)
        sequence.stamps += self._new_stamps(sequence, sampled)
        sequence.sampled = sampled
        return sequence


class Fleet:
    """Simulated `protocols.Engine` over several engines; samples go to the least loaded one.

    The lengths of a request depend on its seed only; its tokens are zeros.
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
        self.engines = [_Engine(self, index, version) for index in range(num_engines)]
        self.counts = Counter[str]()
        """tokens, sequences, preempted, failures."""
        self._version = version
        self._steps: dict[int, Step] = {}
        self._jobs: dict[str, _Job] = {}
        # Heap of load and index; outdated entries are dropped when they reach the top.
        self._by_load = [(0, index) for index in range(num_engines)]
        self._changed: set[int] = set()
        """Engines that received sequences since the last iteration of the loop."""
        self._unassigned: list[_Sequence] = []
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
        job = _Job(request, answer, finished, finished.count(None))
        self._jobs[request.id] = job
        for sample, (length, done) in enumerate(zip(lengths, sampled, strict=True)):
            if finished[sample] is None:
                stop_reason: StopReason = "stop" if length <= longest else "length"
                length, stamps = min(length, longest), self._stamps_of(done)
                before = min(sum(tokens for _, tokens in stamps), length - 1)
                self._send(_Sequence(job, sample, length, stop_reason, stamps, before))
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
        engine, now_s = self.engines[index], self.loop.time()
        if not engine.up:
            return
        engine.advance(now_s)
        self.counts["failures"] += 1
        sequences, engine.up = engine.leave(), False
        engine.set_timer()
        for sequence in sequences:
            self._send(sequence)
        self.loop.call_at(now_s + repaired_after_s, self._repair, engine)

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

    def finish(self, engine: _Engine, sequence: _Sequence, stamps: list[tuple[int, int]]) -> None:
        """Record a finished sequence."""
        job = sequence.job
        self._set_load(engine, -1)
        self.counts["tokens"] += sequence.length
        self.counts["sequences"] += 1
        job.sampled[sequence.sample] = self._completion(stamps, sequence.stop_reason)
        job.left -= 1
        self._deliver_if_finished(job)

    def _deliver_if_finished(self, job: _Job) -> None:
        if not job.left and self._jobs.pop(job.request.id, None) and not job.answer.done():
            job.answer.set_result([done for done in job.sampled if done is not None])

    def _send(self, sequence: _Sequence) -> None:
        while self._by_load:
            load, index = self._by_load[0]
            engine = self.engines[index]
            if engine.up and engine.load == load:
                engine.waiting.append(sequence)
                self._set_load(engine, 1)
                if not self._changed:
                    self.loop.call_soon(self._settle)
                self._changed.add(index)
                return
            heappop(self._by_load)
        self._unassigned.append(sequence)

    def _set_load(self, engine: _Engine, change: int) -> None:
        engine.load += change
        heappush(self._by_load, (engine.load, engine.index))
        if len(self._by_load) > 64 + 8 * len(self.engines):
            self._by_load = [(engine.load, engine.index) for engine in self.engines if engine.up]
            heapify(self._by_load)

    def _settle(self) -> None:
        now_s = self.loop.time()
        for index in sorted(self._changed):
            engine = self.engines[index]
            engine.advance(now_s)
            engine.admit_waiting()
            engine.set_timer()
        self._changed.clear()

    def _stall(self, engine: _Engine, seconds: float) -> None:
        engine.advance(self.loop.time())
        engine.stop_for(seconds, "transfer")
        engine.set_timer()

    def _arrive(self, engine: _Engine, version: int) -> None:
        engine.advance(self.loop.time())
        engine.swap(version)
        engine.admit_waiting()
        engine.set_timer()

    def _repair(self, engine: _Engine) -> None:
        engine.advance(self.loop.time())
        engine.up = True
        engine.swap(self._version)
        self._set_load(engine, 0)
        unassigned, self._unassigned = self._unassigned, []
        for sequence in unassigned:
            self._send(sequence)

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
