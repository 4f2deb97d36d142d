"""Weight sync: latest-wins delivery of versions, which all weight channels share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Sent = TypeVar("Sent")
Arrived = TypeVar("Arrived")

OnEvent: TypeAlias = Callable[[str, float, float, Mapping[str, int | float]], None]
"""on_event(name, start_s, end_s, args), times of time.perf_counter; called in the delivery thread.
"""

_WAKE_UP_S = 1.0
_CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WeightUpdate(Generic[Sent]):
    """A version in flight."""

    version: int
    content: Sent
    sent_s: float
    """Time of sending, by time.perf_counter."""


class LatestWins(Generic[Sent, Arrived]):
    """A thread delivers one version after the other to one or several destinations.

    A waiting version is dropped when a newer one is sent. Each destination keeps the newest
    delivered version.

    It has more than 200 lines because senders, waiters and the thread share one lock.
    """

    def __init__(
        self, name: str, transfer: Callable[[WeightUpdate[Sent]], None], num_destinations: int = 1
    ):
        """
        Args:
            name: Name of the channel in error messages.
            transfer: Transfers a version and calls `deliver` for each destination; runs in the
                thread.
            num_destinations: Number of destinations.
        """
        self._name, self._transfer = name, transfer
        # One waiting version (`send` puts it, the thread takes it) and the newest version of each
        # destination (the thread puts it, any thread reads it). The condition guards them and all
        # counts.
        self._changed = threading.Condition()
        self._waiting: WeightUpdate[Sent] | None = None
        self._newest: dict[int, tuple[int, Arrived] | None] = dict.fromkeys(range(num_destinations))
        self._last_version: int | None = None
        self._last_error_text = ""
        self._is_paused = False
        self._error: Exception | None = None
        self._closed = False
        self._sums: dict[str, list[float]] = {}
        # Owned by this object. Ends with `close` or with the first error, which `send`, `newest`
        # and `wait` raise.
        self._thread = threading.Thread(target=self._run, name=f"{name} delivery", daemon=True)
        self._thread.start()

    def publish(self, version: int, make: Callable[[], Sent]) -> None:
        """Send a version.

        Raises:
            ValueError: The version is not newer than the last one.
            RuntimeError: The delivery thread died; the cause is its error.
        """
        if not self.send(version, make):
            raise ValueError(
                f"expected a version above {self._last_version}, found version {version}: versions "
                "must increase"
            )

    def send(self, version: int, make: Callable[[], Sent]) -> bool:
        """Queue the return value of `make` for delivery.

        Returns:
            False, without any effect, if the version is not newer than the last one.
        """
        start = time.perf_counter()
        with self._changed:
            self._check()
            if self._last_version is not None and version <= self._last_version:
                return False
            self._last_version = version
        content = make()
        with self._changed:
            # Another thread may have sent a newer version meanwhile.
            is_outdated = self._waiting is not None and self._waiting.version > version
            self.count(
                published=1,
                dropped=int(self._waiting is not None),
                publish_s=time.perf_counter() - start,
            )
            if not is_outdated:
                self._waiting = WeightUpdate(version, content, start)
            self._changed.notify_all()
        return True

    def deliver(self, version: int, arrived: Arrived, destination: int = 0) -> None:
        """Store the newest version of a destination; called by `transfer`."""
        with self._changed:
            if destination in self._newest:  # It may have been removed during the transfer.
                self._newest[destination], self._last_error_text = (version, arrived), ""
                self._changed.notify_all()

    def add_destination(self, destination: int) -> None:
        """Add a destination, which gets the versions sent from now on."""
        with self._changed:
            self._newest[destination] = None

    def remove_destination(self, destination: int) -> None:
        """Remove a destination with its newest version."""
        with self._changed:
            del self._newest[destination]

    def fail(self, version: int, why: str) -> None:
        """Record why a version failed, so that it may be sent again; called by `transfer`."""
        with self._changed:
            self._last_error_text = why
            if self._last_version == version:
                arrived = [-1 if newest is None else newest[0] for newest in self._newest.values()]
                self._last_version = min(arrived) if min(arrived) >= 0 else None

    def withdraw(self, version: int) -> None:
        """Discard a delivered version, so that it may be sent again."""
        with self._changed:
            if self._last_version == version and self._waiting is None:
                self._last_version = None
                self._newest = {
                    destination: None if newest is not None and newest[0] >= version else newest
                    for destination, newest in self._newest.items()
                }

    @property
    def in_flight(self) -> int | None:
        """Newest version that is sent, and neither delivered everywhere nor failed; or None."""
        with self._changed:
            last = self._last_version
            return (
                None
                if last is None or all(self._has(last, destination) for destination in self._newest)
                else last
            )

    @property
    def last_failure(self) -> str:
        """Why the newest version failed; empty if it was delivered or is in flight again."""
        with self._changed:
            return "" if self.in_flight is not None else self._last_error_text

    def newest(self, after: int, destination: int = 0) -> Arrived | None:
        """Return the newest delivered content if its version is above `after`; never waits."""
        with self._changed:
            self._check()
            newest = self._newest[destination]
            return newest[1] if newest is not None and newest[0] > after else None

    def wait(self, at_least: int, timeout_s: float, destination: int = 0) -> Arrived:
        """Wait for a version of at least `at_least`.

        Raises:
            TimeoutError: None was delivered within `timeout_s`.
            RuntimeError: The channel is closed or its thread died.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended() or self._has(at_least, destination), timeout_s
            )
            self._check()
            newest = self._newest[destination]
            if newest is None or newest[0] < at_least:
                has = "none" if newest is None else f"version {newest[0]}"
                raise TimeoutError(
                    f"waited {timeout_s} s for weights of version {at_least} or newer; "
                    f"{self._name} has {has}, the last one published is {self._last_version}"
                    + (self._last_error_text and f"; {self._last_error_text}")
                )
            return newest[1]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Deliver nothing while inside; the last version sent meanwhile follows.

        Raises:
            RuntimeError: The channel is paused already.
        """
        with self._changed:
            if self._is_paused:
                raise RuntimeError(f"{self._name} is paused already: one evaluation at a time")
            self._is_paused = True
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def count(self, **amounts: int | float) -> None:
        """Add amounts to metrics, each with weight 1."""
        with self._changed:
            for name, amount in amounts.items():
                sums = self._sums.setdefault(name, [0.0, 0.0])
                sums[0] += amount
                sums[1] += 1

    def metrics(self, *counts: str) -> dict[str, tuple[float, float]]:
        """Return and reset the sum and weight of each metric.

        Args:
            counts: Metrics that are always present, with weight 1.
        """
        with self._changed:
            sums, self._sums = self._sums, {}
        counted = {name: (sums.get(name, [0.0])[0], 1.0) for name in counts}
        return {name: (total, weight) for name, (total, weight) in sums.items()} | counted

    def close(self) -> None:
        """End the thread after the version in flight; waiting callers get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"{self._name}'s thread did not end within {_CLOSE_TIMEOUT_S} s of close()"
            )

    def _run(self) -> None:
        try:
            while (update := self._next_update()) is not None:
                self._transfer(update)
                # Frees its memory before the next one arrives.
                del update
        except Exception as error:  # of any class: `_check` raises it in senders and waiters
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_update(self) -> WeightUpdate[Sent] | None:
        """Wait for the next version to deliver; None at the end."""
        with self._changed:
            while not self._closed:
                if self._waiting is not None and not self._is_paused:
                    update, self._waiting = self._waiting, None
                    return update
                self._changed.wait(_WAKE_UP_S)
        return None

    def _has_ended(self) -> bool:
        return self._closed or self._error is not None

    def _has(self, version: int, destination: int) -> bool:
        newest = self._newest[destination]
        return newest is not None and newest[0] >= version

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"{self._name} ended with {type(self._error).__name__}: {self._error}"
            ) from self._error
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
