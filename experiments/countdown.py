"""Countdown: make a number from three others, each used once.

    python -m areal_jax.train --exp=tiny_tools_sft --run-folder=runs/tiny_tools
    python -m areal_jax.train --exp=countdown

Hardware: any; two CPU cores and 2 GB of memory suffice. No network, no account, no accelerator.

The policy of the first command writes down attempts, such as 3*8-5=24-5=19, and boxes one of them, whether or not it came out.
Training teaches it to try what may come out, and to go on until something does. Answers are parsed, never evaluated.
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
    policy=PolicyConfig(path="runs/tiny_tools/policy"),
    tasks=exercises,
    eval_tasks=chz.replace(exercises, split="heldout", num_tasks=256),
    engine=chz.replace(aime.engine, max_new_tokens=128),
    evaluation=chz.replace(aime.evaluation, every_steps=50, num_tasks=256),
)
