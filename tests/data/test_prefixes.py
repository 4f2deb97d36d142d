"""Packing of sequences that begin alike."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.data.packing import TrainingSequence, lay_out_shared, pack
from areal_jax.data.prefixes import find_branches, sort_alike


def sequence(tokens: list[int], num_context: int) -> TrainingSequence:
    own = np.asarray(tokens, np.int32)
    return TrainingSequence(
        own,
        np.arange(len(own)) >= num_context,
        experts=np.stack([own, 5 - own], axis=1)[:, None].astype(np.uint8),
        num_context=num_context,
    )


def routed(numbers: list[int], num_context: int) -> TrainingSequence:
    """A sequence in which number 3 is the token 2 with other experts."""
    own = sequence(numbers, num_context)
    return own._replace(tokens=np.minimum(own.tokens, 2))


# Few different tokens, so that many sequences begin alike, at any depth.
drawn_sequences = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=14).flatmap(
        lambda tokens: st.builds(routed, st.just(tokens), st.integers(0, len(tokens)))
    ),
    min_size=1,
    max_size=12,
)


@given(drawn_sequences, st.integers(14, 40), st.integers(1, 3))
def test_every_token_sees_its_own_sequence(
    sequences: list[TrainingSequence], row_tokens: int, rows: int
) -> None:
    batches, layout = pack(sequences, rows=rows, row_tokens=row_tokens, share_prefixes=True)
    places = np.arange(row_tokens)
    for number, (start, each) in enumerate(zip(layout.starts, sequences, strict=True)):
        row, column = divmod(int(start), row_tokens)
        batch = batches[row // rows]
        assert batch.visible_until is not None
        until, tokens = batch.visible_until[row % rows], batch.tokens[row % rows]
        shared = int(layout.branches.num_shared[number])
        assert shared < max(1, each.num_context)
        for i in range(shared, len(each.tokens)):
            place = column + i - shared
            seen = (places <= place) & (place < until)
            # In the row, the tokens that it sees are those of its sequence, in order.
            np.testing.assert_array_equal(tokens[seen], each.tokens[: i + 1])
            assert batch.experts is not None and each.experts is not None
            np.testing.assert_array_equal(batch.experts[row % rows][seen], each.experts[: i + 1])
            np.testing.assert_array_equal(
                batch.positions[row % rows][seen], np.arange(i + 1, dtype=np.int32)
            )
            assert batch.loss_mask[row % rows, place] == each.loss_mask[i]


@given(drawn_sequences, st.integers(14, 40))
def test_gather_returns_shared_tokens_to_each_sequence(
    sequences: list[TrainingSequence], row_tokens: int
) -> None:
    layout = lay_out_shared(sequences, rows=2, row_tokens=row_tokens)
    packed = layout.scatter((each.tokens for each in sequences), np.int32)
    assert (
        np.count_nonzero(packed)
        == layout.filled[0]
        == sum(layout.shared[::-1]) - 2 * (layout.shared[0])
    )
    for found, each in zip(layout.gather(packed), sequences, strict=True):
        np.testing.assert_array_equal(found, each.tokens)


def test_a_conversation_is_packed_once_with_its_calls():
    # Two samples of a prompt of 10 tokens: the first is exported as calls of 20, 40 and 60 tokens,
    # each the beginning of the next.
    rng = np.random.default_rng(0)
    prompt, turns, other = rng.integers(1, 99, 10), rng.integers(1, 99, 50), np.full(30, 100)
    conversation = np.concatenate([prompt, turns]).astype(np.int32)
    calls = [sequence(conversation[:n].tolist(), n - 10) for n in (20, 40, 60)]
    sequences = [*calls, sequence([*prompt.tolist(), *other.tolist()], 10)]
    alike = sort_alike(
        [each.tokens for each in sequences], [each.num_context for each in sequences]
    )
    branches = find_branches(alike, 128)
    assert branches.parents.tolist() == [-1, 0, 1, 0]
    # The last shared token is packed again, because the next one is predicted from it.
    assert branches.num_shared.tolist() == [0, 19, 39, 9]
    (tree,) = branches.trees
    assert tree == [0, 1, 2, 3]


def test_large_trees_are_cut_where_rows_are_short():
    # 8 answers of 20 tokens to one prompt of 40: 60 + 7 · 21 = 207 tokens in one tree. Rows of 128
    # hold 60 + 3 · 21 = 123 of them.
    prompt = np.arange(1, 41)
    sequences = [sequence([*prompt.tolist(), *[100 + i] * 20], 40) for i in range(8)]
    alike = sort_alike(
        [each.tokens for each in sequences], [each.num_context for each in sequences]
    )
    branches = find_branches(alike, 128)
    assert [len(tree) for tree in branches.trees] == [4, 4]
    layout = lay_out_shared(sequences, rows=1, row_tokens=128)
    assert layout.shape[0] == 2 and layout.filled == (246.0, 256.0)
    # A row of 256 holds all of them.
    assert lay_out_shared(sequences, rows=1, row_tokens=256).filled == (207.0, 256.0)


def test_short_common_beginnings_are_not_shared():
    sequences = [sequence([1, 2, 3, *[10 + i] * 37], 3) for i in range(4)]
    assert lay_out_shared(sequences, rows=1, row_tokens=160).shared == (0.0, 160.0)
