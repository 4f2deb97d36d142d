"""Prompt lengths, computed by hand with a tokenizer of one token per letter."""

from __future__ import annotations

import chz
import numpy as np
import pytest

from areal_jax.data.sources import MAX_MEASURED
from areal_jax.records import Message, Task
from areal_jax.rewards.config import ToolsConfig
from areal_jax.workflows.config import Agent, MultiTurn, SingleTurn, Tags, ToolUse, WorkflowConfig
from areal_jax.workflows.prompt_budget import (
    LaterTurns,
    Limits,
    Prompts,
    doubtful_prompts,
    later_turns,
    measure_prompts,
    refused_prompts,
    required_prompt_tokens,
    too_few_tasks,
)


class Letters:
    """One token per letter, one around each message, and two before the answer."""

    stop_token_ids = (0,)
    vocab_size = 128

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) % 128 for letter in text], np.int32)

    def render(self, messages: object) -> np.ndarray:
        return self.encode("".join(f"|{message.content}" for message in messages) + ">>")  # type: ignore[attr-defined]

    def render_next(self, messages: object) -> np.ndarray:
        return self.render(messages)

    def render_answer(self, prompt: object, answer: str) -> np.ndarray:
        return self.encode(answer)

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(map(chr, tokens))


def tasks(*questions: str, answer: str = "7", kind: str = "math") -> list[Task]:
    return [
        Task(str(place), (Message("user", text),), answer, kind=kind)
        for place, text in enumerate(questions)
    ]


def measured(
    workflow: WorkflowConfig, *questions: str, answer: str = "7", kind: str = "math"
) -> Prompts:
    given = tasks(*questions, answer=answer, kind=kind)
    return measure_prompts(Letters(), "tasks", given, workflow, max_new_tokens=10, is_boxed=True)


MULTI_TURN = MultiTurn(max_turns=3, feedback="wrong")
# |wrong>>, twice.
TWICE = LaterTurns(2, 8, 8, "workflow.max_turns")


def test_measured_prompts_include_the_system_message() -> None:
    assert list(measured(SingleTurn(), "12345", "1").lengths) == [8, 4]
    tools = ToolUse(call_format=Tags(), tools=ToolsConfig(names=("calculator",)))
    reported = measured(tools, "12345")
    assert reported.lengths[0] > 8 + 50, "the system message describes the tools"
    assert list(measured(chz.replace(tools, announce=False), "12345").lengths) == [8]
    # Of equal prompts one counts; the answer has to stand in its box: \boxed{12} has ten letters.
    assert measured(SingleTurn(), "1", "1", "2").num_distinct == 2
    assert measured(SingleTurn(), "1", "2", answer="12").num_unanswerable == 0
    assert measured(SingleTurn(), "1", "2", answer="123").num_unanswerable == 2
    assert measured(SingleTurn(), "1", "2", answer="123", kind="code").num_unanswerable == 0


def test_many_tasks_are_measured_evenly_spaced() -> None:
    many = ["1"] * MAX_MEASURED + ["12345"] * MAX_MEASURED
    found = measured(SingleTurn(), *many)
    assert sorted(found.lengths) == [4] * (MAX_MEASURED // 2) + [8] * (MAX_MEASURED // 2)
    assert (found.longest, found.num_tasks) == (
        10,
        2 * MAX_MEASURED,
    )  # a quarter more than what was seen
    assert measured(SingleTurn(), "12345").longest == 8


def test_later_turns_measure_the_workflows_messages() -> None:
    assert later_turns(Letters(), SingleTurn()).num == 0
    assert later_turns(Letters(), MULTI_TURN) == TWICE
    tools = ToolsConfig(names=("calculator", "python"), max_output_chars=400)
    found = later_turns(Letters(), ToolUse(max_turns=4, tools=tools))
    assert (found.num, found.least_tokens, found.most_tokens) == (3, 4, 403)
    assert later_turns(Letters(), ToolUse(max_turns=4)).most_tokens < 30, (
        "results of a calculator are short"
    )
    agent = later_turns(Letters(), Agent(command="cat", expected_calls=2))
    assert (agent.num, agent.is_required) == (1, False)


def test_required_prompt_tokens_fit_every_turn() -> None:
    # 42 + 2 * (96 + 1 + 8) = 252, rounded up; one token more does not fit.
    assert required_prompt_tokens(42, TWICE, 96) == 256
    assert required_prompt_tokens(46, TWICE, 96) == 256
    assert required_prompt_tokens(47, TWICE, 96) == 320
    assert required_prompt_tokens(42, later_turns(Letters(), SingleTurn()), 96) == 64


def prompts(*lengths: int, unanswerable: int = 0) -> Prompts:
    return Prompts("tasks", len(lengths), lengths, len(lengths), unanswerable)


ONE_TURN = LaterTurns(0, 0, 0, "")


@pytest.mark.parametrize(
    ("lengths", "turns", "limit", "message"),
    [
        (
            (65, 70),
            ONE_TURN,
            64,
            (
                "longer than engine.max_prompt_tokens=64: the shortest has 65 tokens; set "
                "engine.max_prompt_"
            ),
        ),
        ((64, 70), ONE_TURN, 64, None),
        # 30 + 8 + a token and its end.
        (
            (30, 40),
            TWICE,
            39,
            "engine.max_prompt_tokens=39 is too small for a second turn",
        ),
        ((30, 40), TWICE, 40, None),
        ((30, 40), LaterTurns(2, 8, 8, "workflow.expected_calls", is_required=False), 39, None),
    ],
)
def test_prompts_that_never_fit_are_refused(
    lengths: tuple[int, ...], turns: LaterTurns, limit: int, message: str | None
) -> None:
    found = list(refused_prompts(prompts(*lengths), turns, Limits(limit, 10, 1000)))
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


def test_answers_that_do_not_fit_are_refused_or_counted() -> None:
    limits = Limits(64, 10, 1000)
    assert "max_new_tokens=10 is shorter than every answer" in next(
        refused_prompts(prompts(9, unanswerable=1), ONE_TURN, limits)
    )
    assert list(refused_prompts(prompts(9, 9, unanswerable=1), ONE_TURN, limits)) == []
    assert list(doubtful_prompts(prompts(9, 9, unanswerable=1), ONE_TURN, limits)) == [
        (
            "1 of 2 prompts of tasks have answers longer than engine.max_new_tokens=10; raise "
            "engine.max_new_tokens"
        )
    ]


def test_prompts_that_fit_in_part_are_counted_with_a_remedy() -> None:
    assert list(doubtful_prompts(prompts(60, 64), ONE_TURN, Limits(64, 10, 1000))) == []
    (too_long,) = doubtful_prompts(prompts(60, 64, 65, 90), ONE_TURN, Limits(64, 10, 1000))
    assert too_long == (
        "2 of 4 prompts of tasks are longer than engine.max_prompt_tokens=64 and will be rejected; "
        "set engine.max_prompt_tokens=128, or to 0"
    )
    # 20 + 2 * (10 + 1 + 8) = 58 fits into 60, 23 + 38 = 61 does not; of the third turn it is.
    (cut,) = doubtful_prompts(prompts(20, 22, 23), TWICE, Limits(60, 10, 1000))
    assert cut.startswith(
        "1 of 3 prompts of tasks do not fit engine.max_prompt_tokens=60 in turn 3 after"
    )
    (beyond,) = doubtful_prompts(prompts(23), TWICE, Limits(60, 10, 70))
    assert (
        "the policy has 70 positions; lower engine.max_new_tokens or workflow.max_turns" in beyond
    )


def test_fewer_tasks_than_groups_per_batch_give_a_warning() -> None:
    assert list(too_few_tasks(prompts(1, 2), 2, 100)) == []
    (message,) = too_few_tasks(prompts(1, 2), 4, 100)
    assert (
        "tasks has 2 distinct prompts for rollout.groups_per_batch=4" in message
        and "200 epochs" in message
    )
