"""Rolling weight update: engines swap weights in turns, so that not all stop at once."""

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
"""One engine in this many may swap at a time, so that with hundreds the last one does not wait for
all others."""

_TURN_S = 10.0
"""Duration after which a turn expires, in seconds: the engine may hang."""

_BEGIN_S = 5.0
"""Maximum time from the request of a turn to the start of the swap, in seconds; later the turn
could expire during the swap.
"""

_REQUEST_AGAIN_S = 1.0
"""Interval at which an engine repeats its request for a turn, in seconds."""

Ticket: TypeAlias = float
"""Identifier of a turn: the time of its request by the engine's own clock. Tickets of one engine
increase."""


class RollingUpdate:
    """Grants turns to engines in the order of their requests; thread-safe.

    Messages may be lost, late, duplicated or out of order: an engine repeats its request until it
    has swapped, every grant of one turn has the same ticket, and the end of one turn never ends
    another.
    """

    def __init__(
        self, num_engines: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a queue without requests.

        Args:
            num_engines: Returns the current number of engines.
            clock: Returns the time in seconds.
        """
        self._num_engines, self._clock = num_engines, clock
        # Swapping engines, each with its ticket and the time of the grant; and waiting engines in
        # order of request, each with its newest ticket and its callback. Guarded by the lock.
        self._swapping: dict[int, tuple[Ticket, float]] = {}
        self._waiting: dict[int, tuple[Ticket, Callable[[Ticket], None]]] = {}
        self._lock = threading.Lock()

    @property
    def swapping(self) -> frozenset[int]:
        """Engines that have a turn."""
        with self._lock:
            return frozenset(self._swapping)

    def request_turn(self, number: int, ticket: Ticket, grant: Callable[[Ticket], None]) -> None:
        """Request a turn; a repeated request keeps its place.

        Args:
            number: Engine.
            ticket: Identifier of the turn.
            grant: Callback with the ticket when the turn begins: now, or in the thread that ends
                another engine's turn. If the engine has a turn already, that one is granted again,
                because the first grant may be lost.
        """
        with self._lock:
            granted = self._swapping.get(number)
            if granted is None:
                known, _ = self._waiting.get(number, (-math.inf, grant))
                self._waiting[number] = max(ticket, known), grant
        if granted is not None:
            grant(granted[0])
        self.grant_turns()

    def end_turn(self, number: int, ticket: Ticket) -> None:
        """End an engine's turn of this ticket and drop its older requests."""
        with self._lock:
            for turns in (self._swapping, self._waiting):
                if number in turns and turns[number][0] <= ticket:
                    del turns[number]
        self.grant_turns()

    def remove_engine(self, number: int) -> None:
        """Drop the turn and requests of an engine that left."""
        self.end_turn(number, math.inf)

    def grant_turns(self) -> None:
        """Begin as many turns as allowed; expired turns end first."""
        granted = list[tuple[Callable[[Ticket], None], Ticket]]()
        with self._lock:
            now_s = self._clock()
            self._swapping = {
                each: turn for each, turn in self._swapping.items() if now_s - turn[1] < _TURN_S
            }
            while self._waiting and len(self._swapping) < max(
                1, self._num_engines() // ENGINES_PER_TURN
            ):
                number = next(iter(self._waiting))
                ticket, grant = self._waiting.pop(number)
                granted.append((grant, ticket))
                self._swapping[number] = ticket, now_s
        # Outside of the lock: a callback may request a turn.
        for grant, ticket in granted:
            grant(ticket)


class RollingSource:
    """Weight source that returns new weights only during the engine's turn."""

    def __init__(
        self,
        source: WeightSource,
        *,
        request_turn: Callable[[Ticket, Callable[[Ticket], None]], None],
        end_turn: Callable[[Ticket], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            source: Source of the weights.
            request_turn: Requests a turn; its second argument is a thread-safe callback for the
                grant.
            end_turn: Reports that the turn of a ticket is over or not needed.
            clock: Returns the time in seconds.
        """
        self._source, self._clock = source, clock
        self._request_turn, self._end_turn = request_turn, end_turn
        self._has_turn = threading.Event()
        # The current turn, the newest request, and the newest ended ticket. Guarded by the lock:
        # the granting thread and the engine loop's thread write them.
        self._turn: Ticket | None = None
        self._requested: Ticket | None = None
        self._ended: Ticket = -math.inf
        self._lock = threading.Lock()

    def grant_turn(self, ticket: Ticket) -> None:
        """Begin a turn if the engine still waits for this ticket; else end it."""
        with self._lock:
            if self._turn is not None and ticket <= self._turn:
                return  # A repeated grant of the current turn.
            is_wanted = (
                self._requested is not None and self._ended < ticket and self._is_fresh(ticket)
            )
            if is_wanted:
                self._turn = ticket
                self._has_turn.set()
        if not is_wanted:
            self._finish(ticket)

    def complete_swap(self) -> None:
        """End the turn after the engine has swapped."""
        with self._lock:
            self._requested, turn = None, self._turn
        if turn is not None:
            self._finish(turn)

    def newest(self, after: int) -> Weights | None:
        """Return newer weights during the engine's turn, else None; request a turn if needed."""
        weights = self._source.newest(after)
        if weights is None:
            return None
        with self._lock:
            turn = self._turn
        if turn is not None and not self._is_fresh(turn):
            # The turn could expire before the end of the swap.
            self._finish(turn)
        now_s = self._clock()
        ticket: Ticket | None = None
        with self._lock:
            if self._turn is None and (
                self._requested is None or now_s - self._requested >= _REQUEST_AGAIN_S
            ):
                self._requested = ticket = max(now_s, math.nextafter(self._ended, math.inf))
        if ticket is not None:
            self._request_turn(ticket, self.grant_turn)
        return weights if self._has_turn.is_set() else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Wait for weights, then for the engine's turn; both end after `timeout_s`."""
        deadline_s = self._clock() + timeout_s
        weights = self._source.wait(at_least, timeout_s)
        if self.newest(weights.version - 1) is None:
            self._has_turn.wait(deadline_s - self._clock())
        return weights

    def _is_fresh(self, ticket: Ticket) -> bool:
        return self._clock() - ticket < _BEGIN_S

    def _finish(self, ticket: Ticket) -> None:
        with self._lock:
            self._ended = max(self._ended, ticket)
            if self._turn is not None and self._turn <= ticket:
                self._turn = None
                self._has_turn.clear()
        self._end_turn(ticket)


def rolling_sources(sources: Sequence[WeightSource]) -> list[RollingSource]:
    """Wrap the weight sources of engines of one process so that the engines swap in turns."""
    rolling_update = RollingUpdate(lambda: len(sources))
    return [rolling_source(rolling_update, number, source) for number, source in enumerate(sources)]


def rolling_source(
    rolling_update: RollingUpdate, number: int, source: WeightSource
) -> RollingSource:
    """Wrap the weight source of an engine of this process, which swaps in its turn."""
    return RollingSource(
        source,
        request_turn=partial(rolling_update.request_turn, number),
        end_turn=partial(rolling_update.end_turn, number),
    )
