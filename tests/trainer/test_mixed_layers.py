"""Training of families whose layers differ: in windows, or in the kind of attention."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tiny_training import train_mesh

from areal_jax.data.sft import SupervisedExample
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import Remat
from areal_jax.models.decoder import Policy
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.step import TrainableModel

WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 3,
    "sliding_window_pattern": 3,
}
LINEAR = {
    "architectures": ["Qwen3_5ForCausalLM"],
    **{"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "partial_rotary_factor": 0.5, "full_attention_interval": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "remat"),
    [(WINDOWS, "none"), (LINEAR, "none"), (LINEAR, "full")],
    ids=["windows", "linear attention", "linear attention with remat"],
)
def test_layers_of_every_kind_learn(family: dict[str, object], remat: Remat) -> None:
    config = {
        **family,
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        "max_position_embeddings": 64,
    }
    policy = Policy(ModelConfig.from_hf(config, "a test"))
    params = policy.init(jax.random.key(0))
    trainer = SupervisedTrainer(
        TrainerConfig(remat=remat),
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
    for (path, old), new in zip(
        jax.tree.leaves_with_path(params["layers"]),
        jax.tree.leaves(trainer.params["layers"]),
        strict=True,
    ):
        moved = np.abs(np.asarray(new - old)).reshape(len(old), -1).max(axis=1)
        assert (moved > 0).all(), path
