"""RLHF with the embedded policy: a reward model from generated preferences, and GRPO against it.

    areal-train --exp=reward_model num_steps=50 trainer.optimizer.learning_rate=4e-4 \\
        --run-folder=runs/tiny_reward
    areal-train --exp=rlhf_tiny

Hardware: two CPU cores and 2 GB of memory. Beside other work the first command takes two minutes
and the second five.

The reward model ranks 82 % of 512 held-out pairs. The sigmoid of its score is the reward; the
verifier is only measured. The policy is over-optimized (arXiv:2210.10760): within 40 steps the mean
score rises from 0.44 to 0.75, while pass@1 on 256 held-out problems, which the verifier decides,
rises from 28 % to 32 % in 5 steps and falls to 5 %. The report shows both. With half of the reward
from the verifier (rewards.model.weight=0.5) pass@1 is 53 % after 40 steps.
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.rewards.config import RewardModelConfig

aime = load_experiment("aime")
model = RewardModelConfig(path="runs/tiny_reward/policy", max_tokens=160)
experiment = chz.replace(
    aime,
    name="rlhf_tiny",
    description="a tiny policy trained on the scores of a reward model",
    num_steps=40,
    rewards=chz.replace(aime.rewards, model=model),
    evaluation=chz.replace(aime.evaluation, every_steps=10, num_tasks=256),
    trainer=chz.replace(
        aime.trainer, optimizer=chz.replace(aime.trainer.optimizer, learning_rate=2e-4)
    ),
)
