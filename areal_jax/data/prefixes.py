"""Sequences of a row that begin alike: each token that they share is packed once.

With recorded experts a token is shared where its experts are equal, too.

The sequences form trees. A root is packed whole. Every other sequence is a branch: it shares the
first tokens of its parent, and only the rest of it is packed, somewhere behind its parent. The last
shared token is packed with the branch again, because the next token is predicted from it.

In the row a tree is in depth-first order, and the branches of a sequence in descending order of
what they share. The tokens that see a token are then those from itself up to the end of the last
branch that shares it (`Visibility.until`). Attention thus reads a tree of any depth from one number
for each token.

numpy only. Axes: N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt8

MIN_SHARED_FRACTION = 0.125
"""Least part of a sequence that it shares as a branch. Trees are harder to pack than sequences."""


class Branches(NamedTuple):
    """Trees of sequences."""

    parents: Int[np.ndarray, "N"]
    """Index of the sequence whose first tokens each shares; -1 for roots."""
    num_shared: Int[np.ndarray, "N"]
    """Number of first tokens that are packed with ancestors only."""
    trees: Sequence[Sequence[int]]
    """Sequences of each tree, depth first."""


def unshared(num_sequences: int) -> Branches:
    """Return trees of one sequence each."""
    return Branches(
        np.full(num_sequences, -1),
        np.zeros(num_sequences, np.int64),
        [[i] for i in range(num_sequences)],
    )


class Alike(NamedTuple):
    """A sequence, and what it may share with the one before it in the order of their tokens.

    Of all earlier sequences in this order, the one before shares the most tokens.
    """

    number: int
    length: int
    num_shareable: int


def sort_alike(
    tokens: Sequence[Int[np.ndarray, "_"]],
    num_context: Sequence[int],
    experts: Sequence[Shaped[np.ndarray, "_ L k"] | None] | None = None,
) -> list[Alike]:
    """Sort sequences so that those that begin alike are adjacent.

    Args:
        tokens: tokens of each sequence.
        num_context: number of its first tokens that it may share, because nothing reads what is
            predicted of them.
        experts: recorded experts of its tokens, which must be equal where it shares them; None:
            the router chooses.
    """
    found = [None] * len(tokens) if experts is None else experts
    symbols = [_symbols(*each) for each in zip(tokens, found, strict=True)]
    order = sorted(range(len(tokens)), key=lambda i: symbols[i].tobytes())
    before = [np.zeros((0, 1), np.uint8), *(symbols[i] for i in order[:-1])]
    return [
        Alike(i, len(tokens[i]), min(num_context[i], _count_equal(previous, symbols[i])) - 1)
        for i, previous in zip(order, before[: len(order)], strict=True)
    ]


def _symbols(
    tokens: Int[np.ndarray, "T"], experts: Shaped[np.ndarray, "T L k"] | None
) -> UInt8[np.ndarray, "T _"]:
    """Return bytes of each token, and of a hash of its experts, that sort like numbers."""
    columns = [tokens.astype(">u4").view(np.uint8).reshape(-1, 4)]
    if experts is not None:
        flat = experts.reshape(len(tokens), -1).astype(np.uint64)
        # Odd factors modulo 2^64: two different lists have the same hash with a probability of
        # less than 2^-47.
        factors = np.random.default_rng(0).integers(0, 2**63, flat.shape[1], np.uint64) * 2 + 1
        columns.append((flat @ factors).astype(">u8").view(np.uint8).reshape(-1, 8))
    return np.concatenate(columns, axis=1)


def find_branches(alike: Sequence[Alike], max_tree_tokens: int) -> Branches:
    """Join sequences that begin alike into trees.

    Args:
        alike: all sequences, as sorted by `sort_alike`.
        max_tree_tokens: maximum number of packed tokens of a tree with more than one sequence.
    """
    branches = unshared(len(alike))
    parents, num_shared, _ = branches
    children = [list[int]() for _ in alike]
    roots = list[int]()
    tree_tokens = 0
    previous = -1
    for i, length, shared in alike:
        if (
            shared >= max(1.0, MIN_SHARED_FRACTION * length)
            and tree_tokens + length - shared <= max_tree_tokens
        ):
            parent = previous
            while shared <= num_shared[parent]:  # all of it is packed with an ancestor
                parent = int(parents[parent])
            parents[i], num_shared[i] = parent, shared
            children[parent].append(i)
            tree_tokens += length - shared
        else:
            roots.append(i)
            tree_tokens = length
        previous = i
    for each in children:
        each.sort(key=lambda i: -num_shared[i])
    return branches._replace(trees=[_depth_first(root, children) for root in sorted(roots)])


def visible_until(
    branches: Branches, lengths: Int[np.ndarray, "N"], starts: Int[np.ndarray, "N"]
) -> list[Int[np.ndarray, "_"]]:
    """Return for the packed tokens of each sequence the first index that no longer sees them.

    Args:
        branches: trees of sequences.
        lengths: tokens of each sequence, with those that it shares.
        starts: index of the first packed token of each sequence. Trees are contiguous.
    """
    ends = starts + lengths - branches.num_shared
    until = [np.full(end - start, end) for start, end in zip(starts, ends, strict=True)]
    for tree in branches.trees:
        tree_ends = ends.copy()
        # Children before their parents, the last child first.
        for i in reversed(tree):
            if (parent := branches.parents[i]) >= 0:
                tree_ends[parent] = max(tree_ends[parent], tree_ends[i])
                seen = until[parent][: branches.num_shared[i] - branches.num_shared[parent]]
                np.maximum(seen, tree_ends[i], out=seen)
    return until


def _count_equal(a: UInt8[np.ndarray, "_ _"], b: UInt8[np.ndarray, "_ _"]) -> int:
    """Return the number of first rows that are equal."""
    length = min(len(a), len(b))
    differs = (a[:length] != b[:length]).any(axis=1)
    return int(differs.argmax()) if differs.any() else length


def _depth_first(root: int, children: Sequence[Sequence[int]]) -> list[int]:
    order, stack = [], [root]
    while stack:
        order.append(last := stack.pop())
        stack.extend(reversed(children[last]))
    return order
