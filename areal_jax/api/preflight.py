"""Preflight from Python; the command line uses the same function."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from areal_jax.api.background import call_beside_loop
from areal_jax.cluster.environment import prepare
from areal_jax.config.experiment import AnyExperiment
from areal_jax.config.load import source_of
from areal_jax.parallel.config import PlacementConfig

if TYPE_CHECKING:
    from areal_jax.run.preflight import PreflightReport


def preflight(experiment: AnyExperiment, source: str | None = None) -> PreflightReport:
    """Try an experiment without training it, as `python -m areal_jax.train --preflight` does:
    right, wrong and misleading answers, from the prompt to one update.

    Rewards, rows and workflows may be Python objects. Needs no accelerator, and takes a CPU where
    jax is not imported yet.

    Args:
        experiment: settings of the run.
        source: name or file of the experiment, whose docstring may say which command makes its
            policy; None: the file that defines its classes.

    Returns:
        The rewards of every script, and the findings; `passed` if there are none.

    Raises:
        ConfigError: a part of the experiment is missing, or does not fit the others.
    """
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"
    prepare(PlacementConfig())
    from areal_jax.run.preflight import run_preflight

    return call_beside_loop(
        lambda: run_preflight(experiment, source or source_of(experiment)),
        lambda: None,
        "preflight",
    )
