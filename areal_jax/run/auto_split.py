"""placement.rollout_share=auto: trial steps, and the split of devices that balances generation and
training.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import chz

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.cluster.signals import Interrupted, Stopped
from areal_jax.config.experiment import Experiment
from areal_jax.errors import ConfigError, NotLearning
from areal_jax.metrics import jsonl, names
from areal_jax.metrics.config import MetricsConfig
from areal_jax.run.make_plan import make_plan
from areal_jax.run.plan import Plan, split_at
from areal_jax.run.start import start
from areal_jax.sim.measured import StageTimes, stage_times
from areal_jax.sim.planner import rank_splits

NUM_STEPS = 2


def balanced(plan: Plan, folder: Path) -> Plan:
    """Split the devices of a plan by the times of NUM_STEPS synchronous trial steps in `folder`.

    The trial's weights are discarded. The split is in the settings of the returned plan, so that a
    resumed run has the same. Where the policy does not fit the best split, or the devices do not
    divide, the next best is taken.

    Raises:
        ConfigError: there are too few tasks for a trial step, or no split is possible.
        Interrupted: a signal ended the trial.
    """
    experiment, start_s = plan.experiment, time.perf_counter()
    assert isinstance(experiment, Experiment)
    if folder.exists():
        shutil.rmtree(folder)  # left by a failed start
    folder.mkdir(parents=True)
    try:
        # Few steps may have no gradient; only their times are needed.
        with suppress(NotLearning):
            start(replace(plan, experiment=on_trial(experiment)), folder, resume=False)
    except Stopped as stopped:
        raise Interrupted(stopped.number) from stopped
    shutil.rmtree(folder / CHECKPOINTS)
    rows = [row for row in jsonl.read(folder / "metrics.jsonl") if names.REWARD in row]
    if not rows:
        raise ConfigError(
            "placement.rollout_share=auto: expected tasks for one trial step, found too few; set "
            "placement.rollout_share to a number"
        )
    times = stage_times(folder, experiment.engine.steps_per_dispatch)
    generate_s, train_s = device_seconds(plan, times, rows)
    split = best_split(plan, generate_s, train_s)
    print(
        f"placement.rollout_share=auto: {split.rollout_mesh.size} devices decode, "
        f"{split.train_mesh.size} train; a batch takes {generate_s:.3g} device-seconds to generate "
        f"and {train_s:.3g} to train on, by {NUM_STEPS} trial steps in {folder} "
        f"({time.perf_counter() - start_s:.0f} s)",
        flush=True,
    )
    return split


def on_trial(experiment: Experiment) -> Experiment:
    """The settings of trial steps: synchronous, so that stages do not overlap, without evaluations,
    checkpoints and moves.
    """
    return chz.replace(
        experiment,
        num_steps=NUM_STEPS,
        rollout=chz.replace(experiment.rollout, max_staleness=0),
        evaluation=chz.replace(experiment.evaluation, every_steps=0),
        checkpoint=chz.replace(experiment.checkpoint, every_steps=0, export_hf=False),
        metrics=MetricsConfig(samples=False, progress=False),
        placement=chz.replace(experiment.placement, adaptive=False),
    )


def device_seconds(
    plan: Plan, times: StageTimes, rows: Sequence[Mapping[str, int | float]]
) -> tuple[float, float]:
    """Device-seconds of generating a batch with every slot full, and of training on it.

    Args:
        rows: of metrics.jsonl, one for each step.
    """
    tokens, prefilled = (
        fmean(row[f"rollout/{name}"] for row in rows) for name in ("tokens", "prefill_tokens")
    )
    generate_s = tokens * times.decode_step_s / plan.experiment.engine.num_slots
    generate_s += prefilled * times.prefill_token_s / len(plan.engines)
    return generate_s * plan.rollout_mesh.size, times.train_step_s * plan.train_mesh.size


def best_split(plan: Plan, generate_s: float, train_s: float) -> Plan:
    """The plan of the best balanced split that is possible.

    Args:
        generate_s: device-seconds of generating a batch.
        train_s: device-seconds of training on it.

    Raises:
        ConfigError: no split is possible; the message has the reason of the best one.
    """
    num_devices, refusals = plan.train_mesh.size + plan.rollout_mesh.size, list[ConfigError]()
    for rollout in rank_splits(num_devices, generate_s, train_s):
        try:
            return make_plan(split_at(plan, rollout, num_devices - rollout), compiler=plan.compiler)
        except ConfigError as refusal:
            refusals.append(refusal)
    raise ConfigError(
        f"placement.rollout_share=auto finds no split of {num_devices} devices; the best one: "
        f"{refusals[0]}"
    )
