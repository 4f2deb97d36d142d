"""Python objects in place of the text of settings: rewards, rows and workflows."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import chz
import pytest
from tiny_runs import tiny_experiment, write_tiny_policy

import areal_jax
from areal_jax import CustomWorkflow, Message, Rows, Task
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import load_experiment, read_config, write_config
from areal_jax.data.config import PromptConfig
from areal_jax.data.sources import load_tasks
from areal_jax.errors import ConfigError
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.service import RewardService
from areal_jax.workflows.config import WorkflowConfig

TASK = Task("one", (Message("user", "1+1="),), "2")
ROWS = [{"problem": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]


@chz.chz
class SecondTry(CustomWorkflow):
    """Every answer gets a reply, and every reply another answer."""

    message: str = chz.field(default="Again.", doc="text of the reply")

    async def run(self, task: Task, chat: areal_jax.Chat) -> float | None:
        second = await chat.reply(self.message)
        return 0.25 if len(second) % 3 else None


def graded(function: Any, *answers: str, **settings: Any) -> tuple[RewardService, list[Any]]:
    async def main() -> tuple[RewardService, list[Any]]:
        config = RewardConfig(function=function, **settings)
        async with RewardService(config) as service:
            await service.start()
            found = await asyncio.gather(*(service(TASK, answer) for answer in answers))
        return service, found

    return asyncio.run(main())


def test_closure_is_called_in_this_process() -> None:
    seen = list[str]()

    def grade(task: Task, answer: str) -> float:
        seen.append(answer)
        return 1.0 if answer == task.answer else 0.25

    service, found = graded(grade, "2", "3")
    assert [(each.kind, each.score) for each in found] == [("correct", 1.0), ("wrong", 0.25)]
    assert sorted(seen) == ["2", "3"]
    assert service.counters()["calls"] == 2
    assert service.counters()["failed"] == 0


def test_async_closures_share_one_loop_and_leave_no_thread() -> None:
    loops = set[int]()
    before = set(threading.enumerate())

    async def grade(task: Task, answer: str) -> bool:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0.01)
        return True

    _, found = graded(grade, *"abcdef")
    assert [each.kind for each in found] == ["correct"] * 6
    assert len(loops) == 1
    # A call's own thread ends after it has handed on the result.
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


def test_errors_and_timeouts_of_a_closure_are_counted() -> None:
    def grade(task: Task, answer: str) -> bool:
        if answer == "raise":
            raise LookupError("mine")
        if answer == "disk":
            raise OSError("full")
        if answer == "exit":
            raise SystemExit(3)
        if answer == "hang":
            time.sleep(1.0)
        return "no reward" if answer == "text" else True  # type: ignore[return-value] # wrong on purpose

    answers = ("raise", "disk", "exit", "hang", "text", "fine")
    service, found = graded(grade, *answers, timeout_s=0.3, num_workers=6)
    assert [each.kind for each in found] == [
        *("crashed", "infrastructure", "crashed", "timeout", "crashed", "correct")
    ]
    assert [each.failed for each in found] == [True] * 5 + [False]
    assert "LookupError: mine" in found[0].detail and "in grade" in found[0].trace
    assert found[3].detail == "no grade within rewards.timeout_s=0.3 s"
    assert service.counters()["failed"] == 5


def test_timeout_cancels_an_async_closure() -> None:
    ended = list[str]()

    async def grade(task: Task, answer: str) -> bool:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(answer)
        return True

    _, (found,) = graded(grade, "a", timeout_s=0.2)
    assert (found.kind, ended) == ("timeout", ["a"])


def test_function_with_an_import_path_runs_in_a_reward_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text("def even(task, answer):\n    return len(answer) % 2 == 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    even = importlib.import_module("my_rewards").even
    experiment = load_experiment("aime").replace(**{"rewards.function": even})
    assert experiment.rewards.function == f"{file}:even"
    write_config(experiment, tmp_path / "config.json")
    assert read_config(tmp_path / "config.json").rewards == experiment.rewards
    service, found = graded(even, "ab", "abc")
    assert [each.kind for each in found] == ["correct", "wrong"]
    assert service.counters()["worker_starts"] == 1


def test_rows_are_tasks_or_fields() -> None:
    source = Rows(rows=iter([*ROWS[:2], TASK, {"question": "no answer"}, "text"]))
    tasks, skipped = load_tasks(source, PromptConfig(suffix=" Box it."))
    assert [task.answer for task in tasks] == ["1", "2", "2"]
    assert [task.prompt[0].content for task in tasks] == ["0+1= Box it.", "1+1= Box it.", "1+1="]
    assert sum(map(len, skipped.values())) == 2
    with pytest.raises(ValueError, match="the given rows: no row can be a task"):
        load_tasks(Rows(rows=[{"a": 1}]), PromptConfig())


def test_config_names_objects_and_asks_for_them_again(tmp_path: Path) -> None:
    experiment = load_experiment("aime").replace(
        tasks=ROWS, **{"rewards.function": lambda task, answer: True}
    )
    assert isinstance(experiment, Experiment) and isinstance(experiment.tasks, Rows)
    assert vars(experiment.tasks.rows)["object"] == tuple(ROWS)
    write_config(experiment, tmp_path / "config.json")
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["tasks"], written["tasks.rows"]) == ("Rows", "python:rows")
    assert written["rewards.function"].startswith("python:test_config_names_objects")
    # Whoever only evaluates or serves the policy needs no reward function and no tasks.
    assert read_config(tmp_path / "config.json").policy == experiment.policy
    with pytest.raises(ConfigError, match=r"rewards\.function=python:.*resume=True"):
        areal_jax.train(None, tmp_path, resume=True)
    with pytest.raises(ConfigError, match="set launch=Local"):
        experiment.replace("launch=Ray")


def test_workflow_without_a_method_is_refused() -> None:
    @chz.chz
    class Mine(WorkflowConfig):
        pass

    with pytest.raises(ConfigError, match="workflow=Mine is no workflow of the package"):
        load_experiment("aime").replace(workflow=Mine())


@pytest.mark.slow
def test_objects_train_and_resume(tmp_path: Path) -> None:
    calls = list[str]()

    def grade(task: Task, answer: str) -> float:
        calls.append(task.answer)
        return len(answer) % 2

    def mine(num_steps: int) -> Experiment:
        return tiny_experiment(tmp_path / "policy", num_steps=num_steps).replace(
            tasks=ROWS,
            workflow=SecondTry(message="More?"),
            **{"rewards.function": grade, "engine.max_prompt_tokens": 200},
        )

    write_tiny_policy(tmp_path / "policy")
    run = tmp_path / "run"
    areal_jax.train(mine(1), run)
    with pytest.raises(ConfigError, match="pass the experiment with it again"):
        areal_jax.train(None, run, resume=True)
    result = areal_jax.train(mine(2), run, resume=True)
    assert result.version == 2
    assert set(calls) <= {row["answer"] for row in ROWS}
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    # 0.25 of the way from wrong (-5) to correct (5), or the grade of the second answer.
    assert {sample["reward"] for sample in samples} <= {-5.0, -2.5, 5.0}
    assert any(sample["reward"] == -2.5 for sample in samples)


@pytest.mark.slow
def test_preflight_tries_python_objects() -> None:
    """The tutorial of rewards has one that is refused."""
    seen = list[str]()

    def last_box(task: Task, answer: str) -> bool:
        seen.append(answer)
        return answer.rpartition("\\boxed{")[2].partition("}")[0] == task.answer

    report = areal_jax.preflight(load_experiment("aime").replace(**{"rewards.function": last_box}))
    assert report.passed and "" in seen
