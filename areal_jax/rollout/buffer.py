"""The rollout buffer: holds finished groups until the trainer takes them, oldest first."""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import Callable, Iterable

from areal_jax.records import Group


class TasksExhausted(RuntimeError):
    """The task stream has ended, and fewer groups than a batch remain."""


class Buffer:
    """Finished groups, ordered by the start of the group."""

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[], str] = lambda: "",
        groups: Iterable[Group] = (),
    ) -> None:
        """Create a buffer.

        Args:
            timeout_s: limit on the wait for one batch, in seconds.
            describe: state to add to the error of a timeout, such as the gate's.
            groups: buffered groups of a resumed run.
        """
        self.timeout_s = timeout_s
        self.describe = describe
        self.waited_s = 0.0
        """Total wait of `take`, in seconds of the event loop's clock."""
        # A heap by group id. The controller puts, the trainer takes, both in the asyncio thread, so
        # that checking and popping are atomic. It ends with the run. The gate bounds its length.
        self._groups: list[tuple[int, Group]] = []
        self._ids: set[int] = set()
        self._failure: BaseException | None = None
        self._ended = False
        # Set by whatever may end a wait: enough groups, a failure, the end of the tasks. Each
        # waiter clears it before it waits.
        self._changed = asyncio.Event()
        self._num_wanted = sys.maxsize
        """Smallest batch that a waiter waits for: a put below it does not wake the waiter."""
        for group in groups:
            self.put(group)

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Add a finished group.

        Raises:
            ValueError: a group of this id was put before. Each group is trained on once.
        """
        if group.id in self._ids:
            raise ValueError(f"expected each group once, found group {group.id} a second time")
        self._ids.add(group.id)
        heapq.heappush(self._groups, (group.id, group))
        if len(self) >= self._num_wanted:
            self._num_wanted = sys.maxsize  # those who still wait set it again
            self._changed.set()

    async def take(self, n: int, version: int) -> list[Group]:
        """Wait for `n` groups to train version `version` on, oldest first. Each is returned once.

        Raises:
            TimeoutError: the groups were not finished within `timeout_s`.
            TasksExhausted: the tasks ended before `n` groups.
            BaseException: the error passed to `fail`.
        """
        clock = asyncio.get_running_loop().time
        start_s = clock()
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                while not self._has(n):
                    self._num_wanted = min(self._num_wanted, n)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"expected {n} groups for version {version} within "
                f"rollout.batch_timeout_s={self.timeout_s:g} s, found {len(self)}; "
                f"{self.describe()}"
            ) from None
        finally:
            self.waited_s += clock() - start_s
        return [heapq.heappop(self._groups)[1] for _ in range(n)]

    def _has(self, n: int) -> bool:
        if self._failure is not None:
            raise self._failure
        if len(self) < n and self._ended:
            raise TasksExhausted(
                f"the tasks are exhausted: expected {n} groups for a batch, found {len(self)}"
            )
        return len(self) >= n

    def fail(self, error: BaseException) -> None:
        """Make waiting and future calls of `take` raise `error`. The first error is kept."""
        self._failure = self._failure or error
        self._changed.set()

    def end(self) -> None:
        """Mark the end of the tasks: no more groups will be put."""
        self._ended = True
        self._changed.set()

    def snapshot(self) -> tuple[Group, ...]:
        """Return the groups that were not taken, oldest first."""
        return tuple(group for _, group in sorted(self._groups, key=lambda entry: entry[0]))
