"""The end of a run on the terminal: its outcome in a table, and the commands that follow."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.metrics import names
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.jsonl import read
from areal_jax.metrics.progress import format_duration, format_rate
from areal_jax.reports.series import Series, collect
from areal_jax.storage import shown

LABEL_WIDTH = 12
MAX_WINDOW = 10
"""Steps at the beginning and the end of a run over which the reward is averaged."""

NONE = Series([], [])


def shell_command(name: str, *arguments: str) -> str:
    """A command of the package as it can be typed here: the console script, with its folder where
    the shell does not find it.

    Args:
        name: such as `train`.
        arguments: not quoted.
    """
    python, here = Path(sys.executable), Path.cwd()
    script = python.with_name(f"areal-{name}")
    if shutil.which(script.name) == str(script):
        return shlex.join([script.name, *arguments])
    program, module = (script, []) if script.is_file() else (python, ["-m", f"areal_jax.{name}"])
    program = program.relative_to(here) if program.is_relative_to(here) else program
    return shlex.join([str(program), *module, *arguments])


def summary_lines(
    folder: Path,
    num_steps: int,
    *,
    elapsed_s: float,
    stage_s: Mapping[str, float],
    findings: Mapping[str, int],
) -> Iterator[str]:
    """The outcome of a run, every figure with the steps or versions that it is of.

    Args:
        folder: the run's folder.
        num_steps: steps that the run should make.
        elapsed_s: time since this process began to load, in seconds.
        stage_s: time of its stages, in seconds.
        findings: first step of every health check that has a finding at the end.
    """
    series = collect(read(folder / METRICS))
    for label, text in (
        ("steps", _steps(series, num_steps)),
        ("time", _time(elapsed_s, stage_s)),
        ("reward", _trend(series, names.REWARD)),
        ("loss", "" if names.REWARD in series else _trend(series, names.LOSS)),
        ("pass@1", _change(series, names.PASS_AT_1, ".1%")),
        ("evaluation", _change(series, names.EVAL_REWARD, ".4g")),
        ("perplexity", _change(series, names.PERPLEXITY, ".4g")),
        ("accuracy", _change(series, names.ACCURACY, ".1%")),
        ("throughput", _throughput(series)),
        ("health", ", ".join(f"{name} since step {step}" for name, step in findings.items())),
    ):
        if text:
            yield f"{label:<{LABEL_WIDTH}}{text}"


def next_commands(folder: Path) -> Iterator[str]:
    """The commands that evaluate and serve the newest checkpoint of a run, if it has one."""
    if saved_versions(folder / CHECKPOINTS):
        evaluate = shell_command("evaluate", f"checkpoint={shown(folder)}")
        serve = shell_command("serve", f"model={shown(folder)}")
        yield f"{'evaluate it':<{LABEL_WIDTH}}{evaluate}"
        yield f"{'serve it':<{LABEL_WIDTH}}{serve}"


def _steps(series: Mapping[str, Series], num_steps: int) -> str:
    trained = series.get(names.REWARD) or series.get(names.LOSS) or NONE
    return f"{max(trained.versions, default=-1) + 1} of {num_steps}"


def _time(elapsed_s: float, stage_s: Mapping[str, float]) -> str:
    parts = ", ".join(
        f"{name} {format_duration(seconds)}" for name, seconds in stage_s.items() if seconds >= 1
    )
    return format_duration(elapsed_s) + (f", of which {parts}" if parts else "")


def _trend(series: Mapping[str, Series], name: str) -> str:
    """Means over the first and the last steps; one mean where there are few."""
    versions, values = series.get(name, NONE)
    if not values:
        return ""
    window = max(1, min(MAX_WINDOW, len(values) // 4))
    parts = [slice(window)] + [slice(-window, None)] * (len(values) > 1)
    return ", ".join(f"{fmean(values[part]):.4g} {_of_steps(versions[part])}" for part in parts)


def _of_steps(versions: Sequence[int]) -> str:
    # The row of a version is of the step that trained it.
    first, last = versions[0] + 1, versions[-1] + 1
    return f"in step {first}" if first == last else f"in steps {first} to {last}"


def _change(series: Mapping[str, Series], name: str, form: str) -> str:
    """The first and the last score."""
    scores = list(zip(*series.get(name, NONE), strict=True))
    ends = scores[:1] + scores[1:][-1:]
    return ", ".join(f"{score:{form}} of version {version}" for version, score in ends)


def _throughput(series: Mapping[str, Series]) -> str:
    """Medians over the steps, which leave out the slow first ones."""
    return ", ".join(
        f"{label} {format_rate(median(series[name].values))} tok/s"
        for label, name in (
            ("rollout", names.ROLLOUT_TOKENS_PER_S),
            ("train", names.TRAIN_TOKENS_PER_S),
        )
        if name in series
    )
