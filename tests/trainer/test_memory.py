"""What is predicted of memory holds against what XLA reports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from tiny_training import POLICY, train_mesh

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.rl.losses import sft_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.memory import predicted_bytes
from areal_jax.trainer.step import Learner


def test_parameters_gradients_and_moments_are_exact() -> None:
    whole = predicted_bytes(TrainerConfig(), POLICY, train_mesh(), jnp.float32, row_tokens=24)
    assert whole["parameters"] == whole["gradients"] == 4 * POLICY.config.num_params
    assert whole["optimizer"] == 2 * whole["parameters"] + 4  # Adam's count is an int32
    # Cut four ways all but norms and what does not divide: a quarter, and a little more.
    cut = predicted_bytes(TrainerConfig(), POLICY, train_mesh(4, tensor=2), jnp.float32, row_tokens=24)
    assert whole["parameters"] / 4 <= cut["parameters"] < whole["parameters"] / 3
    assert cut["optimizer"] == 2 * cut["parameters"] + 4


@pytest.mark.parametrize(
    ("remat", "mesh"), [(False, {}), (True, {"devices": 4, "tensor": 2})], ids=["kept", "remat, fsdp 2 x tensor 2"]
)
def test_the_estimate_is_near_what_xla_reports(remat: bool, mesh: dict[str, int]) -> None:
    policy = Policy(
        ModelConfig.from_hf(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "vocab_size": 2048,
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_hidden_layers": 10,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
            },
            source="a test",
        )
    )
    config = TrainerConfig(rows_per_micro_batch=4, remat=remat, logp_chunk_tokens=128)
    predicted = predicted_bytes(config, policy, train_mesh(**mesh), jnp.float32, row_tokens=128)
    memory = accumulate_memory(config, policy, mesh)
    # XLA's temporaries hold one set of gradients besides activations and logits.
    estimate = predicted["activations"] + predicted["logits"] + predicted["gradients"]
    assert 0.6 < estimate / memory < 1.6


def accumulate_memory(config: TrainerConfig, policy: Policy, mesh: dict[str, int]) -> int:
    learner = Learner(
        config,
        policy,
        jax.jit(policy.init)(jax.random.key(0)),
        train_mesh(**mesh),
        jnp.float32,
        1,
        objective=lambda logp, _, batch, num_tokens: sft_loss(logp, batch.loss_mask, num_tokens),
        temperature=1.0,
        row_tokens=128,
    )
    memory = learner._program("accumulate").memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes
