"""Fully asynchronous reinforcement learning (AReaL, arXiv:2505.24298, figure 2).

    tasks -> gate -> workflow -> engine -> reward -> buffer -> trainer -> weight channel -> engine

Generation never waits for training. The gate (`rollout/gate.py`, equation 3) bounds staleness, how
far generation runs ahead; the engine switches to new weights between two decode steps; and the
trainer's importance weights correct for stale tokens (equation 5). With `max_staleness=0` the same
loop is synchronous.

Threads: the asyncio thread owns all counting (gate, buffer, controller); each engine loop has its
own thread; the trainer runs one step at a time in a worker thread; other processes grade answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from areal_jax.config.experiment import Experiment, is_due
from areal_jax.errors import CorruptedState
from areal_jax.protocols import ReinforcementRun
from areal_jax.records import Group, StepResult
from areal_jax.rollout.adaptive_staleness import adapt_limit
from areal_jax.rollout.buffer import Buffer, TasksExhausted
from areal_jax.rollout.controller import Rollouts, open_gate, run_rollouts
from areal_jax.threads import run_in_thread


async def train(run: ReinforcementRun, exp: Experiment) -> None:
    """Train until the last step, the end of the tasks or a stop request; end with a checkpoint."""
    trainer = run.trainer
    gate, buffer = open_gate(exp.rollout, trainer.version, run.restored)
    if trainer.version == 0:
        async with run.watched():
            await run.stop.unless_set(run.evaluation.evaluate(0))

    generating = run_rollouts(
        run.stream,
        run.engine,
        run.workflow,
        run.grader,
        gate,
        buffer,
        exp.rollout,
        sampling=run.sampling,
        seed=exp.seed,
        restored=run.restored,
        max_consecutive_failures=exp.rewards.max_consecutive_failures,
    )
    async with generating as rollouts, run.watched(rollouts):
        for version in range(trainer.version, exp.num_steps):
            groups = await next_batch(run, buffer, exp.rollout.groups_per_batch, version)
            if groups is None:
                break
            step = await train_step(run, rollouts, groups)
            await run.adapt_split()  # may move devices between training and decoding
            # The engine switches to the new weights between two decode steps.
            run.weight_channel.publish(version + 1, trainer.params)
            adapt_limit(gate, exp.rollout, step.metrics)
            gate.version = version + 1  # admits one more batch of groups, under a fixed bound
            num_samples = float(sum(len(group.samples) for group in groups))
            run.record(version, {**step.metrics, "samples": num_samples}, rollouts.counters())
            run.recording.record_samples(version, groups, step.stale)
            if version + 1 < exp.num_steps:
                if is_due(version + 1, exp.checkpoint.every_steps):
                    await save(run, rollouts)
                # May end the trainer hosts, and start others from a checkpoint.
                await run.adapt_hosts(partial(save, run, rollouts))
                if is_due(version + 1, exp.evaluation.every_steps):
                    await run.evaluation.start(version + 1)
        await save(run, rollouts)

    async with run.watched():
        await run.finish()


async def next_batch(
    run: ReinforcementRun, buffer: Buffer, num_groups: int, version: int
) -> list[Group] | None:
    """Take the oldest finished groups, each once, to train `version` on; None at the end of the
    tasks or at a stop request.
    """
    try:
        return await run.stop.unless_set(buffer.take(num_groups, version))
    except TasksExhausted as end:
        run.recording.say(f"training ends after {version} steps: {end}")
        return None


async def train_step(
    run: ReinforcementRun, rollouts: Rollouts, groups: Sequence[Group]
) -> StepResult:
    """Update the policy on one batch: proximal log-probs, advantages, mini-batches.

    Raises:
        FloatingPointError: training diverged; the batch is in the last checkpoint, to be trained
            on again.
        CorruptedState: the step was applied in part, so that no checkpoint is saved.
    """
    try:
        with run.recording.span("trainer", f"step {run.trainer.version}"):
            return await run_in_thread(partial(run.trainer.step, groups), "trainer")
    except CorruptedState:
        raise
    except FloatingPointError:
        await save(run, rollouts, untrained=groups)
        raise


async def save(run: ReinforcementRun, rollouts: Rollouts, untrained: Sequence[Group] = ()) -> None:
    """Save a checkpoint of trainer and rollouts, between two steps.

    Args:
        untrained: a batch taken from the buffer that no step was trained on.
    """
    state = await rollouts.snapshot()
    await run.save(run.trainer.version, replace(state, buffered=(*untrained, *state.buffered)))
