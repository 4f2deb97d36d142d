"""Start a run: reinforcement learning or fine-tuning, in this process or on a cluster."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from areal_jax.cluster.config import Ray
from areal_jax.config.experiment import Experiment
from areal_jax.finetune import fine_tune
from areal_jax.loop import train
from areal_jax.run.build import build_run
from areal_jax.run.callbacks import RunControl
from areal_jax.run.claim import Claim, claimed
from areal_jax.run.plan import Plan
from areal_jax.run.trainer import example_trainer, rl_trainer


def start(
    plan: Plan,
    run_folder: Path,
    *,
    resume: bool,
    source: str | None = None,
    claim: Claim | None = None,
    control: RunControl | None = None,
) -> None:
    """Train a plan, from the start or from the newest checkpoint in `run_folder`.

    Args:
        source: name or file of the experiment, for processes on other hosts.
        claim: the caller's claim on the folder; None: it is claimed here.
        control: the caller's callbacks and stop requests.

    Raises:
        FloatingPointError: training diverges.
        Stopped: a signal ended the run early; its state is saved.
        NotSaved: the last checkpoint could not be written.
        NotLearning: no step changed the policy.
        FolderInUse: another process has claimed the folder.
    """
    with nullcontext(claim) if claim else claimed(run_folder) as held:
        asyncio.run(_start(plan, run_folder, resume, source, held, control or RunControl()))


async def _start(
    plan: Plan,
    run_folder: Path,
    resume: bool,
    source: str | None,
    claim: Claim,
    control: RunControl,
) -> None:
    exp = plan.experiment
    build = partial(build_run, plan, run_folder, resume=resume, control=control)
    if not isinstance(exp, Experiment):
        async with build(make_trainer=example_trainer) as run:
            await fine_tune(run, exp)
    elif isinstance(exp.launch, Ray):
        # Ray is an optional dependency.
        from areal_jax.run.cluster import train_on_cluster

        await train_on_cluster(
            plan,
            run_folder,
            partial(train, exp=exp),
            resume=resume,
            source=source,
            claim=claim,
            control=control,
        )
    else:
        async with build(make_trainer=rl_trainer) as run:
            await train(run, exp)
