"""Packing: algorithm 1 and the layout of micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_lines import num_lines

from areal_jax.data.packing import TrainingSequence, allocate, lay_out, pack

lengths_and_capacity = st.lists(st.integers(1, 50), min_size=0, max_size=60).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max([1, *lengths]), 120))
)


def test_allocation_of_a_worked_example() -> None:
    # 300 and 250 open two bins; 200 goes to the one with fewer tokens (250); 150 fits only with
    # 300; 100 fits in neither.
    lengths = [100, 200, 300, 150, 250]
    bins = allocate(lengths, 500)
    assert [{lengths[i] for i in members} for members in bins] == [{300, 150}, {250, 200}, {100}]


@given(lengths_and_capacity)
def test_every_sequence_is_in_one_bin_within_capacity(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bins = allocate(lengths, capacity)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in bins)
    assert all(bins)


@given(lengths_and_capacity)
def test_allocation_equals_algorithm_1_of_the_paper(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    expected: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [
            members
            for members in expected
            if sum(lengths[j] for j in members) + lengths[i] <= capacity
        ]
        if not room:
            expected.append([i])
        else:
            min(room, key=lambda members: (len(members), sum(lengths[j] for j in members))).append(
                i
            )
    assert allocate(lengths, capacity) == expected


def test_too_long_sequence_error_names_the_setting() -> None:
    with pytest.raises(
        ValueError,
        match=r"501 tokens does not fit into a row of 500; set trainer\.row_tokens to at least 501",
    ):
        allocate([3, 501], 500)


def papers_lengths(num_sequences: int) -> np.ndarray:
    """Lengths of prompts of at most 1024 tokens with answers of at most 27 648.

    Half are below e^8.5 = 4915, one in a hundred is above 28 000.
    """
    return np.clip(np.random.default_rng(0).lognormal(8.5, 0.8, num_sequences), 64, 28672).astype(
        np.int64
    )


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    # As in the paper; each alone, the maximum number of bins; 450 short ones per bin.
    [
        (papers_lengths, 28672),
        (lambda count: np.full(count, 200), 300),
        (lambda count: np.full(count, 64), 28672),
    ],
    ids=["paper", "alone", "short"],
)
def test_allocation_work_is_linear_in_sequences(
    lengths: Callable[[int], np.ndarray], capacity: int
) -> None:
    # At the paper's 8192, at most 231 lines of Python per sequence, with 450 sequences per bin.
    half, full = (
        num_lines(lambda count=count: allocate(lengths(count), capacity)) for count in (4096, 8192)
    )
    assert full < 2.1 * half and full < 240 * 8192


@pytest.mark.parametrize("row_tokens", [28672, 32768])
def test_padding_of_the_papers_lengths_is_at_most_5_percent(
    row_tokens: int,
) -> None:
    # 8192 samples in 4 mini-batches.
    assert lay_out(papers_lengths(2048), rows=1, row_tokens=row_tokens).efficiency >= 0.95


@given(lengths_and_capacity, st.integers(1, 5))
def test_gather_inverts_scatter(case: tuple[list[int], int], rows: int) -> None:
    lengths, row_tokens = case
    layout = lay_out(lengths, rows=rows, row_tokens=row_tokens)
    # Consecutive numbers reveal a token that is lost, repeated or moved.
    numbers = np.split(np.arange(1, sum(lengths) + 1), np.cumsum(lengths)[:-1]) if lengths else []
    packed = layout.scatter(numbers, np.int64)
    assert packed.shape == (layout.shape[0], rows, row_tokens)
    assert np.count_nonzero(packed) == sum(lengths)
    for ours, theirs in zip(layout.gather(packed), numbers, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(lengths_and_capacity, st.integers(1, 5))
def test_rows_contain_complete_sequences_end_to_end(case: tuple[list[int], int], rows: int) -> None:
    lengths, row_tokens = case
    rng = np.random.default_rng(0)
    sequences = [
        TrainingSequence(
            rng.integers(1, 99, n).astype(np.int32),
            rng.random(n) < 0.5,
            (i + rng.random(n)).astype(np.float32),
            rng.integers(0, 9, n).astype(np.int32),
            rng.integers(0, 9, (n, 3, 2)).astype(np.uint8),
        )
        for i, n in enumerate(lengths)
    ]
    batches, layout = pack(sequences, rows=rows, row_tokens=row_tokens)
    assert layout.filled == (sum(lengths), len(batches) * rows * row_tokens)
    # No more micro-batches than needed.
    assert len(batches) == -(-len(allocate(lengths, row_tokens)) // rows)
    found: list[bytes] = []
    for batch in batches:
        assert all(
            column is not None and column.shape[:2] == (rows, row_tokens) for column in batch[:-2]
        )
        assert batch.images is None and batch.visible_until is None
        # Padding has no expert.
        assert batch.experts is not None
        assert (batch.experts[batch.segment_ids == 0] == 255).all()
        assert (batch.experts[batch.segment_ids > 0] < 9).all()
        for row in range(rows):
            segments = batch.segment_ids[row]
            filled = np.count_nonzero(segments)
            # Padding (segment 0) comes last, and segments count 1, 1, 2, 2, 2, ...
            assert not segments[filled:].any()
            assert set(np.diff(segments[:filled], prepend=0)) <= {0, 1}
            assert not batch.tokens[row, filled:].any() and not batch.loss_mask[row, filled:].any()
            for segment in range(1, segments.max(initial=0) + 1):
                inside = segments == segment
                np.testing.assert_array_equal(batch.positions[row, inside], np.arange(inside.sum()))
                sequence = sequences[int(batch.behave_logp[row, inside][0])]
                np.testing.assert_array_equal(batch.loss_mask[row, inside], sequence.loss_mask)
                np.testing.assert_array_equal(batch.behave_logp[row, inside], sequence.behave_logp)
                np.testing.assert_array_equal(batch.age[row, inside], sequence.age)
                found.append(batch.tokens[row, inside].tobytes())
    assert sorted(found) == sorted(sequence.tokens.tobytes() for sequence in sequences)


@given(st.lists(st.tuples(*[st.integers(1, 20)] * 3), max_size=20), st.integers(1, 5))
def test_grouped_sequences_are_adjacent_in_one_row(
    lengths: list[tuple[int, ...]], rows: int
) -> None:
    layout = lay_out(
        [length for unit in lengths for length in unit], rows=rows, row_tokens=64, num_together=3
    )
    starts, segments = layout.starts.reshape(-1, 3), layout.segments.reshape(-1, 3)
    for i, unit in enumerate(lengths):
        assert list(starts[i] - starts[i, 0]) == [0, unit[0], unit[0] + unit[1]]
        assert starts[i, 0] // 64 == (starts[i, 2] + unit[2] - 1) // 64
        assert segments[i, 0] % 3 == 1 and list(segments[i] - segments[i, 0]) == [0, 1, 2]
    # As algorithm 1 places one sequence of the total length each.
    joined = lay_out([sum(unit) for unit in lengths], rows=rows, row_tokens=64)
    np.testing.assert_array_equal(starts[:, 0], joined.starts)


def test_empty_batch_packs_to_nothing() -> None:
    batches, layout = pack([], rows=4, row_tokens=16)
    assert batches == [] and layout.gather(layout.scatter([], np.int32)) == []
