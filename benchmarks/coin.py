"""A reward that knows nothing of mathematics: what grading processes of async_vs_sync.py import."""

from __future__ import annotations

import zlib

from areal_jax.records import Task


def coin(task: Task, answer: str) -> bool:
    """Right for half of all answers, so that every update changes the weights."""
    del task
    return zlib.crc32(answer.encode()) % 2 == 0
