"""Reward functions of one's own: what is refused before training, which signatures work, and what
failures leave."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

import pytest

from areal_jax.errors import ConfigError
from areal_jax.records import Message, RewardResult, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.failures import MAX_DISTINCT, FailureLog
from areal_jax.rewards.functions import traceback_of
from areal_jax.rewards.probe import probe
from areal_jax.rewards.service import RewardService

FUNCTIONS = r"""
import asyncio, os, time
import numpy as np

def good(task, answer): return task.answer in answer
def swapped(answer, task): return answer == task.answer
async def awaited(task, answer):
    await asyncio.sleep(0)
    return task.answer in answer
def of_numpy(task, answer): return np.float32(0.5)
def truth_of_numpy(task, answer): return np.bool_(task.answer in answer)
def constant(task, answer): return 0.25

def raises(task, answer): return helper(answer)
def helper(answer): raise ArithmeticError(f"no reward for {answer!r}")
def text(task, answer): return "1.0"
def nothing(task, answer): pass
def not_a_number(task, answer): return float("nan")
def infinite(task, answer): return float("inf")
def too_much(task, answer): return 2.5
def shaped(task, answer): return np.ones(3)
def listed(task, answer): return [1.0]
def coroutine_in_list(task, answer): return [awaited(task, answer)]
def generates(task, answer): yield 1.0
async def generates_async(task, answer): yield 1.0
def hangs(task, answer): time.sleep(1000)
def dies(task, answer): os._exit(3)
def leaves(task, answer): raise SystemExit(4)
def imports(task, answer):
    import no_such_module
def on_the_reference(task, answer):
    if answer: raise KeyError("reference")
    return 0
def unreachable(task, answer): raise ConnectionRefusedError("nobody listens")

def trl(prompts, completions, **kwargs):
    assert prompts == ["1+1?"], prompts
    return [float(a in c) for c, a in zip(completions, kwargs["answer"], strict=True)]
def trl_columns(completions, ground_truth): return [float(g in c) for c, g in zip(completions, ground_truth, strict=True)]
def trl_messages(prompts, completions, solution, **kwargs):
    assert prompts[0][-1] == {"role": "user", "content": "1+1?"}
    return [1.0 if s in c[0]["content"] else 0.0 for c, s in zip(completions, solution, strict=True)]
async def trl_async(completions, answer, **kwargs): return [float(a in c) for c, a in zip(completions, answer, strict=True)]
def trl_ids(prompts, completions, completion_ids, **kwargs): return [0.0]
def trl_two(prompts, completions, **kwargs): return [0.0, 1.0]
def trl_none(prompts, completions, **kwargs): return [None]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["index"] == "sum"
    return float(ground_truth in solution_str)
def verl_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(ground_truth in solution_str), "acc": True}
def parts(task, answer): return {"correct": float(task.answer in answer), "short": 0.5 * (len(answer) < 5)}
def verl_parts(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "length": len(solution_str), "said": solution_str, "kl": float("nan")}
def odd_parts(task, answer): return {"correct": "yes"}
def no_parts(task, answer): return {}
def verl_without_score(data_source, solution_str, ground_truth, extra_info=None): return {"acc": 1.0}
def verl_more(data_source, solution_str, ground_truth, sandbox_fusion_url): return 0.0
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos): return [0.0]

def foreign(response, ground_truth): return response == ground_truth
def alone(answer): return 1.0
def anything(**kwargs): return 1.0
no_function = 3
"""


def task(answer: str = "42", number: int = 0) -> Task:
    return Task(f"sum{number or ''}", (Message("user", "1+1?"),), answer, family="sums")


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return tmp_path / "own.py"


def probed(config: RewardConfig, *tasks: Task, must_grade: bool = True) -> list[str]:
    async def main() -> list[str]:
        async with RewardService(config) as service:
            await service.start()
            found = await probe(service.grade, tasks or (task(),), config, must_grade=must_grade)
            assert (service.grades.total(), service.num_failed) == (0, 0), (
                "probing counts for nothing"
            )
            return found

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["good", "awaited", "truth_of_numpy", "swapped"])
@pytest.mark.parametrize("scale", ["unit", "raw"])
def test_valid_functions_start_without_output(
    functions: Path, name: str, scale: Literal["unit", "raw"]
) -> None:
    assert probed(RewardConfig(function=f"{functions}:{name}", scale=scale)) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ArithmeticError: no reward for ''"),
        ("text", "found '1.0' of type str"),
        ("nothing", "found None of type NoneType"),
        ("not_a_number", "expected a finite number, found nan"),
        ("infinite", "expected a finite number, found inf"),
        ("too_much", "found 2.5; set rewards.scale=raw"),
        ("shaped", "of type ndarray; it is called for one answer at a time"),
        ("listed", "found [1.0] of type list; it is called for one answer at a time"),
        ("coroutine_in_list", "of type list"),
        ("generates", "of type generator; return a number instead"),
        ("generates_async", "of type async_generator; return a number instead"),
        ("hangs", "no grade within rewards.timeout_s=1 s; raise rewards.timeout_s"),
        ("dies", "exit code 3"),
        ("leaves", "SystemExit: 4"),
        ("imports", "No module named 'no_such_module'"),
        (
            "on_the_reference",
            "failed on the reference answer '42' to task sum: KeyError: 'reference'",
        ),
        ("unreachable", "ConnectionRefusedError: nobody listens"),
        ("trl_two", "expected a list of 1 number, one for each completion, found [0.0, 1.0]"),
        ("trl_none", "found None"),
        ("verl_without_score", """a dict with "score", found {'acc': 1.0}"""),
    ],
)
@pytest.mark.slow
def test_functions_that_do_not_work_are_refused(functions: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        probed(
            RewardConfig(function=f"{functions}:{name}", timeout_s=1.0 if name == "hangs" else 60.0)
        )
    assert reason in str(refused.value)
    assert f"rewards.function={functions}:{name} failed on " in str(refused.value)


def test_error_shows_only_frames_of_the_user_function(functions: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        probed(RewardConfig(function=f"{functions}:raises"))
    frames = [line for line in str(refused.value).splitlines() if line.startswith('  File "')]
    assert len(frames) == 2 and all(f'File "{functions}"' in frame for frame in frames), (
        refused.value
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "trl_ids",
            (
                "TRL's signature is called with prompts, completions, answer, solution, "
                "ground_truth, task_id, family"
            ),
        ),
        ("verl_more", "sandbox_fusion_url is not among them"),
        ("verl_batch", "found (data_sources, solution_strs, ground_truths, extra_infos)"),
        ("foreign", "found (response, ground_truth)"),
        ("alone", "found (answer)"),
        ("anything", "found (**kwargs)"),
        ("no_function", "found int, which cannot be called"),
    ],
)
def test_unknown_signatures_are_named_beside_the_known(
    functions: Path, name: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        probed(RewardConfig(function=f"{functions}:{name}"))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "name", ["trl", "trl_columns", "trl_messages", "trl_async", "verl", "verl_dict"]
)
def test_signatures_of_trl_and_verl_are_adapted(functions: Path, name: str) -> None:
    config = RewardConfig(function=f"{functions}:{name}")

    async def main() -> None:
        async with RewardService(config) as grader:
            found = [await grader(task(), answer) for answer in ("", "it is 42", "it is 41")]
            assert [grade.kind for grade in found] == ["wrong", "correct", "wrong"], found
            assert grader.counters()["failed"] == 0

    asyncio.run(main())


def test_an_import_that_fails_is_refused_with_its_frames(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import no_such_module\n")
    with pytest.raises(
        ConfigError,
        match=r"rewards\.function=.*No module named 'no_such_module'\n.*\n  File .*own\.py",
    ):
        probed(RewardConfig(function=f"{tmp_path / 'own.py'}:grader"))
    (tmp_path / "exits.py").write_text("raise SystemExit('not today')\n")
    with pytest.raises(ConfigError, match="SystemExit: not today"):
        probed(RewardConfig(function=f"{tmp_path / 'exits.py'}:grader"))


def test_raw_rewards_are_any_finite_number(functions: Path) -> None:
    async def main() -> None:
        async with RewardService(
            RewardConfig(function=f"{functions}:too_much", scale="raw")
        ) as grader:
            grade = await grader(task(), "2")
            assert grade == RewardResult("scored", score=2.5)
            assert grade.to_reward(5.0, -5.0) == 2.5
        async with RewardService(
            RewardConfig(function=f"{functions}:infinite", scale="raw")
        ) as grader:
            assert (await grader(task(), "2")).failed

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        # The sum of all; of 41 and 42 both are short.
        (
            "parts",
            "raw",
            [(0.5, {"correct": 0.0, "short": 0.5})] * 1 + [(1.5, {"correct": 1.0, "short": 0.5})],
        ),
        # verl's score is the reward, and its other numbers are components.
        ("verl_parts", "unit", [(0.0, {"length": 2.0}), (1.0, {"length": 2.0})]),
    ],
)
def test_components_of_a_reward_keep_their_names(
    functions: Path, name: str, scale: Literal["unit", "raw"], expected: list[object]
) -> None:
    async def main() -> None:
        async with RewardService(
            RewardConfig(function=f"{functions}:{name}", scale=scale)
        ) as grader:
            found = [await grader(task(), answer) for answer in ("41", "42")]
            assert [(grade.score, grade.components) for grade in found] == expected

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("odd_parts", "expected a finite number, found 'yes'"), ("no_parts", "found an empty dict")],
)
def test_components_that_are_no_numbers_are_refused(
    functions: Path, name: str, reason: str
) -> None:
    async def main() -> None:
        config = RewardConfig(function=f"{functions}:{name}", scale="raw")
        async with RewardService(config) as grader:
            grade = await grader(task(), "42")
            assert grade.failed and reason in grade.detail

    asyncio.run(main())


def test_a_function_that_gives_no_reference_credit_is_warned(functions: Path) -> None:
    (warning,) = probed(RewardConfig(function=f"{functions}:constant"))
    assert (
        "returns 0.25 for an empty answer to task sum and the same for its reference answer '42'"
        in warning
    )


def test_unreadable_reference_answers_are_warned_or_refused() -> None:
    good, torn = task("42"), task("\\frac{1", number=2)
    assert probed(RewardConfig(), good) == []
    (warning,) = probed(RewardConfig(), good, torn)
    assert warning.startswith(
        "1 of 2 reference answers are not graded correct in \\boxed{}: task sum2: '\\\\frac{1' is "
    )
    with pytest.raises(ConfigError, match=r"of 1 rows is graded correct.*task sum2"):
        probed(RewardConfig(), torn)
    assert len(probed(RewardConfig(), torn, must_grade=False)) == 1


def test_failing_tool_calls_are_reported_and_counted(functions: Path) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=f"{functions}:on_the_reference")) as grader:
            failed = await grader(task(), "42")
            assert failed.failed and failed.kind == "crashed" and "own.py" in failed.trace
            assert not (await grader(task(), "")).failed
            counters = grader.counters()
            assert (counters["calls"], counters["failed"], counters["failed_fraction"]) == (
                2,
                1,
                0.5,
            )
        async with RewardService(
            RewardConfig(function=f"{functions}:hangs", timeout_s=0.5)
        ) as grader:
            assert (await grader(task(), "42")).failed

    asyncio.run(main())


def test_the_same_traceback_is_logged_once_with_counts(
    functions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with RewardService(
            RewardConfig(function=f"{functions}:raises", num_workers=2)
        ) as grader:
            await asyncio.gather(*(grader(task(), str(number)) for number in range(129)))

    asyncio.run(main())
    assert caplog.text.count("Traceback") == 1
    # At the 11th and the 101st call, and at the end: 128 after the first.
    assert [f"same error {count} times since" in caplog.text for count in (10, 100, 128)] == [
        True
    ] * 3
    assert len(caplog.records) == 4


def test_distinct_errors_are_remembered_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    frame = '  File "own.py", line {}, in grader'
    for number in range(3 * MAX_DISTINCT):
        log.add(
            "sum",
            RewardResult(
                "crashed", f"ValueError: {number}", failed=True, trace=frame.format(number)
            ),
        )
    assert len(caplog.records) == 3 * MAX_DISTINCT
    assert len(log._seen) == MAX_DISTINCT
    caplog.clear()
    log.add(
        "sum",
        RewardResult(
            "crashed",
            "ValueError: other words",
            failed=True,
            trace=frame.format(3 * MAX_DISTINCT - 1),
        ),
    )
    with caplog.at_level(logging.WARNING):
        log.close()
    assert len(caplog.records) == 0 or "same error 1 times" in caplog.text


def test_long_tracebacks_are_cut(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def grader(): raise ValueError('x' * 100_000)\n")
    scope: dict[str, object] = {}
    exec(compile((tmp_path / "own.py").read_text(), str(tmp_path / "own.py"), "exec"), scope)
    try:
        scope["grader"]()  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        assert len(traceback_of(error)) < 5000
