"""Several engines take new weights one after another, so that not all stop at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_jax.records import Weights, WeightSource

ENGINES_PER_TURN = 8
"""Of so many engines one may swap at a time: with hundreds, the last should not wait for all others."""

_TURN_S = 10.0
"""An engine that has not come back by then has lost its turn: it may have died."""

_ASK_AGAIN_S = 0.2


class Turns:
    """Whose turn it is. From any thread."""

    def __init__(self) -> None:
        # Engines that swap, and since when (time.monotonic). Guarded by the condition, which is told of every turn that ends.
        self._swapping: dict[int, float] = {}
        self._ended = threading.Condition()

    def take(self, number: int, num_engines: int) -> bool:
        """Begin an engine's turn, unless others have theirs, or it has its own."""
        with self._ended:
            if not self._has_room(num_engines) or number in self._swapping:
                return False
            self._swapping[number] = time.monotonic()
            return True

    def wait(self, num_engines: int, timeout_s: float) -> None:
        """Sleep until an engine's turn may begin, or the time is over."""
        with self._ended:
            self._ended.wait_for(lambda: self._has_room(num_engines), timeout_s)

    def over(self, number: int) -> None:
        """End an engine's turn, if it has one."""
        with self._ended:
            if self._swapping.pop(number, None) is not None:
                self._ended.notify_all()

    def _has_room(self, num_engines: int) -> bool:
        now_s = time.monotonic()
        self._swapping = {each: since_s for each, since_s in self._swapping.items() if now_s - since_s < _TURN_S}
        return len(self._swapping) < max(1, num_engines // ENGINES_PER_TURN)


class Rolling:
    """Lets engines of one process take newer weights from their sources in turns.

    An engine's turn begins when `newest` gives it weights, and ends when `swapped` says so, or when it asks again. An engine
    that can do nothing without a version sleeps in `wait` until it has come, and its turn may begin."""

    def __init__(self, sources: Sequence[WeightSource]):
        """Args: sources: of each engine."""
        self._sources, self._turns = sources, Turns()

    def of(self, number: int) -> WeightSource:
        """What the engine of that number, from 0, asks instead of its source."""
        return _Turn(self, number)

    def newest(self, number: int, after: int) -> Weights | None:
        """What the engine's source has, or None while others swap."""
        self._turns.over(number)
        weights = self._sources[number].newest(after)
        return weights if weights is not None and self._turns.take(number, len(self._sources)) else None

    def swapped(self, number: int) -> None:
        """The engine's turn is over."""
        self._turns.over(number)

    def wait(self, number: int, at_least: int, timeout_s: float) -> Weights:
        """What the engine's source has. It returns when others have swapped, too, but after `timeout_s` at the latest."""
        deadline_s = time.monotonic() + timeout_s
        weights = self._sources[number].wait(at_least, timeout_s)
        self._turns.wait(len(self._sources), deadline_s - time.monotonic())
        return weights


@dataclass(frozen=True)
class _Turn:
    """One engine's view."""

    rolling: Rolling
    number: int

    def newest(self, after: int) -> Weights | None:
        return self.rolling.newest(self.number, after)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return self.rolling.wait(self.number, at_least, timeout_s)


class InTurn:
    """The same for an engine whose turn is given by another process: the source of its driver."""

    def __init__(self, source: WeightSource, ask: Callable[[], None]):
        """Args: ask: asks for a turn; where it is granted, `give` is called."""
        self._source, self._ask = source, ask
        self._has_turn = threading.Event()
        # When it has asked for the next turn (time.monotonic). The driver's thread writes it.
        self._asked_s: float | None = None

    def give(self) -> None:
        """It is the engine's turn, if it still wants one."""
        if self._asked_s is not None:
            self._has_turn.set()

    def swapped(self) -> None:
        """The engine's turn is over."""
        self._asked_s = None
        self._has_turn.clear()

    def newest(self, after: int) -> Weights | None:
        """What the source has, once it is the engine's turn."""
        weights = self._source.newest(after)
        if weights is None or self._has_turn.is_set():
            return weights
        now_s = time.monotonic()
        if self._asked_s is None or now_s - self._asked_s >= _ASK_AGAIN_S:
            self._asked_s = now_s
            self._ask()
        return None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """What the source has. It returns when it is the engine's turn, too, but after `timeout_s` at the latest."""
        deadline_s = time.monotonic() + timeout_s
        weights = self._source.wait(at_least, timeout_s)
        if self.newest(weights.version - 1) is None:
            self._has_turn.wait(deadline_s - time.monotonic())
        return weights
