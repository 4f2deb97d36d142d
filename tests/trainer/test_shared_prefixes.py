"""Samples that begin alike: training on their shared tokens once changes no gradient."""

from __future__ import annotations

from typing import Any

import chz
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_training import train_mesh

from areal_jax.models import lora
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Policy
from areal_jax.records import NO_VERSION, Group, Sample, Task
from areal_jax.rl.config import GSPO
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import (
    SampleLimits,
    estimate_advantages,
    pack_rollouts,
    policy_batches,
    select_tokens,
)
from areal_jax.trainer.state import frozen_shardings
from areal_jax.trainer.step import Learner, TrainableModel

LIMITS = SampleLimits(max_staleness=2, max_new_tokens=64)
CONFIG = TrainerConfig(num_mini_batches=1, remat="none", router_aux_loss_coef=0.0)


def conversation(rng: np.random.Generator, prompt: np.ndarray, num_calls: int) -> list[Sample]:
    """Return a sample for each call; the prompt of each is the conversation before."""
    tokens, samples = prompt, []
    for _ in range(num_calls):
        answer = rng.integers(0, 32, int(rng.integers(3, 9))).astype(np.int32)
        mask = np.arange(len(tokens) + len(answer)) >= len(tokens)
        tokens = np.concatenate([tokens, answer])
        samples.append(
            Sample(
                tokens=tokens,
                loss_mask=mask,
                behave_logp=np.where(mask, rng.normal(-3.5, 0.2, len(mask)), 0).astype(np.float32),
                versions=np.where(mask, rng.integers(0, 3, len(mask)), NO_VERSION).astype(np.int32),
                reward=float(rng.random() < 0.5),
                grade="correct",
                stop_reason="stop",
            )
        )
        tokens = np.concatenate([tokens, rng.integers(0, 32, 2).astype(np.int32)])
    return samples


def groups() -> list[Group]:
    """Two groups of single answers and one of conversations of two calls each."""
    rng = np.random.default_rng(0)
    found = []
    for number, num_calls in enumerate((1, 1, 2)):
        prompt = rng.integers(0, 32, 9 + number).astype(np.int32)
        samples = [each for _ in range(4) for each in conversation(rng, prompt, num_calls)]
        found.append(Group(number, Task(f"task-{number}", (), "1"), tuple(samples)))
    return found


def policy_of(family: dict[str, Any]) -> Policy:
    config = {
        **{"architectures": ["Qwen2ForCausalLM"], "vocab_size": 32, "hidden_size": 16},
        **{"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 64},
        **family,
    }
    return Policy(ModelConfig.from_hf(config, "a test"))


def gradients_and_metrics(
    policy: Policy, mesh: Mesh, row_tokens: int, *, shares_prefixes: bool
) -> tuple[Any, dict[str, float], tuple[float, float]]:
    """Return gradients and metrics of one update, and the shared and all tokens."""
    rng = np.random.default_rng(1)

    def drawn(leaf: Any) -> np.ndarray:
        return (rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5).astype(np.float32)

    base = None
    params = jax.tree.map(drawn, policy.abstract())
    if policy.lora:
        base = jax.device_put(params, frozen_shardings(policy, mesh))
        params = jax.tree.map(drawn, lora.abstract(policy))
    config = chz.replace(CONFIG, loss=GSPO()) if row_tokens == 640 else CONFIG
    learner: Learner = policy_learner(
        config,
        TrainableModel(
            policy=policy,
            params=params,
            mesh=mesh,
            compute_dtype=np.float32,
            row_tokens=row_tokens,
            base=base,
            shares_prefixes=shares_prefixes,
        ),
        1,
    )
    packed = pack_rollouts(select_tokens(groups(), 2, LIMITS), config, LIMITS, learner)
    estimate = estimate_advantages(packed.batch, config, LIMITS, ())
    (update,) = policy_batches(packed, estimate, (), learner)
    accumulated = learner.programs.run("zeros")
    for batch in update.micro_batches:
        accumulated = learner.programs.run(
            "accumulate",
            learner.params,
            learner.base,
            accumulated,
            batch,
            np.float32(update.num_loss_tokens),
            np.bool_(True),
        )
    measured = jax.device_get(accumulated.measured)
    metrics = {name: total / weight for name, (total, weight) in measured.metrics.items() if weight}
    return jax.device_get(accumulated.gradients), metrics, packed.mini_batches[0].layout.shared


EXPERTS = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 12, "head_dim": 4},
}
WINDOWS = {
    **{"architectures": ["Gemma3ForCausalLM"], "sliding_window": 6, "sliding_window_pattern": 2},
    "head_dim": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "axes", "row_tokens"),
    [
        # The second of two layers has no window.
        (policy_of(WINDOWS), {}, 64),
        (policy_of(WINDOWS), {}, 640),
        (policy_of(EXPERTS), {"devices": 2, "fsdp": 1, "expert": 2}, 64),
        (Policy(policy_of({}).config, LoRA(rank=2, alpha=2.0)), {}, 64),
        (policy_of({}), {"devices": 4, "fsdp": 2, "context": 2}, 64),
        (policy_of({}), {"devices": 2, "fsdp": 1, "context": 2}, 640),
    ],
    ids=[
        *("windows", "blocked windows", "experts", "adapter", "context"),
        "blocked context",
    ],
)
def test_shared_tokens_are_trained_on_once(
    policy: Policy, axes: dict[str, Any], row_tokens: int
) -> None:
    mesh = train_mesh(**axes)
    plain, plain_metrics, _ = gradients_and_metrics(policy, mesh, row_tokens, shares_prefixes=False)
    shared, metrics, (num_shared, num_tokens) = gradients_and_metrics(
        policy, mesh, row_tokens, shares_prefixes=True
    )
    assert num_shared > 0.35 * num_tokens
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(plain))
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(shared), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * scale, err_msg=str(path))
    for name in plain_metrics.keys() - {"router_busiest_expert", "router_idle_experts"}:
        if name != "router_balance_loss":
            assert metrics[name] == pytest.approx(plain_metrics[name], rel=1e-5, abs=1e-6), name
