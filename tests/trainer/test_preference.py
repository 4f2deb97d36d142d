"""Preference training: a pair counts the same wherever it lies, and what is chosen gains on what is
rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_training import POLICY, ROW_TOKENS, params, train_mesh

from areal_jax.data.preferences import PreferencePair
from areal_jax.data.sft import SupervisedExample
from areal_jax.models import lora
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.rl.config import DPO, BradleyTerry, Preference
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.frozen import FrozenPolicy
from areal_jax.trainer.preference import PreferenceTrainer
from areal_jax.trainer.step import TrainableModel

LOG_2 = 0.693147


def pairs(seed: int = 0, count: int = 6) -> list[PreferencePair]:
    """Two answers of 2 to 5 tokens to a prompt of 2 to 6; the chosen ones of even tokens, the
    others of odd ones."""
    rng = np.random.default_rng(seed)

    def answer(prompt: np.ndarray, parity: int) -> SupervisedExample:
        said = 2 * rng.integers(0, 16, rng.integers(2, 6)) + parity
        tokens = np.concatenate([prompt, said]).astype(np.int32)
        return SupervisedExample(tokens, np.arange(len(tokens)) >= len(prompt))

    prompts = [rng.integers(0, 32, rng.integers(2, 7)) for _ in range(count)]
    return [PreferencePair(answer(prompt, 0), answer(prompt, 1)) for prompt in prompts]


def reward_model() -> tuple[Policy, Params]:
    policy = Policy(replace(POLICY.config, readout="SequenceClassification"))
    weights = {name: leaf for name, leaf in params().items() if name != "head"}
    return policy, weights | {"value": np.full((16, 1), 0.1, np.float32)}


def trainer(
    loss: Preference, *, rows: int = 2, row_tokens: int = ROW_TOKENS, devices: int = 1
) -> PreferenceTrainer:
    policy, weights = reward_model() if isinstance(loss, BradleyTerry) else (POLICY, params())
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0),
        rows_per_micro_batch=rows,
        remat="none",
    )
    mesh = train_mesh(devices=devices)
    reference = None if policy.config.is_scalar else frozen(config, mesh, row_tokens)
    model = TrainableModel(
        policy=policy, params=weights, mesh=mesh, compute_dtype=jnp.float32, row_tokens=row_tokens
    )
    return PreferenceTrainer(
        loss, config, model, num_updates=100, measures=True, reference=reference
    )


def frozen(config: TrainerConfig, mesh: Mesh, row_tokens: int = ROW_TOKENS) -> FrozenPolicy:
    placed = shardings(mesh, POLICY.axes(), POLICY.abstract(), TRAIN_RULES)
    forward = Forward(config, POLICY, mesh, jnp.float32, temperature=1.0, row_tokens=row_tokens)
    return FrozenPolicy(forward, jax.device_put(params(), placed))


def mean(metrics: Mapping[str, tuple[float, float] | float], name: str) -> float:
    value = metrics[name]
    assert isinstance(value, tuple)
    return value[0] / value[1]


BOTH = pytest.mark.parametrize("loss", [DPO(), BradleyTerry()], ids=["a policy", "a reward model"])


@BOTH
@pytest.mark.slow
def test_chosen_answers_gain_on_rejected_ones(loss: Preference) -> None:
    learning, unseen = trainer(loss), pairs(seed=1, count=16)
    learning.warm_up()
    before = learning.measure(unseen)
    if not isinstance(loss, BradleyTerry):
        # The reference is the policy itself: every reward is 0.
        assert mean(before, "margin") == pytest.approx(0.0, abs=1e-5)
        assert mean(before, "loss") == pytest.approx(LOG_2, abs=1e-3)
    steps = [learning.step(pairs(seed)) for seed in range(2, 10)]
    after = learning.measure(unseen)
    assert mean(after, "margin") > mean(before, "margin") + 0.1
    assert mean(after, "accuracy") > 0.85
    assert mean(after, "loss") < mean(before, "loss")
    assert learning.version == 8 and after["loss"][1] == 16
    # zeros, accumulate, add, apply, measure and init; the reference's log-probabilities.
    assert {step.metrics["num_compilations"] for step in steps} == {
        6.0 if isinstance(loss, BradleyTerry) else 7.0
    }


@BOTH
@pytest.mark.slow
def test_micro_batches_devices_and_padding_change_nothing(loss: Preference) -> None:
    together, apart = trainer(loss, rows=16), trainer(loss, rows=1, row_tokens=40, devices=2)
    for way in (together, apart):
        # With other weights than the reference's.
        way.restore(
            way.state._replace(params=jax.tree.map(lambda leaf: np.asarray(leaf) * 1.1, way.params))
        )
    shown = pairs(seed=3, count=8)
    whole, parts = together.step(shown).metrics, apart.step(shown).metrics
    for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward"):
        assert mean(parts, name) == pytest.approx(mean(whole, name), rel=1e-4, abs=1e-5), name
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5),
        apart.params,
        jax.device_get(together.params),
    )


@pytest.mark.slow
def test_reference_of_an_adapter_is_its_base() -> None:
    policy = Policy(POLICY.config, LoRA(rank=2))
    mesh, config = (
        train_mesh(),
        TrainerConfig(optimizer=OptimizerConfig(learning_rate=5e-2, warmup_fraction=0.0)),
    )
    fresh = jax.device_get(lora.init(policy, jax.random.key(0)))
    model = TrainableModel(
        policy=policy,
        params=fresh,
        mesh=mesh,
        compute_dtype=jnp.float32,
        row_tokens=ROW_TOKENS,
        base=jax.device_put(params()),
    )
    reference = frozen(config, mesh)
    learning = PreferenceTrainer(
        DPO(), config, model, num_updates=9, measures=True, reference=reference
    )
    shown = pairs(6)
    rewards = [mean(learning.measure(shown), "margin")]
    for _ in range(3):
        learning.step(shown)
        rewards.append(mean(learning.measure(shown), "margin"))
    assert (
        rewards[0] == pytest.approx(0.0, abs=1e-5)
        and rewards == sorted(rewards)
        and rewards[-1] > 0.01
    )
    # The whole policy with the adapter merged, against a reference of the base alone, gives the
    # same rewards.
    merged = lora.merge(policy, params(), jax.device_get(learning.params))
    whole = trainer(DPO())
    whole.restore(whole.state._replace(params=merged))
    assert mean(whole.measure(shown), "margin") == pytest.approx(rewards[-1], rel=1e-3)
