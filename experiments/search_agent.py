"""Questions that need a search tool: the policy learns what to search for.

    areal-train --exp=tiny_tools_sft examples.families=facts num_steps=50 \\
        --run-folder=runs/tiny_tools
    areal-train --exp=search_agent

Hardware: any; two CPU cores and 2 GB of memory suffice. Needs no network, account or accelerator.

The questions are about 1800 generated facts, such as "In hall 27, box 72 has 361 pens." The policy
of the first command writes `<search>QUERY</search>`, reads the best passage, and answers with its
number; its queries omit random words of the question. Training teaches it to search with the whole
question: pass@1 on 256 held-out facts rises from 13 % to 54 % within 5 steps and to 71 % after all
20. CPU time: 60 seconds for the first command, 110 for the second.

With your own documents (files of .txt, .md, or .jsonl with the field text), questions and policy:

    areal-train --exp=search_agent policy.path=Qwen/Qwen3-1.7B tasks=Files \\
        tasks.path=questions.jsonl eval_tasks=Files eval_tasks.path=test.jsonl \\
        workflow.tools.documents=DIR workflow.tools.num_results=3 workflow.call_format=Hermes \\
        workflow.announce=true workflow.max_turns=6 engine.max_prompt_tokens=8192 \\
        engine.max_new_tokens=1024
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.data.config import Exercises
from areal_jax.models.config import PolicyConfig
from areal_jax.rewards.config import ToolsConfig
from areal_jax.workflows.config import Tags, ToolUse

aime = load_experiment("aime")
exercises = Exercises(families=("facts",))
experiment = chz.replace(
    aime,
    name="search_agent",
    description="questions that need a search tool",
    num_steps=20,
    policy=PolicyConfig(path="runs/tiny_tools/policy"),
    tasks=exercises,
    eval_tasks=chz.replace(exercises, split="heldout", num_tasks=256),
    workflow=ToolUse(
        max_turns=2,
        call_format=Tags(),
        announce=False,
        tools=ToolsConfig(names=("search",), documents="facts", num_results=1),
    ),
    engine=chz.replace(aime.engine, max_prompt_tokens=96, max_new_tokens=48),
    evaluation=chz.replace(aime.evaluation, every_steps=5, num_tasks=256),
)
