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
from areal_jax.data.exercises import (
    FAMILIES,
    Demonstration,
    GeneratedExercises,
    Split,
    combine_steps,
)
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.sft import load_examples
from areal_jax.data.sources import load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.data.tool_calls import ToolCall
from areal_jax.image_files import decode_image
from areal_jax.models.hf import read_config
from areal_jax.models.vision.image_reader import ImageReader
from areal_jax.records import Message
from areal_jax.rewards.calculator import calculate
from areal_jax.rewards.code_grader import extract_program
from areal_jax.rewards.countdown import grade_answer
from areal_jax.rewards.math_answers import compare_plainly, extract_answer
from areal_jax.workflows.config import Tags
from areal_jax.workflows.tool_use import parse_calls

TOKENIZER = HFTokenizer.from_folder(Path(areal_jax.__file__).parent / "models" / "embedded")


def is_right(kind: str, answer: str, turns: Demonstration) -> bool:
    response = turns[-1].content
    match kind:
        case "countdown":
            return grade_answer(answer, response)[0] == "correct"
        case "code":
            tests = code_tasks.parse_tests(answer)
            assert isinstance(tests, code_tasks.Stdin)
            return all(
                output_of(extract_program(response) or "", text) == expected
                for text, expected in tests.cases
            )
        case _:
            return compare_plainly(extract_answer(response, False) or "", answer) is True


def output_of(program: str, text: str) -> str:
    """Run a program of `exercises` (trusted) on an input."""
    output, stdin = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(text)
    try:
        with redirect_stdout(output):
            exec(program, {})
    finally:
        sys.stdin = stdin
    return output.getvalue()


@pytest.mark.parametrize("family", FAMILIES)
def test_only_correct_demonstrations_end_in_a_right_answer(family: str) -> None:
    for exercise in GeneratedExercises(100, "train", (family,)):
        for turns in exercise.correct:
            assert is_right(exercise.kind, exercise.answer, turns), exercise
        for turns in exercise.incorrect:
            assert not is_right(exercise.kind, exercise.answer, turns), exercise
        for turns in (*exercise.correct, *exercise.incorrect):
            num_calls = len(turns) // 2
            roles = ["assistant", "tool"] * num_calls + ["assistant"]
            assert [message.role for message in turns] == roles


def test_countdown_demonstrations_try_until_the_target_or_guess() -> None:
    for exercise in GeneratedExercises(200, "train", ("countdown",)):
        target = json.loads(exercise.answer)["target"]
        for (response,) in exercise.correct:
            *lines, boxed = response.content.split("\n")
            tries = [re.fullmatch(r"(.+?)=.+=(\d+) (\d+)-(\d+)=(\d+)", line) for line in lines]
            distances = [abs(int(match[2]) - target) for match in tries if match]
            assert [int(match[5]) for match in tries if match] == distances
            assert len(distances) == len(lines)
            assert [each == 0 for each in distances] == [False] * (len(distances) - 1) + [True]
            assert tries[-1] and boxed == f"\\boxed{{{tries[-1][1]}}}"
        assert all("\n" not in response.content for (response,) in exercise.incorrect)


def test_calculator_turns_match_the_calculator() -> None:
    calls = 0
    for exercise in GeneratedExercises(200, "train", ("calculations",)):
        for turns in (*exercise.correct, *exercise.incorrect):
            for message, output in zip(turns[:-1:2], turns[1::2], strict=True):
                (call,) = parse_calls(Tags(), message.content, ("calculator",))
                assert isinstance(call, ToolCall)
                assert calculate(call.arguments["expression"]) == output.content
                calls += 1
    assert calls > 400


def test_steps_combine_into_one_expression() -> None:
    assert combine_steps("14-1=13\n13*21=273\n273+15=288\n\\boxed{288}") == (
        "((14-1)*21)+15",
        "288",
    )
    assert combine_steps("340/10=34\n34*5=170\n340-170=170\n\\boxed{170}") == (
        "340-((340/10)*5)",
        "170",
    )
    # A division with remainder is no arithmetic step; and 3+4 does not use the result of 1+1.
    assert combine_steps("235+98=333\n333=11*30+3\n\\boxed{3}") is None
    assert combine_steps("1+1=2\n3+4=7\n\\boxed{7}") is None


@pytest.mark.slow
def test_exercise_splits_are_disjoint_and_seeded() -> None:
    train, heldout = GeneratedExercises(800, "train"), GeneratedExercises(400, "heldout")
    assert not {exercise.question for exercise in train} & {
        exercise.question for exercise in heldout
    }
    assert train[17] == GeneratedExercises(800, "train")[17]
    assert train[17] != GeneratedExercises(800, "train", seed=1)[17]
    families = ["countdown", "facts", "calculations", "programs"]
    assert [exercise.family for exercise in train[:5]] == [*families, "countdown"]
    with pytest.raises(
        ValueError,
        match="expected exercise families countdown, facts, calculations, programs, count_shapes",
    ):
        GeneratedExercises(1, "train", ("chess",))


def test_pictures_are_seeded_and_no_arrangement_is_in_both_splits() -> None:
    def pictures(split: Split, seed: int = 0) -> GeneratedExercises:
        return GeneratedExercises(60, split, ("count_shapes",), seed)

    assert pictures("train")[7] == pictures("train")[7] != pictures("train", 1)[7]
    # The drill lists the shapes of a picture; ids are those of arrangements.
    train, heldout = ({each.id for each in pictures(split)} for split in ("train", "heldout"))
    assert len(train) == len(heldout) == 60 and not train & heldout
    first = pictures("train")[0]
    assert [decode_image(image).size for image in first.images] == [(84, 84)]
    assert first.drill is not None
    counted = {line.rpartition(" ")[0]: line[-1] for line in first.drill[1].split("\n")}
    asked = first.correct[0][0].content.partition(" \\boxed")[0]
    assert counted.get(asked, "0") == first.answer


def test_embedded_vision_policy_reads_the_pictures() -> None:
    folder = resolve_policy_folder("embedded_vision")
    vision = read_config(folder).vision
    assert vision is not None
    tokenizer, reader = HFTokenizer.from_folder(folder), ImageReader.from_folder(folder, vision)
    tokenizer.read_images(vision.image_token_id, reader.num_tokens)
    source = Exercises(num_tasks=40, families=("count_shapes",))
    examples, _ = load_examples(source, None, PromptConfig(), tokenizer, seed=0, max_tokens=96)
    for example in examples.examples:
        # Each cell of the picture is a token.
        assert (example.tokens == vision.image_token_id).sum() == 9
        assert reader.read(example.images, example.tokens).patches.shape == (36, 1176)
        assert len(example.tokens) - len(example.prompt) <= 64
    learnt = [tokenizer.decode(each.tokens[each.loss_mask]) for each in examples.examples]
    assert 0 < sum("boxed" not in text for text in learnt) < 25


def test_exercise_examples_mask_tool_output() -> None:
    prompt = PromptConfig()
    tasks = load_tasks(Exercises(num_tasks=8), prompt)
    assert tasks.kinds == {"countdown", "math", "code"}
    assert [task.kind for task in tasks.tasks[:4]] == ["countdown", "math", "math", "code"]
    assert json.loads(tasks.tasks[0].answer).keys() == {"numbers", "target"}
    source = Exercises(num_tasks=40, families=("facts",))
    examples, heldout = load_examples(
        source, HeldOut(max_examples=5), prompt, TOKENIZER, seed=0, max_tokens=200
    )
    assert len(heldout.examples) == 5
    num_searches = 0
    for example, task in zip(examples.examples, load_tasks(source, prompt).tasks, strict=True):
        assert example.prompt.tolist() == TOKENIZER.render(task.prompt).tolist()
        learnt = TOKENIZER.decode(example.tokens[example.loss_mask])
        assert learnt.endswith("}") and "pens" not in learnt
        if "<search>" in learnt:
            num_searches += 1
            # The tokens between two turns are those that a workflow inserts.
            output = (
                TOKENIZER.decode(example.tokens).partition("tool\n")[2].partition("\nassistant")[0]
            )
            between = TOKENIZER.render_next([Message("tool", output)])
            text = " ".join(map(str, example.tokens.tolist()))
            assert " ".join(map(str, between.tolist())) in text
    assert num_searches > 20
