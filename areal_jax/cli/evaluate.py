"""python -m areal_jax.evaluate --exp=NAME [checkpoint=...] [data=...] [a.b=c ...]: what a policy is
worth."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.cli.arguments import (
    experiment_parser,
    help_text,
    named_experiment,
    refused,
    refused_by_disk,
    show,
)
from areal_jax.cluster.environment import prepare
from areal_jax.cluster.signals import interruptible
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import CONFIG_FILE, experiment_names
from areal_jax.config.overrides import parse_overrides, settings
from areal_jax.config.policy_names import NamedPolicy, named_policy
from areal_jax.data.benchmarks import BENCHMARKS, find_benchmark
from areal_jax.errors import ConfigError

USAGE = f"""\
usage: python -m areal_jax.evaluate --exp=NAME [checkpoint=WHERE] [data=WHAT] [a.b=c ...] [options]

Have a policy answer problems, grader the answers, and report the figures. The same command goes on where it was stopped.

  --exp=NAME            an experiment ({{names}}), or the path of a .py file that defines `experiment`;
                        where checkpoint= names a run, that run's own settings are taken if it is left out
  --config=FILE         instead of --exp: the {CONFIG_FILE} of an earlier run
  checkpoint=WHERE      a run folder (its newest checkpoint), RUN/{CHECKPOINTS}/VERSION, a Hugging Face folder or hub name, a
                        PEFT folder, or the URL of a server that speaks OpenAI's protocol, such as http://127.0.0.1:8000/v1
                        (with the token in OPENAI_API_KEY); the experiment's own policy where not given
  data=WHAT             {{benchmarks}},
                        or a file or folder in any of their formats; the experiment's eval_tasks where not given
  a.b=c                 change a setting, such as evaluation.samples_per_task=32 or engine.max_new_tokens=2048
  --folder=DIR          where to write, and to go on; evaluations/NAME-CHECKPOINT-DIGEST where not given
  --help                this text, with every setting; with --exp or --config, their values
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status, with one message on stderr where it is not 0.

    2 where the input cannot be or another process has the folder; 1 where problems failed that may
    be answered when they are asked again, or the disk is full; 130 and 143 where SIGINT or SIGTERM
    ended it."""
    with interruptible() as interruption:
        interruption.advice = lambda: "the same command goes on where it was"
        try:
            return _run(_parse(sys.argv[1:] if argv is None else argv))
        except ConfigError as error:
            return refused(f"{error}", 2)
        except KeyboardInterrupt as interrupt:
            return interruption.refused(interrupt)
        except OSError as error:
            return refused_by_disk(error, interruption.advice())


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = experiment_parser()
    parser.add_argument("--folder", type=Path)
    return parser.parse_intermixed_args(list(argv))


def _run(arguments: argparse.Namespace) -> int:
    given = parse_overrides(arguments.overrides)
    where, data = given.pop("checkpoint", ""), given.pop("data", "")
    arguments.overrides = [f"{key}={value}" for key, value in given.items()]
    if arguments.help:
        usage = USAGE.format(names=", ".join(experiment_names()), benchmarks=", ".join(BENCHMARKS))
        show(
            help_text(
                usage,
                named_experiment(arguments) if arguments.exp or arguments.config else Experiment,
            )
        )
        return 0
    server = where if where.startswith(("http://", "https://")) else None
    named = named_policy(where, "checkpoint") if where and not server else NamedPolicy({})
    if named.checkpoint is not None and not (arguments.exp or arguments.config):
        arguments.config = named.checkpoint.folder / CONFIG_FILE
    implied = [f"policy.{key}={text}" for key, text in named.settings.items()]
    if data:
        implied += _tasks_of(data)
    arguments.overrides = [*implied, *arguments.overrides]
    experiment = named_experiment(arguments)
    # jax reads its flags when it is first imported, so that everything that imports it comes after
    # this.
    prepare(experiment.placement)
    from areal_jax.run import evaluation as evaluating

    try:
        evaluating.run(
            experiment, checkpoint=named.checkpoint, server=server, folder=arguments.folder
        )
    except evaluating.Unanswered as error:
        return refused(f"{error}", 1)
    return 0


def _tasks_of(data: str) -> list[str]:
    """The settings of the tasks that `data=` names, all of them, as overrides."""
    try:
        source = find_benchmark(data)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    listed = settings(source, "eval_tasks.").values()
    return [
        f"eval_tasks={type(source).__name__}",
        *(f"{setting.key}={setting.text()}" for setting in listed),
        "evaluation.num_tasks=none",
    ]
