"""Experts of the tokens in the pages of the KV cache, for router replay (R3, arXiv:2510.11370).

A page has the experts with which its keys and values were last computed, so that sequences which
share a prefix share its experts. A sequence records those of its pages before they are released,
and to keep the experts of each token from when the token was first fed, also before they are
computed again with other weights.

Axes: S slots, T tokens, L layers, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from jaxtyping import Int, Shaped
from numpy.typing import DTypeLike

from areal_jax.engine.batch import DecodeOutput, PrefillChunk
from areal_jax.engine.kv_cache.pages import PageTable
from areal_jax.engine.sequence import Sequence, SequenceState


class ExpertLog:
    """Experts by page, on the host. Used by the engine thread only."""

    def __init__(
        self, table: PageTable, shape: tuple[int, ...], dtype: DTypeLike, *, keeps_first: bool
    ):
        """
        Args:
            table: pages of all data shards.
            shape: layers, and experts of a token.
            dtype: type of the numbers of experts.
            keeps_first: whether a token keeps the experts of when it was first fed, instead of
                those with which its keys and values were computed last.
        """
        self._table, self._keeps_first = table, keeps_first
        self._pages = [
            np.zeros((pool.num_pages, table.page_tokens, *shape), dtype) for pool in table.pools
        ]

    def log_prefill(self, chunk: PrefillChunk, experts: Shaped[np.ndarray, "T L k"]) -> None:
        """Log the experts of a prefilled chunk."""
        pages, rows = self._places(chunk.pages, chunk.start, chunk.start + len(chunk.tokens))
        self._pages[chunk.shard][pages, rows] = experts

    def log_dispatch(self, output: DecodeOutput, positions: Int[np.ndarray, "S"]) -> None:
        """Log the experts of a dispatch.

        Args:
            output: output of the dispatch.
            positions: position of the first token that it fed, by slot.
        """
        assert output.experts is not None
        size = self._table.page_tokens
        for slot in np.flatnonzero(output.counts):
            count, start = int(output.counts[slot]), int(positions[slot])
            fed = np.arange(start, start + count)
            pages = self._table.array[slot, fed // size]
            self._pages[self._table.shard(int(slot))][pages, fed % size] = output.experts[
                :count, slot
            ]

    def copy(self, pairs: SequenceOf[SequenceOf[tuple[int, int]]]) -> None:
        """Copy pages, as (from, to), by data shard."""
        for pages, copies in zip(self._pages, pairs, strict=True):
            for source, target in copies:
                pages[target] = pages[source]

    def record(self, sequence: Sequence) -> None:
        """Record the experts of a running sequence: of the tokens fed since the last call, or with
        `keeps_first=False` of all.
        """
        if sequence.state is not SequenceState.RUNNING or sequence.slot is None:
            return
        before, end = sequence.experts, sequence.num_tokens - 1
        if not self._keeps_first:
            before = None
        start = 0 if before is None else len(before)
        pages, rows = self._places(sequence.pages, start, end)
        new = self._pages[self._table.shard(sequence.slot)][pages, rows]
        sequence.experts = new if before is None else np.concatenate([before, new])

    def _places(
        self, pages: SequenceOf[int], start: int, end: int
    ) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "T"]]:
        """Page of each position, and its place in the page."""
        positions, size = np.arange(start, max(end, start)), self._table.page_tokens
        return np.asarray(pages, np.int64)[positions // size], positions % size
