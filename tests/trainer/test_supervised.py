"""Supervised fine-tuning learns by heart what it is shown."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import POLICY, ROW_TOKENS, params, train_mesh

from areal_jax.data.sft import SupervisedExample
from areal_jax.models.decoder import Params
from areal_jax.trainer import step
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.step import TrainableModel


def examples(seed: int = 0, count: int = 5) -> list[SupervisedExample]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, ROW_TOKENS + 1, count)
    return [
        SupervisedExample(rng.integers(0, 32, n).astype(np.int32), np.arange(n) >= 2)
        for n in lengths
    ]


def model(given: Params, row_tokens: int) -> TrainableModel:
    return TrainableModel(
        policy=POLICY,
        params=given,
        mesh=train_mesh(),
        compute_dtype=jnp.float32,
        row_tokens=row_tokens,
    )


@pytest.fixture(scope="module")
def trainer() -> SupervisedTrainer:
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=2e-2), rows_per_micro_batch=3, remat="none"
    )
    made = SupervisedTrainer(config, model(params(), ROW_TOKENS), num_updates=100)
    made.warm_up()
    return made


@pytest.mark.slow
def test_loss_falls_and_only_the_mask_is_learnt(trainer: SupervisedTrainer) -> None:
    data = examples()
    first = trainer.step(data)
    last = [trainer.step(data) for _ in range(29)][-1]
    assert trainer.version == 30
    before, after = first.metrics["loss"], last.metrics["loss"]
    assert isinstance(before, tuple) and isinstance(after, tuple)
    assert (
        before[1]
        == after[1]
        == first.metrics["tokens_trained"]
        == sum(example.loss_mask.sum() for example in data)
    )
    assert after[0] < 0.25 * before[0]
    assert last.metrics["num_compilations"] == 5.0


@pytest.mark.slow
def test_two_threads_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=2e-2), rows_per_micro_batch=1, remat="none"
    )

    def after_three_steps() -> tuple[SupervisedTrainer, list[Any]]:
        made = SupervisedTrainer(config, model(params(), ROW_TOKENS), num_updates=100)
        return made, [made.step(examples(seed)).metrics["loss"] for seed in range(3)]

    (two, losses), threads = after_three_steps(), []
    monkeypatch.setattr(step, "MOST_PARAMS_OF_TWO_THREADS", 0)
    monkeypatch.setattr(step, "ThreadPoolExecutor", threads.append)
    one, expected = after_three_steps()
    assert not threads and two.num_compilations == one.num_compilations + 1
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), two.params, one.params)


def test_a_saved_state_repeats_the_step(trainer: SupervisedTrainer) -> None:
    saved = jax.device_get(trainer.state)
    trainer.step(examples(1))
    once = jax.device_get(trainer.params)
    trainer.restore(saved)
    trainer.step(examples(1))
    jax.tree.map(np.testing.assert_array_equal, trainer.params, once)


def test_a_broken_policy_is_refused(trainer: SupervisedTrainer) -> None:
    saved = jax.device_get(trainer.state)
    trainer.restore(saved._replace(params=saved.params | {"norm": np.full(16, np.nan, np.float32)}))
    with pytest.raises(FloatingPointError, match=r"loss is nan.*trainer\.optimizer\.learning_rate"):
        trainer.step(examples(2))
    trainer.restore(saved)


@pytest.mark.slow
def test_perplexity_of_a_policy_that_can_be_worked_out() -> None:
    # Layers add nothing, every embedding is all ones, and so is what the last norm makes of it: in
    # every context the logit of token 0 is 16 * ln(31) / 16 = ln 31 and that of the 31 others 0. So
    # p(0) = 31 / 62 = 1/2, and 1/62 for each other.
    given = jax.tree.map(np.zeros_like, params())
    for name in ("embed", "norm"):
        given[name] = np.ones_like(given[name])
    given["head"][:, 0] = np.log(31) / 16
    made = SupervisedTrainer(
        TrainerConfig(), model(given, row_tokens=8), num_updates=1, measures=True
    )
    made.warm_up()
    compiled = made.num_compilations
    shown = [
        SupervisedExample(np.array([5, 0, 0, 3], np.int32), np.array([False, True, True, True])),
        SupervisedExample(np.array([0, 4, 0], np.int32), np.array([False, False, True])),
    ]
    total, num_tokens = made.measure(shown)["loss"]
    # 1/2 * 1/2 * 1/62 in the first and 1/2 in the second: (8 * 62) ** (1/4) = 4.7193 a token.
    # Packed together or apart.
    assert num_tokens == 4
    assert np.exp(total / num_tokens) == pytest.approx(4.7193, abs=1e-4)
    assert sum(made.measure([example])["loss"][0] for example in shown) == pytest.approx(
        total, rel=1e-6
    )
    assert made.num_compilations == compiled and made.version == 0


def test_measuring_the_loss_learns_nothing_and_agrees_with_the_next_step(
    trainer: SupervisedTrainer,
) -> None:
    saved = jax.device_get(trainer.state)
    total, num_tokens = trainer.measure(examples(3))["loss"]
    jax.tree.map(np.testing.assert_array_equal, trainer.params, saved.params)
    loss = trainer.step(examples(3)).metrics["loss"]
    assert isinstance(loss, tuple)
    assert (total, num_tokens) == (pytest.approx(loss[0], rel=1e-5), loss[1])
