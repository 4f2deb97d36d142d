"""Repositories with a fault in one line, which the policy reads and repairs in a sandbox.

    areal-train --exp=tiny_tools_sft examples=Repositories examples.num_tasks=100000 \\
        engine.max_prompt_tokens=288 --run-folder=runs/tiny_coder
    areal-train --exp=coding_agent

Hardware: any; two CPU cores and 2 GB of memory suffice, on Linux with user namespaces for the
sandbox. Needs no network, account or accelerator.

Each sample has a workspace of its own, with a module and a test that fails. The policy of the first
command reads the module by `cat` and changes it by `sed`, often the wrong part, or not at all; with
other arguments than those of the visible test, the repaired function is graded in another sandbox.
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.data.config import Repositories
from areal_jax.models.config import PolicyConfig
from areal_jax.rewards.config import ToolsConfig
from areal_jax.workflows.config import CodingAgent, Tags

aime = load_experiment("aime")
repositories = Repositories()
experiment = chz.replace(
    aime,
    name="coding_agent",
    description="repositories with a fault in one line, repaired in a sandbox",
    num_steps=20,
    policy=PolicyConfig(path="runs/tiny_coder/policy"),
    tasks=repositories,
    eval_tasks=chz.replace(repositories, split="heldout", num_tasks=256),
    workflow=CodingAgent(
        max_turns=3, call_format=Tags(), announce=False, tools=ToolsConfig(names=("shell",))
    ),
    rewards=chz.replace(aime.rewards, num_workers=2),
    engine=chz.replace(aime.engine, max_prompt_tokens=320, max_new_tokens=128),
    evaluation=chz.replace(aime.evaluation, every_steps=10, num_tasks=256),
)
