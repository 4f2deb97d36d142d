"""What training will take of each device's memory, told without a device doing anything."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from areal_jax.models.decoder import Policy
from areal_jax.parallel.sharding import bytes_per_device
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.optimizer import make_optimizer
from areal_jax.trainer.state import frozen, frozen_shardings, state_shardings, trained

KEPT_PER_MLP = 6
"""Arrays of the MLP's width that a layer keeps for its backward pass. This and the next two: fitted to what XLA reports."""
KEPT_PER_SCORE = 2
KEPT_PER_WIDTH = 5
KEPT_PER_LOGIT = 2


def predicted_bytes(
    config: TrainerConfig, policy: Policy, mesh: Mesh, compute_dtype: DTypeLike, *, row_tokens: int
) -> Mapping[str, int]:
    """Bytes on each device of the train mesh, by what they are for. Parameters, gradients and optimizer are exact; activations
    and logits are estimates that hold within about a third."""
    abstract, axes = trained(policy)
    model, optimizer = policy.config, make_optimizer(config.optimizer, axes)
    placed, base = state_shardings(policy, mesh, optimizer), frozen(policy, compute_dtype)
    params = bytes_per_device(abstract, placed.params)
    itemsize, wide = jnp.dtype(compute_dtype).itemsize, jnp.dtype(jnp.float32).itemsize
    tokens, tensor = config.rows_per_micro_batch * row_tokens, mesh.shape["tensor"]
    # Scores of a query reach back to the start of its row: half of it on average. They are float32 whatever computes them.
    scores = KEPT_PER_SCORE * model.num_attention_heads * (row_tokens + min(row_tokens, 128)) // 2 * wide // tensor
    of_layer = tokens * (
        KEPT_PER_WIDTH * model.hidden_size * itemsize + KEPT_PER_MLP * model.intermediate_size * itemsize // tensor + scores
    )
    between_layers = model.num_hidden_layers * tokens * model.hidden_size * itemsize
    return ({"frozen": bytes_per_device(base, frozen_shardings(policy, mesh))} if policy.lora else {}) | {
        "parameters": params,
        "gradients": params,
        "optimizer": bytes_per_device(jax.eval_shape(optimizer.init, abstract), placed.opt_state),
        "activations": between_layers + of_layer if config.remat else model.num_hidden_layers * of_layer,
        "logits": KEPT_PER_LOGIT * min(tokens, config.logp_chunk_tokens) * model.vocab_size * wide // tensor,
    }
