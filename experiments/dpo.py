"""Direct preference optimization: a policy learns from pairs of a chosen and a rejected answer.

python -m areal_jax.train --exp=dpo examples=Files examples.path=pairs.jsonl policy.path=DIR
"""

from areal_jax.config import PreferenceExperiment
from areal_jax.data.config import Synthetic
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig

experiment = PreferenceExperiment(
    name="dpo",
    description="direct preference optimization on pairs of answers",
    num_steps=100,
    examples=Synthetic(num_tasks=20_000),
    examples_per_batch=32,
    heldout_every_steps=50,
    engine=EngineConfig(num_slots=96, max_prompt_tokens=64, max_new_tokens=96),
    trainer=TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-4, schedule="linear", warmup_fraction=0.1, weight_decay=0.0),
        row_tokens=512,
        rows_per_micro_batch=1,
    ),
    evaluation=EvaluationConfig(every_steps=0),
)
