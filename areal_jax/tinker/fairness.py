"""Admission of the work of several tenants: of those who wait, the one with the least running work
is next, and of its sessions the one with the least.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class FairQueue:
    """Work in order of arrival within a session. Used by the event loop only."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        """
        Args:
            capacity: most running work; work that is larger runs alone.
        """
        self._capacity = capacity
        # Of all, (), of tenants, (tenant,), and of their sessions, (tenant, session).
        self._running = Counter[tuple[str, ...]]()
        # Size, and a future that is resolved when the work may run; sessions in order of arrival.
        self._waiting: OrderedDict[tuple[str, str], deque[tuple[int, asyncio.Future[None]]]] = (
            OrderedDict()
        )

    @asynccontextmanager
    async def turn(self, tenant: str, session: str, size: int) -> AsyncIterator[None]:
        """Wait until work of this size may run, and hold its share in the block."""
        whose = tenant, session
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
            yield
        finally:
            self._add(whose, -size)
            self._admit()

    def _add(self, whose: tuple[str, str], size: int) -> None:
        for each in ((), whose[:1], whose):
            self._running[each] += size
            if not self._running[each]:
                del self._running[each]

    def _admit(self) -> None:
        while True:
            self._forget_cancelled()
            if not self._waiting:
                return
            whose = min(
                self._waiting, key=lambda each: (self._running[each[:1]], self._running[each])
            )
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
