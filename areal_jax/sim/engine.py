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
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from typing import Literal

from areal_jax.records import Completion, Request, StopReason
from areal_jax.sim.costs import DecodeCosts, Step

ASSIGNED_UP_TO = 0.9
"""Cache utilization up to which sequences are admitted; full caches preempt down to it."""

_TINY = 1e-6
"""Tolerance of step counts, in steps."""


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
class SimulatedRequest:
    """An unfinished request."""

    request: Request
    answer: asyncio.Future[list[Completion]]
    sampled: list[Completion | None]
    """By sample; None until it is finished."""
    left: int
    prefilled: tuple[int, int] = (-1, -1)
    """Engine and version that hold the prompt."""


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A sample of a request."""

    job: SimulatedRequest
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


class SimulatedEngine:
    """One engine: running sequences and a queue.

    It has more than 200 lines because prefill, decoding, swaps and preemption share one clock.
    """

    def __init__(
        self,
        costs: DecodeCosts,
        behavior: EngineBehavior,
        index: int,
        version: int,
        *,
        counts: Counter[str],
        step: Callable[[int], Step],
        on_finish: Callable[[SimulatedEngine, SimulatedSequence, list[tuple[int, int]]], None],
    ) -> None:
        """Create an idle engine.

        Args:
            costs: Costs of prefill, swaps and recomputation.
            behavior: Scheduling.
            index: Number of the engine in its fleet.
            version: Version of its weights.
            counts: Counts of the fleet; the engine counts preempted sequences.
            step: Returns the cost of a decode step, by number of sequences.
            on_finish: Callback with a finished sequence and its versions and token counts.
        """
        self.costs, self.behavior, self.index, self.version = costs, behavior, index, version
        self.kv_tokens = costs.kv_tokens
        self._loop, self._step_cost, self._on_finish = (
            asyncio.get_running_loop(),
            step,
            on_finish,
        )
        self._counts = counts
        self.up = True
        self.held_back: int | None = None
        """Version that waits for the running sequences to end."""
        self.waiting: deque[SimulatedSequence] = deque()
        self.live: dict[int, SimulatedSequence] = {}
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
        self.full_s = 0.0
        """Decode time weighted by the share of slots, or of the cache, that was in use."""
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
                in_slots, in_cache = num / self.behavior.num_slots, self.context / self.kv_tokens
                self.full_s += elapsed_s * min(1.0, max(in_slots, in_cache))
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
        if self.live and self.behavior.on_update == "drain":
            self.held_back = version
            return
        self.held_back = None
        self.version = version
        self.history.append((self.steps, version))
        self.stop_for(self.costs.copy_s, "swap")
        if self.live and self.behavior.on_update == "recompute":
            lengths = (
                len(each.job.request.prompt_tokens) + self._length(each)
                for each in self.live.values()
            )
            pairs = sum(length**2 for length in lengths) / 2
            self.stop_for(self.costs.recompute_s(self.context, pairs), "recompute")

    def admit_waiting(self) -> None:
        behavior, room = self.behavior, ASSIGNED_UP_TO * self.kv_tokens
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
                self.stop_for(self.costs.prefill_s(tokens, tokens**2 / 2), "prefill")
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
        until_full = (self.kv_tokens - self.context) / num if num > 1 else inf
        steps = max(0.0, min(self._ends[0][0] - self.steps, until_full))
        seconds = (
            steps * (step.fixed_s + step.context_s * self.context)
            + step.context_s * num * steps * steps / 2
        )
        at_s = max(self.as_of_s, self.stopped_until_s) + seconds
        self._timer = self._loop.call_at(at_s, self._wake)

    def leave(self) -> list[SimulatedSequence]:
        """Remove and return all sequences with their tokens."""
        left = [self._free_slot(number) for number in list(self.live)] + list(self.waiting)
        self.held_back = None
        self.waiting.clear()
        return left

    def stamps(self, sequence: SimulatedSequence) -> list[tuple[int, int]]:
        """Return versions and token counts of a running sequence."""
        return [*sequence.stamps, *self._new_stamps(sequence, self._length(sequence))]

    def _step(self) -> Step:
        return self._step_cost(len(self.live))

    def _cached(self, sequence: SimulatedSequence) -> float:
        """Return the cached tokens of a sequence."""
        return (
            len(sequence.job.request.prompt_tokens)
            + sequence.sampled
            + self.steps
            - sequence.assigned_at
        )

    def _length(self, sequence: SimulatedSequence) -> int:
        """Return the number of tokens of a running sequence."""
        return min(
            sequence.length, sequence.sampled + int(self.steps - sequence.assigned_at + _TINY)
        )

    def _new_stamps(self, sequence: SimulatedSequence, sampled: int) -> list[tuple[int, int]]:
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
        now_s = self._loop.time()
        self.advance(now_s)
        while self._ends and self._ends[0][0] <= self.steps + _TINY:
            number = heappop(self._ends)[1]
            if number in self.live:
                sequence = self.live.pop(number)
                self.context -= self._cached(sequence)
                self._on_finish(
                    self, sequence, [*sequence.stamps, *self._new_stamps(sequence, sequence.length)]
                )
        if self.context >= self.kv_tokens - 1:
            while len(self.live) > 1 and self.context > ASSIGNED_UP_TO * self.kv_tokens:
                self.waiting.appendleft(self._free_slot(next(reversed(self.live))))
                self._counts["preempted"] += 1
        if self.held_back is not None:
            self.swap(self.held_back)
        self.admit_waiting()
        self.set_timer()

    def _free_slot(self, number: int) -> SimulatedSequence:
        sequence = self.live.pop(number)
        sampled = self._length(sequence)
        self.context -= self._cached(sequence)
        sequence.stamps += self._new_stamps(sequence, sampled)
        sequence.sampled = sampled
        return sequence
