"""Countdown: make a number from three others, each used once.

    python -m areal_jax.train --exp=tiny_tools_sft examples.families=countdown --run-folder=runs/tiny_tools
    python -m areal_jax.train --exp=countdown

Hardware: any; two CPU cores and 2 GB of memory suffice. No network, no account, no accelerator.

The policy of the first command writes down attempts, such as 3+8-5=11-5=6, and boxes one of them, whether or not it came out.
Training teaches it to go on until one does: held-out pass@1 on 256 of them goes from 26.6 % to 30.5 % after 60 steps and 32.8 %
after 100, where it stays. Answers are parsed, never evaluated. Two idle cores need three and a half minutes for the first
command, and two and a half for the second.

Rows with `nums` and `target` (as Jiayi-Pan/Countdown-Tasks-3to4 has them) are tasks with all four operations:

    python -m areal_jax.train --exp=countdown policy.path=Qwen/Qwen2.5-3B tasks=Hub tasks.name=Jiayi-Pan/Countdown-Tasks-3to4 \\
        eval_tasks=Files eval_tasks.path=test.jsonl engine.max_prompt_tokens=256 engine.max_new_tokens=1024 \\
        trainer.optimizer.learning_rate=1e-6
"""

import chz

from areal_jax.config import load_experiment
from areal_jax.data.config import Exercises
from areal_jax.models.config import PolicyConfig

aime = load_experiment("aime")
exercises = Exercises(families=("countdown",))
experiment = chz.replace(
    aime,
    name="countdown",
    description="a number from three others, each used once",
    num_steps=100,
    policy=PolicyConfig(path="runs/tiny_tools/policy"),
    tasks=exercises,
    eval_tasks=chz.replace(exercises, split="heldout", num_tasks=256),
    engine=chz.replace(aime.engine, max_new_tokens=128),
    evaluation=chz.replace(aime.evaluation, every_steps=20, num_tasks=256),
)
