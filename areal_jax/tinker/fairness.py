"""Admission of the work of several tenants: of those who wait, the one with the least running work
is next, of its sessions the one with the least, and of their samplers the one with the least.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TypeAlias

Whose: TypeAlias = tuple[str, str, str]
"""Tenant, session, and path of the sampler."""


class FairQueue:
    """Work in order of arrival of each sampler. Used by the event loop only."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        """
        Args:
            capacity: most running work; work that is larger runs alone.
        """
        self._capacity = capacity
        # Of all, (), of tenants, (tenant,), of their sessions, and of the samplers of these.
        self._running = Counter[tuple[str, ...]]()
        # Size, and a future that is resolved when the work may run; samplers in order of arrival.
        self._waiting: OrderedDict[Whose, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        # Number of paused works.
        self._paused = Counter[Whose]()

    @asynccontextmanager
    async def turn(
        self, whose: Whose, size: int
    ) -> AsyncIterator[Callable[[], AbstractContextManager[None]]]:
        """Wait until work of this size may run, and hold its share in the block.

        Yields:
            Pauses the work in a block: others have its share, and no other work of the sampler
            begins.
        """
        may_run: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append((size, may_run))
        self._admit()
        try:
            await may_run
        except asyncio.CancelledError:
            if may_run.done() and not may_run.cancelled():
                self._add(whose, -size)
            self._admit()
            raise
        try:
            yield lambda: self._pause(whose, size)
        finally:
            self._add(whose, -size)
            self._admit()

    @contextmanager
    def _pause(self, whose: Whose, size: int) -> Iterator[None]:
        self._paused[whose] += 1
        self._add(whose, -size)
        self._admit()
        try:
            yield
        finally:
            self._paused[whose] -= 1
            if not self._paused[whose]:
                del self._paused[whose]
            # It goes on at once, also beyond the capacity.
            self._add(whose, size)
            self._admit()

    def _add(self, whose: Whose, size: int) -> None:
        for depth in range(len(whose) + 1):
            self._running[whose[:depth]] += size
            if not self._running[whose[:depth]]:
                del self._running[whose[:depth]]

    def _admit(self) -> None:
        while True:
            self._forget_cancelled()
            ready = [whose for whose in self._waiting if not self._paused[whose]]
            if not ready:
                return
            whose = min(ready, key=lambda each: [self._running[each[:n]] for n in (1, 2, 3)])
            size, may_run = self._waiting[whose][0]
            total = self._running[()]
            if total and total + size > self._capacity():
                return
            self._waiting[whose].popleft()
            self._add(whose, size)
            may_run.set_result(None)

    def _forget_cancelled(self) -> None:
        for whose, works in list(self._waiting.items()):
            while works and works[0][1].cancelled():
                works.popleft()
            if not works:
                del self._waiting[whose]
