"""Problems with large numbers, and a calculator tool.

    areal-train --exp=tiny_tools_sft examples.families=calculations num_steps=80 \\
        --run-folder=runs/tiny_tools
    areal-train --exp=tool_math

Hardware: any; two CPU cores and 2 GB of memory suffice. Needs no network, account or accelerator.

The policy of the first command writes `<calculator>EXPRESSION</calculator>`, reads the value, and
answers; it samples among several expressions for every problem. Training teaches it the correct
one: pass@1 on 256 held-out problems rises from 10 % to 28 %. CPU time: 80 seconds for the first
command, 110 for the second.

A policy with tool calls in Qwen's format can also call a Python sandbox:

    areal-train --exp=tool_math policy.path=Qwen/Qwen3-1.7B tasks=Files \\
        tasks.path=train.jsonl eval_tasks=Files eval_tasks.path=test.jsonl \\
        workflow.call_format=Hermes workflow.announce=true \\
        workflow.tools.names=calculator,python workflow.max_turns=6 \\
        engine.max_prompt_tokens=4096 engine.max_new_tokens=1024
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.data.config import Exercises
from areal_jax.models.config import PolicyConfig
from areal_jax.rewards.config import ToolsConfig
from areal_jax.workflows.config import Tags, ToolUse

aime = load_experiment("aime")
exercises = Exercises(families=("calculations",))
experiment = chz.replace(
    aime,
    name="tool_math",
    description="problems with large numbers and a calculator tool",
    num_steps=20,
    policy=PolicyConfig(path="runs/tiny_tools/policy"),
    tasks=exercises,
    eval_tasks=chz.replace(exercises, split="heldout", num_tasks=256),
    workflow=ToolUse(
        max_turns=2, call_format=Tags(), announce=False, tools=ToolsConfig(names=("calculator",))
    ),
    engine=chz.replace(aime.engine, max_prompt_tokens=128, max_new_tokens=64),
    evaluation=chz.replace(aime.evaluation, every_steps=5, num_tasks=256),
)
