"""The rollouts that each trainer step was trained on, recorded so that a run can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from areal_jax.checkpoint.recovery import decode, deserialize, encode, serialize
from areal_jax.errors import ConfigError
from areal_jax.metrics.files import add_file_name
from areal_jax.metrics.jsonl import JsonLines
from areal_jax.records import Group, RolloutState

ROLLOUTS = "rollouts"
"""Folder of a run with one file per trainer step."""
ASSIGNMENTS = "assignments.jsonl"
"""File in it with a row per step: each request since the last, and the number of its engine. A
request that moved has several; of two rows of one step, the last is that of the resumed run."""


class RolloutLog:
    """Writes the batch of each step in a thread of its own, in order, and the engine of every
    request that was submitted before the step ended.
    """

    def __init__(self, run_folder: Path) -> None:
        """
        Args:
            run_folder: folder of the run.
        """
        self._folder = run_folder / ROLLOUTS
        self._folder.mkdir(exist_ok=True)
        self._assigned = JsonLines(self._folder / ASSIGNMENTS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout log")
        self._last: Future[None] | None = None
        self._assignments: list[tuple[str, int]] = []

    def write(self, version: int, groups: Sequence[Group]) -> None:
        """Start to write the batch that `version` was trained on; a step of a resumed run replaces
        the file of the lost one.

        Raises:
            OSError: the last batch could not be written.
        """
        self.wait()
        assignments, self._assignments = self._assignments, []
        self._last = self._thread.submit(self._write, version, groups, assignments)

    def assign(self, request_id: str, engine: int) -> None:
        """Record that an engine has a request. Ids begin with the id of the group."""
        self._assignments.append((request_id, engine))

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: the last batch could not be written.
        """
        if self._last is not None:
            last, self._last = self._last, None
            last.result()

    def close(self) -> None:
        """Write what is pending, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._assigned.close()

    def _write(
        self, version: int, groups: Sequence[Group], assignments: Sequence[tuple[str, int]]
    ) -> None:
        self._assigned.append(version, {"assignments": assignments})
        path = path_of(self._folder.parent, version)
        packed = serialize(encode(RolloutState({}, 0, {}, tuple(groups), ())))
        unfinished = path.with_suffix(".unfinished")
        with add_file_name(path):
            unfinished.write_bytes(packed.tobytes())
            unfinished.replace(path)


def path_of(run_folder: Path, version: int) -> Path:
    """Return the file with the batch that `version` was trained on."""
    return run_folder / ROLLOUTS / f"{version:06d}.bin"


def read_rollouts(run_folder: Path, version: int) -> tuple[Group, ...]:
    """Read the batch that `version` was trained on.

    Raises:
        ConfigError: it was not recorded, or its file is damaged.
    """
    path = path_of(run_folder, version)
    try:
        return decode(deserialize(np.fromfile(path, np.uint8)))[0].buffered
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: expected the rollouts of step {version}, found no such file; only runs with "
            "metrics.rollouts=true can be replayed"
        ) from error
    except (ValueError, KeyError, StopIteration) as error:
        raise ConfigError(f"{path}: damaged ({type(error).__name__}: {error})") from error
