"""Random reward of async_vs_sync.py, imported by its grading processes."""

from __future__ import annotations

import zlib

from areal_jax.records import Task


def coin(task: Task, answer: str) -> bool:
    """Grade about half of all answers as correct, so that every update changes the weights."""
    del task
    return zlib.crc32(answer.encode()) % 2 == 0
