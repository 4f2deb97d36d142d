"""`python -m areal_jax.report RUN_FOLDER`: write the report of a run again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from areal_jax.cli.arguments import Parser, answer, fail, fail_on_disk, show
from areal_jax.errors import ConfigError
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.report import write_report
from areal_jax.run.claim import writable

USAGE = """\
usage: areal-report RUN_FOLDER

Write report.html and learning_curve.png of a run folder again, from its metrics.jsonl,
samples.jsonl and run.json. The run may have ended early, or still be running. No device and no
weights are needed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0; 2 for invalid input; 1 where the disk is full. Not 0: one line on stderr.
    """
    try:
        command = _parse(argv)
        if answer(command, USAGE):
            return 0
        show(f"report: {_write(command.run_folder)}")
    except ConfigError as error:
        return fail(f"{error}", 2)
    except OSError as error:
        return fail_on_disk(error, "the same command writes the report")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("give one run folder; --help says more")
    parser.add_argument("run_folder", type=Path, nargs="?")
    command = parser.parse(argv)
    if command.run_folder is None and command.help is None and not command.version:
        parser.error("expected a run folder, found none")
    return command


def _write(folder: Path) -> Path:
    if not (folder / METRICS).is_file():
        raise ConfigError(
            f"{folder}: expected a run folder with {METRICS}, found none; give the folder of a run"
        )
    try:
        with writable(folder, "RUN_FOLDER"):
            return write_report(folder)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder}: expected the files of a run, found others "
            f"({type(error).__name__}: {error}); give the folder of a run"
        ) from error
