"""Several engines take new weights one after another, so that not all stop at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from areal_jax.protocols import WeightSource
from areal_jax.records import Weights

ENGINES_PER_TURN = 8
"""Of so many engines one may swap at a time: with hundreds, the last should not wait for all
others."""

_TURN_S = 10.0
"""An engine that has not swapped by then has lost its turn: it may hang."""

_BEGIN_S = 5.0
"""A swap begins at most this long after the engine asked for the turn, which then lasts until it
may have been given away."""

_ASK_AGAIN_S = 1.0

Ticket: TypeAlias = float
"""Name of a turn: when the engine asked for it, by the engine's own clock. Tickets of one engine
only grow."""


class RollingUpdate:
    """Whose turn it is: that of who has asked first. From any thread.

    Any message may be lost, late, doubled or out of order: an engine repeats its question until it
    has swapped, every answer to it is the same until the turn is over, and the end of one turn
    never ends another."""

    def __init__(
        self, num_engines: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args: num_engines: how many there are now. clock: seconds."""
        self._num_engines, self._clock = num_engines, clock
        # Engines that swap, each with its ticket and when the turn was granted; and those that want
        # to, in the order of asking, each with its newest ticket and whom to tell. Guarded by the
        # lock.
        self._swapping: dict[int, tuple[Ticket, float]] = {}
        self._asking: dict[int, tuple[Ticket, Callable[[Ticket], None]]] = {}
        self._lock = threading.Lock()

    @property
    def swapping(self) -> frozenset[int]:
        """Engines whose turn it is."""
        with self._lock:
            return frozenset(self._swapping)

    def ask(self, number: int, ticket: Ticket, give: Callable[[Ticket], None]) -> None:
        """Let `give` be called with the ticket when the engine's turn begins: now, or in the thread
        of whoever ends another's.

        An engine that asks again keeps its place. Where it is its turn already it is given that
        turn again, for the first answer may be lost."""
        with self._lock:
            granted = self._swapping.get(number)
            if granted is None:
                known, _ = self._asking.get(number, (-math.inf, give))
                self._asking[number] = max(ticket, known), give
        if granted is not None:
            give(granted[0])
        self.grant()

    def over(self, number: int, ticket: Ticket) -> None:
        """End an engine's turn of that ticket, and its older wishes for one."""
        with self._lock:
            for those in (self._swapping, self._asking):
                if number in those and those[number][0] <= ticket:
                    del those[number]
        self.grant()

    def leave(self, number: int) -> None:
        """There is no such engine any more."""
        self.over(number, math.inf)

    def grant(self) -> None:
        """Begin the turns there is room for, those of engines that have lost theirs included."""
        given = list[tuple[Callable[[Ticket], None], Ticket]]()
        with self._lock:
            now_s = self._clock()
            self._swapping = {
                each: turn for each, turn in self._swapping.items() if now_s - turn[1] < _TURN_S
            }
            while self._asking and len(self._swapping) < max(
                1, self._num_engines() // ENGINES_PER_TURN
            ):
                number = next(iter(self._asking))
                ticket, give = self._asking.pop(number)
                given.append((give, ticket))
                self._swapping[number] = ticket, now_s
        # Whoever is told may ask in turn.
        for give, ticket in given:
            give(ticket)


class RollingSource:
    """A source of weights whose engine takes them when it is its turn."""

    def __init__(
        self,
        source: WeightSource,
        *,
        ask: Callable[[Ticket, Callable[[Ticket], None]], None],
        over: Callable[[Ticket], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            ask: asks for a turn; what it is given is called when the turn begins, from any thread.
            over: says that the turn of a ticket is over, or not wanted.
            clock: seconds.
        """
        self._source, self._ask, self._over, self._clock = source, ask, over, clock
        self._has_turn = threading.Event()
        # The turn that the engine has; its newest wish for one; and the newest ticket that is of no
        # use any more. Guarded by the lock: whoever gives turns writes them, and the engine loop's
        # thread.
        self._turn: Ticket | None = None
        self._asked: Ticket | None = None
        self._ended: Ticket = -math.inf
        self._lock = threading.Lock()

    def give(self, ticket: Ticket) -> None:
        """It is the engine's turn, if it still wants this one."""
        with self._lock:
            if self._turn is not None and ticket <= self._turn:
                return  # It has this turn, and may be swapping.
            is_wanted = self._asked is not None and self._ended < ticket and self._is_fresh(ticket)
            if is_wanted:
                self._turn = ticket
                self._has_turn.set()
        if not is_wanted:
            self._end(ticket)

    def swapped(self) -> None:
        """The engine has taken what it was given: the turn is over."""
        with self._lock:
            self._asked, turn = None, self._turn
        if turn is not None:
            self._end(turn)

    def newest(self, after: int) -> Weights | None:
        """What the source has, once it is the engine's turn."""
        weights = self._source.newest(after)
        if weights is None:
            return None
        with self._lock:
            turn = self._turn
        if turn is not None and not self._is_fresh(turn):
            # By the end of the swap the turn might be another engine's.
            self._end(turn)
        now_s = self._clock()
        ticket: Ticket | None = None
        with self._lock:
            if self._turn is None and (self._asked is None or now_s - self._asked >= _ASK_AGAIN_S):
                self._asked = ticket = max(now_s, math.nextafter(self._ended, math.inf))
        if ticket is not None:
            self._ask(ticket, self.give)
        return weights if self._has_turn.is_set() else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """What the source has. It returns when it is the engine's turn, too, but after `timeout_s`
        at the latest."""
        deadline_s = self._clock() + timeout_s
        weights = self._source.wait(at_least, timeout_s)
        if self.newest(weights.version - 1) is None:
            self._has_turn.wait(deadline_s - self._clock())
        return weights

    def _is_fresh(self, ticket: Ticket) -> bool:
        return self._clock() - ticket < _BEGIN_S

    def _end(self, ticket: Ticket) -> None:
        with self._lock:
            self._ended = max(self._ended, ticket)
            if self._turn is not None and self._turn <= ticket:
                self._turn = None
                self._has_turn.clear()
        self._over(ticket)


def rolling_sources(sources: Sequence[WeightSource]) -> list[RollingSource]:
    """The sources of engines of one process, by which they swap in turns."""
    turns = RollingUpdate(lambda: len(sources))
    return [
        RollingSource(source, ask=partial(turns.ask, number), over=partial(turns.over, number))
        for number, source in enumerate(sources)
    ]
