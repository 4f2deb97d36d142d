"""Direct preference optimization (DPO) on pairs of a chosen and a rejected answer.

    areal-train --exp=dpo examples=Files examples.path=pairs.jsonl policy.path=DIR

Hardware: a CPU for the embedded policy, which `--exp=dpo` alone trains on correct and wrong
solutions of generated problems; with num_steps=20 its accuracy on 512 held-out pairs rises from
50 %, where policy and reference are equal, to 86 %. A GPU of 80 GB for a policy of 1.5 B
parameters.

A row of the file (jsonl, json or parquet, or a folder with train and test files) has two answers to
one prompt,

    {"prompt": "1+1?", "chosen": "2", "rejected": "3"}

as text or as messages; `chosen` and `rejected` may also be whole conversations that differ in their
last answer. Other rows, and pairs that do not fit into trainer.row_tokens together, are skipped and
logged. A twentieth of the prompts is held out to measure loss and accuracy.

The reference is the initial policy or another one; it can be offloaded to host memory. IPO bounds
the margin:

    areal-train --exp=dpo loss=IPO loss.beta=0.1 trainer.reference.offload=true \\
        policy.path=DIR
"""

from areal_jax.config.experiment import PreferenceExperiment
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
        optimizer=OptimizerConfig(
            learning_rate=1e-4, schedule="linear", warmup_fraction=0.1, weight_decay=0.0
        ),
        row_tokens=512,
        rows_per_micro_batch=1,
    ),
    evaluation=EvaluationConfig(every_steps=0),
)
