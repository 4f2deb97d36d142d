"""Replay of agents after a crash: calls with journaled prompts are not sampled again."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tiny_engine import TinyEngine

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Completion, Message, RewardResult, Sample, Sampling, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rollout.calls import JournaledGenerate
from areal_jax.serve.sessions import AgentServer
from areal_jax.workflows.agent import AgentHost, Agents
from areal_jax.workflows.config import Agent

TOKENIZER = HFTokenizer.from_folder(EMBEDDED)
TASK = Task(id="t", prompt=(Message("user", "hi"),), answer="")

AGENTS = """
import itertools, openai

times = itertools.count()

async def ask(base_url, api_key, contents):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = []
        for content in contents:
            messages.append({"role": "user", "content": content})
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return 1

async def same(task, base_url, api_key):
    return await ask(base_url, api_key, ["a", "b"])

async def other(task, base_url, api_key):
    return await ask(base_url, api_key, ["a", f"time {next(times)}"])
"""


async def grader(task: Task, answer: str) -> RewardResult:
    return RewardResult("correct")


def run_twice(function: str) -> tuple[list[tuple[Sample, ...]], list[int]]:
    """Run a group and its replay; return the samples and the engine's request count of each."""

    async def main() -> tuple[list[tuple[Sample, ...]], list[int]]:
        async with AsyncExitStack() as stack:
            engine, journal = TinyEngine(max_prompt_tokens=200), dict[str, tuple[Completion, ...]]()
            ticking = asyncio.create_task(engine.run())
            sessions = await stack.enter_async_context(AgentServer(TOKENIZER, 6, 60.0).listening())
            host = AgentHost(Agent(function=function), sessions)
            stack.push_async_callback(host.close)
            samples, num_requests = list[tuple[Sample, ...]](), list[int]()
            for _ in range(2):
                calls = JournaledGenerate(
                    engine, 0, Sampling(6, stop_token_ids=(0,)), 3, 0, journal
                )
                samples.append(
                    await Agents(TOKENIZER, 2, RewardConfig(), host, asyncio.Semaphore(2))(
                        TASK, calls, grader
                    )
                )
                num_requests.append(len(engine.submitted))
            ticking.cancel()
            return samples, num_requests

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(tmp_path_factory.mktemp("agents")) / "replayed.py"
    path.write_text(AGENTS)
    return path


@pytest.mark.slow
def test_identical_agent_replays_without_sampling(program: Path):
    [first, second], num_requests = run_twice(f"{program}:same")
    assert num_requests == [4, 4]
    tokens = [sorted(sample.tokens.tolist() for sample in samples) for samples in (first, second)]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_diverging_agent_samples_its_new_prompts(program: Path):
    [first, second], num_requests = run_twice(f"{program}:other")
    # The first turns are equal; the second ones differ.
    assert num_requests == [4, 6]
    assert len(first) == len(second) == 2
