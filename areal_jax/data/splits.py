"""Splits of generated data: what is held out depends on the content alone, so that the splits share
nothing, whatever their seeds."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, TypeAlias

Split: TypeAlias = Literal["train", "heldout"]

HELDOUT_SHARE = 8
"""One item in this many is held out; a hash of its content decides."""


def digest_of(content: str) -> str:
    """Return the hash of an item's content, as 12 hexadecimal digits."""
    return blake2b(content.encode(), digest_size=6).hexdigest()


def is_in_split(digest: str, split: Split) -> bool:
    """Return whether an item belongs to a split.

    Args:
        digest: result of `digest_of`.
        split: the split.
    """
    return (int(digest[:2], 16) % HELDOUT_SHARE == 0) == (split == "heldout")
