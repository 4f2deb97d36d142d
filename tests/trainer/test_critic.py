"""Laws of a training step with a critic, on a tiny policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import (
    POLICY,
    ROW_TOKENS,
    SCALAR,
    batch,
    critic_params,
    group,
    made_once,
    make_trainer,
    mean,
    sample,
    train_mesh,
)

from areal_jax.checkpoint.checksums import CheckpointError
from areal_jax.checkpoint.recovery import Columns
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.errors import CorruptedState
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Policy
from areal_jax.records import Group
from areal_jax.rl.advantages import Trajectory, generalized_advantages, value_targets
from areal_jax.rl.config import GAE, PPO, Advantages, DecoupledPPO, GroupNormalized
from areal_jax.trainer.config import Critic, OptimizerConfig, TrainerConfig
from areal_jax.trainer.memory_estimate import predicted_bytes
from areal_jax.trainer.ppo import Trainer

GAE_RAW = GAE(gamma=0.9, lam=0.8, normalize=False)
CONFIG = TrainerConfig(
    loss=PPO(),
    advantages=GAE_RAW,
    critic=Critic(
        optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.0), value_clip_eps=None
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    num_mini_batches=1,
    rows_per_micro_batch=4,
    remat="none",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "the policy's loss a mean over sequences": {"loss_mean": "sequences"},
    "longer rows, remat, two mini-batches": {
        "rows_per_micro_batch": 1,
        "remat": "full",
        "row_tokens": 2 * ROW_TOKENS,
        "num_mini_batches": 2,
    },
    "data 2 x fsdp 2 x tensor 2": {
        "rows_per_micro_batch": 2,
        "mesh": {"devices": 8, "tensor": 2, "fsdp": 2},
    },
}


def make(
    mesh: dict[str, int] | None = None,
    row_tokens: int = ROW_TOKENS,
    has_critic: bool = True,
    num_updates: int = 100,
    **changes: Any,
) -> Trainer:
    critic = critic_params() if has_critic else None
    config, on = chz.replace(CONFIG, **changes), train_mesh(**mesh or {})
    return make_trainer(config, on, row_tokens=row_tokens, num_updates=num_updates, critic=critic)


@pytest.fixture(scope="module")
def shared() -> Callable[[str], Trainer]:
    return made_once(make, VARIANTS)


def plain_trajectories(groups: Sequence[Group]) -> list[list[Trajectory]]:
    """One sequence at a time, without packing: the value before token t is the head's, of the
    hidden state of token t-1."""
    weights = critic_params()

    @jax.jit
    def read(weights: Any, tokens: jax.Array) -> jax.Array:
        # Padded behind, which a causal model does not see.
        ones, places = jnp.ones((1, ROW_TOKENS), jnp.int32), jnp.arange(ROW_TOKENS)[None]
        hidden, _, _ = POLICY.hidden(
            weights, tokens, places, packed_attention(ones), compute_dtype=jnp.float32
        )
        return (hidden[0] @ weights["value"])[:, 0] + weights["value_bias"]

    def one(s: Any) -> Trajectory:
        length = len(s.tokens)
        following = np.asarray(read(weights, np.pad(s.tokens, (0, ROW_TOKENS - length))[None]))
        before = np.append(np.nan, following[: length - 1])
        after = float(following[length - 1]) if s.stop_reason == "length" else 0.0
        return Trajectory(s.reward, s.loss_mask, s.loss_mask, values=before, value_after=after)

    return [[one(s) for s in g.samples] for g in groups]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow
def test_advantages_are_those_of_one_sequence_at_a_time_on_any_devices(
    shared: Callable[[str], Trainer], variant: str
) -> None:
    groups = batch()
    trajectories = plain_trajectories(groups)
    result = shared(variant).step(groups)
    assert any(s.stop_reason == "length" for g in groups for s in g.samples)
    for ours, theirs in zip(result.advantages, trajectories, strict=True):
        for values, trajectory in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(
                values, generalized_advantages(GAE_RAW, trajectory), atol=1e-5
            )


@pytest.mark.slow
def test_critic_loss_ignores_the_policy_loss_mean(
    shared: Callable[[str], Trainer],
) -> None:
    learnt = []
    for variant in ("one device", "the policy's loss a mean over sequences"):
        trainer = shared(variant)
        result = trainer.step(batch())
        critic = trainer.state.critic
        assert critic is not None
        learnt.append(
            (mean(result, "value_loss"), mean(result, "loss"), np.asarray(critic.params["value"]))
        )
    (value_loss, loss, head), (other_value_loss, other_loss, other_head) = learnt
    assert other_value_loss == pytest.approx(value_loss, rel=1e-6) and abs(other_loss - loss) > 1e-3
    np.testing.assert_allclose(other_head, head, atol=1e-6)


@pytest.mark.slow
def test_critic_loss_equals_single_sequences_and_reports_its_variance(
    shared: Callable[[str], Trainer],
) -> None:
    groups = batch()
    trajectories = plain_trajectories(groups)
    action_mask = np.concatenate([t.action_mask for g in trajectories for t in g])
    values = np.concatenate([np.asarray(t.values) for g in trajectories for t in g])[action_mask]
    returns = np.concatenate(
        [target for g in value_targets(GAE_RAW, trajectories) for target in g]
    )[action_mask]
    result = shared("one device").step(groups)
    assert mean(result, "value_loss") == pytest.approx(
        0.5 * np.mean((values - returns) ** 2), abs=1e-5
    )
    assert mean(result, "values") == pytest.approx(values.mean(), abs=1e-5)
    assert mean(result, "returns") == pytest.approx(returns.mean(), abs=1e-5)
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert result.metrics["explained_variance"] == pytest.approx(explained, abs=1e-4)


@pytest.mark.slow
def test_cutting_into_micro_batches_and_devices_changes_no_update(
    shared: Callable[[str], Trainer],
) -> None:
    # Three micro-batches of 4 rows on one device, two of 8 on eight.
    states = []
    for variant in ("one device", "data 2 x fsdp 2 x tensor 2"):
        trainer = shared(variant)
        trainer.step(batch())
        states.append(jax.device_get((trainer.params, trainer.state.critic)))
    one, eight = states
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), one, eight)
    moved = jax.tree.map(
        lambda now, before: float(np.abs(now - before).max()), one[1].params, critic_params()
    )
    assert all(size > 1e-4 for size in jax.tree.leaves(moved))


@pytest.mark.slow
def test_values_learn_a_constant_reward(
    shared: Callable[[str], Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = shared("one device")
    monkeypatch.setattr(trainer, "config", chz.replace(trainer.config, advantages=GAE()))
    monkeypatch.setattr(trainer, "limits", dataclasses.replace(trainer.limits, max_staleness=None))
    rng = np.random.default_rng(3)
    groups = [
        group(
            i,
            *(
                dataclasses.replace(sample(rng, 12, reward=2.0), stop_reason="stop")
                for _ in range(3)
            ),
        )
        for i in range(4)
    ]
    results = [trainer.step(groups) for _ in range(60)]
    assert mean(results[-1], "value_loss") < 0.05 * mean(results[0], "value_loss")
    assert mean(results[-1], "values") == pytest.approx(2.0, abs=0.2)


def test_in_the_first_steps_only_the_critic_learns(
    shared: Callable[[str], Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = shared("one device")
    monkeypatch.setattr(
        trainer,
        "config",
        chz.replace(trainer.config, critic=chz.replace(trainer.config.critic, warmup_steps=1)),
    )
    before = jax.device_get((trainer.params, trainer.state.critic))
    trainer.step(batch())
    warm = jax.device_get((trainer.params, trainer.state.critic))
    jax.tree.map(np.testing.assert_array_equal, before[0], warm[0])
    assert (before[1].params["value"] != warm[1].params["value"]).all()
    trainer.step(batch())
    assert (warm[0]["embed"] != jax.device_get(trainer.params)["embed"]).any()


@pytest.mark.slow
def test_policy_learning_rate_counts_from_its_first_update_after_warmup() -> None:
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_fraction=0.0, schedule="linear")
    trainer = make(
        loss=DecoupledPPO(),
        optimizer=chz.replace(optimizer, learning_rate=1e-3),
        critic=Critic(optimizer=chz.replace(optimizer, learning_rate=1e-3), warmup_steps=1),
        num_mini_batches=2,
        num_updates=2 * 2,
    )
    first = trainer.step(batch(num_groups=2))
    assert "learning_rate" not in first.metrics and trainer._learner.forward.num_compilations == 0
    second = trainer.step(batch(num_groups=2))
    # Of the step's two updates the mean: the policy's are the whole of its line, the critic's the
    # latter half of four.
    assert mean(second, "learning_rate") == pytest.approx(1e-3 * (1 + 1 / 2) / 2)
    assert mean(second, "value_learning_rate") == pytest.approx(1e-3 * (2 / 4 + 1 / 4) / 2)


def live_bytes() -> int:
    """Of memory that arrays lie in; several may share some."""
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def test_a_checkpoint_holds_the_critic_and_repeats_the_step(
    shared: Callable[[str], Trainer], tmp_path: Path
) -> None:
    trainer, store, nothing = (
        shared("one device"),
        CheckpointStore(tmp_path, keep=2),
        Columns({}, {}),
    )
    trainer.step(batch())
    store.save(1, trainer.state, nothing)
    store.wait()
    trainer.step(batch(1))
    once = jax.device_get(trainer.state)
    # Never is there more than one state: the old one goes before the new one comes, which is taken
    # over as it is.
    sizes = sum(
        leaf.nbytes for leaf in jax.tree.leaves(trainer.state) if isinstance(leaf, jax.Array)
    )
    before = live_bytes()
    abstract = trainer.let_go()
    assert live_bytes() == before - sizes
    saved, _ = store.restore(1, abstract)
    trainer.restore(saved)
    assert live_bytes() == before
    trainer.step(batch(1))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), once)
    # Of each one to begin with and four to learn by; values, but no log-probs.
    assert trainer.num_compilations == 11
    # A run without a critic cannot resume from here, and one with a critic not from a checkpoint
    # that has none.
    alone = trainer.state._replace(critic=None)
    with pytest.raises(
        CheckpointError, match=r"found but not expected: .*critic\..*trainer\.advantages"
    ):
        store.restore(1, alone)
    store.save(2, alone, nothing)
    store.wait()
    with pytest.raises(
        CheckpointError, match=r"expected but not found: .*critic\..*trainer\.critic"
    ):
        store.restore(2, trainer.state)
    assert store.restore(2, alone)[0].critic is None
    store.close()


def test_diverged_critic_is_named(shared: Callable[[str], Trainer]) -> None:
    trainer = shared("one device")
    state = trainer.state
    assert state.critic is not None
    broken = state.critic.params | {"value_bias": np.full(1, np.nan, np.float32)}
    trainer.restore(jax.device_get(state._replace(critic=state.critic._replace(params=broken))))
    with pytest.raises(
        CorruptedState, match=r"step 0: the critic's values .*trainer\.critic\.optimizer"
    ):
        trainer.step(batch())
    assert trainer.version == 0


def test_truncated_answers_bootstrap_from_the_critic(
    shared: Callable[[str], Trainer],
) -> None:
    trainer = shared("one device")
    rng = np.random.default_rng(5)
    # The longest of the batch, which differs from a finished answer in its stop reason only.
    whole = dataclasses.replace(sample(rng, ROW_TOKENS, 0, reward=1.0), stop_reason="stop")
    cut = dataclasses.replace(whole, stop_reason="length")
    result = trainer.step([group(0, whole, cut), *batch(num_groups=3)])
    ((ended, going_on), *_) = result.advantages
    ((_, reported),) = plain_trajectories([group(0, whole, cut)])
    assert reported.value_after != 0.0
    # gamma V behind the last token, and gamma lambda of that a token earlier.
    gain = going_on - ended
    assert gain[-1] == pytest.approx(0.9 * reported.value_after, abs=1e-5)
    assert gain[-2] == pytest.approx(0.9 * 0.72 * reported.value_after, abs=1e-5)


@pytest.mark.parametrize(("advantages", "has_critic"), [(GAE(), False), (GroupNormalized(), True)])
def test_gae_and_a_critic_go_together(advantages: Advantages, has_critic: bool) -> None:
    with pytest.raises(ValueError, match=r"trainer\.advantages"):
        make(advantages=advantages, has_critic=has_critic)


def test_memory_estimates_include_the_critic() -> None:
    alone = predicted_bytes(CONFIG, POLICY, train_mesh(), jnp.float32, row_tokens=ROW_TOKENS)
    both = predicted_bytes(
        CONFIG, POLICY, train_mesh(), jnp.float32, row_tokens=ROW_TOKENS, critic=SCALAR
    )
    # Parameters and two moments in float32, and Adam's count. Its updates take no more than the
    # policy's, which have logits.
    assert both == {**alone, "critic": 3 * 4 * SCALAR.config.num_params + 4}
    larger = Policy(dataclasses.replace(SCALAR.config, num_hidden_layers=20))
    more = predicted_bytes(
        CONFIG, POLICY, train_mesh(), jnp.float32, row_tokens=ROW_TOKENS, critic=larger
    )
    assert more["critic"] > 4 * 4 * larger.config.num_params - alone["gradients"]
