"""Agents: user programs over HTTP, samples of their calls, and their failures."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import EngineStopped, first_error
from areal_jax.protocols import Workflow
from areal_jax.records import Completion, Message, RewardResult, Sample, Task, ToolResult
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.processes import has_ended
from areal_jax.serve.sessions import AgentServer
from areal_jax.workflows import agent
from areal_jax.workflows.agent import AgentFailed, AgentHost, Runner
from areal_jax.workflows.config import Agent
from areal_jax.workflows.from_config import make_workflow

TOKENIZER = HFTokenizer.from_folder(EMBEDDED)
REWARDS = RewardConfig(correct=2.0, wrong=-1.0)
TASK = Task(id="t", prompt=(Message("user", "What is 1+1?"),), answer="2")

AGENTS = """
import asyncio, json, os, subprocess, sys, time, urllib.error, urllib.request

def ask(base_url, api_key, messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(
        base_url + "/chat/completions", body, {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(error.read().decode()) from None

def two_calls(task, base_url, api_key):
    messages = [{"role": m.role, "content": m.content} for m in task.prompt]
    answer = ask(base_url, api_key, messages)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Sure?"}]
    return 0.5 if ask(base_url, api_key, messages) else 0

async def in_a_loop(task, base_url, api_key):
    return await asyncio.to_thread(ask, base_url, api_key, [{"role": "user", "content": task.answer}]) != ""

class Made:
    def __init__(self, reward):
        self.rewards = iter([reward, reward / 2])

    async def __call__(self, task, base_url, api_key):
        return await in_a_loop(task, base_url, api_key) and next(self.rewards)

def adjusted(task, base_url, api_key, reward):
    return ungraded(task, base_url, api_key) or reward

def ungraded(task, base_url, api_key):
    ask(base_url, api_key, [{"role": "user", "content": "q"}])

def ungraded_twice(task, base_url, api_key):
    for question in "qr":
        ask(base_url, api_key, [{"role": "user", "content": question}])

def silent(task, base_url, api_key):
    return 1

def fails(task, base_url, api_key):
    raise KeyError("mine")

def too_much(task, base_url, api_key):
    ask(base_url, api_key, [{"role": "user", "content": "q"}])
    return 7

async def hangs(task, base_url, api_key):
    await asyncio.sleep(60)

async def stays(task, base_url, api_key):
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

def leaves(task, base_url, api_key):
    return ungraded(task, base_url, api_key) if task.id == "t" else sys.exit(3)

def is_interrupted(task, base_url, api_key):
    if task.id != "t":
        raise KeyboardInterrupt
    return ungraded(task, base_url, api_key)

async def leaves_the_loop(task, base_url, api_key):
    return leaves(task, base_url, api_key)

async def leaves_in_a_task(task, base_url, api_key):
    async with asyncio.TaskGroup() as tasks:
        return await tasks.create_task(leaves_the_loop(task, base_url, api_key))

async def leaves_in_a_thread(task, base_url, api_key):
    return await asyncio.to_thread(leaves, task, base_url, api_key)

async def gives_up(task, base_url, api_key):
    if task.id != "t":
        raise asyncio.CancelledError
    return await in_a_loop(task, base_url, api_key)

async def blocks_at_once(task, base_url, api_key):
    if task.id == "bad":
        time.sleep(600)
    return await in_a_loop(task, base_url, api_key)

async def blocks_later(task, base_url, api_key):
    answer = await in_a_loop(task, base_url, api_key)
    if task.id == "bad":
        time.sleep(600)
    return answer

async def exits(task, base_url, api_key):
    if task.id == "bad":
        os._exit(3)
    return await in_a_loop(task, base_url, api_key)

async def forks(task, base_url, api_key):
    if pid := os.fork():
        with open(task.id + "/forked", "w") as file:
            file.write(str(pid))
        return await in_a_loop(task, base_url, api_key)
    return 0.25

def floods(task, base_url, api_key):
    for _ in range(1000):
        print("flood\\n" * 100)
        os.write(1, b"")
    return ungraded(task, base_url, api_key)

def starts_others(task, base_url, api_key):
    # A child, an orphan in a session of its own, and a process that ignores signals.
    orphan = "import os,sys,time\\nif os.fork(): sys.exit()\\nos.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    deaf = "import os,signal,time\\nsignal.signal(15, signal.SIG_IGN); time.sleep(600)"
    pids = [subprocess.Popen(["sleep", "600"]).pid, subprocess.Popen([sys.executable, "-c", deaf]).pid]
    pids += [int(subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True).stdout.readline())]
    with open(task.id + "/writing", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename(task.id + "/writing", task.id + "/pids")
    time.sleep(600)

async def starts_others_async(task, base_url, api_key):
    time.sleep = lambda _: None
    starts_others(task, base_url, api_key)
    await asyncio.sleep(600)

if __name__ == "__main__" and len(sys.argv) > 1:
    class Task: id = sys.argv[2]
    starts_others(Task, "", "")
elif __name__ == "__main__":
    task = json.load(sys.stdin)
    answer = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], [{"role": "user", "content": task["answer"]}])
    root, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"]
    assert (root + "/v1", key) == (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print("thinking aloud")
    print(json.dumps(bool(answer)))
    sys.exit(3 if task["id"] == "bad" else 0)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(tmp_path_factory.mktemp("agents")) / "agents.py"
    path.write_text(AGENTS)
    return path


class ScriptedPolicy:
    """Samples the tokens of the texts in order, repeats the last, and counts the threads that it
    is called in."""

    def __init__(self, *texts: str, error: Exception | None = None) -> None:
        self.texts, self.error = list(texts or ["2"]), error
        self.threads = set[int]()

    async def __call__(self, prompt_tokens: Any, num_samples: int, **how: Any) -> list[Completion]:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        sampled = np.append(TOKENIZER.encode(text), np.int32(TOKENIZER.stop_token_ids[0])).astype(
            np.int32
        )
        zeros = np.zeros(len(sampled), np.int32)
        return [
            Completion(sampled, zeros.astype(np.float32) - 1, zeros, "stop")
            for _ in range(num_samples)
        ]


async def grader(task: Task, answer: str) -> RewardResult:
    return RewardResult("correct" if answer == task.answer else "wrong")


def workflow(config: Agent, host: Runner, num_samples: int) -> Workflow:
    return make_workflow(
        config, TOKENIZER, num_samples, REWARDS, max_prompt_tokens=200, tools=no_tools, host=host
    )


async def no_tools(tool: str, argument: str) -> ToolResult:
    raise AssertionError("agents call none")


def work(
    config: Agent,
    generate: ScriptedPolicy,
    *,
    num_samples: int = 3,
    task: Task = TASK,
) -> tuple[Sample, ...]:
    async def main() -> tuple[Sample, ...]:
        async with AsyncExitStack() as stack:
            sessions = await stack.enter_async_context(
                AgentServer(TOKENIZER, 50, 100.0).listening()
            )
            host = AgentHost(config, sessions)
            stack.push_async_callback(host.close)
            await host.start()
            return await workflow(config, host, num_samples)(task, generate, grader)

    return asyncio.run(asyncio.wait_for(main(), 100))


def failure(config: Agent, generate: ScriptedPolicy, **how: Any) -> Exception:
    with pytest.raises(Exception) as failed:
        work(config, generate, **how)
    return first_error(failed.value)


def test_extending_calls_are_one_sample_with_the_agents_reward(program: Path):
    samples = work(Agent(function=f"{program}:two_calls"), ScriptedPolicy())
    assert len(samples) == 3
    answer_tokens = len(TOKENIZER.encode("2")) + 1
    for sample in samples:
        assert sample.loss_mask.sum() == 2 * answer_tokens
        # Half of the way from -1 to 2.
        assert (sample.reward, sample.grade) == (0.5, "wrong")
        assert TOKENIZER.decode(sample.tokens).count("Sure?") == 1


def test_per_call_export_makes_one_sample_per_call(program: Path):
    samples = work(
        Agent(function=f"{program}:two_calls", export="per_call"), ScriptedPolicy(), num_samples=2
    )
    assert [sample.reward for sample in samples] == [0.5] * 4
    assert {int(sample.loss_mask.sum()) for sample in samples} == {len(TOKENIZER.encode("2")) + 1}


def test_async_agent_runs_next_to_its_thread(program: Path):
    generate = ScriptedPolicy()
    samples = work(Agent(function=f"{program}:in_a_loop"), generate, num_samples=4)
    assert [(sample.reward, sample.grade) for sample in samples] == [(2.0, "correct")] * 4
    assert generate.threads == {threading.get_ident()}


@pytest.mark.parametrize(("answer", "reward"), [("2", 2.0), ("3", -1.0)])
def test_agent_that_returns_none_has_its_last_answer_graded(
    program: Path, answer: str, reward: float
):
    [sample] = work(Agent(function=f"{program}:ungraded"), ScriptedPolicy(answer), num_samples=1)
    assert sample.reward == reward
    samples = work(
        Agent(function=f"{program}:ungraded_twice"), ScriptedPolicy("7", answer), num_samples=1
    )
    assert [sample.reward for sample in samples] == [reward, reward]


def test_arguments_are_the_functions_or_make_its_object_once(program: Path):
    arguments = '{"reward": 1.0}'
    [sample] = work(
        Agent(function=f"{program}:adjusted", arguments=arguments), ScriptedPolicy(), num_samples=1
    )
    assert sample.reward == 2.0
    samples = work(
        Agent(function=f"{program}:Made", arguments=arguments), ScriptedPolicy(), num_samples=2
    )
    assert sorted(sample.reward for sample in samples) == [0.5, 2.0]
    with pytest.raises(ValueError, match=r"workflow.arguments: expected a JSON object"):
        work(Agent(function=f"{program}:Made", arguments="1"), ScriptedPolicy())
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'size'"):
        work(Agent(function=f"{program}:Made", arguments='{"size": 1}'), ScriptedPolicy())


def test_command_is_an_agent(program: Path):
    samples = work(Agent(command=f"{sys.executable} {program}"), ScriptedPolicy(), num_samples=2)
    assert [(sample.reward, sample.grade) for sample in samples] == [(2.0, "correct")] * 2


def test_failing_command_fails_its_group(program: Path):
    bad = Task(id="bad", prompt=(), answer="2")
    error = failure(
        Agent(command=f"{sys.executable} {program}"), ScriptedPolicy(), num_samples=1, task=bad
    )
    assert isinstance(error, AgentFailed)
    assert "exit code 3" in str(error)


@pytest.mark.parametrize(
    ("name", "raised"),
    [
        ("leaves", "SystemExit(3)"),
        ("is_interrupted", "KeyboardInterrupt()"),
        ("leaves_the_loop", "SystemExit(3)"),
        ("leaves_in_a_task", "SystemExit(3)"),
        ("leaves_in_a_thread", "SystemExit(3)"),
        ("gives_up", "CancelledError()"),
    ],
)
def test_agent_that_exits_fails_its_own_task_only(program: Path, name: str, raised: str):
    config = Agent(function=f"{program}:{name}", timeout_s=20.0)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            host = AgentHost(
                config,
                await stack.enter_async_context(AgentServer(TOKENIZER, 50, 100.0).listening()),
            )
            stack.push_async_callback(host.close)
            bad = Task(id="bad", prompt=(), answer="2")
            with pytest.raises(ExceptionGroup) as failed:
                await workflow(config, host, 1)(bad, ScriptedPolicy(), grader)
            error = first_error(failed.value)
            assert isinstance(error, AgentFailed)
            assert (
                "the agent on task bad failed: RuntimeError: expected it to return, it raised "
                f"{raised}"
            ) in str(error)
            assert len(await workflow(config, host, 2)(TASK, ScriptedPolicy(), grader)) == 2

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.slow
def test_agents_that_ignore_cancellation_are_killed(program: Path):
    error = failure(
        Agent(function=f"{program}:stays", timeout_s=4.0), ScriptedPolicy(), num_samples=1
    )
    assert isinstance(error, TimeoutError)
    assert f"it was at {program}:" in str(error) and "in stays: await asyncio.sleep(60)" in str(
        error
    )


BAD = Task(id="bad", prompt=(), answer="2")


@asynccontextmanager
async def hosted(config: Agent) -> AsyncIterator[AgentHost]:
    async with AsyncExitStack() as stack:
        host = AgentHost(
            config, await stack.enter_async_context(AgentServer(TOKENIZER, 50, 100.0).listening())
        )
        stack.push_async_callback(host.close)
        await host.start()
        yield host


def all_ended(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            while not has_ended(psutil.Process(pid)):
                time.sleep(0.01)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", ["blocks_at_once", "blocks_later"])
@pytest.mark.slow
def test_blocking_agent_is_logged_and_others_continue(
    program: Path, name: str, caplog: pytest.LogCaptureFixture
):
    config = Agent(function=f"{program}:{name}", timeout_s=10.0, stall_warning_s=0.5)

    async def main() -> None:
        async with hosted(config) as host:
            bad = asyncio.ensure_future(workflow(config, host, 1)(BAD, ScriptedPolicy(), grader))
            await asyncio.sleep(2)
            # Begun while the other one blocks.
            assert len(await workflow(config, host, 3)(TASK, ScriptedPolicy(), grader)) == 3
            assert not bad.done()
            with pytest.raises(ExceptionGroup) as failed:
                await bad
            assert isinstance(first_error(failed.value), TimeoutError)
            assert f"in {name}: time.sleep(600)" in str(first_error(failed.value))

    asyncio.run(asyncio.wait_for(main(), 90))
    assert "event loop blocked: the agent on task bad" in caplog.text
    assert f"{program}:" in caplog.text and f"in {name}: time.sleep(600)" in caplog.text


@pytest.mark.timeout(100)
def test_agents_restart_if_another_one_blocks_their_worker(
    program: Path, monkeypatch: pytest.MonkeyPatch
):
    config = Agent(function=f"{program}:blocks_at_once", timeout_s=80.0, stall_warning_s=0.5)

    async def main() -> None:
        async with hosted(config) as host:
            held = Held()
            with monkeypatch.context() as shared:
                shared.setattr(agent, "MAX_WORKERS", 1)
                others = asyncio.ensure_future(workflow(config, host, 2)(TASK, held, grader))
                while held.waiting < 2:
                    await asyncio.sleep(0.01)
            bad = asyncio.ensure_future(workflow(config, host, 1)(BAD, ScriptedPolicy(), grader))
            while held.waiting < 4:
                await asyncio.sleep(0.01)
            held.let.set()
            assert len(await others) == 2
            assert not bad.done()
            bad.cancel()
            await asyncio.gather(bad, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 90))


@pytest.mark.timeout(100)
@pytest.mark.slow
def test_agent_timeout_starts_when_it_has_a_worker(program: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent, "MAX_WORKERS", 1)
    config = Agent(function=f"{program}:blocks_at_once", timeout_s=8.0)

    async def main() -> None:
        async with hosted(config) as host:
            bad = [
                asyncio.ensure_future(workflow(config, host, 1)(BAD, ScriptedPolicy(), grader))
                for _ in range(2)
            ]
            await asyncio.sleep(0.5)
            # Whenever its turn comes: the others block the only worker until their time-outs.
            assert len(await workflow(config, host, 1)(TASK, ScriptedPolicy(), grader)) == 1
            assert all(
                isinstance(each, ExceptionGroup)
                for each in await asyncio.gather(*bad, return_exceptions=True)
            )

    asyncio.run(asyncio.wait_for(main(), 90))


@pytest.mark.timeout(100)
@pytest.mark.slow
def test_agent_that_kills_its_worker_fails_alone(program: Path):
    config = Agent(function=f"{program}:exits", timeout_s=60.0)

    async def main() -> None:
        async with hosted(config) as host:
            held = Held()
            others = asyncio.ensure_future(workflow(config, host, 3)(TASK, held, grader))
            while held.waiting < 3:
                await asyncio.sleep(0.01)
            with pytest.raises(ExceptionGroup) as failed:
                await workflow(config, host, 1)(BAD, ScriptedPolicy(), grader)
            assert "its process ended with exit code 3" in str(first_error(failed.value))
            held.let.set()
            assert len(await others) == 3

    asyncio.run(asyncio.wait_for(main(), 90))


def test_forked_copy_of_an_agent_sends_no_result(program: Path, tmp_path: Path):
    samples = work(
        Agent(function=f"{program}:forks"),
        ScriptedPolicy(),
        num_samples=1,
        task=replace(TASK, id=str(tmp_path)),
    )
    assert len(samples) == 1
    all_ended([int((tmp_path / "forked").read_text())])


def test_prints_of_agents_go_to_standard_error(program: Path, capfd: pytest.CaptureFixture[str]):
    assert len(work(Agent(function=f"{program}:floods"), ScriptedPolicy(), num_samples=2)) == 2
    assert capfd.readouterr().err.count("flood") == 200_000


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", ["starts_others", "starts_others_async"])
@pytest.mark.parametrize("ends", ["timeout", "close"])
@pytest.mark.slow
def test_descendants_of_agents_are_killed_with_them(
    program: Path, tmp_path: Path, name: str, ends: str
):
    config = Agent(function=f"{program}:{name}", timeout_s=10.0 if ends == "timeout" else 90.0)

    async def main() -> None:
        async with hosted(config) as host:
            task = replace(TASK, id=str(tmp_path))
            working = asyncio.ensure_future(
                workflow(config, host, 1)(task, ScriptedPolicy(), grader)
            )
            while not (tmp_path / "pids").exists():
                await asyncio.sleep(0.05)
            if ends == "timeout":
                with pytest.raises(ExceptionGroup):
                    await working
                await asyncio.to_thread(all_ended, pids())
            else:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    def pids() -> list[int]:
        return [int(pid) for pid in (tmp_path / "pids").read_text().split()]

    asyncio.run(asyncio.wait_for(main(), 90))
    assert len(pids()) == 3
    all_ended(pids())


HOST = """
import asyncio, sys
from contextlib import AsyncExitStack
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Task
from areal_jax.serve.sessions import AgentServer
from areal_jax.workflows.agent import AgentHost
from areal_jax.workflows.config import Agent

async def main(how, task):
    async with AgentServer(HFTokenizer.from_folder(EMBEDDED), 50, 100.0).listening() as sessions:
        host = AgentHost(Agent(**how), sessions)
        await host.run(Task(id=task, prompt=(), answer=""), None)

asyncio.run(main(eval(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", ["function", "command"])
def test_descendants_of_agents_are_killed_with_the_trainer(
    program: Path, tmp_path: Path, kind: str
):
    named = (
        f"{program}:starts_others"
        if kind == "function"
        else f"{sys.executable} {program} starts_others {tmp_path}"
    )
    given = [sys.executable, "-c", HOST, repr({kind: named}), str(tmp_path)]
    trainer = subprocess.Popen(
        given, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    )
    try:
        while not (tmp_path / "pids").exists():
            assert trainer.poll() is None
            time.sleep(0.05)
        started = psutil.Process(trainer.pid).children(recursive=True)
    finally:
        trainer.kill()
        trainer.wait(60)
    assert len(started) >= 2  # the guard and what it guards
    all_ended(
        [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        + [each.pid for each in started]
    )


@pytest.mark.timeout(100)
@pytest.mark.slow
def test_agent_timeouts_pause_during_pinned_evaluations(program: Path):
    config = Agent(function=f"{program}:in_a_loop", timeout_s=4.0)

    async def main() -> None:
        async with hosted(config) as host:
            held = Held()
            training = [asyncio.ensure_future(workflow(config, host, 1)(TASK, held, grader))]
            while held.waiting < 1:
                await asyncio.sleep(0.01)
            with host.evaluating(holds=True) as runner:
                training.append(
                    asyncio.ensure_future(workflow(config, host, 1)(TASK, held, grader))
                )
                # The clock of the evaluation's own agents runs.
                with pytest.raises(ExceptionGroup) as failed:
                    await workflow(config, runner, 1)(TASK, Held(), grader)
                assert isinstance(first_error(failed.value), TimeoutError)
                await asyncio.sleep(1)
                assert not any(each.done() for each in training)
            held.let.set()
            assert [len(await each) for each in training] == [1, 1]
            # And it is back.
            with pytest.raises(ExceptionGroup):
                await workflow(config, host, 1)(TASK, Held(), grader)

    asyncio.run(asyncio.wait_for(main(), 90))


def test_function_that_cannot_be_loaded_is_refused(tmp_path: Path):
    (tmp_path / "agents.py").write_text("import no_such_module")

    async def main(name: str) -> None:
        async with hosted(Agent(function=f"{tmp_path}/{name}")):
            raise AssertionError("it was loaded")

    for name, words in (
        ("agents.py:f", "ModuleNotFoundError: No module named"),
        ("none.py:f", "FileNotFoundError"),
    ):
        with pytest.raises(ValueError, match=words):
            asyncio.run(main(name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("silent", "expected a call of the policy, found none"),
        ("fails", "KeyError: 'mine'"),
        ("too_much", "expected a bool or a number from 0 to 1, found 7"),
    ],
)
def test_failing_agent_fails_its_group_with_its_error(program: Path, name: str, words: str):
    error = failure(Agent(function=f"{program}:{name}"), ScriptedPolicy())
    assert isinstance(error, AgentFailed)
    assert words in str(error)


def test_hanging_agent_times_out(program: Path):
    error = failure(Agent(function=f"{program}:hangs", timeout_s=0.3), ScriptedPolicy())
    assert isinstance(error, TimeoutError)
    assert "has not ended within workflow.timeout_s=0.3" in str(error)


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_hanging_command_is_killed_with_its_descendants(tmp_path: Path):
    (tmp_path / "hangs.sh").write_text(
        "sleep 600 &\necho $$ $! > pids.writing; mv pids.writing pids\nwait"
    )
    error = failure(
        Agent(command=f"sh -c 'cd {tmp_path}; . ./hangs.sh'", timeout_s=3.0),
        ScriptedPolicy(),
        num_samples=1,
    )
    assert isinstance(error, TimeoutError)
    assert "has not ended within workflow.timeout_s=3" in str(error)
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(started) == 2
    for pid in started:
        with suppress(psutil.NoSuchProcess):
            while not has_ended(psutil.Process(pid)):
                time.sleep(0.01)


class Held(ScriptedPolicy):
    """Answers only once released, and counts waiting calls."""

    def __init__(self) -> None:
        super().__init__()
        self.let, self.waiting = asyncio.Event(), 0

    async def __call__(self, prompt_tokens: Any, num_samples: int, **how: Any) -> list[Completion]:
        self.waiting += 1
        await self.let.wait()
        return await super().__call__(prompt_tokens, num_samples, **how)


def test_evaluation_agents_do_not_wait_for_training_agents(
    program: Path,
):
    config = Agent(function=f"{program}:in_a_loop", max_running=2)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            host = AgentHost(
                config,
                await stack.enter_async_context(AgentServer(TOKENIZER, 50, 100.0).listening()),
            )
            stack.push_async_callback(host.close)
            # Weights that training waits for come after the evaluation.
            held = Held()
            training = asyncio.ensure_future(workflow(config, host, 5)(TASK, held, grader))
            while held.waiting < 2:
                await asyncio.sleep(0.01)
            assert len(await workflow(config, host, 3)(TASK, ScriptedPolicy(), grader)) == 3
            assert held.waiting == 2
            held.let.set()
            assert len(await training) == 5

    asyncio.run(asyncio.wait_for(main(), 60))


def test_engine_stop_is_raised_instead_of_agent_failure(program: Path):
    error = failure(
        Agent(function=f"{program}:two_calls"), ScriptedPolicy(error=EngineStopped("died"))
    )
    assert isinstance(error, EngineStopped)


@pytest.mark.parametrize("config", [Agent(), Agent(function="a.py:f", command="true")])
def test_agent_requires_one_of_function_and_command(config: Agent):
    with pytest.raises(ValueError, match="expected one of workflow"):
        AgentHost(config, AgentServer(TOKENIZER, 50, 100.0))
