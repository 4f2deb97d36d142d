"""Laws of a training step, on a tiny policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_training import (
    POLICY,
    PROMPT_TOKENS,
    ROW_TOKENS,
    batch,
    group,
    made_once,
    make_trainer,
    mean,
    params,
    sample,
    train_mesh,
)

from areal_jax.data.packing import TrainingSequence, pack
from areal_jax.errors import CorruptedState
from areal_jax.models.attention import packed_attention
from areal_jax.records import Group
from areal_jax.rl.advantages import Trajectory, compute_advantages
from areal_jax.rl.config import (
    GSPO,
    M2PO,
    PPO,
    DecoupledPPO,
    GroupNormalized,
    Loss,
    M2POClip,
    Mean,
    Reinforce,
    Unweighted,
)
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.rl.losses import decoupled_ppo_loss
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.pipeline import MiniBatch, pack_rollouts, select_tokens
from areal_jax.trainer.ppo import Trainer

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
CONFIG = TrainerConfig(
    optimizer=OPTIMIZER, num_mini_batches=1, rows_per_micro_batch=4, remat="none"
)

VARIANTS: dict[str, dict[str, Any]] = {
    "one mini-batch": {},
    "two mini-batches": {"num_mini_batches": 2},
    "one longer row, remat, chunks": {
        "rows_per_micro_batch": 1,
        "remat": "full",
        "logp_chunk_tokens": 16,
        "row_tokens": 2 * ROW_TOKENS,
    },
    "fsdp 2 x context 2 x tensor 2": {
        "rows_per_micro_batch": 2,
        "mesh": {"devices": 8, "tensor": 2, "context": 2},
    },
    "context 2, remat, chunks": {
        "rows_per_micro_batch": 2,
        "remat": "attention",
        "logp_chunk_tokens": 16,
        "mesh": {"devices": 2, "context": 2},
    },
    "moments on the host": {"optimizer": chz.replace(OPTIMIZER, offload=True)},
    "data 2 x fsdp 2 x tensor 2": {
        "rows_per_micro_batch": 1,
        "mesh": {"devices": 8, "tensor": 2, "fsdp": 2},
    },
}


def make(
    mesh: dict[str, int] | None = None,
    row_tokens: int = ROW_TOKENS,
    given: Any = None,
    compute_dtype: Any = jnp.float32,
    **changes: Any,
) -> Trainer:
    config = chz.replace(CONFIG, **changes)
    return make_trainer(
        config,
        train_mesh(**mesh or {}),
        given=given,
        compute_dtype=compute_dtype,
        row_tokens=row_tokens,
    )


@pytest.fixture(scope="module")
def shared() -> Callable[[str], Trainer]:
    return made_once(make, VARIANTS)


def assert_close(ours: Any, theirs: Any, atol: float = 1e-5) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(ours):
        other = dict(jax.tree_util.tree_leaves_with_path(theirs))[path]
        np.testing.assert_allclose(leaf, other, atol=atol, err_msg=jax.tree_util.keystr(path))


def plain_step(groups: Sequence[Group]) -> tuple[float, Any]:
    """Loss and new parameters without packing, micro-batches, shards or jit of ours: one sequence
    at a time, optax's AdamW."""
    advantages = compute_advantages(
        CONFIG.advantages,
        [[Trajectory(s.reward, s.loss_mask, s.loss_mask) for s in g.samples] for g in groups],
    )
    num_tokens = float(sum(s.loss_mask.sum() for g in groups for s in g.samples))

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(
        weights: Any,
        tokens: jax.Array,
        behave_logp: jax.Array,
        advantages: jax.Array,
        length: jax.Array,
    ) -> jax.Array:
        # Padded behind, which a causal model does not see.
        ones = jnp.ones((1, ROW_TOKENS), jnp.int32)
        hidden, _, _ = POLICY.hidden(
            weights,
            tokens[None],
            jnp.arange(ROW_TOKENS)[None],
            packed_attention(ones),
            compute_dtype=jnp.float32,
        )
        logp = token_logprobs(hidden, POLICY.head(weights), tokens[None], ones, chunk_tokens=10**6)[
            0
        ][0]
        mask = (jnp.arange(ROW_TOKENS) >= PROMPT_TOKENS) & (jnp.arange(ROW_TOKENS) < length)
        fixed = jax.lax.stop_gradient(logp)
        return decoupled_ppo_loss(
            logp, fixed, behave_logp, advantages, mask, num_tokens=num_tokens
        ).loss

    weights = jax.tree.map(jnp.asarray, params())
    loss, gradients = 0.0, jax.tree.map(jnp.zeros_like, weights)
    for g, advantages_G in zip(groups, advantages, strict=True):
        for s, advantages_T in zip(g.samples, advantages_G, strict=True):
            pad = (0, ROW_TOKENS - len(s.tokens))
            arguments = (
                np.pad(s.tokens, pad),
                np.pad(s.behave_logp, pad),
                np.pad(advantages_T, pad),
                len(s.tokens),
            )
            value, gradient = loss_and_gradient(weights, *arguments)
            loss, gradients = loss + float(value), jax.tree.map(jnp.add, gradients, gradient)
    is_matrix = jax.tree_util.tree_map_with_path(
        lambda path, _: not {"bias", "norm"} & set(str(path[-1].key).split("_")), weights
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.1, mask=is_matrix),
    )
    update: Any = optimizer.update
    updates, _ = update(gradients, optimizer.init(weights), weights)
    return loss, optax.apply_updates(weights, updates)


@pytest.mark.slow
def test_a_step_equals_the_plain_computation(shared: Callable[[str], Trainer]) -> None:
    trainer, groups = shared("one mini-batch"), batch()
    result = trainer.step(groups)
    loss, expected = plain_step(groups)
    assert mean(result, "loss") == pytest.approx(loss, abs=1e-5)
    assert_close(trainer.params, expected)
    assert trainer.version == 1


@pytest.mark.parametrize("variant", list(VARIANTS)[2:])
@pytest.mark.slow
def test_micro_batches_padding_and_shards_change_nothing(
    variant: str, shared: Callable[[str], Trainer]
) -> None:
    reference, trainer, groups = shared("one mini-batch"), shared(variant), batch(seed=1)
    expected, result = reference.step(groups), trainer.step(groups)
    for name in (
        "loss",
        "grad_norm",
        "entropy",
        "clip_fraction",
        "behave_weight",
        "kl_behave_theta",
    ):
        assert mean(result, name) == pytest.approx(mean(expected, name), abs=1e-5), name
    for name in ("log_ratio_rms", "sequence_ess", "behave_weight_p95"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4), name
    assert_close(trainer.params, reference.params)
    assert_close(trainer.state.opt_state, reference.state.opt_state)


@pytest.mark.slow
def test_ess_exponent_scales_each_update_by_its_share(shared: Callable[[str], Trainer]) -> None:
    plain, groups = shared("one mini-batch"), batch(seed=1)
    before = jax.tree.map(np.array, plain.params)
    scaled = make(optimizer=chz.replace(OPTIMIZER, ess_exponent=0.5), given=before)
    expected, result = plain.step(groups), scaled.step(groups)
    share = expected.metrics["sequence_ess"]
    assert isinstance(share, float)
    factor = share**0.5
    assert factor < 0.99
    assert mean(result, "learning_rate") == pytest.approx(
        factor * mean(expected, "learning_rate"), rel=1e-5
    )
    moved, scaled_move = (
        np.asarray(trainer.params["embed"]) - before["embed"] for trainer in (plain, scaled)
    )
    np.testing.assert_allclose(scaled_move, factor * moved, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "loss_mean"),
    [
        (GSPO(clip_eps=0.1, clip_eps_high=0.1), "sequences"),
        (M2PO(max_second_moment=0.003), "constant"),
        (M2POClip(max_second_moment=0.003, clip_min=1.0, clip_max=1.0001), "tokens"),
    ],
    ids=["GSPO", "M2PO", "M2POClip"],
)
@pytest.mark.slow
def test_micro_batches_do_not_change_sequence_or_batch_means(loss: Loss, loss_mean: Mean) -> None:
    groups = batch(seed=1)
    # All of the batch in one micro-batch, and in several.
    whole, cut = (
        make(loss=loss, loss_mean=loss_mean, rows_per_micro_batch=rows) for rows in (16, 1)
    )
    expected, result = whole.step(groups), cut.step(groups)
    assert mean(result, "loss") == pytest.approx(mean(expected, "loss"), abs=1e-6)
    assert_close(whole.params, cut.params)
    if isinstance(loss, M2PO):
        # Some tokens are left out, and the loss is still counted over all of them.
        assert result.metrics["m2po_kept_fraction"] == expected.metrics["m2po_kept_fraction"]
        assert 0.1 < mean(result, "m2po_kept_fraction") < 0.9
    if isinstance(loss, M2POClip):
        assert mean(result, "clip_fraction") == mean(expected, "clip_fraction")
        assert 0.05 < mean(result, "clip_fraction") < 0.9


@pytest.mark.slow
def test_the_mean_over_sequences_is_the_mean_of_their_means() -> None:
    # Reinforce with everything on policy: the loss of a token is minus its advantage, and the mean
    # of centred ones is 0 by sequences. By tokens the longer, wrong answer weighs more: 6 tokens of
    # 1/2 and 16 of -1/2, so -(3 - 8) / 22.
    by_mean: dict[str, float] = {}
    for name in ("tokens", "sequences", "constant"):
        trainer = make(
            loss=Reinforce(importance_weighting=Unweighted()),
            loss_mean=name,
            advantages=GroupNormalized(divide_by="nothing"),
        )
        rng = np.random.default_rng(3)
        result = trainer.step([group(0, sample(rng, 10, 0, 1.0), sample(rng, 20, 0, 0.0))])
        by_mean[name] = mean(result, "loss")
    assert by_mean["tokens"] == pytest.approx(5 / 22, abs=1e-6)
    assert by_mean["sequences"] == pytest.approx(0.0, abs=1e-6)
    assert by_mean["constant"] == pytest.approx(5 / (2 * (ROW_TOKENS - PROMPT_TOKENS)), abs=1e-6)


@pytest.mark.slow
def test_bfloat16_is_for_activations_only(shared: Callable[[str], Trainer]) -> None:
    reference, groups = shared("one mini-batch"), batch(seed=15)
    expected = reference.step(groups)
    trainer = make(compute_dtype=jnp.bfloat16)
    result = trainer.step(groups)
    # bfloat16 keeps 8 bits: log-probs of about 4 are off by about 0.02, and means by less.
    assert mean(result, "loss") == pytest.approx(mean(expected, "loss"), abs=0.05)
    assert mean(result, "entropy") == pytest.approx(mean(expected, "entropy"), abs=0.02)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.state)} == {
        np.dtype(np.float32),
        np.dtype(np.int32),
    }


@pytest.mark.slow
def test_state_is_restored_on_another_mesh(shared: Callable[[str], Trainer]) -> None:
    trainer = shared("one mini-batch")
    trainer.step(batch(seed=2))
    saved = jax.device_get(trainer.state)
    trainer.step(batch(seed=3))
    resumed = shared("data 2 x fsdp 2 x tensor 2")
    resumed.restore(saved)
    resumed.step(batch(seed=3))
    assert resumed.version == trainer.version == 2
    assert_close(resumed.params, trainer.params)
    # On the same mesh it goes on bit for bit.
    once = jax.device_get(trainer.params)
    trainer.restore(saved)
    trainer.step(batch(seed=3))
    assert_close(trainer.params, once, atol=0.0)


def test_proximal_is_the_policy_just_before_the_step(
    shared: Callable[[str], Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, groups = shared("two mini-batches"), batch(seed=4)
    learner = trainer._learner
    expected: list[np.ndarray] = []
    seen: list[tuple[bool, np.ndarray, dict[str, Any]]] = []
    put, update = learner.put, learner.update

    def put_and_forward(packed: Any) -> DeviceBatch:
        moved = put(packed)
        expected.append(np.asarray(learner.logprobs(moved)))
        return moved

    def watched_update(
        batches: Sequence[DeviceBatch], num_tokens: int, *, proximal_is_current: bool
    ) -> Any:
        measured = update(batches, num_tokens, proximal_is_current=proximal_is_current)
        seen.append(
            (
                proximal_is_current,
                np.concatenate([np.asarray(b.proximal_logp) for b in batches]),
                measured.measured.metrics,
            )
        )
        return measured

    monkeypatch.setattr(learner, "put", put_and_forward)
    monkeypatch.setattr(learner, "update", watched_update)
    trainer.step(groups)

    (first_is_current, _, first), (second_is_current, second_proximal, second) = seen
    # Theta is proximal in the first update: every ratio is 1, so that the mean of e^x - 1 - x is 0.
    assert first_is_current and first["ratio"][0] / first["ratio"][1] == pytest.approx(
        1.0, abs=1e-5
    )
    assert first["kl_proximal_theta"][0] / first["kl_proximal_theta"][1] < 1e-10
    # The second reads what was computed before the first, by which theta has moved.
    num_first = len(expected) - len(second_proximal) // learner.rows
    np.testing.assert_array_equal(second_proximal, np.concatenate(expected[num_first:]))
    assert (
        not second_is_current
        and second["kl_proximal_theta"][0] / second["kl_proximal_theta"][1] > 1e-5
    )


def packed_together(trainer: Trainer, groups: Sequence[Group]) -> MiniBatch:
    """All groups in one mini-batch."""
    config = chz.replace(trainer.config, num_mini_batches=1)
    chosen = select_tokens(groups, trainer.version, trainer.limits)
    (mini_batch,) = pack_rollouts(chosen, config, trainer.limits, trainer._learner).mini_batches
    return mini_batch


def test_the_forward_pass_for_proximal_agrees_with_that_of_the_update(
    shared: Callable[[str], Trainer],
) -> None:
    trainer, groups = shared("two mini-batches"), batch(seed=5)
    learner = trainer._learner
    mini_batch = packed_together(trainer, groups)
    batches = [
        each._replace(proximal_logp=learner.logprobs(each)) for each in mini_batch.micro_batches
    ]
    (metrics, _), _ = learner.update(batches, mini_batch.num_loss_tokens, proximal_is_current=False)
    ratio, divergence = metrics["ratio"], metrics["kl_proximal_theta"]
    assert isinstance(ratio, tuple) and isinstance(divergence, tuple)
    assert ratio[0] / ratio[1] == pytest.approx(1.0, abs=1e-5)
    assert divergence[0] / divergence[1] < 1e-10


def test_packed_is_alone(shared: Callable[[str], Trainer]) -> None:
    trainer, groups = shared("two mini-batches"), batch(seed=6)
    learner = trainer._learner

    def logprobs(*of: Group) -> list[np.ndarray]:
        """Of every sample, found again among the packed rows by its tokens."""
        found = {}
        for packed in packed_together(trainer, of).micro_batches:
            segments, tokens, logp = (
                np.asarray(x) for x in (packed.segment_ids, packed.tokens, learner.logprobs(packed))
            )
            for row in range(learner.rows):
                for segment in range(1, segments[row].max() + 1):
                    inside = segments[row] == segment
                    found[tokens[row, inside].tobytes()] = logp[row, inside]
        return [found[s.tokens.tobytes()] for g in of for s in g.samples]

    together = logprobs(*groups)
    alone = [logp for g in groups for s in g.samples for logp in logprobs(group(0, s))]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_stale_tokens_are_context_only(shared: Callable[[str], Trainer]) -> None:
    trainer = shared("one mini-batch")
    trainer.version = 5
    groups = batch(seed=7, version=3)
    first = groups[0].samples[0]
    # Age 2 is allowed (max_staleness=2), age 3 is not: here the first two sampled tokens.
    old = replace(
        first,
        versions=np.where(
            np.arange(len(first.tokens)) < PROMPT_TOKENS + 2, first.versions - 1, first.versions
        ),
    )
    stale = [group(0, old, *groups[0].samples[1:]), *groups[1:]]
    result = trainer.step(stale)
    assert result.metrics["tokens_stale"] == 2.0
    assert result.metrics["staleness_max"] == 2.0
    assert mean(result, "staleness") == 2.0
    np.testing.assert_array_equal(
        result.stale[0][0].nonzero()[0], [PROMPT_TOKENS, PROMPT_TOKENS + 1]
    )
    assert not any(mask.any() for masks in result.stale[1:] for mask in masks)

    # The same as if those tokens had never been sampled by the policy, whatever was recorded of
    # them.
    masked = replace(old, loss_mask=np.arange(len(old.tokens)) >= PROMPT_TOKENS + 2)
    after = jax.device_get(trainer.params)
    trainer = shared("one mini-batch")
    trainer.version = 5
    again = trainer.step([group(0, masked, *groups[0].samples[1:]), *groups[1:]])
    assert again.metrics["tokens_stale"] == 0.0
    assert_close(trainer.params, after, atol=0.0)


def test_a_kind_of_tasks_may_be_older_than_the_others(
    shared: Callable[[str], Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = shared("one mini-batch")
    monkeypatch.setattr(
        trainer, "limits", replace(trainer.limits, max_staleness_by_kind={"code": 3})
    )
    trainer.version = 3
    groups = batch(seed=7)  # of version 0, a version more than max_staleness=2 allows
    program = replace(groups[0], task=replace(groups[0].task, kind="code"))
    result = trainer.step([program, *groups[1:]])
    assert not any(mask.any() for mask in result.stale[0])
    assert all(
        np.array_equal(mask, sample.loss_mask)
        for group, masks in zip(groups[1:], result.stale[1:], strict=True)
        for sample, mask in zip(group.samples, masks, strict=True)
    )


def test_no_token_is_stale_without_a_bound(
    shared: Callable[[str], Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = shared("one mini-batch")
    monkeypatch.setattr(trainer, "limits", replace(trainer.limits, max_staleness=None))
    trainer.version = 1000
    result = trainer.step(batch(seed=8))
    assert result.metrics["tokens_stale"] == 0.0
    assert mean(result, "staleness") == 1000.0


def test_a_batch_without_a_trainable_token_changes_nothing_but_the_version(
    shared: Callable[[str], Trainer],
) -> None:
    trainer = shared("two mini-batches")
    trainer.version = 9
    before = jax.device_get(trainer.state)
    result = trainer.step(batch(seed=9))
    assert trainer.version == 10
    assert_close(trainer.params, before.params, atol=0.0)
    assert_close(trainer.state.opt_state, before.opt_state, atol=0.0)
    assert result.metrics["num_updates"] == 0.0
    assert result.metrics["tokens_trained"] == 0.0
    assert result.metrics["tokens_stale"] == sum(
        s.loss_mask.sum() for g in batch(seed=9) for s in g.samples
    )
    assert all(np.isfinite(value).all() for value in result.metrics.values())


def test_non_finite_loss_leaves_the_state_unchanged(
    shared: Callable[[str], Trainer],
) -> None:
    trainer, groups = shared("one mini-batch"), batch(seed=10)
    trainer.step(batch(seed=11))
    before = jax.device_get(trainer.state)
    # A token that the sampler says it had next to no chance to draw: proximal/behave = e^1000 =
    # inf.
    broken = replace(
        groups[0].samples[0],
        behave_logp=np.where(groups[0].samples[0].loss_mask, -1000.0, 0.0).astype(np.float32),
    )
    broken_reward = replace(groups[0].samples[1], reward=1.0 - broken.reward)
    with pytest.raises(
        FloatingPointError,
        match=r"step 1, update 1 of 1: loss is .*last good version is 1.*learning_rate",
    ):
        trainer.step([group(0, broken, broken_reward, *groups[0].samples[2:]), *groups[1:]])
    assert trainer.version == 1
    assert_close(trainer.params, before.params, atol=0.0)
    assert_close(trainer.state.opt_state, before.opt_state, atol=0.0)
    trainer.step(groups)
    assert trainer.version == 2


def test_a_partly_applied_step_is_reported_as_corrupted(shared: Callable[[str], Trainer]) -> None:
    trainer, rng = shared("two mini-batches"), np.random.default_rng(12)
    # The longest group is dealt to the first mini-batch, the other to the second.
    groups = [
        group(i, *(sample(rng, size, reward=float(j)) for j in range(2)))
        for i, size in enumerate((20, 12))
    ]
    first = groups[1].samples[0]
    broken = group(
        1,
        replace(first, behave_logp=np.where(first.loss_mask, -1000.0, 0.0).astype(np.float32)),
        groups[1].samples[1],
    )
    with pytest.raises(
        CorruptedState,
        match=r"step 0, update 2 of 2: loss is .* 1 before it were, .* version 0 is gone",
    ):
        trainer.step([groups[0], broken])
    trainer = shared("one mini-batch")
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), trainer.params)
    trainer.restore(trainer.state._replace(params=params))
    with pytest.raises(
        CorruptedState, match=r"update 1 of 1: loss is nan.* version 0 itself predicts no finite"
    ):
        trainer.step(groups)


@pytest.mark.slow
def test_nothing_compiles_after_warm_up() -> None:
    given = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.devices()[0]), params())
    trainer = make(given=given, num_mini_batches=2)
    trainer.warm_up()
    assert_close(trainer.params, given, atol=0.0)
    assert trainer.version == 0
    compiled = trainer.num_compilations
    rng = np.random.default_rng(12)
    with counting_compilations() as events:
        for seed in range(30):
            result = trainer.step(
                batch(
                    seed, int(rng.integers(2, 6)), int(rng.integers(1, 5)), version=trainer.version
                )
            )
            assert result.metrics["num_compilations"] == compiled
    assert events == []
    # What the trainer was given is still the caller's.
    assert_close(given, params(), atol=0.0)


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Everything that XLA compiles meanwhile, in any thread."""
    events: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield events
        # Were the event renamed, the list would stay empty for ever.
        num_before = len(events)
        jax.jit(lambda x: x + 41)(1).block_until_ready()
        assert len(events) == num_before + 1
        del events[num_before:]
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_rewarded_tokens_become_more_likely(shared: Callable[[str], Trainer]) -> None:
    trainer = shared("one mini-batch")
    rng = np.random.default_rng(13)
    good, bad = sample(rng, 12, reward=1.0), sample(rng, 12, reward=0.0)
    groups = [group(0, good, bad)]
    first = trainer.step(groups)
    last = first
    for version in range(1, 5):
        fresh = [
            replace(s, versions=np.where(s.loss_mask, version, -1).astype(np.int32))
            for s in (good, bad)
        ]
        last = trainer.step([group(version, *fresh)])
    # The advantages are 1/sqrt(2) and -1/sqrt(2) (mean 1/2, sample deviation 1/sqrt(2)), so the
    # loss falls as they part.
    for advantages, expected in zip(first.advantages[0], [0.707107, -0.707107], strict=True):
        np.testing.assert_allclose(advantages, np.full(12, expected), atol=2e-6)
    assert mean(last, "loss") < mean(first, "loss") - 0.01


@pytest.mark.slow
def test_correct_answers_have_a_loss_of_their_own() -> None:
    # Both answers of the first group are right, both of the second wrong: no advantage, so that the
    # loss is that of the first group's 6 + 16 tokens, in one micro-batch or several.
    rng = np.random.default_rng(21)
    right = group(0, sample(rng, 10, 0, 1.0), sample(rng, 20, 0, 1.0))
    wrong = group(1, sample(rng, 14, 0, 0.0), sample(rng, 14, 0, 0.0))
    again = [
        replace(s, versions=np.where(s.loss_mask, 1, -1).astype(np.int32)) for s in right.samples
    ]
    whole, cut = (make(positive_nll_coef=0.1, rows_per_micro_batch=rows) for rows in (16, 1))
    first = jax.device_get(whole.state)
    expected, alone = whole.step([right]), jax.device_get(whole.params)
    assert mean(expected, "positive_nll") > 2.0
    assert mean(whole.step([group(2, *again)]), "positive_nll") < mean(expected, "positive_nll")
    whole.restore(first)
    result = whole.step([right, wrong])
    for each in (result, cut.step([right, wrong])):
        assert mean(each, "positive_nll") == pytest.approx(mean(expected, "positive_nll"), rel=1e-5)
        assert mean(each, "loss") == pytest.approx(0.1 * mean(expected, "positive_nll"), rel=1e-5)
    assert_close(whole.params, alone)
    assert_close(whole.params, cut.params)


def test_metrics_describe_the_batch(shared: Callable[[str], Trainer]) -> None:
    rng = np.random.default_rng(14)
    samples = [
        sample(rng, 10, 0, 1.0),
        sample(rng, 20, 0, 0.0),
        sample(rng, 14, 0, 1.0),
        sample(rng, 14, 0, 1.0),
    ]
    samples = [
        replace(s, stop_reason="length" if i == 1 else "stop") for i, s in enumerate(samples)
    ]
    result = shared("one mini-batch").step([group(0, *samples[:2]), group(1, *samples[2:])])
    assert mean(result, "reward") == 0.75
    assert mean(result, "truncated_fraction") == 0.25
    assert mean(result, "groups_without_signal") == 0.5  # both samples of the second are right
    assert mean(result, "answer_tokens") == (6 + 16 + 10 + 10) / 4
    assert result.metrics["tokens_trained"] == 42.0
    # 6 tokens of .707107 and 16 of -.707107.
    assert mean(result, "advantage") == pytest.approx(-10 * 0.707107 / 42, abs=1e-5)
    # Algorithm 1 takes 20, 14, 14, 10 tokens into rows of 24: {20}, {14, 10}, {14}, 4 rows of a
    # micro-batch.
    assert result.metrics["packing_efficiency"] == (58.0, 96.0)


@pytest.mark.parametrize(
    "loss",
    [PPO(), DecoupledPPO(proximal="behave"), DecoupledPPO(proximal="interpolate")],
    ids=["PPO", "behave", "interpolate"],
)
@pytest.mark.slow
def test_known_proximal_policy_needs_no_forward_pass(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(loss=loss, num_mini_batches=2)
    monkeypatch.setattr(
        trainer._learner,
        "logprobs",
        lambda _: pytest.fail("a forward pass for the proximal policy"),
    )
    result = trainer.step(batch())
    assert result.metrics["num_updates"] == 2.0


@pytest.mark.slow
def test_behave_as_proximal_policy_is_plain_ppo() -> None:
    plain, decoupled = (
        make(loss=PPO(), num_mini_batches=2),
        make(loss=DecoupledPPO(proximal="behave"), num_mini_batches=2),
    )
    results = [trainer.step(batch()) for trainer in (plain, decoupled)]
    assert mean(results[1], "behave_weight") == 1.0
    assert mean(results[0], "loss") == pytest.approx(mean(results[1], "loss"), abs=1e-7)
    assert_close(decoupled.params, plain.params, atol=1e-7)


@pytest.mark.slow
def test_interpolation_goes_by_the_age_of_every_token() -> None:
    # Tokens of versions 1 and 3 in a step from version 3: ages 2 and 0, so that the proximal
    # log-probability lies 2/3 of the way from behave to theta, and on behave. The first update's
    # theta is the policy as it is: log(theta/proximal) is 1/3 of log(theta/behave) on the old
    # tokens and all of it on the new ones.
    trainer = make(
        loss=Reinforce(proximal="interpolate", importance_weighting=Unweighted()),
        num_mini_batches=1,
    )
    trainer.restore(trainer.state._replace(version=np.asarray(3, np.int32)))
    rng = np.random.default_rng(5)
    versions = np.where(np.arange(12) % 2, 1, 3)
    groups = [
        group(i, sample(rng, 12, versions, 1.0), sample(rng, 12, versions, 0.0)) for i in range(2)
    ]
    packed = [TrainingSequence(s.tokens, s.loss_mask) for g in groups for s in g.samples]
    batches, layout = pack(
        packed, rows=trainer._learner.rows, row_tokens=trainer._learner.row_tokens
    )
    logps = layout.gather(
        np.stack([trainer._learner.logprobs(trainer._learner.put(each)) for each in batches])
    )
    ratios = [
        np.exp((logp - s.behave_logp) * np.where(versions == 1, 1 / 3, 1.0))[s.loss_mask]
        for logp, s in zip(logps, (s for g in groups for s in g.samples), strict=True)
    ]
    assert mean(trainer.step(groups), "ratio") == pytest.approx(
        np.concatenate(ratios).mean(), rel=1e-5
    )


@pytest.mark.slow
def test_an_entropy_bonus_keeps_the_policy_undecided() -> None:
    # Without a reward, and hence without an advantage, there is nothing but the bonus.
    rng = np.random.default_rng(6)
    groups = [group(i, *(sample(rng, 12, reward=1.0) for _ in range(2))) for i in range(2)]
    gained = []
    for coef in (0.0, 0.1):
        trainer = make(
            entropy_coef=coef, optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0)
        )
        first = mean(trainer.step(groups), "entropy")
        gained.append(mean(trainer.step(groups), "entropy") - first)
    assert gained[0] == 0.0
    # The entropy of 40 tokens is at most log(40) = 3.69 and nearly that to begin with.
    assert gained[1] > 1e-3


def test_unusable_training_data_names_the_setting(
    shared: Callable[[str], Trainer],
) -> None:
    trainer, groups = shared("two mini-batches"), batch()
    good = groups[0].samples[0]
    with pytest.raises(
        ValueError, match=r"1 groups cannot be split into 2 mini-batches.*trainer\.num_mini_batches"
    ):
        trainer.step(groups[:1])
    with pytest.raises(ValueError, match=r"sample 0 of group 7 \(task task-7\).*not finite"):
        trainer.step([group(7, replace(good, reward=float("nan"))), *groups])
    with pytest.raises(
        CorruptedState, match=r"sample 0 of group 7.*behaviour log-probability.*learning_rate"
    ):
        trainer.step(
            [group(7, replace(good, behave_logp=np.full_like(good.behave_logp, np.nan))), *groups]
        )
    with pytest.raises(ValueError, match="begins with a token"):
        trainer.step([group(7, replace(good, loss_mask=np.ones_like(good.loss_mask))), *groups])
    too_long = sample(np.random.default_rng(0), ROW_TOKENS + 1)
    with pytest.raises(
        ValueError,
        match=rf"{ROW_TOKENS + 1} tokens does not fit into a row of {ROW_TOKENS}.*trainer\.row_tokens",
    ):
        trainer.step([group(7, too_long), *groups])
    assert trainer.version == 0
