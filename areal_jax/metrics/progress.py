"""Progress line of training or an evaluation: live on a terminal, periodic plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from areal_jax.metrics import names

PLAIN_INTERVAL_S = 5.0
"""Minimum interval of plain lines, except for the first and the last step."""

_SCORES = (names.PASS_AT_1, names.EVAL_REWARD, names.PERPLEXITY, names.ACCURACY)


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
    yield f"rollout {_rate(metrics.get(names.ROLLOUT_TOKENS_PER_S))} tok/s"


class Progress:
    """Shows a run's steps, or an evaluation's tasks. For one thread."""

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
            show_steps: whether to show steps; else only lines of `say`.
            unit: name of a step.
            facts: yields the facts to show from a step's metrics and the latest scores.
            console: the terminal or file to print to.
            clock: returns the time in seconds.
        """
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._num_steps, self._show_steps, self._clock = num_steps, show_steps, clock
        self._unit, self._facts_of = unit, facts
        self._start_s = clock()
        self._printed_s = float("-inf")
        # The first step that this process finished, and its time: the estimate of the time left
        # excludes compilation and loading.
        self._first_ended: tuple[int, float] | None = None
        self._scores: dict[str, float] = {}
        self._shown: tuple[int, Mapping[str, float], float] | None = None
        self.say(headline)
        self._bar = self._make_bar(first_step) if show_steps and self._console.is_terminal else None

    def say(self, text: str) -> None:
        """Print a line, above the live line if there is one."""
        self._console.print(Text(text))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` steps are done, the last with these metrics; missing ones show as a
        dash."""
        self._remember(metrics)
        now_s = self._clock()
        self._shown = step, metrics, now_s
        facts = self._facts(step, metrics, now_s - self._start_s)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, facts=facts)
        elif self._show_steps and (
            step == self._num_steps or now_s - self._printed_s >= PLAIN_INTERVAL_S
        ):
            self._printed_s = now_s
            self.say(f"{self._unit} {step}/{self._num_steps}  {facts}")

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Show the scores of an evaluation from now on."""
        self._remember(metrics)
        if self._bar is not None and self._shown is not None:
            step, last, then_s = self._shown
            self._bar.update(
                self._bar.task_ids[0], facts=self._facts(step, last, then_s - self._start_s)
            )

    def close(self) -> None:
        """Stop the live line; it stays visible if it shows a step."""
        if self._bar is not None:
            if self._shown is None:
                self._bar.update(self._bar.task_ids[0], visible=False)
            self._bar.stop()

    def _remember(self, metrics: Mapping[str, float]) -> None:
        self._scores |= {name: metrics[name] for name in _SCORES if name in metrics}

    def _make_bar(self, first_step: int) -> Bar:
        step = TextColumn(
            f"{self._unit} {{task.completed}}/{{task.total}}", table_column=Column(no_wrap=True)
        )
        facts = TextColumn(
            "{task.fields[facts]}", table_column=Column(overflow="fold")
        )  # two lines where one is too short
        bar = Bar(BarColumn(bar_width=16), step, facts, console=self._console)
        bar.add_task(
            "",
            total=self._num_steps,
            completed=first_step,
            facts=f"waiting for the first {self._unit}",
        )
        bar.start()
        return bar

    def _facts(self, step: int, metrics: Mapping[str, float], elapsed_s: float) -> str:
        first_step, first_s = self._first_ended = self._first_ended or (step, elapsed_s)
        done = step - first_step
        left_s = (elapsed_s - first_s) / done * (self._num_steps - step) if done > 0 else None
        facts = self._facts_of(metrics, self._scores)
        return "  ".join((*facts, f"{_duration(elapsed_s)} elapsed", f"{_duration(left_s)} left"))


def _rl_facts(metrics: Mapping[str, float], scores: Mapping[str, float]) -> Iterator[str]:
    yield f"reward {_number(metrics.get(names.REWARD), '.2f')}"
    if names.EVAL_REWARD in scores:
        yield f"evaluation reward {scores[names.EVAL_REWARD]:.4g}"
    else:
        yield f"pass@1 {_number(scores.get(names.PASS_AT_1), '.1%')}"
    mean, largest = metrics.get(names.STALENESS_MEAN), metrics.get(names.STALENESS_MAX)
    yield f"staleness {_number(mean, '.1f')}/{_number(largest, '.0f')}"
    yield f"rollout {_rate(metrics.get(names.ROLLOUT_TOKENS_PER_S))} tok/s"
    yield f"train {_rate(metrics.get(names.TRAIN_TOKENS_PER_S))} tok/s"


def _supervised_facts(metrics: Mapping[str, float], scores: Mapping[str, float]) -> Iterator[str]:
    yield f"loss {metrics[names.LOSS]:.4f}"
    if names.ACCURACY in scores:
        yield f"accuracy {scores[names.ACCURACY]:.1%}"
    else:
        yield f"perplexity {_number(scores.get(names.PERPLEXITY), '.4g')}"
    if names.PASS_AT_1 in scores:
        yield f"pass@1 {scores[names.PASS_AT_1]:.1%}"
    yield f"train {_rate(metrics.get(names.TRAIN_TOKENS_PER_S))} tok/s"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _rate(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return (
        f"{value:.0f}"
        if value < 1e4
        else f"{value / 1e3:.0f}k"
        if value < 1e6
        else f"{value / 1e6:.1f}M"
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
