"""Supervised fine-tuning on conversations.

    areal-train --exp=sft examples=Files examples.path=chat.jsonl policy.path=DIR

Hardware: a CPU for the embedded policy, which `--exp=sft` alone trains on generated problems harder
than those it was trained on: held-out perplexity falls from 7.3 to 1.6 within 100 updates, in about
two minutes. A GPU of 80 GB for a policy of 1.5 B parameters.

A row of the file (jsonl, json or parquet, or a folder with train and test files) is a conversation,
whose assistant messages are trained on,

    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}

or a prompt with its answer, such as `question` and `answer`; examples.prompt_field and
examples.answer_field name other fields. Other rows, and rows longer than trainer.row_tokens, are
skipped and logged. A twentieth of the prompts is held out to measure perplexity, unless other
examples are given:

    areal-train --exp=sft examples=Files examples.path=gsm8k/train.jsonl \\
        eval_examples=Files eval_examples.path=gsm8k/test.jsonl

Measuring pass@1 is optional:

    areal-train --exp=sft evaluation.every_steps=50 eval_tasks.difficulty=medium
"""

from areal_jax.config.experiment import SFTExperiment
from areal_jax.data.config import Synthetic
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig

experiment = SFTExperiment(
    name="sft",
    description="supervised fine-tuning on conversations",
    num_steps=100,
    examples=Synthetic(difficulty="medium", num_tasks=20_000),
    examples_per_batch=32,
    heldout_every_steps=50,
    engine=EngineConfig(max_prompt_tokens=256, max_new_tokens=256),
    trainer=TrainerConfig(
        optimizer=OptimizerConfig(
            learning_rate=1e-3, schedule="cosine", warmup_fraction=0.03, beta2=0.98
        ),
        row_tokens=512,
        rows_per_micro_batch=1,
    ),
    evaluation=EvaluationConfig(every_steps=0),
)
