"""A learner whose policy has a scalar head reads out one number a token, and learns it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import POLICY, ROW_TOKENS, params, train_mesh

from areal_jax.data.packing import TrainingSequence, pack
from areal_jax.metrics.meters import Mean
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Policy
from areal_jax.rl.token_losses import PolicyLoss
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.programs import Objective
from areal_jax.trainer.step import Learner, TrainableModel

SCALAR = Policy(dataclasses.replace(POLICY.config, readout="TokenClassification"))


def squared_error(
    values: jax.Array, batch: DeviceBatch, num_tokens: jax.Array, _: jax.Array
) -> PolicyLoss:
    loss = jnp.sum(jnp.where(batch.loss_mask, (values - 2.0) ** 2, 0.0))
    return PolicyLoss(
        loss / num_tokens,
        {"loss": Mean(jax.lax.stop_gradient(loss), jnp.sum(batch.loss_mask, dtype=jnp.float32))},
    )


@pytest.mark.slow
def test_values_are_read_out_and_learnt() -> None:
    trunk = {name: leaf for name, leaf in params().items() if name != "head"}
    head = {"value": np.full((16, 1), 0.3, np.float32), "value_bias": np.full(1, 0.5, np.float32)}
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=3e-2), rows_per_micro_batch=2, remat="none"
    )
    model = TrainableModel(
        policy=SCALAR,
        params=trunk | head,
        mesh=train_mesh(devices=2),
        compute_dtype=jnp.float32,
        row_tokens=ROW_TOKENS,
    )
    learner = Learner(config, model, Objective(squared_error), num_updates=100)
    tokens = np.random.default_rng(0).integers(0, 32, 15).astype(np.int32)
    zeros = np.zeros(15, np.float32)
    batches, layout = pack(
        [TrainingSequence(tokens, zeros == 0)] * 3, rows=learner.rows, row_tokens=ROW_TOKENS
    )
    batch = learner.put(batches[0])
    found = layout.gather(np.asarray(learner.logprobs(batch))[None])
    hidden, _, _ = jax.jit(
        lambda trunk, tokens: SCALAR.hidden(
            trunk,
            tokens,
            jnp.arange(15)[None],
            packed_attention(jnp.ones((1, 15), int)),
            compute_dtype=jnp.float32,
        )
    )(trunk, jnp.asarray(tokens)[None])
    for values in found:
        np.testing.assert_allclose(values, (np.asarray(hidden[0]) * 0.3).sum(-1) + 0.5, atol=1e-5)
    losses = []
    for _ in range(20):
        loss = learner.update([batch], 45, proximal_is_current=False).measured.metrics["loss"]
        assert isinstance(loss, tuple)
        losses.append(loss[0] / loss[1])
    assert losses[-1] < 0.1 * losses[0]
