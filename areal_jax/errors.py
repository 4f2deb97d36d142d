"""Exceptions that cross rooms."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be; the message names the key, what was expected and what came."""


class InvalidRequest(ValueError):
    """A request that no retry can make right, such as a prompt beyond the engine's limit: its task
    is skipped and counted."""


class EngineStopped(RuntimeError):
    """The engine has died or was closed and will answer nothing more; `__cause__` says why."""


class AllRejected(RuntimeError):
    """Every group is rejected, which is a fault of the run, not of its tasks; `__cause__` is the
    last one's error."""


class RewardsFailing(AllRejected):
    """Every reward call of several groups in a row failed."""


class NotLearning(RuntimeError):
    """A run that ends because its health checks say that it cannot learn, or that ends without
    having learnt."""


class NotSaved(RuntimeError):
    """The last checkpoint of a run could not be written."""


class CorruptedState(FloatingPointError):
    """Training has diverged, and what is in memory is nothing to resume from: a step is done in
    part, or the parameters or the batch are not finite themselves."""


def first_error(error: Exception) -> Exception:
    """The error inside a TaskGroup's, however often it was wrapped; any other error itself."""
    return first_error(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
