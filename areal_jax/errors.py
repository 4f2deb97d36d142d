"""Exceptions that cross rooms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """An invalid setting; the message names the key, the expected and the found value."""


class InvalidRequest(ValueError):
    """A request that no retry can satisfy, such as a prompt beyond the engine's limit.

    Its task is rejected and counted.
    """


class EngineStopped(RuntimeError):
    """The engine died or was closed and answers no more requests; `__cause__` says why."""


class WorkerDied(RuntimeError):
    """A process of the run died or stopped answering; the message names it and the evidence."""


class NotStarted(WorkerDied):
    """A process of the run failed before it was ready, and would fail again."""


class Unanswered(RuntimeError):
    """Tasks of an evaluation failed that may succeed when they are tried again."""


class NotGraded(RuntimeError):
    """A reward or tool call failed through no fault of the answer.

    The group must not be trained on.
    """


class AllRejected(RuntimeError):
    """Every group is rejected: a fault of the run, not of its tasks.

    `__cause__` is the error of the last group.
    """


class RewardsFailing(AllRejected):
    """Every reward call of several consecutive groups failed."""


class NotLearning(RuntimeError):
    """A health check ended the run, or no step of it changed the policy."""


class ClaimLost(RuntimeError):
    """Another process has taken over the run folder; this process may not write there."""


class NotSaved(RuntimeError):
    """The last checkpoint of a run could not be written."""


class CorruptedState(FloatingPointError):
    """Training diverged and its state in memory cannot be resumed from.

    A step was applied in part, or parameters or batch are not finite.
    """


def first_error(error: Exception) -> Exception:
    """Return the innermost first error of nested exception groups, or the error itself."""
    return first_error(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


@contextmanager
def config_errors(setting: str = "") -> Iterator[None]:
    """Convert loader errors in the block to ConfigError: bad input, not a bug.

    Args:
        setting: that names the input, where the loader's message does not.

    Raises:
        ConfigError: in place of a ValueError or an OSError.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{setting}: {error}" if setting else str(error)) from error
