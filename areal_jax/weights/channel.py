"""What all ways of weights share: versions arrive faster than they travel, and the latest wins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Sent = TypeVar("Sent")
Arrived = TypeVar("Arrived")

Event: TypeAlias = Callable[[str, float, float, Mapping[str, int | float]], None]
"""on_event(name, start_s, end_s, args), times of time.perf_counter; called in the carrying
thread."""

_NAP_S = 1.0
_CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WeightUpdate(Generic[Sent]):
    """A version under way."""

    version: int
    content: Sent
    sent_s: float
    """time.perf_counter."""


class LatestWins(Generic[Sent, Arrived]):
    """A thread carries one version after the other to one or several places, where the newest that
    has arrived lies.

    A version that is not yet on its way when a newer one is sent is dropped."""

    def __init__(self, name: str, carry: Callable[[WeightUpdate[Sent]], None], num_places: int = 1):
        """
        Args:
            name: of the whole, for errors.
            carry: takes a version where it goes and calls `deliver` there; in the thread.
        """
        self._name, self._carry = name, carry
        # One place for the version that waits for the carrier (put by `send`, taken by the carrier)
        # and those with the newest that has arrived (put by the carrier, read by whoever wants it).
        # The condition guards them and all counts.
        self._changed = threading.Condition()
        self._waiting: WeightUpdate[Sent] | None = None
        self._newest: list[tuple[int, Arrived] | None] = [None] * num_places
        self._last_version: int | None = None
        self._last_trouble = ""
        self._is_held = False
        self._error: Exception | None = None
        self._closed = False
        self._sums: dict[str, list[float]] = {}
        # Owned by this object. Ends when `close` says so, or with the first error, which `send`,
        # `newest` and `wait` raise.
        self._carrier = threading.Thread(target=self._run, name=f"{name} carrier", daemon=True)
        self._carrier.start()

    def publish(self, version: int, make: Callable[[], Sent]) -> None:
        """Send a version. ValueError where it is not newer than the last one, and the carrier's
        error where it has died."""
        if not self.send(version, make):
            raise ValueError(
                f"version {version} was published after version {self._last_version}; versions "
                "only grow"
            )

    def send(self, version: int, make: Callable[[], Sent]) -> bool:
        """Let what `make` returns wait for the carrier; False, and nothing is done, where the
        version is not newer than the last one."""
        start = time.perf_counter()
        with self._changed:
            self._check()
            if self._last_version is not None and version <= self._last_version:
                return False
            self._last_version = version
        content = make()
        with self._changed:
            # Another thread may have sent a newer one meanwhile.
            overtaken = self._waiting is not None and self._waiting.version > version
            self.count(
                published=1,
                dropped=int(self._waiting is not None),
                publish_s=time.perf_counter() - start,
            )
            if not overtaken:
                self._waiting = WeightUpdate(version, content, start)
            self._changed.notify_all()
        return True

    def deliver(self, version: int, arrived: Arrived, place: int = 0) -> None:
        """This is now the newest at the place; for the carrier."""
        with self._changed:
            self._newest[place], self._last_trouble = (version, arrived), ""
            self._changed.notify_all()

    def fail(self, version: int, why: str) -> None:
        """A version did not arrive: whoever waits for it in vain learns why, and it may be sent
        again; for the carrier."""
        with self._changed:
            self._last_trouble = why
            if self._last_version == version:
                arrived = [-1 if newest is None else newest[0] for newest in self._newest]
                self._last_version = min(arrived) if min(arrived) >= 0 else None

    def withdraw(self, version: int) -> None:
        """A version that has arrived is of no use: it may be sent again, and is waited for."""
        with self._changed:
            if self._last_version == version and self._waiting is None:
                self._last_version = None
                self._newest = [
                    None if newest is not None and newest[0] >= version else newest
                    for newest in self._newest
                ]

    @property
    def under_way(self) -> int | None:
        """The newest version that was sent and has neither arrived everywhere nor failed."""
        with self._changed:
            last = self._last_version
            return (
                None
                if last is None or all(self._has(last, place) for place in range(len(self._newest)))
                else last
            )

    @property
    def last_failure(self) -> str:
        """Why the newest version did not arrive; empty where it did, or is under way again."""
        with self._changed:
            return "" if self.under_way is not None else self._last_trouble

    def newest(self, after: int, place: int = 0) -> Arrived | None:
        """The newest that has arrived, if its version is above `after`; never waits."""
        with self._changed:
            self._check()
            newest = self._newest[place]
            return newest[1] if newest is not None and newest[0] > after else None

    def wait(self, at_least: int, timeout_s: float, place: int = 0) -> Arrived:
        """Wait for a version of at least `at_least`. TimeoutError names the version waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._has(at_least, place), timeout_s)
            self._check()
            newest = self._newest[place]
            if newest is None or newest[0] < at_least:
                has = "none" if newest is None else f"version {newest[0]}"
                raise TimeoutError(
                    f"waited {timeout_s} s for weights of version {at_least} or newer; "
                    f"{self._name} has {has}, "
                    f"the last one published is {self._last_version}"
                    + (self._last_trouble and f"; {self._last_trouble}")
                )
            return newest[1]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Carry nothing while inside: the newest version stays what it is. What was sent last
        meanwhile follows.

        Raises RuntimeError where it is held already."""
        with self._changed:
            if self._is_held:
                raise RuntimeError(f"{self._name} is held already: one evaluation at a time")
            self._is_held = True
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def count(self, **amounts: int | float) -> None:
        """Add to the measures of these names, each with weight 1."""
        with self._changed:
            for name, amount in amounts.items():
                sums = self._sums.setdefault(name, [0.0, 0.0])
                sums[0] += amount
                sums[1] += 1

    def metrics(self, *counts: str) -> dict[str, tuple[float, float]]:
        """Sum and weight of each measure since the last call; of `counts` the weight is 1, and they
        are always there."""
        with self._changed:
            sums, self._sums = self._sums, {}
        counted = {name: (sums.get(name, [0.0])[0], 1.0) for name in counts}
        return {name: (total, weight) for name, (total, weight) in sums.items()} | counted

    def close(self) -> None:
        """End the carrier after the version under way. Whoever waits gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._carrier.join(_CLOSE_TIMEOUT_S)
        if self._carrier.is_alive():
            raise TimeoutError(
                f"{self._name}'s carrier did not end within {_CLOSE_TIMEOUT_S} s of close()"
            )

    def _run(self) -> None:
        # The thread's outermost door: whatever ends it must reach whoever sends and whoever waits.
        try:
            while (update := self._take()) is not None:
                self._carry(update)
                # What has been carried is not kept until the next one comes.
                del update
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self) -> WeightUpdate[Sent] | None:
        """The version to carry next; None at the end."""
        with self._changed:
            while not self._closed:
                if self._waiting is not None and not self._is_held:
                    update, self._waiting = self._waiting, None
                    return update
                self._changed.wait(_NAP_S)
        return None

    def _over(self) -> bool:
        return self._closed or self._error is not None

    def _has(self, version: int, place: int) -> bool:
        newest = self._newest[place]
        return newest is not None and newest[0] >= version

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"{self._name} ended with {type(self._error).__name__}: {self._error}"
            ) from self._error
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
