"""Test role of an engine that samples 0, 1, 2, ..., reports every token and can die."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np

from areal_jax.cluster import wire
from areal_jax.cluster.worker import Emit
from areal_jax.records import Completion, Request, empty_completion

IN_ITS_TURN = -2


class Counting:
    def __init__(self, emit: Emit, version: int, dies_at: int) -> None:
        """Create the role.

        Args:
            version: stamped on every token.
            dies_at: number of its own tokens after which it waits for `die`; -1: never; or
                IN_ITS_TURN.
        """
        self._emit, self._version, self._dies_at = emit, version, dies_at
        self._sampled: dict[str, list[Completion]] = {}
        self._ended: set[tuple[str, int]] = set()
        self._swap: tuple[float, float] | None = None
        """Start and end of the swap, by time.time."""

    async def begin(self) -> dict[str, Any]:
        return {}

    async def submit(self, plain: Any) -> Any:
        request = wire.decode_request(plain)
        sampled = self._sampled[request.id] = (
            list(request.resume) or [empty_completion()] * request.num_samples
        )
        for step in range(request.sampling.max_new_tokens):
            if step == self._dies_at:
                await asyncio.Event().wait()
            self._emit("progress", {request.id: self._draw(request, sampled)})
            self._emit("measures", {"tokens": (1.0, 1.0), "occupancy": (1.0, 2.0)})
            await asyncio.sleep(0.1)
            if all(self._is_done(request, sample, each) for sample, each in enumerate(sampled)):
                break
        del self._sampled[request.id]
        done = [
            Completion(each.tokens, each.logp, each.versions, "stop", experts=self._experts(each))
            for each in sampled
        ]
        return wire.encode_completions(done)

    def _experts(self, sampled: Completion) -> np.ndarray:
        """Return for each token, in two layers, its number and the number of this engine."""
        ids = np.stack([sampled.tokens, np.full_like(sampled.tokens, self._version)], axis=1)
        return np.stack([ids, ids[:, ::-1]], axis=1).astype(np.uint8)

    def die(self) -> None:
        os._exit(9)

    async def snapshot(self) -> Any:
        return {name: wire.encode_completions(sampled) for name, sampled in self._sampled.items()}

    def end_sample(self, request_id: str, sample: int) -> None:
        self._ended.add((request_id, sample))

    async def update_weights(self, version: int, contributions: Any) -> None:
        self._emit("weights", version)
        while self._swap is None:
            self._emit("turn_requested", time.monotonic())
            await asyncio.sleep(0.1)

    async def grant_turn(self, ticket: float) -> None:
        """Swap once, which takes a while, or die; grants may be repeated."""
        if self._swap is not None:
            begin_s, end_s = self._swap
            if begin_s < end_s:
                self._emit("turn_ended", ticket)
            return
        begin_s = time.time()
        self._swap = begin_s, begin_s
        if self._dies_at == IN_ITS_TURN:
            os._exit(9)
        await asyncio.sleep(0.3)
        self._swap = begin_s, time.time()
        self._emit("turn_ended", ticket)

    def swap(self) -> tuple[float, float] | None:
        return self._swap

    async def end(self) -> None:
        pass

    def _draw(self, request: Request, sampled: list[Completion]) -> dict[int, Any]:
        """Append one token to every unfinished sample."""
        news = {}
        for sample, each in enumerate(sampled):
            if not self._is_done(request, sample, each):
                start = len(each.tokens)
                more = (
                    np.array([start], np.int32),
                    np.array([-0.5], np.float32),
                    np.array([self._version], np.int32),
                )
                one = Completion(*more, "suspended")
                sampled[sample] = each.concatenate(one)
                news[sample] = (start, wire.encode_completion(one))
        return news

    def _is_done(self, request: Request, sample: int, sampled: Completion) -> bool:
        return (
            len(sampled.tokens) >= request.sampling.max_new_tokens
            or (request.id, sample) in self._ended
        )
