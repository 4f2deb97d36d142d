"""The algorithm: fully asynchronous reinforcement learning (AReaL, arXiv:2505.24298, figure 2).

    tasks -> gate -> workflow -> engine -> reward -> buffer -> trainer -> weight channel -> engine

Generation never waits for training. The gate (equation 3) bounds how far it may run ahead, the
engine takes every new version of the weights between two decode steps, and the trainer corrects for
what is stale (equation 5). There is no second loop: with `max_staleness=0` this one is synchronous.

Threads: the asyncio thread owns all counting (gate, buffer, controller); the engine's engine loop
    has a thread of its own; the trainer works in a worker thread, one step at a time; answers are
    graded in other processes.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from areal_jax.checkpoint.recovery import decode, encode
from areal_jax.cluster.config import Ray
from areal_jax.cluster.watchdog import Stalled
from areal_jax.config.experiment import Experiment, FineTuning, PreferenceExperiment
from areal_jax.data.pipeline import TaskStream
from areal_jax.errors import AllRejected, CorruptedState
from areal_jax.metrics import names
from areal_jax.records import Group, RolloutState, Sampling
from areal_jax.rollout.buffer import TasksExhausted
from areal_jax.rollout.controller import Rollouts, open_gate, run_rollouts
from areal_jax.run.build import TRAINER, Run, Trains, assembled, trained_samples
from areal_jax.run.claim import Claim, claimed
from areal_jax.run.liveness import watched
from areal_jax.run.plan import Plan
from areal_jax.run.trainer import rl_trainer, trainer_from_examples
from areal_jax.threads import in_thread
from areal_jax.trainer.step import Metrics
from areal_jax.trainer.versions import FromExamples


@runtime_checkable
class LearnsFromGroups(Trains, Protocol):
    """A trainer of reinforcement learning, here or elsewhere."""

    def step(self, groups: Sequence[Group]) -> Stepped: ...


@runtime_checkable
class Stepped(Protocol):
    """What one step did."""

    @property
    def metrics(self) -> Metrics: ...
    @property
    def stale(self) -> Sequence[Sequence[Bool[np.ndarray, "_"]]]: ...


async def train(run: Run[LearnsFromGroups], exp: Experiment) -> None:
    """Reinforcement learning until the last step, the end of the tasks, or a request to stop; ends
    with a checkpoint."""
    trainer, weight_channel, tokenizer = run.trainer, run.weight_channel, run.plan.tokenizer
    restored = decode(run.restored)[0] if run.restored else None
    tasks = TaskStream(run.plan.tasks.tasks, exp.seed)
    if restored:
        tasks.restore(restored.tasks)
    workflow = run.workflow(exp.rollout.samples_per_group)
    sampling = Sampling(
        exp.engine.max_new_tokens,
        exp.engine.temperature,
        exp.engine.top_k,
        exp.engine.top_p,
        tokenizer.stop_token_ids,
    )
    gate, buffer = open_gate(exp.rollout, trainer.version, restored)
    if trainer.version == 0:
        async with watched(run):
            await run.unless_stopped(run.evaluate(0))

    generating = run_rollouts(
        *(tasks, run.engine, workflow, run.grader, gate, buffer, exp.rollout),
        sampling=sampling,
        seed=exp.seed,
        restored=restored,
        max_consecutive_failures=exp.rewards.max_consecutive_failures,
    )
    async with generating as rollouts, saved_when_stalled(run, rollouts):
        for version in range(trainer.version, exp.num_steps):
            try:
                groups = await next_batch(
                    run, rollouts, exp.rollout.groups_per_batch, version
                )  # oldest first, each once
            except AllRejected:
                await checkpoint(
                    run, rollouts
                )  # nothing finished is lost: the fault may be mended, and the run resumed
                run.report()
                raise
            if groups is None:
                break
            try:
                with run.span(TRAINER, f"step {version}"):
                    # Proximal log-probs, advantages, mini-batches.
                    step = await in_thread(partial(trainer.step, groups), "trainer")
            except CorruptedState:
                raise  # a checkpoint of this would take the place of one to resume from
            except FloatingPointError:
                await checkpoint(
                    run, rollouts, untrained=groups
                )  # nothing finished is lost, whatever is changed next
                raise
            weight_channel.publish(
                version + 1, trainer.params
            )  # the engine swaps between two decode steps
            gate.version = version + 1  # opens exactly one batch of places
            num_samples = sum(len(group.samples) for group in groups)
            run.record(
                version, {**step.metrics, "samples": float(num_samples)}, rollouts.counters()
            )
            run.sinks.write_samples(version, trained_samples(groups, step.stale))
            await housekeeping(run, version + 1, rollouts)  # generation goes on meanwhile
        await checkpoint(run, rollouts)
    async with watched(run):
        await run.finish()


@asynccontextmanager
async def saved_when_stalled(run: Run[LearnsFromGroups], rollouts: Rollouts) -> AsyncIterator[None]:
    """Watch the run; where it stalls, it ends with a checkpoint, unless a step is done in part."""
    try:
        async with watched(run, rollouts):
            yield
    except Stalled as stalled:
        if not stalled.during:
            try:
                await checkpoint(run, rollouts)
            except TimeoutError as error:
                stalled.add_note(
                    f"no checkpoint of version {run.trainer.version} was saved: {error}"
                )
        run.report()
        raise


async def next_batch(
    run: Run[LearnsFromGroups], rollouts: Rollouts, num_groups: int, version: int
) -> list[Group] | None:
    """The batch to train `version` on; None at the end of the tasks, or where stopping is asked
    for."""
    try:
        return await run.unless_stopped(rollouts.buffer.take(num_groups, version))
    except TasksExhausted as end:
        run.progress.say(f"training ends after {version} steps: {end}")
        return None


async def housekeeping(run: Run[LearnsFromGroups], version: int, rollouts: Rollouts) -> None:
    """Checkpoint and evaluate on schedule; after the last step both are done anyway."""
    exp = run.experiment
    if version < exp.num_steps:
        if is_due(version, exp.checkpoint.every_steps):
            await checkpoint(run, rollouts)
        if is_due(version, exp.evaluation.every_steps):
            await run.evaluate_meanwhile(version)


async def checkpoint(
    run: Run[LearnsFromGroups], rollouts: Rollouts, untrained: Sequence[Group] = ()
) -> None:
    """Save all that the run consists of as of this moment, between two steps; `untrained` is a
    batch that was taken in vain."""
    state = await rollouts.snapshot()
    state = replace(state, buffered=(*untrained, *state.buffered))
    await in_thread(partial(run.save, run.trainer.version, encode(state)), "checkpoint")


async def fine_tune(run: Run[FromExamples[Any]], exp: FineTuning) -> None:
    """Learning from examples, the same update with another loss, until the last step or a request
    to stop."""
    trainer = run.trainer
    examples = TaskStream(run.plan.examples.examples, exp.seed)
    if run.restored:
        examples.restore(decode(run.restored)[0].tasks)
    published = trainer.version
    for version in range(trainer.version, exp.num_steps):
        # Before the step, so that a run that resumes from this version measures it again.
        if version == 0 or is_due(version, exp.heldout_every_steps):
            await measure(run, exp)
        batch = [next(examples) for _ in range(exp.examples_per_batch)]
        with run.span("trainer", f"step {version}"):
            metrics = await asyncio.to_thread(trainer.step, batch)
        run.record(version, metrics)
        if run.stop.is_set():
            break
        if is_due(version + 1, exp.checkpoint.every_steps):
            await asyncio.to_thread(run.save, version + 1, encode(nothing_but(examples)))
        if is_due(version + 1, exp.evaluation.every_steps) and version + 1 < exp.num_steps:
            run.weight_channel.publish(published := version + 1, trainer.params)
            await run.evaluate_meanwhile(version + 1)
    await asyncio.to_thread(run.save, trainer.version, encode(nothing_but(examples)))
    if not run.stop.is_set():
        await measure(run, exp)
    if run.plan.decodes and published < trainer.version:
        run.weight_channel.publish(trainer.version, trainer.params)
    await run.finish()


async def measure(run: Run[FromExamples[Any]], exp: FineTuning) -> None:
    """Write down loss, and perplexity or accuracy, of the examples that are not trained on, with
    the parameters as they are."""
    if not exp.heldout_every_steps:
        return
    version, examples = run.trainer.version, run.plan.eval_examples.examples
    with run.span("evaluation", f"loss of version {version}"):
        found = await asyncio.to_thread(run.trainer.measure, examples)
    metrics = {f"evaluation/{name}": total / weight for name, (total, weight) in found.items()}
    loss, count = metrics[names.EVAL_LOSS], found["loss"][1]
    if isinstance(exp, PreferenceExperiment):
        score, of = f"accuracy {metrics[names.ACCURACY]:.1%}", f"{count:.0f} pairs"
    else:
        metrics |= {names.PERPLEXITY: perplexity(loss), "evaluation/loss_tokens": count}
        score, of = (
            f"perplexity {metrics[names.PERPLEXITY]:.4g}",
            f"{count:.0f} tokens of {len(examples)} examples",
        )
    run.record_evaluation(
        version,
        metrics,
        f"version {version}: loss {loss:.4f}, {score} on {of} that are not trained on",
    )


def perplexity(loss: float) -> float:
    """exp(loss): among how many tokens the policy is, on average, undecided; infinite where no
    float holds it."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf


def nothing_but(examples: TaskStream) -> RolloutState:
    """The place in a stream; nothing else lies between examples and trainer."""
    return RolloutState(examples.state(), next_group_id=0, rejected={}, buffered=(), suspended=())


def is_due(version: int, every_steps: int) -> bool:
    """Whether something that happens every so many steps, 0 being never, happens at this
    version."""
    return every_steps > 0 and version % every_steps == 0


def run(
    plan: Plan,
    run_folder: Path,
    *,
    resume: bool,
    source: str | None = None,
    claim: Claim | None = None,
) -> None:
    """Train what the plan describes, from the start or from the newest checkpoint in `run_folder`.

    Args:
        source: name or file of the experiment, for processes elsewhere.
        claim: on the folder, where the caller holds one; it is claimed here otherwise.

    Raises:
        FloatingPointError: training diverges.
        Stopped: a signal ended the run before it was done; it is saved.
        NotSaved: the last checkpoint could not be written.
        FolderInUse: another process has claimed the folder."""
    with nullcontext(claim) if claim else claimed(run_folder) as held:
        asyncio.run(_run(plan, run_folder, resume, source, held))


async def _run(
    plan: Plan, run_folder: Path, resume: bool, source: str | None, claim: Claim
) -> None:
    exp = plan.experiment
    if not isinstance(exp, Experiment):
        async with assembled(
            plan, run_folder, resume=resume, make_trainer=trainer_from_examples
        ) as parts:
            await fine_tune(parts, exp)
    elif isinstance(exp.launch, Ray):
        # Ray is needed nowhere else, and need not be installed.
        from areal_jax.run.cluster import train_on_cluster

        await train_on_cluster(
            plan, run_folder, partial(train, exp=exp), resume=resume, source=source, claim=claim
        )
    else:
        async with assembled(plan, run_folder, resume=resume, make_trainer=rl_trainer) as parts:
            await train(parts, exp)
