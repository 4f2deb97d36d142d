from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from areal_jax.data.exercises import GeneratedExercises
from areal_jax.data.facts import all_facts
from areal_jax.data.tool_calls import ToolCall
from areal_jax.records import RewardResult, Task, ToolResult
from areal_jax.rewards.config import RewardConfig, SandboxConfig, ToolsConfig
from areal_jax.rewards.search import Index
from areal_jax.rewards.service import RewardService
from areal_jax.workflows.config import Tags
from areal_jax.workflows.tool_use import parse_calls

PASSAGES = [
    "The cat sat on the mat.",
    "A dog and a cat.",
    "Dogs: two dogs, one mat.",
    "Nothing of the kind.",
]


def test_a_search_finds_the_passages_that_share_most_and_rarest_words() -> None:
    index = Index(PASSAGES)
    assert index.search("CAT mat!", 1) == [PASSAGES[0]]
    assert set(index.search("cat", 3)) == {PASSAGES[0], PASSAGES[1]}
    assert index.search("dog", 9) == [PASSAGES[1]]
    # Equally good ones stand in their own order.
    assert Index(["same", "same two", "same"]).search("same", 3) == ["same", "same", "same two"]


@pytest.mark.parametrize("query", ["", "zebra", "???", "\ud800", "zebra " * 100_000])
def test_search_without_matches_returns_nothing(query: str) -> None:
    assert Index(PASSAGES).search(query, 3) == []


def test_searching_claims_no_device() -> None:
    # bm25s would start jax when it is imported, if it found it.
    code = (
        "import sys; from areal_jax.rewards.search import Index; Index(['a b']); assert 'jax' "
        "not in sys.modules"
    )
    asyncio.run(_run(code))


async def _run(code: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


def test_exercise_searches_match_the_search_tool() -> None:
    index, exercises = Index(all_facts()), GeneratedExercises(60, "train", ("facts",))
    for exercise in exercises:
        for way in (*exercise.correct, *exercise.incorrect):
            if len(way) > 1:
                (call,) = parse_calls(Tags(), way[0].content, ("search",))
                assert isinstance(call, ToolCall)
                assert index.search(call.arguments["query"], 1) == [way[1].content]


def service(*names: str, timeout_s: float = 20.0, **settings: object) -> RewardService:
    tools = ToolsConfig(names=names, timeout_s=timeout_s, **settings)  # type: ignore[arg-type]
    return RewardService(RewardConfig(sandbox=SandboxConfig(test_timeout_s=2.0)), tools=tools)


def test_tools_run_in_grading_processes(tmp_path: Path) -> None:
    (tmp_path / "cats.md").write_text("Cats have nine lives.\n\nThey sleep a lot.")

    async def main() -> None:
        async with service("calculator", "search", documents=str(tmp_path)) as grader:
            assert await grader.use("calculator", "2*(3+4)") == ToolResult("done", "14")
            refused = await grader.use("calculator", "9**9**9")
            assert refused.kind == "error" and refused.text.startswith(
                "Error: a power of more than"
            )
            assert await grader.use("search", "nine lives") == ToolResult(
                "done", "cats: Cats have nine lives. They sleep a lot."
            )
            assert await grader.use("search", "zebra") == ToolResult("done", "Nothing was found.")
            with pytest.raises(
                ValueError, match="no tool 'python'; this service has calculator, search"
            ):
                await grader.use("python", "print(1)")
            assert grader.counters()["tool/calculator/done"] == 1.0

    asyncio.run(main())


@pytest.mark.slow
def test_a_program_is_run_in_a_sandbox_and_killed_when_it_hangs() -> None:
    async def main() -> dict[str, ToolResult]:
        programs = {
            "prints": "print(6*7)",
            "fails": "print(1)\n1/0",
            "hangs": "while True: pass",
            "sleeps": "import time; time.sleep(1000)",
            "network": "import socket; socket.create_connection(('1.1.1.1', 80), 1)",
            "writes": "open('/usr/x', 'w')",
            "much": "print('x' * 10**7)",
            "kills": "import os; os.kill(os.getppid(), 9); os._exit(0)",
        }
        async with service("python", max_output_chars=50) as grader:
            return {name: await grader.use("python", program) for name, program in programs.items()}

    began_s = time.perf_counter()
    found = asyncio.run(main())
    assert found["prints"] == ToolResult("done", "42\n")
    assert found["fails"] == ToolResult(
        "crashed", "1\n\nError: ZeroDivisionError: division by zero"
    )
    for name in ("hangs", "sleeps"):
        assert found[name].kind == "timeout" and "no end in time" in found[name].text
    for name in ("network", "writes"):
        assert found[name].kind == "crashed" and "Error" in found[name].text
    assert found["much"] == ToolResult("done", "x" * 50 + " ...")
    assert found["kills"].kind in ("done", "crashed")
    assert time.perf_counter() - began_s < 60


def test_tool_timeout_is_killed_and_reported_to_the_policy(tmp_path: Path) -> None:
    async def main() -> ToolResult:
        async with service("python", timeout_s=1.0) as grader:
            return await grader.use(
                "python", "import time\nprint('begun', flush=True)\ntime.sleep(100)"
            )

    # The sandbox has nine tenths of it, so that on an idle machine what was printed is not lost.
    found = asyncio.run(main())
    assert found.kind == "timeout"
    assert found.text in ("begun\n\nError: no end in time", "Error: no result within 1 s")


def test_unavailable_tools_are_refused_at_start(tmp_path: Path) -> None:
    async def start(*names: str, documents: str | None = None) -> None:
        async with service(*names, documents=documents) as grader:
            await grader.start()

    for name, documents, reason in (
        ("browser", None, "no tool browser; known are calculator, python, shell, edit, search"),
        ("search", None, r"workflow\.tools\.documents"),
        ("search", str(tmp_path / "none"), "no document"),
    ):
        with pytest.raises(ValueError, match=reason):
            asyncio.run(start(name, documents=documents))


def test_countdown_is_graded_by_the_service() -> None:
    task = Task("c", (), '{"numbers": [1, 2, 3], "target": 7}', "countdown")

    async def main() -> list[RewardResult]:
        async with RewardService(RewardConfig(), ("countdown",)) as grader:
            return [await grader(task, text) for text in ("\\boxed{1+2*3}", "\\boxed{7}", "7")]

    assert [grade.kind for grade in asyncio.run(main())] == ["correct", "wrong", "no_answer"]
