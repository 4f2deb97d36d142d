"""Countdown: make a number from three others, each used once.

    areal-train --exp=tiny_tools_sft examples.families=countdown \\
        --run-folder=runs/tiny_tools
    areal-train --exp=countdown

Hardware: any; two CPU cores and 2 GB of memory suffice. Needs no network, account or accelerator.

The policy of the first command either guesses or searches: it writes attempts with their distances,
such as 3+8-5=11-5=6 9-6=3, until one is exact. Training teaches it to search: pass@1 on 256
held-out problems rises from 46 % to 66 %. With higher learning rates it forgets addition. Answers
are parsed, never evaluated. On two idle cores the first command takes three and a half minutes, the
second one and a half.

Rows with `nums` and `target` (as in Jiayi-Pan/Countdown-Tasks-3to4) are tasks with all four
operations:

    areal-train --exp=countdown policy.path=Qwen/Qwen2.5-3B tasks=Hub \\
        tasks.name=Jiayi-Pan/Countdown-Tasks-3to4 eval_tasks=Files eval_tasks.path=test.jsonl \\
        engine.max_prompt_tokens=256 engine.max_new_tokens=1024 \\
        trainer.optimizer.learning_rate=1e-6
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.data.config import Exercises
from areal_jax.models.config import PolicyConfig

aime = load_experiment("aime")
exercises = Exercises(families=("countdown",))
experiment = chz.replace(
    aime,
    name="countdown",
    description="Countdown: make a number from three others",
    num_steps=40,
    policy=PolicyConfig(path="runs/tiny_tools/policy"),
    tasks=exercises,
    eval_tasks=chz.replace(exercises, split="heldout", num_tasks=256),
    engine=chz.replace(aime.engine, max_new_tokens=128),
    trainer=chz.replace(
        aime.trainer, optimizer=chz.replace(aime.trainer.optimizer, learning_rate=5e-5)
    ),
    evaluation=chz.replace(aime.evaluation, every_steps=10, num_tasks=256),
)
