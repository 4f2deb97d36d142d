"""Grade-school word problems (GSM8K) from local files.

    hf download openai/gsm8k --repo-type=dataset --local-dir=data/gsm8k
    areal-train --exp=gsm8k policy.path=Qwen/Qwen2.5-0.5B-Instruct

With other jsonl, json or parquet files with `question` and `answer`:

    areal-train --exp=gsm8k policy.path=DIR tasks.path=DIR/train.jsonl \\
        eval_tasks.path=DIR/test.jsonl

Hardware: one GPU of 80 GB for a policy of 0.5 B parameters. Without policy.path, the embedded
policy is trained as a smoke test on any machine; it will hardly solve these problems.
"""

from areal_jax.config.experiment import Experiment
from areal_jax.data.config import Files, PromptConfig
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.rewards.config import RewardConfig
from areal_jax.rollout.config import RolloutConfig
from areal_jax.trainer.config import TrainerConfig

experiment = Experiment(
    name="gsm8k",
    description="grade-school word problems from files",
    num_steps=100,
    tasks=Files(path="data/gsm8k/main"),
    eval_tasks=Files(path="data/gsm8k/main", split="test"),
    prompt=PromptConfig(
        suffix="\nPlease reason step by step, and put your final answer within \\boxed{}."
    ),
    rollout=RolloutConfig(groups_per_batch=32, samples_per_group=8, max_staleness=4),
    engine=EngineConfig(num_slots=192, max_new_tokens=512),
    trainer=TrainerConfig(rows_per_micro_batch=4),
    rewards=RewardConfig(num_workers=4),
    evaluation=EvaluationConfig(every_steps=25),
)
