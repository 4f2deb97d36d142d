"""Endless stream of tasks: reshuffled every epoch, and exactly resumable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import grain

T = TypeVar("T")


class TaskStream(Iterator[T]):
    """Every task (or example) once per epoch, in an order that `seed` and the epoch decide."""

    def __init__(self, tasks: Sequence[T], seed: int) -> None:
        if not tasks:
            raise ValueError("expected tasks, found none")
        self._identity = {"num_tasks": len(tasks), "seed": seed}
        order = grain.MapDataset.source(tasks).seed(seed).shuffle().repeat()
        # Tasks are in memory: prefetching in other threads would only make the position inexact.
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator: grain.DatasetIterator[T] = iter(order.to_iter_dataset(reading))

    def __next__(self) -> T:
        return next(self._iterator)

    def state(self) -> dict[str, int]:
        """The position in the stream, as JSON values."""
        return {"next_index": self._iterator.get_state()["next_index"], **self._identity}

    def restore(self, state: Mapping[str, int]) -> None:
        """Move to the position of `state`.

        Raises:
            ValueError: the state is from a stream of other tasks or another seed.
        """
        found = {name: state.get(name) for name in self._identity}
        if found != self._identity:
            raise ValueError(
                f"expected the position in a stream of {self._identity}, found one of {found}; "
                "resume with the same tasks and seed, so that no task is lost or repeated"
            )
        self._iterator.set_state({"next_index": state["next_index"]})
