"""An agent written with OpenAI's client, trained on the completions of its calls.

    pip install openai
    areal-train --exp=openai_agent

Hardware: any, as for --exp=aime, whose problems it uses. The agent calls the policy, parses the
number in the box, asks again if there is none, and returns a reward. Only the address of the server
connects it with training.

pass@1 on 256 held-out problems rises from 25 % to 43 % within 5 steps and to 49 % after all 20, in
90 seconds of CPU time.

To train your own agent, copy this file anywhere, change `agent`, and pass its path as --exp. Use
workflow.command instead of workflow.function to run a program in any language, with OPENAI_BASE_URL
and OPENAI_API_KEY in its environment.
"""

from functools import cache
from typing import Any

import chz

from areal_jax.config.load import load_experiment
from areal_jax.workflows.config import Agent


@cache
def client():
    """Return one client for all agents, so that they share its connections."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url="http://127.0.0.1", api_key="of a session", timeout=600, max_retries=0
    )


async def agent(task, base_url, api_key):
    """Solve a task; return whether the number in the box is correct."""
    policy = client().with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [
        {"role": message.role, "content": message.content} for message in task.prompt
    ]
    for _ in range(2):
        reply = await policy.chat.completions.create(model="policy", messages=messages)
        said = reply.choices[0].message.content or ""
        _, box, rest = said.rpartition("\\boxed{")
        answer = rest.partition("}")[0]
        if box and answer.isdecimal():
            return int(answer) == int(task.answer)
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Put the answer into a box."},
        ]
    return False


aime = load_experiment("aime")
experiment = chz.replace(
    aime,
    name="openai_agent",
    description="an agent written with OpenAI's client",
    num_steps=20,
    workflow=Agent(function=f"{__file__}:agent", expected_calls=2),
    evaluation=chz.replace(aime.evaluation, every_steps=5, num_tasks=256),
)
