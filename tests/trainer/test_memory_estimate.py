"""What is predicted of memory holds against what XLA reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import POLICY, train_mesh

from areal_jax.models.architecture import ModelConfig, MoEConfig
from areal_jax.models.config import Remat
from areal_jax.models.decoder import Policy
from areal_jax.rl.token_losses import sft_loss
from areal_jax.trainer import state
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.memory_estimate import predicted_bytes
from areal_jax.trainer.programs import Objective
from areal_jax.trainer.step import Learner, TrainableModel


def test_parameters_gradients_and_moments_are_exact() -> None:
    whole = predicted_bytes(TrainerConfig(), POLICY, train_mesh(), jnp.float32, row_tokens=24)
    assert whole["parameters"] == whole["gradients"] == 4 * POLICY.config.num_params
    assert whole["optimizer"] == 2 * whole["parameters"] + 4  # Adam's count is an int32
    # Cut four ways all but norms and what does not divide: a quarter, and a little more.
    cut = predicted_bytes(
        TrainerConfig(), POLICY, train_mesh(4, tensor=2), jnp.float32, row_tokens=24
    )
    assert whole["parameters"] / 4 <= cut["parameters"] < whole["parameters"] / 3
    assert cut["optimizer"] == 2 * cut["parameters"] + 4


BIGGER = Policy(
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


@pytest.mark.parametrize(
    ("remat", "rows", "row_tokens", "mesh"),
    [
        ("none", 4, 128, {}),
        ("attention", 1, 1024, {}),
        ("full", 4, 128, {"devices": 4, "tensor": 2}),
    ],
)
@pytest.mark.slow
def test_the_estimate_is_near_what_xla_reports(
    remat: Remat, rows: int, row_tokens: int, mesh: dict[str, int]
) -> None:
    config = TrainerConfig(rows_per_micro_batch=rows, remat=remat, logp_chunk_tokens=128)
    predicted = predicted_bytes(
        config, BIGGER, train_mesh(**mesh), jnp.float32, row_tokens=row_tokens
    )
    estimate = sum(predicted[name] for name in ("activations", "logits", "gathered weights"))
    assert (
        2 / 3
        < estimate / accumulate_memory(config, BIGGER, mesh, row_tokens).temp_size_in_bytes
        < 3 / 2
    )


@pytest.mark.slow
def test_the_estimate_for_experts_is_near_what_xla_reports() -> None:
    config = TrainerConfig(rows_per_micro_batch=4, remat="none", logp_chunk_tokens=128)
    moe = MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
    )
    experts = Policy(
        replace(
            BIGGER.config,
            architecture="Qwen3MoeForCausalLM",
            attention_bias=False,
            qk_norm=True,
            moe=moe,
        )
    )
    predicted = predicted_bytes(config, experts, train_mesh(), jnp.float32, row_tokens=128)
    estimate = predicted["activations"] + predicted["logits"]
    assert 1 / 2 < estimate / accumulate_memory(config, experts, {}, 128).temp_size_in_bytes < 2


@pytest.mark.slow
def test_accumulating_gradients_makes_no_second_copy_of_them() -> None:
    # Few tokens, so that the temporaries show what there is beside activations: less than one set
    # of gradients, which are added to where they lie.
    config = TrainerConfig(rows_per_micro_batch=1, remat="full", logp_chunk_tokens=16)
    memory = accumulate_memory(config, BIGGER, {}, 16)
    gradients = 4 * BIGGER.config.num_params
    assert memory.alias_size_in_bytes >= gradients
    assert memory.temp_size_in_bytes < 0.6 * gradients


@pytest.mark.slow
def test_an_update_takes_memory_that_grows_linearly_with_the_row() -> None:
    config = TrainerConfig(rows_per_micro_batch=1, remat="full", logp_chunk_tokens=128)
    short, long = (
        accumulate_memory(config, POLICY, {}, tokens).temp_size_in_bytes for tokens in (4096, 16384)
    )
    assert long < 4.1 * short
    # Scores of one head of the longest row would take 1 GiB.
    assert long < 2**26


def test_moments_on_the_host_take_no_memory_that_activations_had_not() -> None:
    config = TrainerConfig(optimizer=OptimizerConfig(offload=True), remat="none")
    held = predicted_bytes(config, POLICY, train_mesh(), jnp.float32, row_tokens=4096)
    assert held["optimizer"] == 0 < held["activations"]


def test_offload_without_such_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "HOST_MEMORY", "memory of no device")
    config = TrainerConfig(optimizer=OptimizerConfig(offload=True))
    with pytest.raises(
        ValueError,
        match=r"trainer.optimizer.offload=true: expected devices with memory of kind .*found cpu",
    ):
        predicted_bytes(config, POLICY, train_mesh(), jnp.float32, row_tokens=24)


def accumulate_memory(
    config: TrainerConfig, policy: Policy, mesh: dict[str, int], row_tokens: int
) -> Any:
    model = TrainableModel(
        policy=policy,
        params=jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), policy.abstract()),
        mesh=train_mesh(**mesh),
        compute_dtype=jnp.float32,
        row_tokens=row_tokens,
    )
    objective = Objective(
        lambda logp, batch, num_tokens, _: sft_loss(logp, batch.loss_mask, num_tokens)
    )
    learner = Learner(config, model, objective, num_updates=1)
    memory = learner.programs.compiled("accumulate").memory_analysis()
    assert memory is not None
    return memory
