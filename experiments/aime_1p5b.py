"""The paper's recipe for mathematics with 1.5 B parameters (AReaL, arXiv:2505.24298, table 3).

    areal-train --exp=aime_1p5b

Policy and data are downloaded from the Hugging Face hub. With local folders or files:

    areal-train --exp=aime_1p5b policy.path=DIR tasks=Files tasks.path=train.jsonl \\
        eval_tasks=Files eval_tasks.path=aime24.jsonl

Hardware: the paper trains 250 steps in 14.8 hours on 16 nodes of 8 H800 (80 GB), three quarters of
which decode, and reports AIME24 pass@1 29.3 -> 42.2 (table 1). The settings do not require that
number: `--dry-run` prints what fits. The KV cache of a sequence of 28 672 tokens takes 0.8 GB, so
that engine.num_slots is about 64 per rollout device of 80 GB.

Differences from the paper: bfloat16 instead of float16; evaluation stops at the 27 648 new tokens
of training (the paper: 32 768).
"""

from areal_jax.config.experiment import Experiment
from areal_jax.data.config import Hub, PromptConfig
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.models.config import PolicyConfig
from areal_jax.rewards.config import RewardConfig
from areal_jax.rl.config import BatchNormalized, DecoupledPPO
from areal_jax.rollout.config import RolloutConfig
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig

experiment = Experiment(
    name="aime_1p5b",
    description="the paper's recipe: R1-Distill-Qwen-1.5B on DeepScaleR, evaluated on AIME24",
    seed=1,
    num_steps=250,
    policy=PolicyConfig(path="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    tasks=Hub(name="agentica-org/DeepScaleR-Preview-Dataset"),
    eval_tasks=Hub(name="HuggingFaceH4/aime_2024"),
    prompt=PromptConfig(
        suffix="\nPlease reason step by step, and put your final answer within \\boxed{}."
    ),
    rollout=RolloutConfig(
        groups_per_batch=512,
        samples_per_group=16,
        max_staleness=8,
        max_running_groups=512,
        batch_timeout_s=7200.0,
    ),
    engine=EngineConfig(
        num_slots=6144,
        max_prompt_tokens=1024,
        max_new_tokens=27648,
        steps_per_dispatch=16,
        temperature=1.0,
        request_timeout_s=14400.0,
    ),
    trainer=TrainerConfig(
        loss=DecoupledPPO(clip_eps=0.2),
        advantages=BatchNormalized(),
        optimizer=OptimizerConfig(
            learning_rate=2e-5,
            warmup_fraction=0.001,
            beta1=0.9,
            beta2=0.95,
            eps=1e-5,
            weight_decay=0.05,
            max_grad_norm=1.0,
        ),
        num_mini_batches=4,
        rows_per_micro_batch=1,
    ),
    rewards=RewardConfig(num_workers=16, correct=5.0, wrong=-5.0),
    evaluation=EvaluationConfig(
        every_steps=50, num_tasks=None, samples_per_task=32, temperature=1.0
    ),
)
