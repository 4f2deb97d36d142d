"""SPO: tracked success rates of prompts, by the numbers of the paper's recipe and in a trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_training import PROMPT_TOKENS, batch, make_trainer, mean, train_mesh

from areal_jax.checkpoint.recovery import encode
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.data.packing import TrainingSequence
from areal_jax.records import RolloutState
from areal_jax.rl.config import SPO
from areal_jax.run.checkpointing import Checkpointer
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.success_rates import Answer, SuccessRate, decay_of

CONFIG = TrainerConfig(
    advantages=SPO(),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    num_mini_batches=1,
    rows_per_micro_batch=4,
    remat="none",
)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return make_trainer(CONFIG, train_mesh())


def test_rates_equal_hand_computed_numbers() -> None:
    # From 0.5 and 0.5, at decay 0.875: rewards 1 and 0 are 0.5 above and 0.766667 below the rate.
    answer = Answer(np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32))
    rate, above = SuccessRate(0.5, 0.5), list[float]()
    for reward in (1.0, 0.0):
        above.append(reward - rate.mean)
        rate = rate.updated(0.875, [reward], answer)
    assert above == pytest.approx([0.5, -0.766667], abs=1e-6)
    assert rate.mean == pytest.approx(0.476331, abs=1e-6)
    # 2^(-0.006 / 0.06) = 0.933033; a policy that has not moved, and one that has moved far.
    assert [decay_of(SPO(), change) for change in (0.006, 0.0, 1.0)] == pytest.approx(
        [0.933033, 0.96, 0.875], abs=1e-6
    )


def test_advantages_are_rewards_above_the_tracked_rate(trainer: Trainer) -> None:
    first, second = batch(seed=1), batch(seed=2)
    start = trainer.step(first)
    assert mean(start, "success_rate_baseline") == 0.5
    assert mean(start, "success_rate_decay") == pytest.approx(0.96)
    rates = [(0.48 + r.sum(), 0.48 + len(r) - r.sum()) for r in map(rewards, first)]
    by_hand = [successes / (successes + failures) for successes, failures in rates]
    changes = [change(trainer, group.samples[0]) for group in first]
    result = trainer.step(second)
    above = [rewards(group) - rate for group, rate in zip(second, by_hand, strict=True)]
    flat = np.concatenate(above)
    expected = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6)
    found = [advantages[-1] for of_group in result.advantages for advantages in of_group]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    decays = np.clip(2.0 ** (-np.array(changes) / 0.06), 0.875, 0.96)
    assert mean(result, "success_rate_decay") == pytest.approx(decays.mean(), rel=1e-5)


def test_a_failed_update_tracks_nothing(trainer: Trainer) -> None:
    state, host_state = jax.device_get(trainer.state), trainer.host_state
    assert host_state is not None
    broken = batch(seed=3)
    samples = tuple(
        replace(each, behave_logp=np.full_like(each.behave_logp, -3e38))
        for each in broken[0].samples
    )
    with pytest.raises(FloatingPointError, match="not applied"):
        trainer.step([replace(broken[0], samples=samples), *broken[1:]])
    after = trainer.host_state
    assert after is not None and after.facts == host_state.facts
    trainer.restore(state)


def test_a_checkpoint_holds_the_tracked_rates(trainer: Trainer, tmp_path: Path) -> None:
    def checkpointer(of: Trainer) -> Checkpointer:
        plan: Any = SimpleNamespace()  # read by results alone
        return Checkpointer(plan=plan, folder=tmp_path, trainer=of, store=store)

    store = CheckpointStore(tmp_path, keep=1)
    trainer.step(batch(seed=4))
    empty = RolloutState({}, 0, {}, (), ())
    checkpointer(trainer).save(trainer.version, encode(empty))
    store.wait()
    expected = trainer.step(batch(seed=5))
    params = jax.device_get(trainer.params)

    resumed = make_trainer(CONFIG, train_mesh())
    checkpointer(resumed).restore(trainer.version - 1)
    found = resumed.step(batch(seed=5))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.params), params)
    assert mean(found, "success_rate_baseline") == mean(expected, "success_rate_baseline")
    store.close()


def rewards(group: Any) -> np.ndarray:
    return np.array([sample.reward for sample in group.samples])


def change(trainer: Trainer, sample: Any) -> float:
    """Mean absolute change of the log-probs of one answer, by a forward pass of its own."""
    learner = trainer._learner
    sequence = TrainingSequence(sample.tokens, sample.loss_mask, sample.behave_logp)
    (packed,), layout = learner.pack([sequence])
    (logp,) = layout.gather(np.asarray(learner.logprobs(learner.put(packed)))[None])
    return float(np.abs(logp - sample.behave_logp)[PROMPT_TOKENS:].mean())
