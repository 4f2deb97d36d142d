"""Several engines take new weights one after another, so that not all stop at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from areal_jax.records import Weights, WeightSource

ENGINES_PER_TURN = 8
"""Of so many engines one may swap at a time: with hundreds, the last should not wait for all others."""

_TURN_S = 10.0
"""An engine that has not swapped by then has lost its turn: it may hang."""

_ASK_AGAIN_S = 1.0


class Turns:
    """Whose turn it is: that of who has asked first. From any thread."""

    def __init__(self, num_engines: Callable[[], int]) -> None:
        """Args: num_engines: how many there are now."""
        self._num_engines = num_engines
        # Engines that swap, and since when (time.monotonic); and those that want to, in the order of asking, each with whom to
        # tell. Guarded by the lock.
        self._swapping: dict[int, float] = {}
        self._asking: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def ask(self, number: int, give: Callable[[], None]) -> None:
        """Let `give` be called once, when the engine's turn begins: now, or in the thread of whoever ends another's.

        To ask again changes nothing, but where an engine hangs its turn is noticed to have ended."""
        with self._lock:
            if number not in self._swapping:
                self._asking.setdefault(number, give)
        self._begin()

    def over(self, number: int) -> None:
        """End an engine's turn, or its wish for one."""
        with self._lock:
            self._swapping.pop(number, None)
            self._asking.pop(number, None)
        self._begin()

    def _begin(self) -> None:
        """Begin the turns there is room for."""
        given = list[Callable[[], None]]()
        with self._lock:
            now_s = time.monotonic()
            self._swapping = {each: since_s for each, since_s in self._swapping.items() if now_s - since_s < _TURN_S}
            while self._asking and len(self._swapping) < max(1, self._num_engines() // ENGINES_PER_TURN):
                number = next(iter(self._asking))
                given.append(self._asking.pop(number))
                self._swapping[number] = now_s
        # Whoever is told may ask in turn.
        for give in given:
            give()


class InTurn:
    """A source of weights whose engine takes them when it is its turn."""

    def __init__(self, source: WeightSource, *, ask: Callable[[Callable[[], None]], None], over: Callable[[], None]):
        """
        Args:
            ask: asks for a turn; what it is given is called when the turn begins, from any thread.
            over: says that the turn is over.
        """
        self._source, self._ask, self._over = source, ask, over
        self._has_turn = threading.Event()
        # When it has asked for the next turn (time.monotonic). The driver's thread writes it.
        self._asked_s: float | None = None

    def give(self) -> None:
        """It is the engine's turn, if it still wants one."""
        if self._asked_s is None:
            self._over()
        else:
            self._has_turn.set()

    def swapped(self) -> None:
        """The engine has taken what it was given: the turn is over."""
        self._asked_s = None
        self._has_turn.clear()
        self._over()

    def newest(self, after: int) -> Weights | None:
        """What the source has, once it is the engine's turn."""
        weights = self._source.newest(after)
        if weights is None or self._has_turn.is_set():
            return weights
        now_s = time.monotonic()
        if self._asked_s is None or now_s - self._asked_s >= _ASK_AGAIN_S:
            self._asked_s = now_s
            self._ask(self.give)
        return weights if self._has_turn.is_set() else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """What the source has. It returns when it is the engine's turn, too, but after `timeout_s` at the latest."""
        deadline_s = time.monotonic() + timeout_s
        weights = self._source.wait(at_least, timeout_s)
        if self.newest(weights.version - 1) is None:
            self._has_turn.wait(deadline_s - time.monotonic())
        return weights


def in_turns(sources: Sequence[WeightSource]) -> list[InTurn]:
    """The sources of engines of one process, by which they swap in turns."""
    turns = Turns(lambda: len(sources))
    return [
        InTurn(source, ask=partial(turns.ask, number), over=partial(turns.over, number))
        for number, source in enumerate(sources)
    ]
