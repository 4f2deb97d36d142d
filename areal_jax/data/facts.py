"""Invented facts: documents whose content only a search can reveal. Standard library only."""

from __future__ import annotations

from hashlib import blake2b
from itertools import product

HALLS = range(10, 60)
BOXES = range(60, 96)
"""No box has the number of a hall."""


def fact(hall: int, box: int) -> tuple[str, int]:
    """Return the content of a box as a sentence, and its number of pens.

    The number has three digits, so that it differs from every hall and box number.
    """
    count = 100 + int.from_bytes(blake2b(f"{hall}/{box}".encode(), digest_size=4).digest()) % 900
    return f"In hall {hall}, box {box} has {count} pens.", count


def all_facts() -> list[str]:
    """All facts, ordered by hall."""
    return [fact(hall, box)[0] for hall, box in product(HALLS, BOXES)]
