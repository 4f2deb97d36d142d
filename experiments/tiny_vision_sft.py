"""Supervised fine-tuning that makes the embedded policy that reads images.

    areal-train --exp=tiny_vision_sft

Hardware: a CPU.

The policy of areal_jax/models/embedded_vision/config.json, a Qwen3-VL, starts from random weights
and learns to count shapes in pictures, in a mixture of correct and wrong ways of counting them
(areal_jax/data/exercises.py). Reinforcement learning (`--exp=count_shapes`) then selects the
correct one. The result is a Hugging Face folder, RUN_FOLDER/policy; copy it over
areal_jax/models/embedded_vision to make it the new embedded policy. pass@1 on 256 held-out pictures
is then 43 %; two busy cores take 17 minutes.
"""

from areal_jax.checkpoint.config import CheckpointConfig
from areal_jax.config.experiment import SFTExperiment
from areal_jax.data.config import Exercises
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.models.config import PolicyConfig
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig

experiment = SFTExperiment(
    name="tiny_vision_sft",
    description="supervised fine-tuning that makes the embedded policy that reads images",
    num_steps=1500,
    policy=PolicyConfig(path="embedded_vision", random_init=True),
    examples=Exercises(families=("count_shapes",), num_tasks=100_000),
    eval_tasks=Exercises(families=("count_shapes",), split="heldout", num_tasks=256),
    examples_per_batch=32,
    heldout_every_steps=500,
    engine=EngineConfig(num_slots=64, max_prompt_tokens=32, max_new_tokens=64),
    trainer=TrainerConfig(
        optimizer=OptimizerConfig(
            learning_rate=2e-3, schedule="cosine", warmup_fraction=0.02, beta2=0.98
        ),
        row_tokens=128,
        rows_per_micro_batch=4,
        row_image_tokens=36,
        remat="none",
    ),
    evaluation=EvaluationConfig(every_steps=500),
    checkpoint=CheckpointConfig(every_steps=500),
)
