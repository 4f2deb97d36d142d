"""Several decode engines that answer as one: each request goes where its beginning is known, or where least is to be done."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from jaxtyping import Int32

from areal_jax.engine.driver import TOTALS, Driver
from areal_jax.records import Completion, Request

BLOCK_TOKENS = 64
"""Beginnings of prompts are known by whole blocks of so many tokens."""

MAX_BEGINNINGS = 1 << 16
"""Beginnings that are remembered; then the ones longest unused are forgotten."""


class Fleet:
    """The local `records.Engine`: one driver or several, on meshes of their own. Use it from the asyncio thread.

    A turn of a conversation goes to the engine that drew the turns before it, whose cache may hold them, unless that has a
    quarter of its slots more to do than another."""

    def __init__(self, drivers: Sequence[Driver]):
        self._drivers = drivers
        self._patience = [max(driver.num_slots // 4, 1) for driver in drivers]
        # Samples that each driver has been asked for and has not answered, and which driver has each unfinished request.
        self._load = [0] * len(drivers)
        self._home: dict[str, int] = {}
        # By the digest of a beginning, the driver that was last given it; least recently used first.
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def start(self) -> None:
        """Start answering."""
        for driver in self._drivers:
            driver.start()

    def close(self) -> None:
        """End all drivers; requests that are not finished fail with EngineStopped."""
        for driver in self._drivers:
            driver.close()

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """As `Driver.submit`, by one of the drivers."""
        beginnings = digests(request.prompt_tokens) if len(self._drivers) > 1 else []
        number = self._choose(beginnings)
        future = self._drivers[number].submit(request)
        for beginning in beginnings:
            self._seen[beginning] = number
            self._seen.move_to_end(beginning)
        while len(self._seen) > MAX_BEGINNINGS:
            self._seen.popitem(last=False)
        self._load[number] += request.num_samples
        self._home[request.id] = number
        future.add_done_callback(lambda _: self._finished(request, number))
        return future

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """As `Driver.snapshot`: of every driver between two dispatches of its own."""
        partials: dict[str, tuple[Completion, ...]] = {}
        for found in await asyncio.gather(*(driver.snapshot() for driver in self._drivers)):
            partials |= found
        return partials

    def suspend(self, request_id: str) -> asyncio.Future[tuple[Completion, ...]]:
        """As `Driver.suspend`."""
        return self._driver(request_id).suspend(request_id)

    def cancel(self, request_id: str) -> None:
        """As `Driver.cancel`."""
        self._driver(request_id).cancel(request_id)

    def end_sample(self, request_id: str, sample: int) -> None:
        """As `Driver.end_sample`."""
        self._driver(request_id).end_sample(request_id, sample)

    def metrics(self) -> dict[str, tuple[float, float]]:
        """As `Driver.metrics`, of all drivers together: what is counted in one time adds up, what is a mean stays one."""
        sums, weights = defaultdict[str, float](float), defaultdict[str, float](float)
        for driver in self._drivers:
            for name, (total, weight) in driver.metrics().items():
                sums[name] += total
                weights[name] += weight / len(self._drivers) if name in TOTALS else weight
        return {name: (sums[name], weights[name]) for name in weights}

    def _choose(self, beginnings: Sequence[bytes]) -> int:
        least = min(range(len(self._load)), key=self._load.__getitem__)
        known = next((self._seen[beginning] for beginning in reversed(beginnings) if beginning in self._seen), None)
        if known is not None and self._load[known] - self._load[least] <= self._patience[known]:
            return known
        return least

    def _driver(self, request_id: str) -> Driver:
        # What no driver has, any of them answers for.
        return self._drivers[self._home.get(request_id, 0)]

    def _finished(self, request: Request, number: int) -> None:
        self._load[number] -= request.num_samples
        self._home.pop(request.id, None)


def digests(tokens: Int32[np.ndarray, "P"]) -> list[bytes]:
    """One of each beginning of whole blocks, shortest first."""
    found, digest = list[bytes](), b""
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        digest = blake2b(digest + tokens[end - BLOCK_TOKENS : end].tobytes(), digest_size=16).digest()
        found.append(digest)
    return found
