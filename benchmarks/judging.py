"""What judges say of real data: canonical programs, mutated ones, gold answers and their near misses; and how fast.

    python benchmarks/judging.py DATA [--parts code mutants live latency math service] [--every 1]

DATA is a folder with humaneval/HumanEval.jsonl, mbpp/mbpp.jsonl, livecodebench/*.jsonl, gsm8k/, math500/, aime24/, aime25/ and
amc23/. `--every n` takes every n-th row. Appends to results/judging.jsonl.

    code      canonical solutions of HumanEval and MBPP: all are to be correct
    mutants   solutions with one comparison, constant, operator or return changed; each is first run with its tests as one script,
              and those that fail there are to be judged not correct
    live      LiveCodeBench's public tests on programs that look the expected output up, and on ones with one output wrong
    latency   a trivial test of each form
    math      gold answers in every common notation, and near misses
    service   256 answers of which 16 hang and 4 crash; 10 000 answers to mathematics in turn

Expected: 164 of 164, and 974 of 974 (two need their class before the tests' own set-up, which is how they are run here); no mutant
and no altered program correct; a trivial test in less than 60 ms on an idle machine; every gold answer correct and no near miss.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from results import append

from areal_jax.data.code_tasks import Asserts, Calls, CodeTests, Stdin, code_problem
from areal_jax.records import Verdict
from areal_jax.rewards.code_tests import CodeJudge
from areal_jax.rewards.config import SandboxConfig
from areal_jax.rewards.sandbox import Ended, Sandboxes, find_walls

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    for part in arguments.parts:
        began_s = time.perf_counter()
        found = PARTS[part](arguments.data, arguments.every)
        append("judging", {"part": part, "every": arguments.every, **found, "seconds": round(time.perf_counter() - began_s, 1)})


def rows(path: Path, every: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][::every]


def judging(config: SandboxConfig) -> CodeJudge:
    return CodeJudge(config, find_walls(config), timeout_s=10.0)


def solved(data: Path, every: int) -> Iterator[tuple[str, Asserts, str]]:
    """Problems with tests and the whole canonical program."""
    for name, file in (("humaneval", "HumanEval.jsonl"), ("mbpp", "mbpp.jsonl")):
        for row in rows(data / name / file, every):
            problem = code_problem(row)
            assert problem is not None and isinstance(problem[1], Asserts)
            yield name, problem[1], row["code"] if "code" in row else row["prompt"] + row["canonical_solution"]


def code(data: Path, every: int) -> dict[str, object]:
    judge = judging(SandboxConfig())
    verdicts = {"humaneval": Counter[str](), "mbpp": Counter[str]()}
    for name, tests, program in solved(data, every):
        verdict = judge.judge(tests, fenced(program))
        verdicts[name][verdict.kind] += 1
        if verdict.kind != "correct":
            print(name, tests.names, verdict)
    judge.close()
    return {name: dict(counts) for name, counts in verdicts.items()}


def mutants(data: Path, every: int) -> dict[str, object]:
    """Solutions changed in one place. What is correct, though it fails as a plain script with its tests, is misjudged."""
    config = SandboxConfig(test_timeout_s=2.0)
    judge, sandboxes = judging(config), Sandboxes(config, find_walls(config))
    counts = Counter[str]()
    for _, tests, program in solved(data, every):
        for mutant in mutated(program):
            script = f"{mutant}\n{tests.imports}\n{tests.tests}"
            sandbox = sandboxes.take()
            with sandbox.start({"kind": "run", "program": script}):
                passes = sandbox.wait(config.test_timeout_s) == Ended("exit", 0)
            sandbox.close()
            kind = judge.judge(tests, fenced(mutant)).kind
            counts[f"{'passing' if passes else 'failing'} as a script, {kind}"] += 1
            if passes != (kind == "correct"):
                print(f"script {'passes' if passes else 'fails'}, verdict {kind}:\n{mutant}\n{tests.tests}")
    judge.close()
    sandboxes.close()
    return {"mutants": dict(counts)}


def mutated(program: str) -> list[str]:
    """Some of the programs that differ in one comparison, operator, constant or return."""
    found = list[str]()
    for place in range(sum(1 for _ in ast.walk(ast.parse(program)))):
        tree = ast.parse(program)
        if mutate(list(ast.walk(tree))[place]):
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
    """Programs that know the expected outputs of LiveCodeBench's public tests, and ones that have the last of them wrong."""
    judge = judging(SandboxConfig())
    counts = Counter[str]()
    for row in rows(next((data / "livecodebench").glob("*.jsonl")), every):
        problem = code_problem(row)
        assert problem is not None
        tests = problem[1]
        for is_altered in (False, True):
            verdict = judge.judge(tests, fenced(looking_up(tests, is_altered)))
            counts[f"{type(tests).__name__}, {'altered' if is_altered else 'right'}: {verdict.kind}"] += 1
            if (verdict.kind == "correct") is is_altered:
                print(row["question_id"], verdict)
    judge.close()
    return {"verdicts": dict(counts)}


def looking_up(tests: CodeTests, is_altered: bool) -> str:
    """A program that has a table of the expected outputs."""
    assert isinstance(tests, Stdin | Calls)
    table = [(given, expected) for given, expected in tests.cases]
    if is_altered:
        given, expected = table[-1]
        table[-1] = (given, f"{expected} 1" if isinstance(tests, Stdin) else [expected])
        table = [pair for pair in table[:-1] if pair[0] != given] + table[-1:]
    if isinstance(tests, Stdin):
        return f"import sys\ngiven = sys.stdin.read()\nprint(next(output for input, output in {table!r} if input == given))"
    named = f"def {tests.function}(self, *given):\n        "
    return f"class Solution:\n    {named}return next(output for input, output in {table!r} if tuple(input) == given)"


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def latency(data: Path, every: int) -> dict[str, object]:
    judge = judging(SandboxConfig())
    double = "def f(x):\n    return 2 * x"
    trivial: dict[str, tuple[CodeTests, str]] = {
        "stdin": (Stdin([("2\n", "4\n")]), "print(2 * int(input()))"),
        "calls": (Calls("f", [((2,), 4)]), double),
        "asserts": (Asserts("assert f(2) == 4", ["f"]), double),
    }
    found = dict[str, object]()
    for name, (tests, program) in trivial.items():
        for how, pause_s in (("one after another", 0.0), ("now and then", 0.2)):
            took_s = list[float]()
            for _ in range(50):
                time.sleep(pause_s)
                began_s = time.perf_counter()
                assert judge.judge(tests, fenced(program)) == Verdict("correct")
                took_s.append(time.perf_counter() - began_s)
            found[f"{name}, {how}, median ms"] = round(1000 * median(took_s), 1)
    judge.close()
    return found


PARTS = {"code": code, "mutants": mutants, "live": live, "latency": latency}

if __name__ == "__main__":
    main()
