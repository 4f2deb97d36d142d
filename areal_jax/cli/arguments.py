"""Shared by the commands: arguments, --help, --version, shell completion, messages on stderr."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import NoReturn

from areal_jax import __version__
from areal_jax.cli.completion import completions
from areal_jax.cli.settings_help import VERSION_OPTION, help_text
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.config.load import experiment_names, load_experiment, read_config
from areal_jax.config.overrides import settings
from areal_jax.errors import ConfigError
from areal_jax.metrics.files import describe_disk_error
from areal_jax.storage import local_only

Completer = Callable[..., Sequence[str]]
"""Completes an argument in the shell; called by argcomplete with named arguments."""


class Parser(argparse.ArgumentParser):
    """A parser of --help, --version and a command's own arguments, in any order, that raises
    ConfigError for invalid ones.
    """

    def __init__(self, advice: str) -> None:
        """
        Args:
            advice: what to do about invalid arguments.
        """
        super().__init__(add_help=False, allow_abbrev=False)
        self._advice = advice
        self.add_argument("-h", "--help", metavar="TOPIC")
        self.add_argument("--version", action="store_true")

    def parse(self, argv: Sequence[str] | None, *, optional: Sequence[str] = ()) -> Namespace:
        """Parse arguments, by default those of the process.

        Args:
            optional: options besides --help whose value may be missing; it is then empty.
        """
        if "_ARGCOMPLETE" in os.environ:
            # The shell asks for completions, in a process of its own.
            import argcomplete

            argcomplete.autocomplete(self)
        given = sys.argv[1:] if argv is None else argv
        bare = {"-h": "--help=", **{name: f"{name}=" for name in ("--help", *optional)}}
        return self.parse_intermixed_args([bare.get(each, each) for each in given])

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self._advice}")


def config_parser(config: object) -> Parser:
    """A parser of overrides of a record, or of a class with its defaults."""
    return _overrides_parser(lambda prefix, **_: completions(prefix, settings(config), {}))


def experiment_parser(others: Mapping[str, Sequence[str]]) -> Parser:
    """A parser of --exp, --config and overrides.

    Args:
        others: values of the keys that are no settings, for completion.
    """

    def complete(prefix: str, parsed_args: Namespace, **_: object) -> list[str]:
        config: object = Experiment
        with suppress(ConfigError):  # the command is not finished
            config = named_experiment(parsed_args)
        return completions(prefix, settings(config), others)

    parser = _overrides_parser(complete)
    _complete_with(parser.add_argument("--exp"), lambda **_: experiment_names())
    parser.add_argument("--config", type=local_only)
    return parser


def _overrides_parser(complete: Completer) -> Parser:
    parser = Parser("settings are given without dashes, as a.b=c, and --help lists them")
    _complete_with(parser.add_argument("overrides", nargs="*"), complete)
    return parser


def _complete_with(action: argparse.Action, complete: Completer) -> None:
    # argcomplete reads this attribute.
    vars(action)["completer"] = complete


def answer(command: Namespace, usage: str, config: object = None) -> bool:
    """Print what --help or --version asks for; whether one of them was given.

    Args:
        usage: of the command.
        config: a record, or a class with its defaults, whose settings --help lists; None: the
            command has no settings.
    """
    if command.version:
        show(f"areal_jax {__version__} (jax {version('jax')}, Python {platform.python_version()})")
    elif command.help is not None:
        show(usage + VERSION_OPTION if config is None else help_text(usage, config, command.help))
    return command.version or command.help is not None


def has_experiment(command: Namespace) -> bool:
    """Whether --exp or --config is given."""
    return bool(command.exp or command.config)


def named_experiment(command: Namespace) -> AnyExperiment:
    """Load the experiment that --exp or --config names, with the overrides.

    Raises:
        ConfigError: none is named, or both are.
    """
    if command.exp and command.config:
        raise ConfigError("--exp and --config both name an experiment; give one")
    if command.config:
        return read_config(command.config, command.overrides)
    if not command.exp:
        raise ConfigError(
            f"expected --exp=NAME, one of {', '.join(experiment_names())}, or --config=FILE; found "
            "neither; --help says more"
        )
    return load_experiment(command.exp, *command.overrides)


def fail(message: str, status: int) -> int:
    """Print why the command ends to stderr; the exit status."""
    print(f"areal_jax: {message}", file=sys.stderr, flush=True)
    return status


def fail_on_disk(error: OSError, advice: str) -> int:
    """Print which file the disk could not write to stderr; the exit status. Raises any other
    error.
    """
    if (fault := describe_disk_error(error)) is None:
        raise error
    return fail(f"{fault}; make room there; {advice}", 1)


def show(text: str) -> None:
    """Print text. A reader that stops early, as `less` and `head` do, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes the buffer when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
