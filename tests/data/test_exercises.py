from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import areal_jax
from areal_jax.data import code_tasks
from areal_jax.data.config import Exercises, HeldOut, PromptConfig
from areal_jax.data.exercises import FAMILIES, GeneratedExercises, Way, expression_of
from areal_jax.data.sft import load_examples
from areal_jax.data.sources import load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Message
from areal_jax.rewards.calculator import calculate
from areal_jax.rewards.code_grader import extract_program
from areal_jax.rewards.countdown import grade_answer
from areal_jax.rewards.math_answers import compare_plainly, extract_answer
from areal_jax.workflows.config import Tags
from areal_jax.workflows.tool_calls import ToolCall, parse_calls

TOKENIZER = HFTokenizer.from_folder(Path(areal_jax.__file__).parent / "models" / "embedded")


def is_right(kind: str, answer: str, way: Way) -> bool:
    said = way[-1].content
    match kind:
        case "countdown":
            return grade_answer(answer, said)[0] == "correct"
        case "code":
            tests = code_tasks.tests_of(answer)
            assert isinstance(tests, code_tasks.Stdin)
            return all(
                output_of(extract_program(said) or "", given) == expected
                for given, expected in tests.cases
            )
        case _:
            return compare_plainly(extract_answer(said, False) or "", answer) is True


def output_of(program: str, given: str) -> str:
    """These programs are ours."""
    output, stdin = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(given)
    try:
        with redirect_stdout(output):
            exec(program, {})
    finally:
        sys.stdin = stdin
    return output.getvalue()


@pytest.mark.parametrize("family", FAMILIES)
def test_good_ways_end_in_a_right_answer_and_bad_ones_do_not(family: str) -> None:
    for exercise in GeneratedExercises(100, "train", (family,)):
        assert all(is_right(exercise.kind, exercise.answer, way) for way in exercise.good), exercise
        assert not any(is_right(exercise.kind, exercise.answer, way) for way in exercise.bad), (
            exercise
        )
        for way in (*exercise.good, *exercise.bad):
            assert [message.role for message in way] == ["assistant", "tool"] * (len(way) // 2) + [
                "assistant"
            ]


def test_who_makes_a_number_tries_until_it_is_off_by_nothing_or_guesses_wrong() -> None:
    for exercise in GeneratedExercises(200, "train", ("countdown",)):
        target = json.loads(exercise.answer)["target"]
        for (said,) in exercise.good:
            *lines, boxed = said.content.split("\n")
            tried = [re.fullmatch(r"(.+?)=.+=(\d+) (\d+)-(\d+)=(\d+)", line) for line in lines]
            off = [abs(int(found[2]) - target) for found in tried if found]
            assert [int(found[5]) for found in tried if found] == off and len(off) == len(lines)
            assert [each == 0 for each in off] == [False] * (len(off) - 1) + [True]
            assert tried[-1] and boxed == f"\\boxed{{{tried[-1][1]}}}"
        assert all("\n" not in said.content for (said,) in exercise.bad)


def test_what_the_calculator_says_in_a_way_is_what_it_calculates() -> None:
    calls = 0
    for exercise in GeneratedExercises(200, "train", ("calculations",)):
        for way in (*exercise.good, *exercise.bad):
            for asked, reported in zip(way[:-1:2], way[1::2], strict=True):
                (call,) = parse_calls(Tags(), asked.content, ("calculator",))
                assert isinstance(call, ToolCall)
                assert calculate(call.argument) == reported.content
                calls += 1
    assert calls > 400


def test_steps_become_one_expression() -> None:
    assert expression_of("14-1=13\n13*21=273\n273+15=288\n\\boxed{288}") == (
        "((14-1)*21)+15",
        "288",
    )
    assert expression_of("340/10=34\n34*5=170\n340-170=170\n\\boxed{170}") == (
        "340-((340/10)*5)",
        "170",
    )
    # A division with remainder is no arithmetic step, and these do not resume from one another.
    assert expression_of("235+98=333\n333=11*30+3\n\\boxed{3}") is None
    assert expression_of("1+1=2\n3+4=7\n\\boxed{7}") is None


def test_the_splits_share_no_question_and_a_seed_says_which_come() -> None:
    train, heldout = GeneratedExercises(800, "train"), GeneratedExercises(400, "heldout")
    assert not {exercise.question for exercise in train} & {
        exercise.question for exercise in heldout
    }
    assert train[17] == GeneratedExercises(800, "train")[17]
    assert train[17] != GeneratedExercises(800, "train", seed=1)[17]
    assert [exercise.family for exercise in train[:4]] == list(FAMILIES)
    with pytest.raises(
        ValueError,
        match="no family chess of exercises; known are countdown, facts, calculations, programs",
    ):
        GeneratedExercises(1, "train", ("chess",))


def test_exercises_are_tasks_for_their_judges_and_examples_whose_tool_output_is_context() -> None:
    prompt = PromptConfig()
    tasks = load_tasks(Exercises(num_tasks=8), prompt)
    assert tasks.kinds == {"countdown", "math", "code"}
    assert [task.kind for task in tasks.tasks[:4]] == ["countdown", "math", "math", "code"]
    assert json.loads(tasks.tasks[0].answer).keys() == {"numbers", "target"}
    source = Exercises(num_tasks=40, families=("facts",))
    examples, apart = load_examples(
        source, HeldOut(max_examples=5), prompt, TOKENIZER, seed=0, max_tokens=200
    )
    assert len(apart.examples) == 5
    searching = 0
    for example, task in zip(examples.examples, load_tasks(source, prompt).tasks, strict=True):
        assert example.prompt.tolist() == TOKENIZER.render(task.prompt).tolist()
        learnt = TOKENIZER.decode(example.tokens[example.loss_mask])
        assert learnt.endswith("}") and "pens" not in learnt
        if "<search>" in learnt:
            searching += 1
            # What stands between two turns is what a workflow puts there.
            reported = (
                TOKENIZER.decode(example.tokens).partition("tool\n")[2].partition("\nassistant")[0]
            )
            between = TOKENIZER.render_next([Message("tool", reported)])
            text = " ".join(map(str, example.tokens.tolist()))
            assert " ".join(map(str, between.tolist())) in text
    assert searching > 20
