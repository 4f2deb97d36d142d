"""Made-up facts, a collection of documents in which a search finds what nobody can know. Standard
library only."""

from __future__ import annotations

from hashlib import blake2b
from itertools import product

HALLS = range(10, 60)
BOXES = range(60, 96)
"""No box has the number of a hall."""


def fact(hall: int, box: int) -> tuple[str, int]:
    """What is in a box, as a sentence, and how many pens that is: three digits, so that no count is
    another number."""
    count = 100 + int.from_bytes(blake2b(f"{hall}/{box}".encode(), digest_size=4).digest()) % 900
    return f"In hall {hall}, box {box} has {count} pens.", count


def all_facts() -> list[str]:
    """Every fact, hall by hall."""
    return [fact(hall, box)[0] for hall, box in product(HALLS, BOXES)]
