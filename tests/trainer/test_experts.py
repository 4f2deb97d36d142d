"""Experts are trained alike on any mesh, and towards an even load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import ROW_TOKENS, train_mesh

from areal_jax.data.sft import SupervisedExample
from areal_jax.models import lora
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import LoRA, Remat
from areal_jax.models.decoder import Params, Policy
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.state import frozen_shardings
from areal_jax.trainer.step import TrainableModel

POLICY = Policy(
    ModelConfig.from_hf(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "router_aux_loss_coef": 0.25,
        },
        source="a test",
    )
)

LATENT = Policy(
    ModelConfig.from_hf(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "q_lora_rank": 6,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        source="a test",
    )
)


@cache
def trained(
    rows_per_shard: int,
    coefficient: float | None = None,
    *,
    policy: Policy = POLICY,
    remat: Remat = "none",
    **mesh: int,
) -> tuple[Mapping[str, float | tuple[float, float]], Params]:
    """Metrics and parameters after two updates."""
    rng = np.random.default_rng(0)
    params, adapter = (
        jax.tree.map(
            lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / leaf.shape[-1] ** 0.5,
            shapes,
        )
        for shapes in (policy.abstract(), lora.abstract(policy) if policy.lora else {})
    )
    on, base = train_mesh(**mesh), None
    if policy.lora:
        params, base = adapter, jax.device_put(params, frozen_shardings(policy, on))
    examples = [
        SupervisedExample(rng.integers(0, 32, n).astype(np.int32), np.arange(n) >= 2)
        for n in rng.integers(9, 25, 20)
    ]
    # Adam divides a gradient by its size; a large eps keeps what is all rounding from growing into
    # a difference.
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2)
    config = TrainerConfig(
        optimizer=optimizer,
        rows_per_micro_batch=rows_per_shard,
        remat=remat,
        router_aux_loss_coef=coefficient,
    )
    model = TrainableModel(
        policy=policy,
        params=params,
        mesh=on,
        compute_dtype=jnp.float32,
        row_tokens=ROW_TOKENS,
        base=base,
    )
    trainer = SupervisedTrainer(config, model, num_updates=10)
    trainer.step(examples[:10])
    return trainer.step(examples[10:]).metrics, jax.device_get(trainer.params)


@pytest.mark.slow
def test_latent_attention_on_eight_devices_trains_as_on_one() -> None:
    alone, params = trained(8, policy=LATENT)
    spread, same = trained(2, policy=LATENT, remat="dots", devices=8, fsdp=2, expert=2, tensor=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), same, params)
    for name in ("loss", "grad_norm", "router_busiest_expert"):
        np.testing.assert_allclose(alone[name], spread[name], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"expert": 2, "tensor": 2}, {"expert": 2}], ids=str)
def test_experts_on_eight_devices_train_as_on_one(mesh: Mapping[str, int]) -> None:
    alone, params = trained(8)
    # Without a tensor axis there are two copies, each with gradients of its own until the update.
    rows = 1 if "tensor" not in mesh else 2
    spread, same = trained(rows, remat="full", devices=8, fsdp=2, **mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), same, params)
    for name in (
        "loss",
        "grad_norm",
        "router_balance_loss",
        "router_busiest_expert",
        "router_idle_experts",
    ):
        np.testing.assert_allclose(alone[name], spread[name], rtol=1e-5)
    # Two of four experts a token: 2 where the load is even, 4 where all choose the same two with
    # certainty.
    balance = alone["router_balance_loss"]
    assert isinstance(balance, tuple) and 2 < balance[0] / balance[1] < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "mesh"), [("dots", {"expert": 2, "tensor": 2}), ("full", {"expert": 2})], ids=str
)
def test_adapters_of_experts_on_eight_devices_train_as_on_one(
    remat: Remat, mesh: Mapping[str, int]
) -> None:
    targets = ("q_proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj")
    policy = Policy(POLICY.config, LoRA(rank=3, targets=targets))
    alone, params = trained(8, policy=policy)
    # Without a tensor axis there are two copies.
    rows = 1 if "tensor" not in mesh else 2
    spread, same = trained(rows, policy=policy, remat=remat, devices=8, fsdp=2, **mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), same, params)
    for name in ("loss", "grad_norm", "router_busiest_expert"):
        np.testing.assert_allclose(alone[name], spread[name], rtol=1e-5)
    assert params["layers"]["mlp"]["expert_down"]["a"].shape == (2, 4, 12, 3)


@pytest.mark.slow
def test_the_load_balance_loss_has_the_weight_that_is_asked_for() -> None:
    # What config.json says, unless the trainer says otherwise.
    assert trained(8)[0]["grad_norm"] != trained(8, 0.0)[0]["grad_norm"]
