"""The report of a run: learning_curve.png, and report.html, which is rewritten during the run."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from areal_jax.errors import ConfigError
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.files import write_atomically
from areal_jax.reports.page import ASSETS, read_asset, render_page
from areal_jax.reports.run_report import RunReport, State
from areal_jax.reports.sections import sections
from areal_jax.reports.series import MAX_POINTS

logger = logging.getLogger(__name__)

REPORT = "report.html"
COMPARISON = "comparison.html"
LEARNING_CURVE = "learning_curve.png"

INTERVAL_S = 10.0
"""Shortest time between two updates of the page."""

SCRIPTS = ("samples.js", "report.js")

TITLES = (
    ("run", "Run"),
    ("health", "Health"),
    ("learning", "Learning"),
    ("policy", "Policy"),
    ("time", "Time"),
    ("staleness", "Staleness"),
    ("samples", "Samples"),
    ("metrics", "All metrics"),
    ("settings", "Configuration"),
)
"""Sections of the page, by id."""


def encode_runs(runs: Sequence[tuple[RunReport, State]], *, live: bool) -> str:
    """Return the data of the page as JSON.

    Args:
        runs: the runs and their states.
        live: whether a server sends updates and samples.
    """
    max_points = MAX_POINTS // max(1, round(len(runs) / 2))
    encoded = ",".join(run.encode(state, max_points, samples=not live) for run, state in runs)
    rest = json.dumps({"live": live, "sections": sections()}, separators=(",", ":"))
    return f'{{"runs":[{encoded}],{rest[1:]}'


def render(runs: Sequence[tuple[RunReport, State]], *, live: bool = False) -> str:
    """Render the page of runs, as of their last update."""
    names = ", ".join(run.folder.resolve().name for run, _ in runs)
    scripts = (*(read_asset(name) for name in SCRIPTS), "start();")
    return render_page(
        ASSETS / "report.html.jinja",
        scripts,
        encode_runs(runs, live=live),
        connect="'self'" if live else "'none'",
        headline=names,
        titles=TITLES,
    )


def write_report(run_folder: Path, state: State) -> Path:
    """Write learning_curve.png and report.html into the run's folder; return the page's path.

    They are made from metrics.jsonl and, if they exist, samples.jsonl and run.json.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    run = open_run(run_folder)
    write_learning_curve(run)
    return write_run(run, state)


def open_run(run_folder: Path) -> RunReport:
    """Read all that a run has written.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    path = run_folder / METRICS
    if not path.exists():
        raise FileNotFoundError(f"{path} expected, found none; name the folder of a run")
    run = RunReport(run_folder)
    run.update()
    return run


def write_run(run: RunReport, state: State) -> Path:
    """Write the page of a run, as of its last update."""
    path = run.folder / REPORT
    write_atomically(path, render([(run, state)]))
    return path


def write_comparison(path: Path, runs: Sequence[tuple[Path, State]]) -> Path:
    """Write a page that shows the curves of several runs together; return its path.

    Args:
        path: the page.
        runs: run folders and the states of their runs.

    Raises:
        FileNotFoundError: a folder holds no run.
    """
    write_atomically(path, render([(open_run(folder), state) for folder, state in runs]))
    return path


def write_learning_curve(run: RunReport) -> None:
    """Write the picture of a run, as of its last update."""
    # Imported here, since matplotlib takes a fifth of the time in which a run is imported.
    from areal_jax.reports.learning_curve import plot

    names = run.metrics.names()
    series = {name: line for name in names if (line := run.metrics.series(name)) is not None}
    write_atomically(run.folder / LEARNING_CURVE, plot(series))


class ReportWriter:
    """Rewrites the report of a run that goes on, in a background thread."""

    def __init__(self, run_folder: Path, interval_s: float = INTERVAL_S) -> None:
        """Start the thread.

        Args:
            run_folder: the run's folder, with metrics.jsonl.
            interval_s: shortest time between two updates, in seconds.
        """
        self._run = RunReport(run_folder)
        self._interval_s = interval_s
        self._is_due, self._is_closed = threading.Event(), threading.Event()
        self._is_finished = False
        # Owned by this writer. The training thread sets `_is_due` after each step; `close` ends it,
        # and only then another thread uses `_run`.
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Rewrite the page soon: the run has written a row."""
        self._is_due.set()

    def finish(self, state: State) -> Path:
        """End the thread, and write the page and the picture a last time; return the page's path.

        Raises:
            OSError: they were not written.
            ConfigError: samples are damaged.
        """
        self._end()
        self._is_finished = True
        self._run.update()
        write_learning_curve(self._run)
        return write_run(self._run, state)

    def close(self) -> None:
        """End the thread. The page of a run that ended with an error, before `finish`, then says
        that it has stopped.
        """
        self._end()
        if not self._is_finished:
            self._update("stopped")

    def _end(self) -> None:
        self._is_closed.set()
        self._is_due.set()
        self._thread.join()

    def _work(self) -> None:
        while self._is_due.wait() and not self._is_closed.is_set():
            self._is_due.clear()
            start_s = time.monotonic()
            self._update("running")
            self._is_closed.wait(max(0.0, start_s + self._interval_s - time.monotonic()))

    def _update(self, state: State) -> None:
        try:
            self._run.update()
            write_run(self._run, state)
        except (OSError, ConfigError) as error:
            # The run goes on, and its end reports a full disk or damaged samples.
            logger.warning("report not updated: %s", error)
