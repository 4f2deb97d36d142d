"""Programs that read input and write output, tested in a sandbox (as in LiveCodeBench).

    areal-train --exp=tiny_tools_sft examples.families=programs num_steps=100 \\
        --run-folder=runs/tiny_tools
    areal-train --exp=code

Hardware: any; two CPU cores and 2 GB of memory suffice, and Linux with user namespaces for the
sandbox. Needs no network, account or accelerator.

The policy of the first command writes programs of two lines, which are often almost correct. Every
answer is tested on five inputs in its own sandbox. pass@1 on 128 held-out questions rises from 8 %
to 34 %. CPU time: 95 seconds for each command, plus that of the sandboxes.

For LiveCodeBench, or rows of HumanEval, MBPP or APPS, with a policy that can write programs:

    areal-train --exp=code policy.path=Qwen/Qwen2.5-Coder-1.5B-Instruct \\
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
    description="programs, tested in a sandbox",
    num_steps=20,
    policy=PolicyConfig(path="runs/tiny_tools/policy"),
    tasks=exercises,
    eval_tasks=chz.replace(exercises, split="heldout", num_tasks=128),
    rewards=chz.replace(aime.rewards, num_workers=2),
    evaluation=chz.replace(aime.evaluation, every_steps=5, num_tasks=128),
)
