"""The stream of tasks: shuffled anew for every epoch, and exactly resumable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import grain

T = TypeVar("T")


class TaskStream(Iterator[T]):
    """Every task (or example) once per epoch, in an order that `seed` and the epoch decide; without
    end."""

    def __init__(self, tasks: Sequence[T], seed: int) -> None:
        if not tasks:
            raise ValueError("expected tasks, came none")
        self._identity = {"num_tasks": len(tasks), "seed": seed}
        order = grain.MapDataset.source(tasks).seed(seed).shuffle().repeat()
        # Tasks lie in memory: reading ahead in other threads would only blur the place.
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator: grain.DatasetIterator[T] = iter(order.to_iter_dataset(reading))

    def __next__(self) -> T:
        return next(self._iterator)

    def state(self) -> dict[str, int]:
        """The place in the stream, as JSON can hold it."""
        return {"next_index": self._iterator.get_state()["next_index"], **self._identity}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go to the place of `state`: what comes next is what came next there. ValueError where it
        is another stream's."""
        came = {name: state.get(name) for name in self._identity}
        if came != self._identity:
            raise ValueError(
                f"expected the place in a stream of {self._identity}, came one of {came}: the "
                "same tasks and seed are needed "
                "to go on without losing or repeating any"
            )
        self._iterator.set_state({"next_index": state["next_index"]})
