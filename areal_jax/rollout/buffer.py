"""The buffer: finished groups wait here until the trainer takes them, oldest first, each once."""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import Callable, Iterable

from areal_jax.records import Group


class TasksExhausted(RuntimeError):
    """The tasks have run out, and fewer groups than a batch remain: training can only end."""


class Buffer:
    """Finished groups, in the order in which they were started."""

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[], str] = lambda: "",
        groups: Iterable[Group] = (),
    ) -> None:
        """Args: timeout_s: how long one batch may take. describe: what to add when it takes longer,
        such as the state of the gate. groups: what a resumed run had in its buffer."""
        self.timeout_s = timeout_s
        self.describe = describe
        self.waited_s = 0.0
        """Time that takes have waited so far, by the event loop's clock."""
        # A heap by group id. The controller puts, the trainer's side takes, both in the asyncio
        # thread, where nothing comes between looking and popping; it ends with its run. The gate
        # bounds its length.
        self._groups: list[tuple[int, Group]] = []
        self._ids: set[int] = set()
        self._failure: BaseException | None = None
        self._ended = False
        # Set at whatever may end a wait: enough groups, a failure, the end of the tasks. Each
        # waiter clears it before it waits.
        self._changed = asyncio.Event()
        self._wanted = sys.maxsize
        """Groups that who waits for the fewest waits for: thousands are put for every take, and
        need not wake it each."""
        for group in groups:
            self.put(group)

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Add a finished group. ValueError where a group of its id was ever put before: each is
        trained on once."""
        if group.id in self._ids:
            raise ValueError(f"group {group.id} was put into the buffer before")
        self._ids.add(group.id)
        heapq.heappush(self._groups, (group.id, group))
        if len(self) >= self._wanted:
            self._wanted = sys.maxsize  # whoever waits on says again for how many
            self._changed.set()

    async def take(self, n: int, version: int) -> list[Group]:
        """Wait for `n` groups to train version `version` on; those started first come first, each
        is handed out once.

        Raises TimeoutError after timeout_s, TasksExhausted where so many will never come, and what
        `fail` was told."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                while not self._has(n):
                    self._wanted = min(self._wanted, n)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"waited rollout.batch_timeout_s={self.timeout_s:g} s for the {n} groups of "
                f"version {version}, "
                f"{len(self)} are finished; {self.describe()}"
            ) from None
        finally:
            self.waited_s += clock() - began_s
        return [heapq.heappop(self._groups)[1] for _ in range(n)]

    def _has(self, n: int) -> bool:
        if self._failure is not None:
            raise self._failure
        if len(self) < n and self._ended:
            raise TasksExhausted(
                f"the tasks have run out: {len(self)} finished groups remain, a batch takes {n}"
            )
        return len(self) >= n

    def fail(self, error: BaseException) -> None:
        """Let waiting and future takes raise `error`: no more groups will come, or none that may be
        trusted. First one wins."""
        self._failure = self._failure or error
        self._changed.set()

    def end(self) -> None:
        """Say that no more groups will be put."""
        self._ended = True
        self._changed.set()

    def snapshot(self) -> tuple[Group, ...]:
        """The groups that no one has taken, oldest first."""
        return tuple(group for _, group in sorted(self._groups, key=lambda entry: entry[0]))
