"""Supervised fine-tuning of the embedded policy on tool calls and programs.

    areal-train --exp=tiny_tools_sft --run-folder=runs/tiny_tools

Hardware: a CPU.

The embedded policy learns a mixture of good and bad strategies for four families of generated
exercises: countdown, facts that need a search, calculations that need a calculator, and programs
(areal_jax/data/exercises.py). `--exp=countdown`, `search_agent`, `tool_math` and `code` start from
the result, runs/tiny_tools/policy. A single family trains faster: examples.families=facts
num_steps=50.
"""

from areal_jax.checkpoint.config import CheckpointConfig
from areal_jax.config.experiment import SFTExperiment
from areal_jax.data.config import Exercises
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig

experiment = SFTExperiment(
    name="tiny_tools_sft",
    description="supervised fine-tuning of the embedded policy on tool calls and programs",
    num_steps=300,
    examples=Exercises(num_tasks=100_000),
    examples_per_batch=64,
    heldout_every_steps=100,
    engine=EngineConfig(num_slots=48, max_prompt_tokens=160, max_new_tokens=96),
    trainer=TrainerConfig(
        optimizer=OptimizerConfig(
            learning_rate=2e-3, schedule="cosine", warmup_fraction=0.05, beta2=0.98
        ),
        rows_per_micro_batch=8,
        remat="none",
    ),
    evaluation=EvaluationConfig(every_steps=0),
    checkpoint=CheckpointConfig(every_steps=0),
)
