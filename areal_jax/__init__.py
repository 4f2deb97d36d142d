"""Fully asynchronous reinforcement learning for reasoning models, in JAX.

Public names are resolved on first use, so that importing the package neither imports jax nor claims
a device.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from areal_jax.config.experiment import Experiment, SFTExperiment
    from areal_jax.config.load import load_experiment
    from areal_jax.protocols import Workflow
    from areal_jax.records import Completion, Group, Message, RewardResult, Sample, Task
    from areal_jax.rl.losses import PolicyLoss, decoupled_ppo_loss, policy_loss
    from areal_jax.rollout.gate import Gate

__all__ = [
    "Completion",
    "Experiment",
    "Gate",
    "Group",
    "Message",
    "PolicyLoss",
    "RewardResult",
    "SFTExperiment",
    "Sample",
    "Task",
    "Workflow",
    "decoupled_ppo_loss",
    "load_experiment",
    "policy_loss",
]

_MODULES = {
    "areal_jax.config.experiment": ("Experiment", "SFTExperiment"),
    "areal_jax.config.load": ("load_experiment",),
    "areal_jax.protocols": ("Workflow",),
    "areal_jax.records": ("Completion", "Group", "Message", "RewardResult", "Sample", "Task"),
    "areal_jax.rl.losses": ("PolicyLoss", "decoupled_ppo_loss", "policy_loss"),
    "areal_jax.rollout.gate": ("Gate",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
