"""Fine-tuning: the same optimizer update as in reinforcement learning, from examples."""

from __future__ import annotations

import asyncio
import math
import sys

from areal_jax.config.experiment import FineTuning, PreferenceExperiment, is_due
from areal_jax.metrics import names
from areal_jax.protocols import FineTuningRun, Stream
from areal_jax.records import RolloutState


async def fine_tune(run: FineTuningRun, exp: FineTuning) -> None:
    """Train on examples until the last step or a stop request; end with a checkpoint."""
    trainer, examples = run.trainer, run.stream
    published = trainer.version
    for version in range(trainer.version, exp.num_steps):
        # Before the step, so that a run that resumes from this version measures it again.
        if version == 0 or is_due(version, exp.heldout_every_steps):
            await measure(run, exp)
        batch = [next(examples) for _ in range(exp.examples_per_batch)]
        with run.recording.span("trainer", f"step {version}"):
            step = await asyncio.to_thread(trainer.step, batch)
        run.record(version, step.metrics)
        if run.stop.is_set():
            break
        if is_due(version + 1, exp.checkpoint.every_steps):
            await run.save(version + 1, position_in(examples))
        if is_due(version + 1, exp.evaluation.every_steps) and version + 1 < exp.num_steps:
            run.weight_channel.publish(published := version + 1, trainer.params)
            await run.evaluation.start(version + 1)
    await run.save(trainer.version, position_in(examples))
    if not run.stop.is_set():
        await measure(run, exp)
    if run.decodes and published < trainer.version:
        run.weight_channel.publish(trainer.version, trainer.params)
    await run.finish()


async def measure(run: FineTuningRun, exp: FineTuning) -> None:
    """Record the loss, and perplexity or accuracy, of the current parameters on held-out
    examples.
    """
    if not exp.heldout_every_steps:
        return
    version, examples = run.trainer.version, run.eval_examples
    with run.recording.span("evaluation", f"loss of version {version}"):
        measured = await asyncio.to_thread(run.trainer.measure, examples)
    metrics = {f"evaluation/{name}": total / weight for name, (total, weight) in measured.items()}
    loss, count = metrics[names.EVAL_LOSS], measured["loss"][1]
    if isinstance(exp, PreferenceExperiment):
        score, size = f"accuracy {metrics[names.ACCURACY]:.1%}", f"{count:.0f} pairs"
    else:
        metrics |= {names.PERPLEXITY: perplexity(loss), "evaluation/loss_tokens": count}
        score = f"perplexity {metrics[names.PERPLEXITY]:.4g}"
        size = f"{count:.0f} tokens of {len(examples)} examples"
    run.recording.record_evaluation(
        version, metrics, f"version {version}: loss {loss:.4f}, {score} on {size} held out"
    )


def perplexity(loss: float) -> float:
    """exp(loss): the number of equally likely tokens that the policy chooses among on average;
    infinite where a float cannot hold it.
    """
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf


def position_in(examples: Stream) -> RolloutState:
    """The position in the stream, which is all that lies between examples and trainer."""
    return RolloutState(
        dict(examples.state()), next_group_id=0, rejected={}, buffered=(), suspended=()
    )
