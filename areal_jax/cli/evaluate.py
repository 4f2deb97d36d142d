"""`areal-evaluate --exp=NAME [checkpoint=...] [data=...] [a.b=c ...]`: evaluate a
policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from areal_jax.api.evaluating import named_inputs, run_evaluation
from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.cli.arguments import (
    answer,
    experiment_parser,
    fail,
    fail_on_disk,
    has_experiment,
    named_experiment,
)
from areal_jax.cli.settings_help import wrap_names
from areal_jax.cluster.signals import interruptible
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import CONFIG_FILE
from areal_jax.config.overrides import parse_overrides
from areal_jax.data.benchmarks import BENCHMARKS
from areal_jax.errors import ConfigError, Unanswered
from areal_jax.storage import local_only

USAGE = f"""\
usage: areal-evaluate --exp=NAME [checkpoint=WHERE] [data=WHAT] [a.b=c ...] [options]

Sample answers of a policy to problems, grade them, and write a report. The same command resumes an
evaluation that stopped.

  --exp=NAME            an experiment, or the path of a .py file that defines `experiment`; default,
                        if checkpoint= names a run: the settings of that run
  --config=FILE         instead of --exp: the {CONFIG_FILE} of an earlier run
  checkpoint=WHERE      a run folder (its newest checkpoint), RUN/{CHECKPOINTS}/VERSION, a Hugging
                        Face folder or hub name, a PEFT folder, or the URL of a server with
                        OpenAI's protocol, such as http://127.0.0.1:8000/v1 (with the token in
                        OPENAI_API_KEY); default: the experiment's policy
  data=WHAT             {{benchmarks}},
                        or a file or folder in any of their formats; default: the experiment's
                        eval_tasks
  a.b=c                 change a setting, such as evaluation.samples_per_task=32
  --folder=DIR          folder to write, or to resume; default: evaluations/NAME-CHECKPOINT-DIGEST
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status, with one message on stderr where it is not 0: 2 for invalid input or a folder
        that another process has claimed; 1 where problems failed that may succeed when they are
        tried again, or the disk is full; 130 and 143 where SIGINT or SIGTERM ended it.
    """
    with interruptible() as interruption:
        interruption.advice = lambda: "the same command resumes it"
        try:
            return _run(_parse(argv))
        except ConfigError as error:
            return fail(f"{error}", 2)
        except KeyboardInterrupt as interrupt:
            return interruption.refused(interrupt)
        except OSError as error:
            return fail_on_disk(error, interruption.advice())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = experiment_parser({"checkpoint": [], "data": list(BENCHMARKS)})
    parser.add_argument("--folder", type=local_only)
    return parser.parse(argv)


def _run(arguments: argparse.Namespace) -> int:
    given = parse_overrides(arguments.overrides)
    where, data = given.pop("checkpoint", ""), given.pop("data", "")
    arguments.overrides = [f"{key}={value}" for key, value in given.items()]
    usage = USAGE.format(benchmarks=wrap_names(BENCHMARKS))
    shown = named_experiment(arguments) if has_experiment(arguments) else Experiment
    if answer(arguments, usage, shown):
        return 0
    inputs = named_inputs(where, data)
    if inputs.checkpoint is not None and not has_experiment(arguments):
        arguments.config = inputs.checkpoint.folder / CONFIG_FILE
    arguments.overrides = [*inputs.overrides, *arguments.overrides]
    try:
        run_evaluation(named_experiment(arguments), inputs, arguments.folder)
    except Unanswered as error:
        return fail(f"{error}", 1)
    return 0
