"""Progress of training or an evaluation: live lines on a terminal, periodic plain lines
elsewhere.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn
from rich.progress import Progress as Bar
from rich.progress import Task as RichTask
from rich.table import Column
from rich.text import Text

from areal_jax.metrics import names

PLAIN_INTERVAL_S = 5.0
"""Minimum interval of plain lines of steps, except for the first and the last step."""

HEARTBEAT_S = 30.0
"""Longest time without a line where there is no terminal."""

VERSION = "version"
"""Version that the latest scores are of, among the scores."""

_SCORES = (names.PASS_AT_1, names.EVAL_REWARD, names.PERPLEXITY, names.ACCURACY, VERSION)


def facts_of_training(metrics: Mapping[str, float], scores: Mapping[str, float]) -> Iterator[str]:
    """Yield the facts to show of a training step.

    Args:
        metrics: metrics of the step.
        scores: scores of the latest evaluation.
    """
    is_supervised = names.REWARD not in metrics and names.LOSS in metrics
    return (_supervised_facts if is_supervised else _rl_facts)(metrics, scores)


def facts_of_evaluation(metrics: Mapping[str, float], scores: Mapping[str, float]) -> Iterator[str]:
    """Yield the facts to show during an evaluation: the score so far, and the throughput."""
    if (reward := scores.get(names.EVAL_REWARD)) is not None:
        yield f"mean reward {reward:.4g}"
    else:
        yield f"pass@1 {_number(scores.get(names.PASS_AT_1), '.1%')}"
    yield f"rollout {format_rate(metrics.get(names.ROLLOUT_TOKENS_PER_S))} tok/s"


class Stage:
    """A stage of a run under way, such as loading or compiling. Updated from any thread."""

    def __init__(self, name: str, start_s: float) -> None:
        """
        Args:
            name: of the stage.
            start_s: time at which it begins, in seconds.
        """
        self.name, self.start_s = name, start_s
        self._programs: dict[str, tuple[str, int, int]] = {}

    def compiles(self, source: str, program: str, number: int, total: int) -> None:
        """Show that a program is compiled next.

        Args:
            source: what compiles it; several do so at a time.
            program: its name.
            number: its number among those of the source, from 1.
            total: number of the source's programs.
        """
        self._programs[source] = program, number, total

    def describe(self) -> str:
        """The stage with the programs that are compiled now and how many there are."""
        of_sources = dict(self._programs)
        if not of_sources:
            return self.name
        number = sum(number for _, number, _ in of_sources.values())
        total = sum(total for _, _, total in of_sources.values())
        now = ", ".join(
            f"{source} {program}"
            for source, (program, number, total) in of_sources.items()
            if number < total or len(of_sources) == 1
        )
        return f"{self.name} {number} of {total}" + (f": {now}" if now else "")

    def describe_end(self) -> str:
        """The stage with the number of programs that it compiled."""
        total = sum(total for _, _, total in self._programs.values())
        return f"{self.name} {total} programs" if total else self.name


class _Row(ProgressColumn):
    """The text of a row, computed at each refresh."""

    def render(self, task: RichTask) -> Text:
        return Text(task.fields["describe"]())


class ProgressDisplay:
    """Shows a run's stages and steps, or an evaluation's tasks. Stages may begin and end in any
    thread; the rest is for one thread.
    """

    def __init__(
        self,
        headline: str,
        num_steps: int,
        first_step: int = 0,
        *,
        show_steps: bool = True,
        unit: str = "step",
        facts: Callable[
            [Mapping[str, float], Mapping[str, float]], Iterable[str]
        ] = facts_of_training,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Print the headline and start the progress line.

        Args:
            headline: policy, data and devices.
            num_steps: steps of the whole run.
            first_step: steps done before this process started.
            show_steps: whether to show stages and steps; else only lines of `say`.
            unit: name of a step.
            facts: yields the facts to show from a step's metrics and the latest scores.
            console: the terminal or file to print to.
            clock: returns the time in seconds.
        """
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._num_steps, self._show_steps, self._clock = num_steps, show_steps, clock
        self._unit, self._facts_of = unit, facts
        self._start_s = clock()
        self._printed_s = self._step_printed_s = float("-inf")
        # The first step that this process finished, and its time: the estimate of the time left
        # excludes compilation and loading.
        self._first_ended: tuple[int, float] | None = None
        self._scores: dict[str, float] = {}
        self._shown: tuple[int, Mapping[str, float], float] | None = None
        self._facts_text = ""
        self.stage_s: dict[str, float] = {}
        """Time of the stages that ended, by name, in seconds."""
        self._stages: list[Stage] = []
        # Guards lines and stages, which the heartbeat's thread reads.
        self._lock = threading.RLock()
        self.say(headline)
        is_live = show_steps and self._console.is_terminal
        self._bar = self._make_bar(first_step) if is_live else None
        # Owned by this object; ended by `close`. A terminal needs none: its rows show the time.
        self._closed = threading.Event()
        if show_steps and not is_live:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @property
    def elapsed_s(self) -> float:
        """Time since the headline, in seconds."""
        return self._clock() - self._start_s

    def say(self, text: str) -> None:
        """Print a line, above the live lines if there are any."""
        with self._lock:
            self._printed_s = self._clock()
            self._console.print(Text(text))

    @contextmanager
    def stage(self, name: str, *, announce: bool = True) -> Iterator[Stage]:
        """Show a stage and its time while the block runs.

        Args:
            name: of the stage; stages of one name add up in `stage_s`.
            announce: print its time at its end; otherwise the block prints its result.
        """
        stage = Stage(name, self._clock())
        with self._lock:
            self._stages.append(stage)
        row = None
        if self._bar is not None:
            row = self._bar.add_task("", total=None, describe=lambda: self._describe(stage))
            self._show_step_row()
        try:
            yield stage
        finally:
            seconds = self._clock() - stage.start_s
            with self._lock:
                self._stages.remove(stage)
                self.stage_s[name] = self.stage_s.get(name, 0.0) + seconds
            if self._bar is not None and row is not None:
                self._bar.remove_task(row)
                self._show_step_row()
        if announce and self._show_steps:
            self.say(f"{stage.describe_end()}: {seconds:.1f} s")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` steps are done, the last with these metrics; missing ones show as a
        dash.
        """
        self._remember(metrics)
        now_s = self._clock()
        self._shown = step, metrics, now_s
        self._facts_text = self._facts(step, metrics, now_s - self._start_s)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)
            self._show_step_row()
        elif self._show_steps and (
            step == self._num_steps or now_s - self._step_printed_s >= PLAIN_INTERVAL_S
        ):
            self._step_printed_s = now_s
            self.say(f"{self._unit} {step}/{self._num_steps}  {self._facts_text}")

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Show the scores of an evaluation of `version` from now on."""
        self._remember({**metrics, VERSION: version})
        if self._shown is not None:
            step, last, then_s = self._shown
            self._facts_text = self._facts(step, last, then_s - self._start_s)

    def tick(self) -> None:
        """Print what is under way if no line was printed for HEARTBEAT_S."""
        with self._lock:
            if self._clock() - self._printed_s >= HEARTBEAT_S:
                self.say(f"{self._under_way()}, {format_duration(self.elapsed_s)} elapsed")

    def close(self) -> None:
        """Stop the live lines; the step stays visible if one has ended."""
        self._closed.set()
        if self._bar is not None:
            if self._shown is None:
                self._bar.update(self._bar.task_ids[0], visible=False)
            self._bar.stop()

    def _beat(self) -> None:
        while not self._closed.wait(1.0):
            self.tick()

    def _under_way(self) -> str:
        if self._stages:
            return "; ".join(map(self._describe, self._stages))
        if self._shown is None:
            return self._waiting()
        step, _, then_s = self._shown
        since = format_duration(self._clock() - then_s)
        return f"{self._unit} {step}/{self._num_steps} ended {since} ago"

    def _describe(self, stage: Stage) -> str:
        return f"{stage.describe()}  {format_duration(self._clock() - stage.start_s)}"

    def _waiting(self) -> str:
        return f"waiting for the first {self._unit}"

    def _show_step_row(self) -> None:
        """Hide the row of steps while the stages before the first step run."""
        if self._bar is not None:
            is_visible = self._shown is not None or not self._stages
            self._bar.update(self._bar.task_ids[0], visible=is_visible)

    def _remember(self, metrics: Mapping[str, float]) -> None:
        self._scores |= {name: metrics[name] for name in _SCORES if name in metrics}

    def _make_bar(self, first_step: int) -> Bar:
        bar = Bar(
            BarColumn(bar_width=16),
            _Row(table_column=Column(overflow="fold")),  # two lines where one is too short
            console=self._console,
        )

        def describe() -> str:
            if self._shown is None:
                elapsed = format_duration(self.elapsed_s)
                return f"{self._unit} {first_step}/{self._num_steps} {self._waiting()}  {elapsed}"
            return f"{self._unit} {self._shown[0]}/{self._num_steps} {self._facts_text}"

        bar.add_task("", total=self._num_steps, completed=first_step, describe=describe)
        bar.start()
        return bar

    def _facts(self, step: int, metrics: Mapping[str, float], elapsed_s: float) -> str:
        first_step, first_s = self._first_ended = self._first_ended or (step, elapsed_s)
        done = step - first_step
        left_s = (elapsed_s - first_s) / done * (self._num_steps - step) if done > 0 else None
        facts = self._facts_of(metrics, self._scores)
        return "  ".join(
            (*facts, f"{format_duration(elapsed_s)} elapsed", f"{format_duration(left_s)} left")
        )


def _rl_facts(metrics: Mapping[str, float], scores: Mapping[str, float]) -> Iterator[str]:
    yield f"reward {_number(metrics.get(names.REWARD), '.2f')}"
    of = f" of version {scores[VERSION]:.0f}" if VERSION in scores else ""
    if names.EVAL_REWARD in scores:
        yield f"evaluation reward {scores[names.EVAL_REWARD]:.4g}{of}"
    else:
        yield f"pass@1 {_number(scores.get(names.PASS_AT_1), '.1%')}{of}"
    mean, largest = metrics.get(names.STALENESS_MEAN), metrics.get(names.STALENESS_MAX)
    yield f"staleness {_number(mean, '.1f')}/{_number(largest, '.0f')}"
    yield f"rollout {format_rate(metrics.get(names.ROLLOUT_TOKENS_PER_S))} tok/s"
    yield f"train {format_rate(metrics.get(names.TRAIN_TOKENS_PER_S))} tok/s"


def _supervised_facts(metrics: Mapping[str, float], scores: Mapping[str, float]) -> Iterator[str]:
    yield f"loss {metrics[names.LOSS]:.4f}"
    if names.ACCURACY in scores:
        yield f"accuracy {scores[names.ACCURACY]:.1%}"
    else:
        yield f"perplexity {_number(scores.get(names.PERPLEXITY), '.4g')}"
    if names.PASS_AT_1 in scores:
        yield f"pass@1 {scores[names.PASS_AT_1]:.1%}"
    yield f"train {format_rate(metrics.get(names.TRAIN_TOKENS_PER_S))} tok/s"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def format_rate(value: float | None) -> str:
    """A rate in three digits or fewer with k or M; a dash where it is not known."""
    if value is None or not math.isfinite(value):
        return "-"
    return (
        f"{value:.0f}"
        if value < 1e4
        else f"{value / 1e3:.0f}k"
        if value < 1e6
        else f"{value / 1e6:.1f}M"
    )


def format_duration(seconds: float | None) -> str:
    """A duration as m:ss or h:mm:ss; a dash where it is not known."""
    if seconds is None:
        return "-"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
