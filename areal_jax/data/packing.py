"""Sequences of any length into micro-batches of one shape, so that one compiled program trains them
all. numpy only.

Axes: M micro-batches, B rows of a micro-batch, T tokens of a row, N sequences, S tokens of a
    sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import DTypeLike

from areal_jax.records import PackedBatch


def allocate(lengths: Sequence[int] | Int[np.ndarray, "N"], capacity: int) -> list[list[int]]:
    """Partition sequences into bins of at most `capacity` tokens (AReaL, arXiv:2505.24298,
    algorithm 1, of one batch or more).

    Longest first, each into the bin with room that has the fewest sequences, of those the one with
    the fewest tokens; into a new bin where none has room. Returns places in `lengths`, bin by bin.
    Raises ValueError where a sequence is longer than `capacity`.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(
            f"a sequence of {lengths.max()} tokens does not fit into a row of {capacity}; set "
            "trainer.row_tokens to at least "
            f"{lengths.max()}, or lower engine.max_prompt_tokens or engine.max_new_tokens"
        )
    bins: list[list[int]] = []
    # by_count[n - 1]: tokens and place of every bin of n sequences, as a heap. Where its least has
    # not enough resources, none of them has.
    by_count: list[list[tuple[int, int]]] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        with_room = (heap for heap in by_count if heap and heap[0][0] + length <= capacity)
        heap = next(with_room, None)
        if heap is None:
            tokens, chosen = 0, len(bins)
            bins.append([])
        else:
            tokens, chosen = heappop(heap)
        bins[chosen].append(i)
        if len(bins[chosen]) > len(by_count):
            by_count.append([])
        heappush(by_count[len(bins[chosen]) - 1], (tokens + length, chosen))
    return bins


class TrainingSequence(NamedTuple):
    """One sequence as training sees it."""

    tokens: Int[np.ndarray, "S"]
    loss_mask: Bool[np.ndarray, "S"]
    behave_logp: Float[np.ndarray, "S"] | float = 0.0
    age: Int[np.ndarray, "S"] | int = 0


@dataclass(frozen=True, eq=False)
class Layout:
    """Where N sequences lie in micro-batches of shape [rows, row_tokens]."""

    shape: tuple[int, int, int]
    """Micro-batches, rows, row_tokens."""
    lengths: Int[np.ndarray, "N"]
    starts: Int[np.ndarray, "N"]
    """Place of each sequence's first token in all micro-batches, flattened."""
    segments: Int[np.ndarray, "N"]
    """Each sequence's segment in its row, from 1."""

    @property
    def filled(self) -> tuple[float, float]:
        """Tokens, and the places that there are for them: a sum and its weight."""
        return float(self.lengths.sum()), float(math.prod(self.shape))

    @property
    def efficiency(self) -> float:
        """Share of the places that hold a token."""
        num_tokens, num_places = self.filled
        return num_tokens / max(1.0, num_places)

    def scatter(
        self, values: Iterable[Shaped[np.ndarray, "_"] | float], dtype: DTypeLike
    ) -> Shaped[np.ndarray, "M B T"]:
        """Per-token values, one array (or one number) for each sequence, to their places; zeros
        where no token lies."""
        packed = np.zeros(self.shape, dtype)
        flat = packed.reshape(-1)
        for start, length, of_sequence in zip(self.starts, self.lengths, values, strict=True):
            flat[start : start + length] = of_sequence
        return packed

    def gather(self, packed: Shaped[np.ndarray, "M B T"]) -> list[Shaped[np.ndarray, "_"]]:
        """Per-token values of all micro-batches back to the sequences, in their order; the inverse
        of `scatter`."""
        flat = packed.reshape(-1)
        return [
            flat[start : start + length]
            for start, length in zip(self.starts, self.lengths, strict=True)
        ]


def lay_out(
    lengths: Sequence[int] | Int[np.ndarray, "N"],
    *,
    rows: int,
    row_tokens: int,
    num_together: int = 1,
) -> Layout:
    """Lay sequences end to end in rows by Algorithm 1, and rows into as few micro-batches as hold
    them.

    Each `num_together` sequences that follow one another are neighbours in one row, in their order.
    Raises ValueError where such sequences together are longer than `row_tokens`."""
    units = np.asarray(lengths, np.int64).reshape(-1, num_together)
    starts, segments = np.zeros_like(units), np.zeros_like(units)
    bins = allocate(units.sum(1), row_tokens)
    for row, registry in enumerate(bins):
        of_row = units[registry]
        ends = np.cumsum(of_row).reshape(of_row.shape)
        starts[registry] = row * row_tokens + ends - of_row
        segments[registry] = np.arange(1, of_row.size + 1).reshape(of_row.shape)
    shape = (-(-len(bins) // rows), rows, row_tokens)
    return Layout(shape, units.reshape(-1), starts.reshape(-1), segments.reshape(-1))


def pack(
    sequences: Sequence[TrainingSequence], *, rows: int, row_tokens: int, num_together: int = 1
) -> tuple[list[PackedBatch], Layout]:
    """Micro-batches that hold every sequence once, and where each lies in them, as `lay_out`
    says."""
    lengths = [len(sequence.tokens) for sequence in sequences]
    layout = lay_out(lengths, rows=rows, row_tokens=row_tokens, num_together=num_together)
    counting = np.arange(row_tokens, dtype=np.int32)
    columns = PackedBatch(
        tokens=layout.scatter((sequence.tokens for sequence in sequences), np.int32),
        segment_ids=layout.scatter((int(segment) for segment in layout.segments), np.int32),
        positions=layout.scatter((counting[:length] for length in layout.lengths), np.int32),
        loss_mask=layout.scatter((sequence.loss_mask for sequence in sequences), np.bool_),
        behave_logp=layout.scatter((sequence.behave_logp for sequence in sequences), np.float32),
        age=layout.scatter((sequence.age for sequence in sequences), np.int32),
    )
    return [PackedBatch(*(column[i] for column in columns)) for i in range(layout.shape[0])], layout
