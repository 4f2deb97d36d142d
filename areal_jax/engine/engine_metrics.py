"""Metrics and events of one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from areal_jax.engine.batch import DecodeOutput
from areal_jax.engine.routing import TOTALS

Event: TypeAlias = Callable[[str, float, float, Mapping[str, int | float]], None]
"""on_event(name, start_s, end_s, args), times of time.perf_counter; called in the engine thread."""


class EngineMetrics:
    """Sums and weights, counted by the engine thread and collected by any other."""

    def __init__(self, num_programs: Callable[[], int], on_event: Event | None):
        self._num_programs, self._on_event = num_programs, on_event
        self._lock = threading.Lock()
        self._sums: dict[str, list[float]] = {}
        self._since_s = time.perf_counter()
        self._programs_before = num_programs()

    def count(self, name: str, amount: int | float, weight: int = 1) -> None:
        """Add an amount and its weight to a metric."""
        with self._lock:
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += amount
            sums[1] += weight

    def count_output(self, output: DecodeOutput, num_steps: int) -> int:
        """Count the output of a dispatch of `num_steps` decode steps; return its tokens."""
        num_tokens = num_samples = int(output.counts.sum())
        self.count("tokens", num_tokens)
        self.count("dispatches", 1)
        if output.drafts is not None:
            num_samples, num_drafts = (int(each.sum()) for each in output.drafts)
            self.count("draft_tokens", num_drafts)
            self.count("accepted_draft_tokens", num_tokens - num_samples)
            if num_drafts:
                self.count("draft_acceptance", num_tokens - num_samples, num_drafts)
        self.count("occupancy", num_samples, num_steps * len(output.counts))
        return num_tokens

    def event(self, name: str, start_s: float, end_s: float, **args: int | float) -> None:
        """Report an event to the listener."""
        if self._on_event is not None:
            self._on_event(name, start_s, end_s, args)

    def collect(self) -> dict[str, tuple[float, float]]:
        """Return sum and weight of every metric since the last call.

        The quotient of the two is the mean or the rate.

        tokens, dispatches, swaps, requests, prefill_tokens, recompute_tokens, preemptions,
        draft_tokens, accepted_draft_tokens, compilations: counts (weight 1).
        kv_used: share of the KV cache's pages in use, by dispatch.
        tokens_per_s: over the time since the last call.
        occupancy: share of slot-steps that sampled a token.
        draft_acceptance: share of verified drafts that were accepted.
        host_gap_us: host time between two dispatches, in which the device waits; 0 if the next one
        was enqueued before.
        swap_stall_s: by swap.
        wait_s: time without a request to work on.
        """
        with self._lock:
            sums, self._sums = self._sums, {}
            now = time.perf_counter()
            elapsed_s, self._since_s = now - self._since_s, now
            programs = self._num_programs()
            compiled, self._programs_before = programs - self._programs_before, programs
        totals = {name: (total, weight) for name, (total, weight) in sums.items()}
        totals |= {name: (totals.get(name, (0.0, 0.0))[0], 1.0) for name in TOTALS}
        rates = {
            "tokens_per_s": (totals["tokens"][0], elapsed_s),
            "compilations": (float(compiled), 1.0),
        }
        return totals | rates
