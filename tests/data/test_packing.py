"""Algorithm 1 and what is built on it."""

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


def test_the_worked_example() -> None:
    # 300 and 250 open two bins; 200 goes to the one of fewer tokens (250); 150 fits only beside
    # 300; 100 fits nowhere.
    lengths = [100, 200, 300, 150, 250]
    bins = allocate(lengths, 500)
    assert [{lengths[i] for i in registry} for registry in bins] == [{300, 150}, {250, 200}, {100}]


@given(lengths_and_capacity)
def test_every_sequence_is_in_one_bin_that_holds_it(sampled: tuple[list[int], int]) -> None:
    lengths, capacity = sampled
    bins = allocate(lengths, capacity)
    assert sorted(i for registry in bins for i in registry) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in registry) <= capacity for registry in bins)
    assert all(bins)


@given(lengths_and_capacity)
def test_it_is_algorithm_1_as_the_paper_writes_it(sampled: tuple[list[int], int]) -> None:
    lengths, capacity = sampled
    expected: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [
            registry
            for registry in expected
            if sum(lengths[j] for j in registry) + lengths[i] <= capacity
        ]
        if not room:
            expected.append([i])
        else:
            min(
                room, key=lambda registry: (len(registry), sum(lengths[j] for j in registry))
            ).append(i)
    assert allocate(lengths, capacity) == expected


def test_a_sequence_longer_than_a_row_is_an_error_with_the_knob() -> None:
    with pytest.raises(
        ValueError,
        match=r"501 tokens does not fit into a row of 500; set trainer\.row_tokens to at least 501",
    ):
        allocate([3, 501], 500)


def papers_lengths(num_sequences: int) -> np.ndarray:
    """Prompts of 1024 tokens at most and answers of 27 648: half are below e^8.5 = 4915, one in a
    hundred above 28 000."""
    return np.clip(np.random.default_rng(0).lognormal(8.5, 0.8, num_sequences), 64, 28672).astype(
        np.int64
    )


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    # Of the paper; each alone, the most bins there can be; 450 short ones in a bin.
    [
        (papers_lengths, 28672),
        (lambda count: np.full(count, 200), 300),
        (lambda count: np.full(count, 64), 28672),
    ],
    ids=["paper", "alone", "short"],
)
def test_twice_the_sequences_are_allocated_with_twice_the_work(
    lengths: Callable[[int], np.ndarray], capacity: int
) -> None:
    # Up to the paper's 8192, the most: 231 lines of Python a sequence, where 450 share a bin.
    half, whole = (
        num_lines(lambda count=count: allocate(lengths(count), capacity)) for count in (4096, 8192)
    )
    assert whole < 2.1 * half and whole < 240 * 8192


@pytest.mark.parametrize("row_tokens", [28672, 32768])
def test_a_mini_batch_of_the_papers_lengths_is_padded_by_one_part_in_twenty_at_most(
    row_tokens: int,
) -> None:
    # 8192 samples in 4 mini-batches.
    assert lay_out(papers_lengths(2048), rows=1, row_tokens=row_tokens).efficiency >= 0.95


@given(lengths_and_capacity, st.integers(1, 5))
def test_scattered_tokens_come_back_in_order(sampled: tuple[list[int], int], rows: int) -> None:
    lengths, row_tokens = sampled
    layout = lay_out(lengths, rows=rows, row_tokens=row_tokens)
    # Numbered through, so that a token that is lost, doubled or moved shows.
    numbers = np.split(np.arange(1, sum(lengths) + 1), np.cumsum(lengths)[:-1]) if lengths else []
    packed = layout.scatter(numbers, np.int64)
    assert packed.shape == (layout.shape[0], rows, row_tokens)
    assert np.count_nonzero(packed) == sum(lengths)
    for ours, theirs in zip(layout.gather(packed), numbers, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(lengths_and_capacity, st.integers(1, 5))
def test_rows_hold_whole_sequences_end_to_end(sampled: tuple[list[int], int], rows: int) -> None:
    lengths, row_tokens = sampled
    rng = np.random.default_rng(0)
    sequences = [
        TrainingSequence(
            rng.integers(1, 99, n).astype(np.int32),
            rng.random(n) < 0.5,
            (i + rng.random(n)).astype(np.float32),
            rng.integers(0, 9, n).astype(np.int32),
        )
        for i, n in enumerate(lengths)
    ]
    batches, layout = pack(sequences, rows=rows, row_tokens=row_tokens)
    assert layout.filled == (sum(lengths), len(batches) * rows * row_tokens)
    # No more micro-batches than needed.
    assert len(batches) == -(-len(allocate(lengths, row_tokens)) // rows)
    found: list[bytes] = []
    for batch in batches:
        assert all(column.shape == (rows, row_tokens) for column in batch)
        for row in range(rows):
            segments = batch.segment_ids[row]
            filled = np.count_nonzero(segments)
            # Padding (segment 0) lies behind all else, and segments count 1, 1, 2, 2, 2, ...
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
def test_what_belongs_together_lies_side_by_side_in_one_row(
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
    # As Algorithm 1 lays out one sequence of their length each.
    whole = lay_out([sum(unit) for unit in lengths], rows=rows, row_tokens=64)
    np.testing.assert_array_equal(starts[:, 0], whole.starts)


def test_an_empty_batch_packs_to_nothing() -> None:
    batches, layout = pack([], rows=4, row_tokens=16)
    assert batches == [] and layout.gather(layout.scatter([], np.int32)) == []
