"""Fully asynchronous reinforcement learning for reasoning models, in JAX.

Public names are resolved on first use, so that importing the package neither imports jax nor claims
a device.
"""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from areal_jax.api.evaluating import Evaluated, evaluate
    from areal_jax.api.preflight import preflight
    from areal_jax.api.results import Result
    from areal_jax.api.server import Server, generate, serve
    from areal_jax.api.training import train, train_async
    from areal_jax.config.experiment import Experiment, SFTExperiment
    from areal_jax.config.load import load_experiment
    from areal_jax.data.config import Rows
    from areal_jax.models.families import register_model_family
    from areal_jax.protocols import Workflow
    from areal_jax.records import Completion, Group, Message, RewardResult, Sample, Task
    from areal_jax.rl.config import CustomAdvantages, CustomLoss
    from areal_jax.rl.losses import decoupled_ppo_loss, policy_loss
    from areal_jax.rl.token_losses import PolicyLoss
    from areal_jax.rollout.gate import Gate
    from areal_jax.run.callbacks import STOP, Callback, EarlyStopping, KeepBest
    from areal_jax.workflows.config import CustomWorkflow
    from areal_jax.workflows.custom import Chat

__all__ = [
    "STOP",
    "Callback",
    "Chat",
    "Completion",
    "CustomAdvantages",
    "CustomLoss",
    "CustomWorkflow",
    "EarlyStopping",
    "Evaluated",
    "Experiment",
    "Gate",
    "Group",
    "KeepBest",
    "Message",
    "PolicyLoss",
    "Result",
    "RewardResult",
    "Rows",
    "SFTExperiment",
    "Sample",
    "Server",
    "Task",
    "Workflow",
    "decoupled_ppo_loss",
    "evaluate",
    "generate",
    "load_experiment",
    "policy_loss",
    "preflight",
    "register_model_family",
    "serve",
    "train",
    "train_async",
]

_MODULES = {
    "areal_jax.api.evaluating": ("Evaluated",),
    "areal_jax.api.preflight": ("preflight",),
    "areal_jax.api.results": ("Result",),
    "areal_jax.api.server": ("Server", "generate"),
    "areal_jax.api.training": ("train_async",),
    "areal_jax.config.experiment": ("Experiment", "SFTExperiment"),
    "areal_jax.config.load": ("load_experiment",),
    "areal_jax.data.config": ("Rows",),
    "areal_jax.models.families": ("register_model_family",),
    "areal_jax.protocols": ("Workflow",),
    "areal_jax.records": ("Completion", "Group", "Message", "RewardResult", "Sample", "Task"),
    "areal_jax.rl.config": ("CustomAdvantages", "CustomLoss"),
    "areal_jax.rl.losses": ("decoupled_ppo_loss", "policy_loss"),
    "areal_jax.rl.token_losses": ("PolicyLoss",),
    "areal_jax.rollout.gate": ("Gate",),
    "areal_jax.run.callbacks": ("STOP", "Callback", "EarlyStopping", "KeepBest"),
    "areal_jax.workflows.config": ("CustomWorkflow",),
    "areal_jax.workflows.custom": ("Chat",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

_FUNCTIONS = {
    "evaluate": "areal_jax.api.evaluating",
    "serve": "areal_jax.api.server",
    "train": "areal_jax.api.training",
}
"""Public functions that a submodule has the name of, with the module that defines each. The
submodule is callable as its function, so that `areal_jax.train(...)` works whether or not
`areal_jax.train` was imported as a module.
"""


class _CallableModule(ModuleType):
    """A submodule that is called as the public function of its name."""

    def _function(self) -> Callable[..., Any]:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_FUNCTIONS[name]), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())


class _Package(ModuleType):
    """The package; importing a submodule sets an attribute of it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FUNCTIONS and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in _FUNCTIONS:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
