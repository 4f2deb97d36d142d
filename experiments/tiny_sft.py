"""Supervised fine-tuning that makes the embedded policy from the problem generator alone.

    areal-train --exp=tiny_sft

Hardware: a CPU.

The policy of areal_jax/models/embedded/config.json starts from random weights and learns a mixture
of correct and wrong methods for every family of problems, each executed without errors. Like a base
model, it then has the methods that reinforcement learning (`--exp=aime`) selects from. The result
is a Hugging Face folder, RUN_FOLDER/policy; copy it over areal_jax/models/embedded to make it the
new embedded policy.
"""

from areal_jax.checkpoint.config import CheckpointConfig
from areal_jax.config.experiment import SFTExperiment
from areal_jax.data.config import Synthetic
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.models.config import PolicyConfig
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig

experiment = SFTExperiment(
    name="tiny_sft",
    description="supervised fine-tuning that makes the embedded policy",
    num_steps=2500,
    policy=PolicyConfig(path="embedded", random_init=True),
    examples=Synthetic(num_tasks=400_000),
    eval_tasks=Synthetic(split="heldout", num_tasks=256),
    examples_per_batch=64,
    heldout_every_steps=500,
    engine=EngineConfig(num_slots=96, max_prompt_tokens=64, max_new_tokens=96),
    trainer=TrainerConfig(
        optimizer=OptimizerConfig(
            learning_rate=3e-3, schedule="cosine", warmup_fraction=0.02, beta2=0.98
        ),
        rows_per_micro_batch=16,
        remat="none",
    ),
    evaluation=EvaluationConfig(every_steps=500),
    checkpoint=CheckpointConfig(every_steps=500),
)
