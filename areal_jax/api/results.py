"""What a run has left in its folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_jax.checkpoint.config import POLICY
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.jsonl import read
from areal_jax.run.callbacks import Row

EVALUATION = "evaluation/"


@dataclass(frozen=True)
class Result:
    """The end of a run, and what is in its folder."""

    run_folder: Path
    version: int
    """Version of the policy: the number of steps that trained it."""
    ended: str
    """Why the run ended: `completed`, `out of tasks`, `stopped by CALLBACK`, or for callbacks of a
    run that fails the error."""

    @property
    def policy_folder(self) -> Path | None:
        """Hugging Face folder with the trained policy; None where the run exported none."""
        folder = self.run_folder / POLICY
        return folder if folder.is_dir() else None

    @property
    def evaluations(self) -> tuple[Row, ...]:
        """Metrics of every evaluation, in order, with `version`."""
        return tuple(row for row in self._rows() if _is_evaluation(row))

    def metrics(self) -> dict[str, np.ndarray]:
        """Metrics of the steps by name, as columns with one entry per step: `version` as integers,
        all others as floats, nan where a step has no value.
        """
        return _columns([row for row in self._rows() if not _is_evaluation(row)])

    def data_frame(self) -> Any:
        """Metrics of the steps as a pandas DataFrame, indexed by version.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas  # pyright: ignore[reportMissingImports] # the user's own

        return pandas.DataFrame(self.metrics()).set_index("version")

    def _rows(self) -> list[dict[str, float | int]]:
        path = self.run_folder / METRICS
        # A number that is not finite is null in the file.
        return [
            {name: math.nan if value is None else value for name, value in row.items()}
            for row in (read(path) if path.is_file() else ())
        ]


def _is_evaluation(row: Row) -> bool:
    return any(name.startswith(EVALUATION) for name in row)


def _columns(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, np.ndarray] = {
        name: np.array([row.get(name, math.nan) for row in rows], np.float64) for name in names
    }
    if rows:
        columns["version"] = columns["version"].astype(np.int64)
    return columns
