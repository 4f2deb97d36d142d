"""The gate: how far generation may run ahead of training (AReaL, arXiv:2505.24298, equation 3)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


class Gate:
    """Lets a group start only while `accepted + running < (max_staleness + version + 1) *
    groups_per_batch` and `running < max_running`.

    Equation 3, `floor((N - 1) / B) <= version + max_staleness`, is the same rule said of the N-th
    group. With max_staleness=0 each version trains on groups started under that version only; None
    lifts the rule. Tasks of one kind may have another max_staleness than all others; nothing
    overtakes a task that has to wait. One asyncio thread counts and waits, so counting needs no
    lock.
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
        """Args: accepted: groups finished and not rejected so far; None: one batch for every
        version there was. A resumed run adds to that what its buffer holds. of_kind: max_staleness
        of kinds of tasks that have their own."""
        self.max_staleness, self._of_kind = max_staleness, dict(of_kind or {})
        bounds = (max_staleness, *self._of_kind.values())
        if (
            groups_per_batch < 1
            or max_running < 1
            or any(bound is not None and bound < 0 for bound in bounds)
        ):
            raise ValueError(
                "expected rollout.groups_per_batch >= 1, rollout.max_running_groups >= 1 and "
                "rollout.max_staleness >= 0 or "
                f"none, came {groups_per_batch}, {max_running} and {', '.join(map(str, bounds))}"
            )
        self._widest = (
            None if None in bounds else max(bound for bound in bounds if bound is not None)
        )
        self.groups_per_batch = groups_per_batch
        self.max_running = max_running
        self.accepted = version * groups_per_batch if accepted is None else accepted
        self.running = 0
        self.rejected = 0
        self._version = version
        # Set at every change of the counts, and cleared by who waits for another one. The
        # controller's feeder waits for it, without a deadline of its own, for a closed gate is no
        # fault: the trainer's wait for a batch has the deadline, and leaving `run_rollouts` cancels
        # the feeder.
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The version that trains. Raising it by one opens groups_per_batch places."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version < self._version:
            raise ValueError(
                f"expected a version of at least {self._version}, came {version}: versions "
                "only "
                "grow"
            )
        self._version = version
        self._changed.set()

    def capacity(self, kind: str | None = None) -> int:
        """How many groups may start now, of a kind of tasks or of the kind that may start soonest;
        never below 0."""
        places = self.max_running - self.running
        bound = self._widest if kind is None else self._bound(kind)
        if bound is not None:
            allowed = (bound + self._version + 1) * self.groups_per_batch
            places = min(places, allowed - self.accepted - self.running)
        return max(0, places)

    async def wait_open(self, kind: str | None = None) -> None:
        """Wait until a group of that kind may start, or of some kind. Call `start` before the next
        await: another waiter may take the place."""
        while not self.capacity(kind):
            self._changed.clear()
            await self._changed.wait()

    def start(self, kind: str | None = None) -> int:
        """Take a place; returns the oldest version whose tokens will not be too old when the group
        is trained on.

        The N-th group trains version `(N - 1) // groups_per_batch`, if none overtakes another."""
        if not self.capacity(kind):
            raise RuntimeError(f"no group may start now: {self}; await wait_open() first")
        trains = (self.accepted + self.running) // self.groups_per_batch
        self.running += 1
        bound = self._widest if kind is None else self._bound(kind)
        return 0 if bound is None else max(0, trains - bound)

    def _bound(self, kind: str) -> int | None:
        return self._of_kind.get(kind, self.max_staleness)

    def accept(self) -> None:
        """A running group is finished and will be trained on."""
        self._end()
        self.accepted += 1
        self._changed.set()

    def reject(self) -> None:
        """A running group is given up; another may start in its place."""
        self._end()
        self.rejected += 1
        self._changed.set()

    def _end(self) -> None:
        if not self.running:
            raise RuntimeError(f"no group is running that could end: {self}")
        self.running -= 1

    def __repr__(self) -> str:
        of_kinds = "".join(
            f", {_in_words(bound)} of kind {kind}" for kind, bound in self._of_kind.items()
        )
        return (
            f"gate at version {self._version} (max_staleness "
            f"{_in_words(self.max_staleness)}{of_kinds}, "
            f"{self.groups_per_batch} groups per batch): "
            f"{self.running} of at most {self.max_running} running, {self.accepted} accepted, "
            f"{self.rejected} rejected, "
            f"{self.capacity()} may start"
        )


def _in_words(max_staleness: int | None) -> str:
    return "unbounded" if max_staleness is None else str(max_staleness)
