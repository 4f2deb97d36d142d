"""Admission of the work of several tenants: of those who wait, the one with the least running work
is next.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class FairQueue:
    """Work in order of arrival within a tenant. Used by the event loop only."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        """
        Args:
            capacity: most running work; work that is larger runs alone.
        """
        self._capacity = capacity
        self._running = Counter[str]()
        # Size, and a future that is resolved when the work may run; tenants in order of arrival.
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Wait until work of this size may run, and hold its share in the block."""
        may_run: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((size, may_run))
        self._admit()
        try:
            await may_run
        except asyncio.CancelledError:
            if may_run.done() and not may_run.cancelled():
                self._running[tenant] -= size
            self._admit()
            raise
        try:
            yield
        finally:
            self._running[tenant] -= size
            self._admit()

    def _admit(self) -> None:
        while True:
            self._forget_cancelled()
            if not self._waiting:
                return
            tenant = min(self._waiting, key=lambda each: self._running[each])
            size, may_run = self._waiting[tenant][0]
            total = self._running.total()
            if total and total + size > self._capacity():
                return
            self._waiting[tenant].popleft()
            self._running[tenant] += size
            may_run.set_result(None)

    def _forget_cancelled(self) -> None:
        for tenant, works in list(self._waiting.items()):
            while works and works[0][1].cancelled():
                works.popleft()
            if not works:
                del self._waiting[tenant]
        self._running += Counter()  # drops tenants without running work
