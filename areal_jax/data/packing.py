"""Sequence packing: `pack` puts sequences of any length into rows of micro-batches of one shape,
for one compiled program.

numpy only. Axes: M micro-batches, B rows of a micro-batch, T tokens of a row, N sequences,
S tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import DTypeLike

from areal_jax.data.prefixes import Branches, find_branches, sort_alike, unshared, visible_until
from areal_jax.records import PackedBatch, PackedImages, SequenceImages, native_expert


def allocate(lengths: Sequence[int] | Int[np.ndarray, "N"], capacity: int) -> list[list[int]]:
    """Partition sequences into bins of at most `capacity` tokens.

    AReaL, arXiv:2505.24298, algorithm 1. Longest sequence first: each goes to the bin with room
    that has the fewest sequences (of those, the fewest tokens), or to a new bin if none has room.

    Returns:
        Indices into `lengths`, by bin.

    Raises:
        ValueError: a sequence is longer than `capacity`.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(
            f"a sequence of {lengths.max()} tokens does not fit into a row of {capacity}; set "
            f"trainer.row_tokens to at least {lengths.max()}, or lower engine.max_prompt_tokens "
            "or engine.max_new_tokens"
        )
    bins: list[list[int]] = []
    # by_count[n - 1]: a heap with the tokens and index of every bin of n sequences. If its first
    # bin has no room, none of them has.
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
    """One sequence with the per-token columns that training needs."""

    tokens: Int[np.ndarray, "S"]
    loss_mask: Bool[np.ndarray, "S"]
    behave_logp: Float[np.ndarray, "S"] | float = 0.0
    age: Int[np.ndarray, "S"] | int = 0
    experts: Shaped[np.ndarray, "S L k"] | None = None
    images: SequenceImages | None = None
    num_context: int = 0
    """Number of first tokens that may be packed once for several sequences, because nothing reads
    what is predicted of them."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions of N sequences in micro-batches of shape [rows, row_tokens]."""

    shape: tuple[int, int, int]
    """Number of micro-batches, rows, row_tokens."""
    lengths: Int[np.ndarray, "N"]
    starts: Int[np.ndarray, "N"]
    """Index of each sequence's first packed token in the flattened micro-batches."""
    segments: Int[np.ndarray, "N"]
    """Segment id of each sequence in its row, from 1."""
    branches: Branches
    """The tokens that sequences share; they are packed with one of them."""

    @property
    def filled(self) -> tuple[float, float]:
        """Number of packed tokens, and number of positions for them: a sum and its weight."""
        shared, _ = self.shared
        return float(self.lengths.sum()) - shared, float(math.prod(self.shape))

    @property
    def shared(self) -> tuple[float, float]:
        """Number of tokens that are packed with another sequence, and number of all tokens."""
        return float(self.branches.num_shared.sum()), float(self.lengths.sum())

    @property
    def efficiency(self) -> float:
        """Share of the positions that hold a token."""
        num_tokens, num_positions = self.filled
        return num_tokens / max(1.0, num_positions)

    def scatter(
        self,
        values: Iterable[Shaped[np.ndarray, "_ ..."] | float],
        dtype: DTypeLike,
        *,
        shape: tuple[int, ...] = (),
        padding: int = 0,
    ) -> Shaped[np.ndarray, "M B T ..."]:
        """Place per-token values into the micro-batches.

        Args:
            values: one array, or one number for all tokens, per sequence. Shared tokens have that
                of the sequence with which they are packed.
            dtype: type of the result.
            shape: shape of one token's value.
            padding: value of places without a token.
        """
        packed = np.full((*self.shape, *shape), padding, dtype)
        flat = packed.reshape(math.prod(self.shape), *shape)
        of_all = zip(
            self.starts.tolist(), self.lengths, self.branches.num_shared, values, strict=True
        )
        for start, length, shared, value in of_all:
            packed_value = value[shared:] if isinstance(value, np.ndarray) else value
            flat[start : start + length - shared] = packed_value
        return packed

    def gather(self, packed: Shaped[np.ndarray, "M B T ..."]) -> list[Shaped[np.ndarray, "_ ..."]]:
        """Return the per-token values of each sequence, in order; the inverse of `scatter`."""
        flat = packed.reshape(math.prod(self.shape), *packed.shape[3:])
        found = [flat[:0]] * len(self.lengths)
        parents, num_shared, trees = self.branches
        for i in chain(*trees):
            shared, start = num_shared[i], self.starts[i]
            own = flat[start : start + self.lengths[i] - shared]
            found[i] = np.concatenate([found[parents[i]][:shared], own]) if shared else own
        return found


def lay_out(
    lengths: Sequence[int] | Int[np.ndarray, "N"],
    *,
    rows: int,
    row_tokens: int,
    num_together: int = 1,
    sizes: Sequence[int] | None = None,
    branches: Branches | None = None,
) -> Layout:
    """Assign sequences to rows by algorithm 1, and rows to as few micro-batches as possible.

    Args:
        lengths: tokens of each sequence.
        rows: rows of a micro-batch.
        row_tokens: tokens of a row.
        num_together: number of consecutive sequences that stay adjacent in one row.
        sizes: share of a row, in tokens, that each sequence occupies; None: its length.
        branches: sequences that share tokens, which stay adjacent; None: none does.

    Raises:
        ValueError: sequences that stay adjacent are longer than `row_tokens`.
    """
    lengths = np.asarray(lengths, np.int64)
    branches = unshared(len(lengths)) if branches is None else branches
    units = branches.trees
    if num_together > 1:
        units = np.arange(len(lengths)).reshape(-1, num_together).tolist()
    packed = lengths - branches.num_shared
    occupied = packed if sizes is None else np.asarray(sizes, np.int64)
    starts, segments = np.zeros_like(lengths), np.zeros_like(lengths)
    bins = allocate([int(occupied[unit].sum()) for unit in units], row_tokens)
    for row, members in enumerate(bins):
        of_row = list(chain(*(units[member] for member in members)))
        ends = np.cumsum(packed[of_row])
        starts[of_row] = row * row_tokens + ends - packed[of_row]
        segments[of_row] = np.arange(1, len(of_row) + 1)
    shape = (-(-len(bins) // rows), rows, row_tokens)
    return Layout(shape, lengths, starts, segments, branches)


def lay_out_shared(sequences: Sequence[TrainingSequence], *, rows: int, row_tokens: int) -> Layout:
    """Lay out sequences of which some begin alike, in as few micro-batches as possible.

    Large trees leave more of a row empty: smaller ones are tried, too, and none.
    """
    alike = sort_alike(
        [sequence.tokens for sequence in sequences],
        [sequence.num_context for sequence in sequences],
        [sequence.experts for sequence in sequences],
    )
    lengths = [len(sequence.tokens) for sequence in sequences]
    layouts = [
        lay_out(
            lengths,
            rows=rows,
            row_tokens=row_tokens,
            branches=find_branches(alike, row_tokens // parts) if parts else None,
        )
        for parts in (1, 2, 4, 0)
    ]
    return min(layouts, key=lambda layout: (layout.shape[0], layout.filled))


def pack(
    sequences: Sequence[TrainingSequence],
    *,
    rows: int,
    row_tokens: int,
    num_together: int = 1,
    row_patches: int = 0,
    share_prefixes: bool = False,
) -> tuple[list[PackedBatch], Layout]:
    """Pack sequences into micro-batches.

    Args:
        sequences: sequences to pack; each is in exactly one micro-batch.
        rows: rows of a micro-batch.
        row_tokens: tokens of a row.
        num_together: as in `lay_out`.
        row_patches: patches of a row, if all sequences have `images`; 0: none has.
        share_prefixes: whether tokens with which several sequences begin are packed once. The
            sequences then have no images.

    Returns:
        The micro-batches, and the position of each sequence in them.

    Raises:
        ValueError: a sequence does not fit into a row.
    """
    lengths = [len(sequence.tokens) for sequence in sequences]
    images = [sequence.images for sequence in sequences if sequence.images is not None]
    if share_prefixes:
        assert num_together == 1 and not images
        layout = lay_out_shared(sequences, rows=rows, row_tokens=row_tokens)
    else:
        layout = lay_out(
            lengths,
            rows=rows,
            row_tokens=row_tokens,
            num_together=num_together,
            sizes=_sizes(lengths, images, row_tokens, row_patches) if images else None,
        )
    positions = np.arange(max(lengths, default=0), dtype=np.int32)
    columns = PackedBatch(
        tokens=layout.scatter((sequence.tokens for sequence in sequences), np.int32),
        segment_ids=layout.scatter((int(segment) for segment in layout.segments), np.int32),
        positions=layout.scatter((positions[:length] for length in layout.lengths), np.int32),
        loss_mask=layout.scatter((sequence.loss_mask for sequence in sequences), np.bool_),
        behave_logp=layout.scatter((sequence.behave_logp for sequence in sequences), np.float32),
        age=layout.scatter((sequence.age for sequence in sequences), np.int32),
    )
    experts = [sequence.experts for sequence in sequences if sequence.experts is not None]
    if experts:
        dtype, shape = experts[0].dtype, experts[0].shape[1:]
        columns = columns._replace(
            experts=layout.scatter(experts, dtype, shape=shape, padding=native_expert(dtype))
        )
    if images:
        positions = layout.scatter((each.positions for each in images), np.int32, shape=(3,))
        columns = columns._replace(
            positions=positions, images=_pack_images(images, layout, row_patches)
        )
    if share_prefixes:
        columns = columns._replace(visible_until=_visible_until(layout))
    present: dict[str, Any] = {
        name: column for name, column in columns._asdict().items() if column is not None
    }

    def part(column: Any, i: int) -> Any:
        is_images = isinstance(column, PackedImages)
        return PackedImages(*(each[i] for each in column)) if is_images else column[i]

    return [
        PackedBatch(**{name: part(column, i) for name, column in present.items()})
        for i in range(layout.shape[0])
    ], layout


def _visible_until(layout: Layout) -> Int[np.ndarray, "M B T"]:
    """Return for each token the first place in its row that does not see it; 0 in padding."""
    column = np.zeros(layout.shape, np.int32)
    flat, places = column.reshape(-1), layout.starts % layout.shape[2]
    until = visible_until(layout.branches, layout.lengths, places)
    for start, of_sequence in zip(layout.starts.tolist(), until, strict=True):
        flat[start : start + len(of_sequence)] = of_sequence
    return column


def _sizes(
    lengths: Sequence[int], images: Sequence[SequenceImages], row_tokens: int, row_patches: int
) -> list[int]:
    """Return the share of a row, in tokens, that the tokens or the patches of a sequence need.

    Sequences whose shares fit into a row have room for both.

    Raises:
        ValueError: the images of a sequence do not fit into a row.
    """
    most = max(len(each.patches) for each in images)
    if most > row_patches:
        raise ValueError(
            f"the images of a sequence have {most} patches, and a row has room for {row_patches}; "
            "raise trainer.row_image_tokens, or lower max_pixels of the policy's image processor"
        )
    return [
        max(length, -(-len(each.patches) * row_tokens // max(1, row_patches)))
        for length, each in zip(lengths, images, strict=True)
    ]


def _pack_images(
    images: Sequence[SequenceImages], layout: Layout, row_patches: int
) -> PackedImages:
    """Place the images of all sequences into their rows, one after the other."""
    num_micro_batches, rows, row_tokens = layout.shape
    num_rows = num_micro_batches * rows
    patches = np.zeros((num_rows, row_patches, images[0].patches.shape[1]), np.float32)
    places = np.zeros((num_rows, row_patches, 5), np.int32)
    slots = np.zeros((num_rows, row_tokens), np.int32)
    num_patches, num_images, num_slots = np.zeros((3, num_rows), np.int64)
    for start, each in zip(layout.starts.tolist(), images, strict=True):
        row, column = divmod(start, row_tokens)
        span = slice(num_patches[row], num_patches[row] + len(each.patches))
        patches[row, span], places[row, span] = each.patches, each.layout
        places[row, span, 0] += num_images[row]
        numbers = num_slots[row] + np.cumsum(each.is_image)
        slots[row, column : column + len(numbers)] = np.where(each.is_image, numbers, 0)
        num_patches[row] += len(each.patches)
        num_images[row] += each.layout[:, 0].max(initial=0)
        num_slots[row] += each.is_image.sum()
    shape = num_micro_batches, rows
    return PackedImages(*(x.reshape(*shape, *x.shape[1:]) for x in (patches, places, slots)))
