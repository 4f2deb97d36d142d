"""`areal-report RUN_FOLDER ...`: write, compare or serve the reports of runs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal_jax.checkpoint.folders import without_checkpoints
from areal_jax.cli.arguments import Parser, answer, fail, fail_on_disk, show
from areal_jax.cluster.signals import SIGNALS
from areal_jax.errors import ConfigError
from areal_jax.metrics.config import METRICS
from areal_jax.reports.live import live_report
from areal_jax.reports.report import COMPARISON, write_comparison, write_report
from areal_jax.reports.run_report import State
from areal_jax.run.claim import is_claimed, writable
from areal_jax.storage import fetch_objects, is_url, local_only, shown

USAGE = f"""\
usage: areal-report RUN_FOLDER [RUN_FOLDER ...] [--out=FILE] [--live] [--port=N]

Write report.html and learning_curve.png of a run folder again, from its metrics.jsonl,
samples.jsonl and run.json. The run may have ended early, or still be running. No device and no
weights are needed.

  RUN_FOLDER ...        several runs: their curves in one page, {COMPARISON} in the first folder
  --out=FILE            another file for that page
  --live                serve the page on 127.0.0.1 until Ctrl-C, with new steps as they end and
                        with all samples
  --port=N              port of --live; default: a free one
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
        if command.live:
            asyncio.run(_serve(command.run_folders, command.port))
        else:
            show(f"report: {_write(command.run_folders, command.out)}")
    except ConfigError as error:
        return fail(f"{error}", 2)
    except OSError as error:
        return fail_on_disk(error, "the same command writes the report")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("give one or more run folders; --help says more")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--out", type=local_only)
    parser.add_argument("run_folders", nargs="*")
    command = parser.parse(argv)
    if command.help is not None or command.version:
        return command
    if not command.run_folders:
        parser.error("expected a run folder, found none")
    if not 0 <= command.port < 65536:
        parser.error(f"--port={command.port}: expected a number from 0 to 65535")
    if command.out and (command.live or len(command.run_folders) < 2):
        parser.error("--out is the file of a comparison: give several run folders and no --live")
    if command.live and (urls := [each for each in command.run_folders if is_url(each)]):
        parser.error(f"--live follows a folder on this machine, found {urls[0]}")
    command.run_folders = [fetch_objects(each, without_checkpoints) for each in command.run_folders]
    for folder in command.run_folders:
        if not (folder / METRICS).is_file():
            raise ConfigError(
                f"{shown(folder)}: expected a run folder with {METRICS}, found none; give the "
                "folder of a run"
            )
    return command


def state_of(folder: Path) -> State:
    """Return whether a process still writes to the folder."""
    return "running" if is_claimed(folder) else "stopped"


@contextmanager
def _readable(folders: Sequence[Path]) -> Iterator[None]:
    """Convert errors of reading the files of runs to ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, KeyError) as error:
        where = ", ".join(map(str, folders))
        raise ConfigError(
            f"{where}: expected the files of a run, found others "
            f"({type(error).__name__}: {error}); give the folder of a run"
        ) from error


def _write(folders: Sequence[Path], out: Path | None) -> Path:
    with _readable(folders):
        if len(folders) == 1:
            with writable(folders[0], "RUN_FOLDER"):
                return write_report(folders[0], state_of(folders[0]))
        path = out or folders[0] / COMPARISON
        with writable(path.parent, "--out" if out else "RUN_FOLDER"):
            return write_comparison(path, [(folder, state_of(folder)) for folder in folders])


async def _serve(folders: Sequence[Path], port: int) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    with _readable(folders):
        try:
            async with live_report(folders, state_of, port) as address:
                show(f"live report until Ctrl-C: {address}")
                await stop.wait()
        except OSError as error:
            raise ConfigError(
                f"--port={port}: cannot listen there ({error.strerror or error})"
            ) from error
