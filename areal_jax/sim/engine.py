"""Engines without devices: they answer requests in the time that a cost model says, under whatever
clock the loop has.

A decode step draws a token in every live sequence. Between two changes of who is live its time
grows linearly with the tokens in the caches, so that whole stretches of steps are one event: s
steps of N sequences with L tokens in their caches take

    s · (fixed + context · L) + context · N · s² / 2

seconds, and who ends next is the top of a heap. What an engine does beside, such as prefill and the
work of taking weights, stops its decoding for as long.
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
"""A sequence is seated while caches are filled up to this share; at 1 the youngest sequences leave
until they are again."""

_TINY = 1e-6
"""Of a step."""


@dataclass(frozen=True)
class EngineHabits:
    """What engines do, beside what it costs."""

    num_slots: int = 256
    on_update: Literal["recompute", "keep", "drain"] = "recompute"
    """Drain: weights wait until all that is under way has ended, and nothing begins before them, as
    without interruption."""
    shares_prompts: bool = True
    """Whether the samples of a request share the prefill of its prompt."""
    steps_per_dispatch: int = 1
    """A sequence that has ended keeps its place until so many steps, counted from its first, are
    full."""
    tokens_per_entry: int = 1
    """Completions have an entry for so many tokens: what counts them need not hold them."""


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
    """Tokens that it will have sampled in the end."""
    stop_reason: StopReason
    stamps: list[tuple[int, int]]
    """Version and number of tokens, of what was sampled before it came to where it is."""
    sampled: int
    """All tokens of the stamps."""
    assigned_at: float = 0.0
    """Steps of its engine when it was seated."""


class _Engine:
    """One engine: a batch that decodes, and a queue of its own."""

    def __init__(self, fleet: Fleet, index: int, version: int) -> None:
        self.fleet, self.index, self.version = fleet, index, version
        self.up = True
        self.held_back: int | None = None
        """Version that waits for the live sequences to end."""
        self.load = 0
        """Sequences seated and waiting."""
        self.waiting: deque[_Sequence] = deque()
        self.live: dict[int, _Sequence] = {}
        """In the order in which they were seated."""
        self.context = 0.0
        """Tokens in the caches."""
        self.steps = 0.0
        """Decode steps since the beginning; they need not be whole between two events."""
        self.as_of_s = 0.0
        """When all of these were so."""
        self.stopped_until_s = 0.0
        self.seconds = defaultdict[str, float](float)
        """What the time went into: decode, prefill, recompute, swap, idle, down."""
        self.history: list[tuple[float, int]] = [(0.0, version)]
        """Steps from which on each version drew."""
        self._ends: list[tuple[float, int]] = []
        self._assigned = 0
        self._timer: asyncio.TimerHandle | None = None

    def advance(self, now_s: float) -> None:
        """Bring everything to this moment. No sequence ends, and the caches do not fill up, before
        it."""
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
        """Decode nothing for so long, from now or from when it may go on."""
        self.stopped_until_s = max(self.stopped_until_s, self.as_of_s) + seconds
        self.seconds[cause] += seconds

    def swap(self, version: int) -> None:
        """Go on with these weights, if they are newer."""
        if not self.up or version <= self.version:
            return
        if self.live and self.fleet.habits.on_update == "drain":
            self.held_back = version
            return
        self.held_back = None
        self.version = version
        self.history.append((self.steps, version))
        self.stop_for(self.fleet.costs.copy_s, "swap")
        if self.live and self.fleet.habits.on_update == "recompute":
            lengths = (
                len(each.job.request.prompt_tokens) + self._length(each)
                for each in self.live.values()
            )
            pairs = sum(length**2 for length in lengths) / 2
            self.stop_for(self.fleet.costs.recompute_s(self.context, pairs), "recompute")

    def admit_waiting(self) -> None:
        habits, room = self.fleet.habits, ASSIGNED_UP_TO * self.fleet.kv_tokens
        while (
            self.up
            and self.held_back is None
            and self.waiting
            and len(self.live) < habits.num_slots
        ):
            sequence = self.waiting[0]
            request = sequence.job.request
            tokens = float(len(request.prompt_tokens) + sequence.sampled)
            if request.min_version > self.version or (self.live and self.context + tokens > room):
                return
            self.waiting.popleft()
            held = (self.index, self.version)
            if sequence.sampled or not habits.shares_prompts or sequence.job.prefilled != held:
                self.stop_for(self.fleet.costs.prefill_s(tokens, tokens**2 / 2), "prefill")
                sequence.job.prefilled = held
            sequence.assigned_at = self.steps
            self.context += tokens
            self._assigned += 1
            self.live[self._assigned] = sequence
            dispatches = ceil((sequence.length - sequence.sampled) / habits.steps_per_dispatch)
            heappush(
                self._ends, (self.steps + dispatches * habits.steps_per_dispatch, self._assigned)
            )

    def set_timer(self) -> None:
        """Wake up when the next sequence ends, or the caches are full."""
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
        """All sequences, with what they have sampled; the engine is then empty."""
        left = [self._free_slot(number) for number in list(self.live)] + list(self.waiting)
        self.held_back = None
        self.waiting.clear()
        self.load = 0
        return left

    def stamps(self, sequence: _Sequence) -> list[tuple[int, int]]:
        """Version and number of tokens of all that a live sequence has sampled."""
        return [*sequence.stamps, *self._new_stamps(sequence, self._length(sequence))]

    def _step(self) -> Step:
        return self.fleet.step(len(self.live))

    def _cached(self, sequence: _Sequence) -> float:
        """Tokens of a sequence in the caches."""
        return (
            len(sequence.job.request.prompt_tokens)
            + sequence.sampled
            + self.steps
            - sequence.assigned_at
        )

    def _length(self, sequence: _Sequence) -> int:
        """Tokens that a live sequence has sampled."""
        return min(
            sequence.length, sequence.sampled + int(self.steps - sequence.assigned_at + _TINY)
        )

    def _new_stamps(self, sequence: _Sequence, sampled: int) -> list[tuple[int, int]]:
        """Of what was sampled since it was seated."""
        found, left = list[tuple[int, int]](), sampled - sequence.sampled
        for since, version in reversed(self.history):
            # A swap comes between two steps: the token under way is the older version's.
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
    """Engines behind one door: the simulated `records.Engine`. Each sample goes to the engine that
    has the fewest.

    A request's lengths depend on its seed alone, as real draws do; its tokens are zeros. All of it
    happens in the loop's own thread, whose clock is the only one."""

    def __init__(
        self,
        costs: DecodeCosts,
        lengths: Lengths,
        num_engines: int,
        habits: EngineHabits | None = None,
        version: int = 0,
    ) -> None:
        self.costs, self.lengths, self.habits = costs, lengths, habits or EngineHabits()
        self.loop = asyncio.get_running_loop()
        self.kv_tokens = costs.kv_tokens
        if self.kv_tokens < 1:
            raise ValueError(
                f"expected room for KV caches beside the weights, came {self.kv_tokens:,} tokens"
            )
        self.engines = [_Engine(self, index, version) for index in range(num_engines)]
        self.counts = Counter[str]()
        """tokens, sequences, preempted, failures."""
        self._version = version
        self._steps: dict[int, Step] = {}
        self._jobs: dict[str, _Job] = {}
        # Load and index of every engine, and entries that were true once: those are dropped where
        # they come up.
        self._by_load = [(0, index) for index in range(num_engines)]
        self._changed: set[int] = set()
        """Engines that sequences were sent to since the loop's last turn."""
        self._homeless: list[_Sequence] = []
        """Sequences that no engine is up for."""

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Answer when the simulated engines have. Cancelling the future frees nothing."""
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
        """What every unfinished request has sampled so far, as of now."""
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
        """Send weights to every engine. Args: arrives_after_s: by engine. stops_for_s: so long it
        stands still before that."""
        self._version = version
        now_s = self.loop.time()
        for engine, after_s in zip(self.engines, arrives_after_s, strict=True):
            if stops_for_s:
                self.loop.call_at(
                    now_s + after_s - stops_for_s, self._stand_still, engine, stops_for_s
                )
            self.loop.call_at(now_s + after_s, self._arrive, engine, version)

    def fail(self, index: int, repaired_after_s: float) -> None:
        """Lose an engine: its sequences go on elsewhere from the tokens they have; it comes back
        with the newest weights."""
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
        """Fail every request, as an engine does whose engine loop has died."""
        for job in self._jobs.values():
            if not job.answer.done():
                stopped = EngineStopped(f"the simulated engines stopped: {error}")
                stopped.__cause__ = error
                job.answer.set_exception(stopped)
        self._jobs.clear()

    def seconds(self) -> dict[str, float]:
        """What all engines have spent their time on until now."""
        total = defaultdict[str, float](float)
        for engine in self.engines:
            engine.advance(self.loop.time())
            engine.set_timer()
            for cause, seconds in engine.seconds.items():
                total[cause] += seconds
        return dict(total)

    def step(self, num_sequences: int) -> Step:
        """Costs of a decode step, worked out once for each number of sequences."""
        found = self._steps.get(num_sequences)
        if found is None:
            found = self._steps[num_sequences] = self.costs.step(num_sequences)
        return found

    def finish(self, engine: _Engine, sequence: _Sequence, stamps: list[tuple[int, int]]) -> None:
        """A sequence of an engine has sampled its last token."""
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
        self._homeless.append(sequence)

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

    def _stand_still(self, engine: _Engine, seconds: float) -> None:
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
        homeless, self._homeless = self._homeless, []
        for sequence in homeless:
            self._send(sequence)

    def _stamps_of(self, done: Completion | None) -> list[tuple[int, int]]:
        if done is None or not len(done.versions):
            return []
        changes = np.flatnonzero(np.diff(done.versions)) + 1
        parts = zip([0, *changes.tolist()], [*changes.tolist(), len(done.versions)], strict=True)
        return [
            (int(done.versions[start]), (end - start) * self.habits.tokens_per_entry)
            for start, end in parts
        ]

    def _completion(self, stamps: Sequence[tuple[int, int]], stop_reason: StopReason) -> Completion:
        """One entry for every tokens_per_entry tokens, and for what is left over."""
        size, ends, total = self.habits.tokens_per_entry, [], 0
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
