"""Choice of the split of devices while a run runs, from the measured times of its last steps.

    device-seconds of generating a batch = rollout devices * seconds * busy * full ** FULLNESS
    device-seconds of training on it     = train devices * seconds of the trainer's step

The planner ranks splits by the slower of the two (`planner.rank_splits`). If the trainer waits,
generating takes all of the time; what it took is remembered for similar batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from areal_jax.sim.planner import rank_splits

NUM_STEPS = 2
"""Number of steps whose times are averaged."""

NUM_SKIPPED = 2
"""Number of steps after a move that are not measured: the one before it, and the transition."""

NUM_FIRST = 5
"""Number of steps at the start that are not measured: engines run ahead of the trainer first."""

MIN_GAIN = 0.08
"""Share of a step's time that a move must save. With less, splits would change with the noise of
lengths."""

MIN_WAIT = 0.05
"""Share of a step that the trainer waits from which generation is the bottleneck."""

FULLNESS = 0.75
"""Exponent of the share of slots in use: 1 if a decode step takes as long for few sequences as for
many, 0 if its time is proportional to them. Chosen by `benchmarks/adaptive_split.py`."""

FORGOTTEN = 0.98
"""Factor of what is remembered, each time that it is read: it may have been too much."""

SIMILAR = 1.5
"""Ratio up to which batches are similar, in tokens."""


class StepTimes(NamedTuple):
    """Measured times of one step."""

    train_s: float
    """Work of the trainer."""
    wait_s: float
    """Wait of the trainer for its batch."""
    elapsed_s: float
    """Time from the end of the step before to the end of this one."""
    busy: float
    """Share of this time in which engines had sequences."""
    full: float
    """Share of their slots, or of their KV caches, in use in that time."""
    tokens: float
    """Tokens of the batch."""


@dataclass(frozen=True)
class Move:
    """A split that is forecast to be faster, and why."""

    rollout: int
    """Number of devices that decode."""
    step_s: float
    """Measured."""
    forecast_s: float
    """Of a step after the move."""
    generate_s: float
    """Device-seconds of generating a batch."""
    train_s: float
    """Device-seconds of training on it."""


def are_similar(tokens: Sequence[float]) -> bool:
    """Return whether no shift of the workload lies between batches of so many tokens."""
    return max(tokens) <= SIMILAR * min(tokens)


class SplitChooser:
    """Chooses among the possible splits of devices."""

    def __init__(self, num_devices: int, splits: Sequence[int], rollout: int):
        """
        Args:
            num_devices: Number of devices.
            splits: Possible numbers of rollout devices.
            rollout: The present one.
        """
        self.num_devices, self.splits, self.rollout = num_devices, set(splits), rollout
        self._times = deque[StepTimes](maxlen=NUM_STEPS)
        self._num_skipped = NUM_FIRST
        self._num_visits = Counter((rollout,))
        # Tokens and device-seconds of a batch while generation was the bottleneck.
        self._bound = 0.0, 0.0

    def observe(self, times: StepTimes) -> None:
        """Add the times of a step."""
        if self._num_skipped:
            self._num_skipped -= 1
        else:
            self._times.append(times)

    def choose(self, steps_left: int, cost_s: Callable[[int], float]) -> Move | None:
        """Return the fastest split, if a move to it pays; None: stay.

        Args:
            steps_left: Number of steps that it would save time in.
            cost_s: Returns the seconds that a move to a split takes. Each return to a split must
                pay twice as much as the one before, so that moves end.
        """
        if len(self._times) < NUM_STEPS or not are_similar([each.tokens for each in self._times]):
            return None
        mean = StepTimes(*map(fmean, zip(*self._times, strict=True)))
        step_s, tokens = mean.train_s + mean.wait_s, mean.tokens
        generate_s = self.rollout * mean.elapsed_s
        if mean.wait_s > MIN_WAIT * step_s:
            self._bound = tokens, generate_s
        else:
            generate_s *= mean.busy * mean.full**FULLNESS
            known, known_s = self._bound
            if are_similar((known, tokens)):
                generate_s = max(generate_s, known_s * tokens / known)
            self._bound = known, known_s * FORGOTTEN
        train_s = mean.train_s * (self.num_devices - self.rollout)

        def slower_s(rollout: int) -> float:
            return max(generate_s / rollout, train_s / (self.num_devices - rollout))

        ranked = rank_splits(self.num_devices, generate_s, train_s)
        best = next(rollout for rollout in ranked if rollout in self.splits)
        forecast_s = step_s * slower_s(best) / slower_s(self.rollout)
        cost = cost_s(best) * 2 ** self._num_visits[best]
        if forecast_s > (1 - MIN_GAIN) * step_s or (step_s - forecast_s) * steps_left <= cost:
            return None
        return Move(best, step_s, forecast_s, generate_s, train_s)

    def moved(self, rollout: int) -> None:
        """Measure another split from now on."""
        self.rollout, self._num_skipped = rollout, NUM_SKIPPED
        self._num_visits[rollout] += 1
        self._times.clear()
