"""Episodes of the real verifiers as agents: its clients drive the sessions of the policy.

Needs the extra `verifiers` in an environment of its own; elsewhere these tests are not collected.
The null harness runs a program whose packages uv fetches once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import first_error
from areal_jax.records import Completion, RewardResult, Sample, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.serve.sessions import AgentServer
from areal_jax.workflows.agent import AgentFailed, AgentHost
from areal_jax.workflows.config import Verifiers
from areal_jax.workflows.from_config import make_workflow

TOKENIZER = HFTokenizer.from_folder(EMBEDDED)

TASKSET = """
import verifiers.v1 as vf


class Sum(vf.TaskData):
    total: int


class Add(vf.Task[Sum]):
    @vf.stop
    async def has_answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.total))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        if trace.last_reply == "fail":
            raise ValueError("cannot be scored")
        return float(len(trace.last_reply) < 3)


class Config(vf.TasksetConfig):
    size: int = 3


class Sums(vf.Taskset[Add, Config]):
    def load(self):
        for number in range(self.config.size):
            yield Add(Sum(prompt=f"{number}+1=", total=number + 1), self.config.task)


__all__ = ["Sums"]
"""


class Scripted:
    """Answers every prompt with one text; keeps the prompts."""

    def __init__(self, text: str) -> None:
        self.tokens = np.array([*TOKENIZER.encode(text), TOKENIZER.stop_token_ids[0]], np.int32)
        self.prompts = list[str]()

    async def __call__(self, prompt_tokens: Any, num_samples: int, **_: Any) -> list[Completion]:
        self.prompts += [TOKENIZER.decode(prompt_tokens)] * num_samples
        logprobs = np.linspace(-1, -0.5, len(self.tokens)).astype(np.float32)
        versions = np.zeros(len(self.tokens), np.int32)
        return [Completion(self.tokens, logprobs, versions, "stop")] * num_samples


async def grader(task: Task, answer: str, tests: Any = None) -> RewardResult:
    raise AssertionError("the environment grades")


@asynccontextmanager
async def player(**settings: Any) -> AsyncIterator[Any]:
    """The workflow of a taskset."""
    config = Verifiers(environment="sums", **settings)
    async with AgentServer(TOKENIZER, 64, 60.0).listening() as sessions:
        host = AgentHost(config, sessions)
        try:
            await host.start()
            yield make_workflow(
                config,
                TOKENIZER,
                2,
                RewardConfig(correct=1.0, wrong=0.0),
                max_prompt_tokens=256,
                tools=None,  # type: ignore[arg-type]
                host=host,
            )
        finally:
            await host.close()


def play(policy: Scripted, *numbers: int, **settings: Any) -> list[tuple[Sample, ...]]:
    async def main() -> list[tuple[Sample, ...]]:
        async with player(**settings) as workflow:
            tasks = [Task(str(number), (), str(number), "environment") for number in numbers]
            return [await workflow(task, policy, grader) for task in tasks]

    return asyncio.run(asyncio.wait_for(main(), 240))


@pytest.fixture(autouse=True)
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.parametrize("renderer", [None, str(EMBEDDED)])
def test_episodes_are_samples_with_named_rewards(renderer: str | None) -> None:
    policy = Scripted("1")
    arguments = json.dumps({"taskset": {"size": 2}})
    first, second, again = play(policy, 0, 1, 2, renderer=renderer, arguments=arguments)
    for samples, right in ((first, 0.75), (second, 0.0), (again, 0.75)):
        assert len(samples) == 2
        for sample in samples:
            assert sample.components == {"right": right, "short": 0.25}
            assert sample.reward == pytest.approx(right + 0.25)
            np.testing.assert_array_equal(sample.tokens[-len(policy.tokens) :], policy.tokens)
            assert sample.loss_mask.sum() == len(policy.tokens)
    # Task 2 is the first one again.
    assert "0+1=" in policy.prompts[0] and "1+1=" in policy.prompts[2]
    assert policy.prompts[0] == policy.prompts[4]


def test_failed_episode_is_named_with_its_error() -> None:
    with pytest.raises(ExceptionGroup) as failed:
        play(Scripted("fail"), 0)
    error = first_error(failed.value)
    assert isinstance(error, AgentFailed) and "cannot be scored" in str(error)


BUSY_ONCE = """
import contextlib
import verifiers.v1.env as env

serving = env.Env.serving
failures = [OSError("the port is busy")]


@contextlib.asynccontextmanager
async def busy_once(self):
    if failures:
        raise failures.pop()
    async with serving(self):
        yield


env.Env.serving = busy_once
"""


def test_environment_that_could_not_serve_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(TASKSET + BUSY_ONCE)

    async def main() -> tuple[Sample, ...]:
        async with player() as workflow:
            task = Task("0", (), "0", "environment")
            with pytest.raises(ExceptionGroup) as failed:
                await workflow(task, Scripted("1"), grader)
            assert "the port is busy" in str(first_error(failed.value))
            return await workflow(task, Scripted("1"), grader)

    for sample in asyncio.run(asyncio.wait_for(main(), 240)):
        assert sample.components == {"right": 0.75, "short": 0.25}
