"""Runs of `areal-train` in separate processes, for comparison by benchmarks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

from areal_jax.metrics import jsonl, names
from areal_jax.metrics.config import METRICS

Rows = list[dict[str, float]]
"""Rows of a run's metrics.jsonl."""


def run_all(runs: Mapping[str, Iterable[str]], folder: Path, num_steps: int) -> dict[str, Rows]:
    """Return the rows of every run by name; finished runs are not repeated.

    Args:
        runs: name to settings.
        folder: parent of the run folders.
        num_steps: number of trainer steps of each run.
    """
    found: dict[str, Rows] = {}
    seconds: list[float] = []
    for name, settings in runs.items():
        where = folder / name
        if not is_finished(where, num_steps):
            started = time.perf_counter()
            command = [
                sys.executable,
                "-m",
                "areal_jax.train",
                f"--run-folder={where}",
                f"num_steps={num_steps}",
                *settings,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(
                    f"{' '.join(command)} exited with status {done.returncode}:\n"
                    f"{done.stderr[-2000:]}"
                )
            seconds.append(time.perf_counter() - started)
            left = sum(not is_finished(folder / other, num_steps) for other in runs)
            print(
                (
                    f"{name}: {seconds[-1]:.0f} s; {left} runs and about "
                    f"{left * fmean(seconds) / 60:.0f} min remaining"
                ),
                flush=True,
            )
        found[name] = read(where)
    return found


def is_finished(run_folder: Path, num_steps: int) -> bool:
    return (run_folder / "report.html").exists() and max(
        row["version"] for row in read(run_folder)
    ) >= num_steps - 1


def read(run_folder: Path) -> Rows:
    return list(jsonl.read(run_folder / METRICS))


def steps(rows: Iterable[dict[str, float]]) -> Rows:
    """Return the rows of trainer steps, without those of evaluations."""
    return [row for row in rows if names.REWARD in row]


def pass_at_1(rows: Iterable[Mapping[str, float]]) -> list[float]:
    """Return pass@1 of all evaluations, in order."""
    return [row[names.PASS_AT_1] for row in rows if names.PASS_AT_1 in row]
