"""Training of families in which only some layers have a window."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tiny_training import train_mesh

from areal_jax.data.sft import SupervisedExample
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.step import TrainableModel


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_every_layer_learns_with_and_without_window() -> None:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 64, "sliding_window": 3, "sliding_window_pattern": 3},
    }
    policy = Policy(ModelConfig.from_hf(config, "a test"))
    params = policy.init(jax.random.key(0))
    trainer = SupervisedTrainer(
        TrainerConfig(),
        TrainableModel(
            policy=policy,
            params=params,
            mesh=train_mesh(),
            compute_dtype=np.float32,
            row_tokens=16,
        ),
        num_updates=1,
    )
    tokens = np.arange(16, dtype=np.int32)
    trainer.step([SupervisedExample(tokens, tokens > 1)])
    moved = np.abs(
        np.asarray(trainer.params["layers"]["mlp"]["gate"] - params["layers"]["mlp"]["gate"])
    )
    assert (moved.max(axis=(1, 2)) > 0).all()
