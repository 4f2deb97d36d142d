"""Runs of `python -m areal_jax.train`, each in a process of its own, for benchmarks to compare.
What is finished stays.
"""

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
"""What a run wrote to metrics.jsonl."""


def run_all(runs: Mapping[str, Iterable[str]], folder: Path, num_steps: int) -> dict[str, Rows]:
    """Rows of every run by name, run now where that has not been done. Args: runs: name to
    settings.
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
                    f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
                )
            seconds.append(time.perf_counter() - started)
            left = sum(not is_finished(folder / other, num_steps) for other in runs)
            print(
                (
                    f"{name}: {seconds[-1]:.0f} s; {left} runs and about "
                    f"{left * fmean(seconds) / 60:.0f} min left"
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
    """Those of trainer steps, not of evaluations."""
    return [row for row in rows if names.REWARD in row]


def pass_at_1(rows: Iterable[Mapping[str, float]]) -> list[float]:
    """Every evaluation's, in order."""
    return [row[names.PASS_AT_1] for row in rows if names.PASS_AT_1 in row]
