"""Runs small enough to take a step in milliseconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np

from areal_jax.config.experiment import Experiment
from areal_jax.data.config import Synthetic
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.metrics.config import MetricsConfig
from areal_jax.models import hf
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.rollout.config import RolloutConfig
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig

TINY_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TINY_ARCHITECTURE = ModelConfig.from_hf(
    TINY_SIZES | {"architectures": ["Qwen2ForCausalLM"]}, source="a test"
)


def write_tiny_policy(folder: Path) -> Path:
    """A Hugging Face folder with a tiny policy; its weights are sampled afresh."""
    shutil.copytree(
        EMBEDDED, folder, ignore=shutil.ignore_patterns("model.safetensors", "README.md")
    )
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = json.loads((folder / "config.json").read_text()) | small
    config.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_settings(folder: Path) -> tuple[str, str]:
    """Settings of a tiny policy with weights, and of a reward for half of its answers.

    Processes of a run load the weights: to sample them is a program that each would compile.
    """
    path, reward = write_tiny_policy(folder / "tiny"), folder / "reward.py"
    policy, random = Policy(hf.read_config(path)), np.random.default_rng(1)

    def weights(name: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        sampled = random.standard_normal(leaf.shape, np.float32)
        return float("norm" in jax.tree_util.keystr(name)) + 0.05 * sampled

    hf.save(path, policy, jax.tree_util.tree_map_with_path(weights, policy.abstract()), path)
    reward.write_text("def parity(task, answer):\n    return len(answer) % 2\n")
    return f"policy.path={path}", f"rewards.function={reward}:parity"


def tiny_experiment(policy: Path, *, num_steps: int = 2) -> Experiment:
    """An experiment with a tiny policy, on two of the devices that tests see."""
    return Experiment(
        name="tiny",
        seed=3,
        num_steps=num_steps,
        policy=PolicyConfig(path=str(policy), random_init=True),
        tasks=Synthetic(num_tasks=1000),
        placement=PlacementConfig(train_devices=1, rollout_devices=1),
        rollout=RolloutConfig(
            groups_per_batch=2, samples_per_group=4, max_running_groups=4, batch_timeout_s=120.0
        ),
        engine=EngineConfig(
            num_slots=8,
            max_prompt_tokens=80,
            max_new_tokens=8,
            steps_per_dispatch=4,
            prefill_chunk_tokens=32,
        ),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0),
            num_mini_batches=1,
            rows_per_micro_batch=2,
        ),
        evaluation=EvaluationConfig(every_steps=0),
        metrics=MetricsConfig(tensorboard=False, trace=False, progress=False),
    )


def write_tiny_experts(folder: Path) -> Path:
    """A Hugging Face folder with a tiny mixture of experts, like `write_tiny_policy`."""
    write_tiny_policy(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {
        name: value
        for name, value in config.items()
        if "window" not in name and name not in ("attention_bias", "layer_types")
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    wanted = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(kept | experts | wanted))
    return folder
