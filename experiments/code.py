"""Programs that read input and write output, run on tests in a sandbox (the form of LiveCodeBench).

    python -m areal_jax.train --exp=tiny_tools_sft examples.families=programs num_steps=100 \\
        --run-folder=runs/tiny_tools
    python -m areal_jax.train --exp=code

Hardware: any; two CPU cores and 2 GB of memory suffice, and Linux with user namespaces for the
sandbox. No network, no account, no accelerator.

The policy of the first command writes programs of two lines that are as often near as right; the
tests teach it what each question asks for. Every answer runs on five inputs in a sandbox of its
own. pass@1 on 128 held-out questions rises from 8 % to 34 %. Processor time: 95 seconds for each
command, and the sandboxes' own.

For LiveCodeBench itself, or rows of HumanEval, MBPP or APPS, and a policy that can write programs:

    python -m areal_jax.train --exp=code policy.path=Qwen/Qwen2.5-Coder-1.5B-Instruct \\
        tasks=Files tasks.path=train.jsonl eval_tasks=Files eval_tasks.path=test.jsonl \\
        engine.max_prompt_tokens=2048 engine.max_new_tokens=4096 rewards.num_workers=16 \\
        rewards.timeout_s=30 trainer.optimizer.learning_rate=1e-6
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.data.config import Exercises
from areal_jax.models.config import PolicyConfig

aime = load_experiment("aime")
exercises = Exercises(families=("programs",))
experiment = chz.replace(
    aime,
    name="code",
    description="programs, run on tests in a sandbox",
    num_steps=20,
    policy=PolicyConfig(path="runs/tiny_tools/policy"),
    tasks=exercises,
    eval_tasks=chz.replace(exercises, split="heldout", num_tasks=128),
    rewards=chz.replace(aime.rewards, num_workers=2),
    evaluation=chz.replace(aime.evaluation, every_steps=5, num_tasks=128),
)
