"""Training with the experts that the engine has recorded (R3, arXiv:2510.11370)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_experts import POLICY
from tiny_runs import tiny_experiment, write_tiny_experts
from tiny_training import ROW_TOKENS, train_mesh

import areal_jax
from areal_jax.data.packing import TrainingSequence, pack
from areal_jax.models.attention import packed_attention
from areal_jax.models.config import Remat
from areal_jax.models.decoder import Params
from areal_jax.parallel.sharding import TRAIN_RULES, put_batch, shardings
from areal_jax.run.rollout_log import read_rollouts
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import Forward, ModelInputs

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
PARAMS: Params = jax.tree.map(
    lambda leaf: RNG.normal(size=leaf.shape).astype(np.float32) / leaf.shape[-1] ** 0.5,
    POLICY.abstract(),
)
LENGTHS = (9, 13, 20, 7, 11, 16)
TOKENS = [RNG.integers(0, 32, length).astype(np.int32) for length in LENGTHS]
# Two of four experts, in each of two layers; the last token is never fed.
EXPERTS = [
    np.concatenate(
        [
            np.array([RNG.permutation(4)[:2] for _ in range(2 * (length - 1))], np.uint8).reshape(
                -1, 2, 2
            ),
            np.full((1, 2, 2), 255, np.uint8),
        ]
    )
    for length in LENGTHS
]
# Three have the same prompt of 6 tokens; the experts of the last differ in its fifth.
NUM_CONTEXT = 6
for each in (1, 3):
    TOKENS[each][:NUM_CONTEXT] = TOKENS[0][:NUM_CONTEXT]
    EXPERTS[each][:NUM_CONTEXT] = EXPERTS[0][:NUM_CONTEXT]
EXPERTS[3][4, 0] = EXPERTS[3][4, 0, ::-1]


def logprobs_and_gradient(
    *, replays: bool, rows: int, remat: Remat, shares: bool = False, **mesh: int
) -> tuple[list[np.ndarray], Any]:
    """Log-probs of the answers by sequence, and the gradient of their sum."""
    on = train_mesh(**mesh)
    config = TrainerConfig(rows_per_micro_batch=rows, remat=remat)
    forward = Forward(
        config,
        POLICY,
        on,
        jnp.float32,
        temperature=1.0,
        row_tokens=ROW_TOKENS,
        replays_router=replays,
        shares_prefixes=shares,
    )
    sequences = [
        TrainingSequence(
            tokens,
            np.arange(len(tokens)) >= NUM_CONTEXT,
            experts=experts,
            num_context=NUM_CONTEXT,
        )
        for tokens, experts in zip(TOKENS, EXPERTS, strict=True)
    ]
    (batch,), layout = pack(
        sequences, rows=forward.rows, row_tokens=ROW_TOKENS, share_prefixes=shares
    )
    # One begins with 5 tokens of another, one with 3.
    assert sorted(layout.branches.num_shared) == ([0, 0, 0, 0, 3, 5] if shares else [0] * 6)
    columns = batch.tokens, batch.segment_ids, batch.positions, batch.experts, batch.loss_mask
    *columns, mask = put_batch(on, columns, TRAIN_RULES)
    inputs = ModelInputs(*columns)
    if shares:
        (until,) = put_batch(on, (batch.visible_until,), TRAIN_RULES)
        inputs = inputs._replace(visible_until=until)
    inputs = inputs if replays else inputs._replace(experts=None)
    placed = shardings(on, POLICY.axes(), POLICY.abstract(), TRAIN_RULES)

    @jax.jit
    def run(params: Params, inputs: ModelInputs):
        def total(params: Params):
            logp = forward.predictions(params, {}, inputs)[0] * mask
            return logp.sum(), logp

        return jax.value_and_grad(total, has_aux=True)(params)

    (_, logp), gradient = run(jax.device_put(PARAMS, placed), inputs)
    return layout.gather(np.asarray(logp)[None]), jax.device_get(gradient)


def test_replay_reaches_forward_gradient_and_remat_on_any_mesh() -> None:
    logp, gradient = logprobs_and_gradient(replays=True, rows=8, remat="none")
    for tokens, experts, ours in zip(TOKENS, EXPERTS, logp, strict=True):
        hidden, _, _ = POLICY.hidden(
            jax.tree.map(jnp.asarray, PARAMS),
            jnp.asarray(tokens)[None],
            jnp.arange(len(tokens))[None],
            packed_attention(jnp.ones((1, len(tokens)), int)),
            compute_dtype=jnp.float32,
            replay=jnp.asarray(experts)[None],
        )
        every = jax.nn.log_softmax(hidden @ PARAMS["head"])[0]
        answer = np.arange(NUM_CONTEXT, len(tokens))
        np.testing.assert_allclose(
            ours[NUM_CONTEXT:], every[answer - 1, tokens[NUM_CONTEXT:]], atol=1e-5
        )
    for shares, axes in ((False, {"fsdp": 2, "tensor": 2}), (True, {"context": 2, "fsdp": 2})):
        spread = logprobs_and_gradient(
            replays=True, rows=2, remat="full", shares=shares, devices=8, expert=2, **axes
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), spread, (logp, gradient)
        )
    native, of_native = logprobs_and_gradient(replays=False, rows=8, remat="none")
    assert max(np.abs(a - b).max() for a, b in zip(native, logp, strict=True)) > 0.01
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), gradient, of_native)
    assert min(jax.tree.leaves(difference["layers"])) > 1e-3


def test_run_replays_what_its_engine_has_recorded(tmp_path: Path) -> None:
    experiment = tiny_experiment(write_tiny_experts(tmp_path / "policy"), num_steps=2).replace(
        **{
            "rewards.function": lambda task, answer: len(answer) % 2,
            "engine.router_replay": True,
            "metrics.rollouts": True,
        }
    )
    result = areal_jax.train(experiment, tmp_path / "run")
    assert result.policy_folder is not None
    samples = [
        sample
        for version in range(2)
        for group in read_rollouts(tmp_path / "run", version)
        for sample in group.samples
    ]
    recorded = [sample.experts for sample in samples if sample.experts is not None]
    assert len(recorded) == len(samples) == 16
    for sample, experts in zip(samples, recorded, strict=True):
        assert experts.shape == (len(sample.tokens), 2, 2)
        assert experts[:-1].max() < 4 and (experts[-1] == 255).all()
    # Not all tokens go to the same experts.
    assert len(np.unique(np.concatenate([experts[:-1] for experts in recorded]))) > 2
