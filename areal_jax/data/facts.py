"""Made-up facts, a collection of documents in which a search finds what nobody can know. Standard library only."""

from __future__ import annotations

from hashlib import blake2b
from itertools import product

NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Tom")
THINGS = ("pens", "books", "beads", "nuts", "boxes", "bags")
HALLS = range(10, 60)


def fact(name: str, thing: str, hall: int) -> tuple[str, int]:
    """What somebody has in a hall, as a sentence, and how many of them."""
    # Three digits, so that no count is the number of a hall.
    count = 100 + int.from_bytes(blake2b(f"{name}/{thing}/{hall}".encode(), digest_size=4).digest()) % 900
    return f"{name} has {count} {thing} in hall {hall}.", count


def all_facts() -> list[str]:
    """Every fact: what each of them has of each thing in each hall."""
    return [fact(name, thing, hall)[0] for hall, name, thing in product(HALLS, NAMES, THINGS)]
