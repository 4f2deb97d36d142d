"""Accuracy and speed of grading on canonical and mutated programs, gold answers and near misses.

    python benchmarks/grading.py DATA [--parts code mutants live latency math service] [--every 1]

DATA is a folder with humaneval/HumanEval.jsonl, mbpp/mbpp.jsonl, livecodebench/*.jsonl, gsm8k/,
math500/, aime24/, aime25/ and amc23/. `--every n` takes every n-th row. Appends to
results/grading.jsonl.

    code      canonical solutions of HumanEval and MBPP: expected correct
    mutants   solutions with one comparison, constant, operator or return changed; those that fail
              as a plain script with their tests are expected not correct
    live      programs that look up the expected output of LiveCodeBench's public tests, and
              programs with one wrong output
    latency   a trivial test of each form
    math      gold answers in every common notation, and near misses
    service   256 answers of which 16 hang and 4 crash; 10 000 answers to mathematics in sequence

Expected: 164 of 164 and 974 of 974 correct (two need their class before the tests' set-up, which is
how they run here); no mutant and no altered program correct; a trivial test in less than 60 ms on
an idle machine; every gold answer correct and every near miss wrong.

The file has over 400 lines because each part is independent and all share one command line.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from results import append

from areal_jax.data.code_tasks import Asserts, CodeTests, FunctionCalls, Stdin, read_code_problem
from areal_jax.records import Message, RewardResult, Task
from areal_jax.rewards.code_grader import CodeGrader
from areal_jax.rewards.config import RewardConfig, SandboxConfig
from areal_jax.rewards.math_answers import compare_plainly, compare_symbolically, extract_answer
from areal_jax.rewards.processes import memory_of_tree
from areal_jax.rewards.sandbox import Ended, Sandboxes, find_sandbox_command
from areal_jax.rewards.service import RewardService

FLIPPED = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
MUTANTS_PER_SOLUTION = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    for part in arguments.parts:
        began_s = time.perf_counter()
        found = PARTS[part](arguments.data, arguments.every)
        append(
            "grading",
            {
                "part": part,
                "every": arguments.every,
                **found,
                "seconds": round(time.perf_counter() - began_s, 1),
            },
        )


def rows(path: Path, every: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][::every]


def grading(config: SandboxConfig) -> CodeGrader:
    return CodeGrader(config, find_sandbox_command(config), timeout_s=10.0)


def solved(data: Path, every: int) -> Iterator[tuple[str, Asserts, str]]:
    """Yield problems with tests and the complete canonical program."""
    for name, file in (("humaneval", "HumanEval.jsonl"), ("mbpp", "mbpp.jsonl")):
        for row in rows(data / name / file, every):
            problem = read_code_problem(row)
            assert problem is not None and isinstance(problem[1], Asserts)
            yield (
                name,
                problem[1],
                row["code"] if "code" in row else row["prompt"] + row["canonical_solution"],
            )


def code(data: Path, every: int) -> dict[str, object]:
    grader = grading(SandboxConfig())
    grades = {"humaneval": Counter[str](), "mbpp": Counter[str]()}
    for name, tests, program in solved(data, every):
        grade = grader.grade_answer(tests, fenced(program))
        grades[name][grade.kind] += 1
        if grade.kind != "correct":
            print(name, tests.names, grade)
    grader.close()
    return {name: dict(counts) for name, counts in grades.items()}


def mutants(data: Path, every: int) -> dict[str, object]:
    """Grade solutions changed in one place.

    A mutant that is graded correct but fails as a plain script with its tests is misgraded.
    """
    config = SandboxConfig(test_timeout_s=2.0)
    grader, sandboxes = grading(config), Sandboxes(config, find_sandbox_command(config))
    counts = Counter[str]()
    for _, tests, program in solved(data, every):
        # Lines of the prompt are not mutated.
        for mutant in mutated(program, len(tests.prompt.splitlines())):
            script = f"{mutant}\n{tests.imports}\n{tests.tests}"
            sandbox = sandboxes.take()
            with sandbox.start({"kind": "run", "program": script}):
                passes = sandbox.wait(config.test_timeout_s) == Ended("exit", 0)
            sandbox.close()
            kind = grader.grade_answer(tests, fenced(mutant)).kind
            counts[f"{'passing' if passes else 'failing'} as a script, {kind}"] += 1
            if passes != (kind == "correct"):
                print(
                    f"script {'passes' if passes else 'fails'}, grade "
                    f"{kind}:\n{mutant}\n{tests.tests}"
                )
    grader.close()
    sandboxes.close()
    return {"mutants": dict(counts)}


def mutated(program: str, after_line: int) -> list[str]:
    """Return programs with a comparison, operator, constant or return changed below a line."""
    found = list[str]()
    for place in range(sum(1 for _ in ast.walk(ast.parse(program)))):
        tree = ast.parse(program)
        node = list(ast.walk(tree))[place]
        if getattr(node, "lineno", 0) > after_line and mutate(node):
            found.append(ast.unparse(tree))
    return random.Random(0).sample(found, min(MUTANTS_PER_SOLUTION, len(found)))


def mutate(node: ast.AST) -> bool:
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in FLIPPED:
            node.ops[0] = FLIPPED[type(op)]()
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in FLIPPED:
            node.op = FLIPPED[type(op)]()
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value)):
            node.value = value + 1
        case ast.Return(value=ast.expr()):
            node.value = ast.Constant(None)
        case _:
            return False
    return True


def live(data: Path, every: int) -> dict[str, object]:
    """Grade programs that know the expected outputs of LiveCodeBench's public tests.

    Altered programs have a wrong last output.
    """
    grader = grading(SandboxConfig())
    counts = Counter[str]()
    for row in rows(next((data / "livecodebench").glob("*.jsonl")), every):
        problem = read_code_problem(row)
        assert problem is not None
        tests = problem[1]
        for is_altered in (False, True):
            grade = grader.grade_answer(tests, fenced(looking_up(tests, is_altered)))
            counts[
                f"{type(tests).__name__}, {'altered' if is_altered else 'right'}: {grade.kind}"
            ] += 1
            if (grade.kind == "correct") is is_altered:
                print(row["question_id"], grade)
    grader.close()
    return {"grades": dict(counts)}


def looking_up(tests: CodeTests, is_altered: bool) -> str:
    """Return a program with a table of the expected outputs."""
    assert isinstance(tests, Stdin | FunctionCalls)
    table = [(given, expected) for given, expected in tests.cases]
    if is_altered:
        given, expected = table[-1]
        table[-1] = (given, f"{expected} 1" if isinstance(tests, Stdin) else [expected])
        table = [pair for pair in table[:-1] if pair[0] != given] + table[-1:]
    if isinstance(tests, Stdin):
        return (
            "import sys\ngiven = sys.stdin.read()\nprint(next(output for input, output in "
            f"{table!r} if input == given))"
        )
    named = f"def {tests.function}(self, *given):\n        "
    return (
        f"class Solution:\n    {named}return next(output for input, output in {table!r} if "
        "tuple(input) == given)"
    )


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def latency(data: Path, every: int) -> dict[str, object]:
    grader = grading(SandboxConfig())
    double = "def f(x):\n    return 2 * x"
    trivial: dict[str, tuple[CodeTests, str]] = {
        "stdin": (Stdin([("2\n", "4\n")]), "print(2 * int(input()))"),
        "calls": (FunctionCalls("f", [((2,), 4)]), double),
        "asserts": (Asserts("assert f(2) == 4", ["f"]), double),
    }
    found = dict[str, object]()
    for name, (tests, program) in trivial.items():
        for how, pause_s in (("one after another", 0.0), ("now and then", 0.2)):
            took_s = list[float]()
            for _ in range(50):
                time.sleep(pause_s)
                began_s = time.perf_counter()
                assert grader.grade_answer(tests, fenced(program)) == RewardResult("correct")
                took_s.append(time.perf_counter() - began_s)
            found[f"{name}, {how}, median ms"] = round(1000 * median(took_s), 1)
    grader.close()
    return found


THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
NUMBER = re.compile(r"-?[0-9]+(?:\.0+)?")


def gold(data: Path, every: int) -> Iterator[tuple[str, str]]:
    for name in ("gsm8k", "math500", "aime24", "aime25", "amc23"):
        for row in rows(data / name / "test.jsonl", every):
            yield name, str(row["answer"]).rpartition("####")[2].strip()


def math(data: Path, every: int) -> dict[str, object]:
    counts = Counter[str]()
    for name, reference in gold(data, every):
        for form, texts, is_correct in (
            ("same", notations(reference), True),
            ("near miss", near_misses(reference), False),
        ):
            for text in texts:
                answer = extract_answer(f"so it is \\boxed{{{text}}}.")
                plainly = compare_plainly(answer or "", reference)
                came = compare_symbolically(answer or "", reference) if plainly is None else plainly
                counts[f"{name}, {form}: {'correct' if came else 'wrong'}"] += 1
                if came is not is_correct:
                    print(f"{name}: {reference} and {text}: {'correct' if came else 'wrong'}")
    return {"answers": dict(counts)}


def notations(reference: str) -> set[str]:
    """Return other notations of the same answer."""
    same = {reference, f"${reference}$", f"\\({reference}\\)", f" {reference} ", f"{reference}."}
    same |= {
        reference.replace("\\frac", "\\dfrac"),
        reference.replace("\\left", "").replace("\\right", ""),
    }
    same |= {
        reference.replace(", ", ","),
        reference.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"),
    }
    plain = THOUSANDS.sub("", reference)
    if NUMBER.fullmatch(plain):
        number = int(float(plain))
        same |= {
            str(number),
            f"{number:,}",
            f"{number}.0",
            f"{number}.00",
            f"+{number}" if number >= 0 else str(number),
        }
        same |= {
            f"\\text{{{number}}}",
            f"\\frac{{{2 * number}}}{{2}}",
            f"x = {number}",
            f"{number} \\text{{ units}}",
        }
        same |= {f"{number:03d}"} if number >= 0 else set()
    return same


def near_misses(reference: str) -> set[str]:
    """Return wrong answers that resemble the reference."""
    plain = THOUSANDS.sub("", reference)
    if NUMBER.fullmatch(plain):
        number = int(float(plain))
        others = {
            number + 1,
            number - 1,
            -number,
            10 * number,
            number + 10,
            number // 10,
            int(str(abs(number))[::-1]),
        } - {number}
        return {
            *map(str, others),
            f"{number}.5",
            f"{number}, {number + 1}",
            f"{number} + 1",
            f"\\frac{{{number}}}{{7}}",
        } - {
            "0, 0",
            "\\frac{0}{7}",
        }
    others = {f"({reference}) + 1", f"{reference}, 77"}
    # Exponents of units are no part of the answer.
    for digit in list(re.finditer(r"(?<!\}\^)[0-9]", reference))[:3]:
        others.add(
            f"{reference[: digit.start()]}{(int(digit.group()) + 1) % 10}{reference[digit.end() :]}"
        )
    for bracket, other in ("[(", "([", "])", ")]"):
        # No interval contains infinity, whatever its bracket.
        others |= (
            {reference.replace(bracket, other)}
            if "," in reference and "infty" not in reference
            else set()
        )
    return others - {reference}


GRADER = """
import os, time

def grader(task, answer):
    if answer == "hang":
        while True:
            pass
    if answer == "crash":
        os._exit(1)
    ended_s = time.process_time() + 0.02
    while time.process_time() < ended_s:
        pass
    return answer == task.answer
"""


def service(data: Path, every: int) -> dict[str, object]:
    return {**asyncio.run(hanging_and_crashing()), **asyncio.run(sustained(10_000 // every))}


async def hanging_and_crashing() -> dict[str, object]:
    """Grade 256 concurrent answers of 20 ms, without and with 16 that hang and 4 that crash."""
    found = dict[str, object]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "own.py").write_text(GRADER)
        config = RewardConfig(
            function=f"{folder}/own.py:grader", num_workers=2, timeout_s=10.0, patience_s=0.1
        )
        healthy = ["2"] * 256
        mixed = [*["hang"] * 16, *["crash"] * 4, *["2"] * 236]
        random.Random(0).shuffle(mixed)
        for name, answers in (("healthy", healthy), ("16 hang, 4 crash", mixed)):
            found[name] = await all_at_once(config, answers)
    return found


async def all_at_once(config: RewardConfig, answers: list[str]) -> dict[str, object]:
    took_s = list[float]()
    async with RewardService(config) as grader:
        await grader.start()
        began_s = time.perf_counter()

        async def ask(answer: str) -> None:
            grade = await grader(Task("sum", (Message("user", "1+1?"),), "2"), answer)
            assert grade.kind == {"hang": "timeout", "crash": "crashed", "2": "correct"}[answer], (
                grade
            )
            if answer == "2":
                took_s.append(time.perf_counter() - began_s)

        await asyncio.gather(*map(ask, answers))
        # The fork server, and one process per place.
        assert len(psutil.Process().children(recursive=True)) <= 1 + config.num_workers
        return {
            "grades": dict(grader.grades),
            "median s": round(median(took_s), 2),
            "last s": round(max(took_s), 2),
        }


async def sustained(number: int) -> dict[str, object]:
    """Grade answers to mathematics, half of them by computer algebra; record total memory."""
    pairs = [
        ("\\frac{1}{2}", "0.5"),
        ("42", "042"),
        ("(3, \\frac{\\pi}{2})", "(3,\\pi/2)"),
        ("7", "8"),
    ]
    pairs += [
        ("x^3+3x-6", "-6+3x+x^3"),
        ("113", "113"),
        ("\\sqrt{117}", "3\\sqrt{13}"),
        ("1,234", "1234"),
    ]
    held = list[int]()
    async with RewardService(RewardConfig(num_workers=2, patience_s=60.0)) as grader:
        await grader(Task("first", (), "\\frac{1}{2}"), "\\boxed{0.5}")
        began_s = time.perf_counter()
        for start in range(0, number, 500):
            block = (pairs[place % len(pairs)] for place in range(start, start + 500))
            await asyncio.gather(
                *(
                    grader(Task("t", (), reference), f"\\boxed{{{answer}}}")
                    for reference, answer in block
                )
            )
            held.append(sum(memory_of_tree(child) for child in psutil.Process().children()) >> 20)
        took_s = time.perf_counter() - began_s
        return {
            "answers/s": round(number / took_s, 1),
            "MiB after every 500": held,
            "grades of mathematics": dict(grader.grades),
        }


PARTS = {
    "code": code,
    "mutants": mutants,
    "live": live,
    "latency": latency,
    "math": math,
    "service": service,
}

if __name__ == "__main__":
    main()
