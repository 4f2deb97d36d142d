"""Callbacks of a run: what the caller does after steps, evaluations and checkpoints."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal

from areal_jax.checkpoint.checksums import FILES
from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import find_checkpoints
from areal_jax.config.load import CONFIG_FILE
from areal_jax.metrics import names
from areal_jax.metrics.files import write_atomically

Row = Mapping[str, float | int]
"""Metrics of one step or evaluation by name, with `version`: a row of metrics.jsonl."""

BEST, SCORE_FILE = "best", "score.json"


class Stop(Enum):
    """What a callback returns to end the run."""

    STOP = "stop"


STOP: Final = Stop.STOP
"""Returned by a callback, ends the run after the current step, with a checkpoint."""


class Callback:
    """Base class of callbacks; override what you need.

    The methods are called in the run's thread, in order, between two steps: a slow one delays the
    run. An error that one raises ends the run with a checkpoint, and is raised by `train`.
    """

    def on_step(self, metrics: Row) -> Stop | None:
        """After a step; `version` is the version that the step trained."""

    def on_evaluation(self, metrics: Row) -> Stop | None:
        """After an evaluation of `version`."""

    def on_checkpoint(self, version: int, folder: Path) -> Stop | None:
        """After the checkpoint of a version is complete in `folder`."""

    def on_end(self, result: Any) -> Stop | None:
        """After the run, also one that failed.

        Args:
            result: the `Result`; `ended` says why the run ended.
        """


class RunControl:
    """Connects a run with its caller: calls the callbacks, and passes stop requests on."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = tuple(callbacks)
        self.error: Exception | None = None
        """The first error of a callback."""
        self.stopped_by = ""
        """Class of the callback that stopped the run; empty: none did."""
        self._lock = threading.Lock()
        self._is_requested = False
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seen = set[tuple[int, int]]()

    @property
    def ends_run(self) -> bool:
        """Whether a callback has ended the run."""
        return bool(self.stopped_by or self.error)

    def request_stop(self) -> None:
        """Stop the run after its current step, from any thread, also before it has begun."""
        with self._lock:
            self._is_requested = True
            if self._loop is not None and self._stop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)

    @contextmanager
    def stopping(self, stop: asyncio.Event) -> Iterator[None]:
        """Set an event of the running loop at a stop request, until the block ends."""
        with self._lock:
            self._stop, self._loop = stop, asyncio.get_running_loop()
            if self._is_requested:
                stop.set()
        try:
            yield
        finally:
            with self._lock:
                self._stop = self._loop = None

    def step(self, metrics: Row) -> None:
        """Call `on_step`."""
        self._call(lambda callback: callback.on_step(metrics))

    def evaluation(self, metrics: Row) -> None:
        """Call `on_evaluation`."""
        self._call(lambda callback: callback.on_evaluation(metrics))

    def checkpoints(self, run_folder: Path, *, call: bool = True) -> None:
        """Call `on_checkpoint` for each checkpoint that is complete since the last call.

        Args:
            call: False: they belong to an earlier run, so that no callback is called.
        """
        if not self.callbacks:
            return
        found = {
            key: folder
            for key, folder in find_checkpoints(run_folder / CHECKPOINTS).items()
            if (folder / FILES).is_file()
        }
        for key in sorted(found.keys() - self._seen) if call else ():
            folder, version = found[key], key[0]
            self._call(lambda each, at=folder, of=version: each.on_checkpoint(of, at))
        self._seen |= found.keys()

    def end(self, result: object) -> None:
        """Call `on_end`. Errors are raised."""
        for callback in self.callbacks:
            callback.on_end(result)

    def _call(self, call: Callable[[Callback], Stop | None]) -> None:
        for callback in self.callbacks:
            try:
                if call(callback) is STOP:
                    self.stopped_by = self.stopped_by or type(callback).__name__
            except Exception as error:  # the user's code; raised at the end of the run
                self.error = self.error or error
        if self.ends_run and self._stop is not None:
            self._stop.set()


class EarlyStopping(Callback):
    """Stops the run when a metric has not improved for some time."""

    def __init__(
        self,
        metric: str = names.PASS_AT_1,
        *,
        patience: int = 3,
        mode: Literal["max", "min"] = "max",
        min_improvement: float = 0.0,
    ) -> None:
        """Watch a metric.

        Args:
            metric: metric of steps or evaluations.
            patience: number of values in a row without improvement after which the run stops.
            mode: whether larger (max) or smaller (min) values are better.
            min_improvement: smallest change that is an improvement.
        """
        self.metric, self.patience, self.num_without = metric, patience, 0
        self._sign, self._min_improvement = 1 if mode == "max" else -1, min_improvement
        self._best = -math.inf

    def on_step(self, metrics: Row) -> Stop | None:
        return self._watch(metrics)

    def on_evaluation(self, metrics: Row) -> Stop | None:
        return self._watch(metrics)

    def _watch(self, metrics: Row) -> Stop | None:
        if self.metric not in metrics:
            return None
        value = self._sign * metrics[self.metric]
        if value > self._best + self._min_improvement or self._best == -math.inf:
            self._best, self.num_without = value, 0
        else:
            self.num_without += 1
        return STOP if self.num_without >= self.patience else None


class KeepBest(Callback):
    """Keeps the checkpoint of the best evaluation, beyond checkpoint.keep.

    RUN/best is a run folder with that one checkpoint: `evaluate` and `serve` take it as they take
    RUN. Only versions that are both evaluated and saved count: set checkpoint.every_steps to a
    divisor of evaluation.every_steps. Hard links need no space until the run deletes its own copy.
    """

    def __init__(
        self, metric: str = names.PASS_AT_1, *, mode: Literal["max", "min"] = "max"
    ) -> None:
        """Watch a metric of evaluations.

        Args:
            metric: the metric.
            mode: whether larger (max) or smaller (min) values are better.
        """
        self.metric, self._sign = metric, 1 if mode == "max" else -1
        self._scores = dict[int, float]()
        # Checkpoints that are not evaluated yet, with their links.
        self._waiting = dict[int, Path]()

    def on_checkpoint(self, version: int, folder: Path) -> None:
        """Link the checkpoint, until its evaluation is known."""
        best = folder.parent.parent / BEST
        linked = best / f"waiting-{version}"
        _copy(folder, linked)
        self._waiting[version] = linked
        self._settle(version)

    def on_evaluation(self, metrics: Row) -> None:
        """Compare the evaluation with the best one."""
        if self.metric in metrics:
            self._scores[int(metrics["version"])] = float(metrics[self.metric])
            self._settle(int(metrics["version"]))

    def on_end(self, result: Any) -> None:
        """Delete links to checkpoints that were never evaluated."""
        for linked in self._waiting.values():
            shutil.rmtree(linked)
        self._waiting.clear()

    def _settle(self, version: int) -> None:
        if version not in self._scores or version not in self._waiting:
            return
        linked, score = self._waiting.pop(version), self._scores[version]
        # Evaluations of older versions come first: theirs will come no more.
        for older in [other for other in self._waiting if other < version]:
            shutil.rmtree(self._waiting.pop(older))
        best = linked.parent
        kept = _read_score(best)
        if kept is not None and self._sign * score <= self._sign * kept["score"]:
            shutil.rmtree(linked)
            return
        (best / CHECKPOINTS).mkdir(exist_ok=True)
        target = best / CHECKPOINTS / str(version)
        if target.exists():
            shutil.rmtree(target)
        os.rename(linked, target)
        shutil.copy2(best.parent / CONFIG_FILE, best / CONFIG_FILE)
        found = {"version": version, "metric": self.metric, "score": score}
        write_atomically(best / SCORE_FILE, json.dumps(found) + "\n")
        for path in (best / CHECKPOINTS).iterdir():
            if path != target:
                shutil.rmtree(path)


def _read_score(best: Path) -> dict[str, Any] | None:
    """Version and score of the checkpoint that is kept; None: there is none."""
    try:
        return json.loads((best / SCORE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _copy(folder: Path, to: Path) -> None:
    """Copy a folder as hard links, or as files where the file system has no hard links."""
    if to.exists():
        shutil.rmtree(to)

    def link(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
        return target

    shutil.copytree(folder, to, copy_function=link)
