"""The staleness gate: limits how far generation runs ahead of training.

AReaL, arXiv:2505.24298, equation 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


class Gate:
    """Admits groups under the staleness bound and the concurrency limit.

    A group may start while `accepted + running < (max_staleness + version + 1) * groups_per_batch`
    and `running < max_running`. This is equation 3, `floor((N - 1) / B) <= version +
    max_staleness`, for the N-th group. With max_staleness=0 each version trains on groups started
    under that version only; None removes the bound. A kind of tasks may have its own
    max_staleness; no task overtakes one that waits. All calls are in one asyncio thread, so
    counting needs no lock.
    """

    def __init__(
        self,
        max_staleness: int | None,
        groups_per_batch: int,
        max_running: int,
        version: int = 0,
        accepted: int | None = None,
        of_kind: Mapping[str, int | None] | None = None,
    ) -> None:
        """Create a gate.

        Args:
            max_staleness: bound in versions; None: unbounded.
            groups_per_batch: groups per trainer step.
            max_running: maximum number of concurrent groups.
            version: the version that trains next.
            accepted: groups finished and not rejected so far; None: one batch per version. A
                resumed run adds its buffered groups.
            of_kind: max_staleness of the kinds of tasks that have their own.

        Raises:
            ValueError: a bound is out of range.
        """
        self.max_staleness, self._of_kind = max_staleness, dict(of_kind or {})
        bounds = (max_staleness, *self._of_kind.values())
        if (
            groups_per_batch < 1
            or max_running < 1
            or any(bound is not None and bound < 0 for bound in bounds)
        ):
            raise ValueError(
                "expected rollout.groups_per_batch >= 1, rollout.max_running_groups >= 1 and "
                f"rollout.max_staleness >= 0 or none, found {groups_per_batch}, {max_running} and "
                f"{', '.join(map(str, bounds))}"
            )
        self._widest = (
            None if None in bounds else max(bound for bound in bounds if bound is not None)
        )
        self._limit: int | None = None
        self.groups_per_batch = groups_per_batch
        self.max_running = max_running
        self.accepted = version * groups_per_batch if accepted is None else accepted
        self.running = 0
        self.rejected = 0
        self._version = version
        # Set at every change of the counts; the waiter clears it. The controller's feeder waits for
        # it without a deadline, as a closed gate is no fault: the trainer's wait for a batch has
        # the deadline, and leaving `run_rollouts` cancels the feeder.
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The version that trains next. Each increment admits groups_per_batch more groups."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version < self._version:
            raise ValueError(
                f"expected a version of at least {self._version}, found {version}; versions "
                "never decrease"
            )
        self._version = version
        self._changed.set()

    @property
    def limit(self) -> int | None:
        """Limit on the bounds of all kinds, which may change during the run; None: no limit."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._limit = limit
        self._changed.set()

    def capacity(self, kind: str | None = None) -> int:
        """Return how many groups may start now; at least 0.

        Args:
            kind: kind of their tasks; None: the kind with the largest bound.
        """
        capacity = self.max_running - self.running
        bound = self._bound(kind)
        if bound is not None:
            allowed = (bound + self._version + 1) * self.groups_per_batch
            capacity = min(capacity, allowed - self.accepted - self.running)
        return max(0, capacity)

    async def wait_open(self, kind: str | None = None) -> None:
        """Wait until a group of this kind (None: of any kind) may start.

        Call `start` before the next await: another waiter may start a group otherwise.
        """
        while not self.capacity(kind):
            self._changed.clear()
            await self._changed.wait()

    def start(self, kind: str | None = None) -> int:
        """Count one more running group.

        The N-th group trains version `(N - 1) // groups_per_batch`, if none overtakes another.

        Returns:
            The oldest version whose tokens are within the bound when the group is trained on.

        Raises:
            RuntimeError: the gate is closed.
        """
        if not self.capacity(kind):
            raise RuntimeError(
                f"expected an open gate, found none may start: {self}; await wait_open() first"
            )
        trained_version = (self.accepted + self.running) // self.groups_per_batch
        self.running += 1
        bound = self._bound(kind)
        return 0 if bound is None else max(0, trained_version - bound)

    def _bound(self, kind: str | None) -> int | None:
        bound = self._widest if kind is None else self._of_kind.get(kind, self.max_staleness)
        return min((each for each in (bound, self._limit) if each is not None), default=None)

    def accept(self) -> None:
        """Count a running group as finished; it will be trained on."""
        self._end()
        self.accepted += 1
        self._changed.set()

    def reject(self) -> None:
        """Count a running group as rejected; another may start instead."""
        self._end()
        self.rejected += 1
        self._changed.set()

    def _end(self) -> None:
        if not self.running:
            raise RuntimeError(f"expected a running group, found none: {self}")
        self.running -= 1

    def __repr__(self) -> str:
        of_kinds = "".join(
            f", {_format_bound(bound)} of kind {kind}" for kind, bound in self._of_kind.items()
        )
        limit = "" if self._limit is None else f", limited to {self._limit}"
        return (
            f"gate at version {self._version} (max_staleness "
            f"{_format_bound(self.max_staleness)}{of_kinds}{limit}, {self.groups_per_batch} groups "
            f"per batch): {self.running} of at most {self.max_running} running, {self.accepted} "
            f"accepted, {self.rejected} rejected, {self.capacity()} may start"
        )


def _format_bound(max_staleness: int | None) -> str:
    return "unbounded" if max_staleness is None else str(max_staleness)
