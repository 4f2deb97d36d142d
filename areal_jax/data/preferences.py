"""Pairs of answers to the same prompt, one chosen and one rejected.

A row of a file has both under `chosen` and `rejected`: as text, with the prompt in a field of its
own; as messages, which go on from the prompt or are whole conversations; or as dialogues in the
text form of Anthropic's hh-rlhf,

    {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    {"chosen": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
    "rejected": [...]} {"chosen": "\\n\\nHuman: 1+1?\\n\\nAssistant: 2", "rejected": "\\n\\nHuman:
    1+1?\\n\\nAssistant: 3"}

What is compared is the last answer; all before it is the prompt, and must be the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from areal_jax.data.config import Files, Hub, PromptConfig, TaskSource
from areal_jax.data.examples import ExampleSet, load_both
from areal_jax.data.exercises import GeneratedExercises
from areal_jax.data.problems import Problem
from areal_jax.data.sft import SupervisedExample, checked, encode_answer
from areal_jax.data.sources import (
    PROMPT_FIELDS,
    BadRow,
    LazySequence,
    Row,
    Skipped,
    first_field,
    messages_of,
    read_rows,
)
from areal_jax.protocols import Tokenizer
from areal_jax.records import Message

SIDES = ("chosen", "rejected")

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
"""Of a dialogue in the text form of hh-rlhf, and their roles."""


@dataclass(frozen=True, slots=True, eq=False)
class PreferencePair:
    """Two conversations that differ in their last answer, each with a mask that is true on that
    answer alone."""

    chosen: SupervisedExample
    rejected: SupervisedExample


def load_pairs(
    source: TaskSource,
    eval_source: TaskSource | None,
    prompt: PromptConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_tokens: int,
    max_pair_tokens: int,
) -> tuple[ExampleSet[PreferencePair], ExampleSet[PreferencePair]]:
    """The pairs to train on and those to evaluate on, as `load_both` says. Of a generated problem,
    the right solution is chosen and one of the wrong ones rejected.

    Args: max_tokens, max_pair_tokens: rows of which either conversation, or both together, are
        longer are skipped."""

    def pair_of(asked: Sequence[Message], chosen: str, rejected: str) -> PreferencePair:
        return PreferencePair(
            *(encode_answer(tokenizer, asked, answer, prompt) for answer in (chosen, rejected))
        )

    def generate(problems: Sequence[Problem] | GeneratedExercises) -> Sequence[PreferencePair]:
        if isinstance(problems, GeneratedExercises):
            raise ValueError(
                "examples=Exercises has conversations with tools, no pairs of answers; set "
                "examples=Synthetic"
            )

        def make(index: int) -> PreferencePair:
            problem, chance = problems[index], random.Random(f"{seed}/{index}")
            return pair_of(
                [Message("user", problem.question)],
                problem.solution,
                chance.choice(problem.wrong_solutions),
            )

        return LazySequence(len(problems), make)

    def read(row: Row, source: Files | Hub) -> list[PreferencePair]:
        try:
            pair = pair_of(*_compared(row, source))
        except ValueError as refusal:
            raise BadRow(str(refusal)) from None
        lengths = len(pair.chosen.tokens), len(pair.rejected.tokens)
        if max(lengths) > max_tokens:
            raise BadRow(f"longer than {max_tokens} tokens")
        if sum(lengths) > max_pair_tokens:
            raise BadRow(f"pair longer than {max_pair_tokens} tokens")
        return [pair]

    def read_all(source: Files | Hub) -> tuple[list[list[PreferencePair]], Skipped]:
        looked_for = (
            f"answers in {' and '.join(SIDES)}, the prompt in them or in "
            f"{', '.join(_prompt_fields(source))}"
        )
        return read_rows(
            source, lambda _, row: read(row, source), "a pair", looked_for, knobs="prompt_field"
        )

    return load_both(
        source,
        eval_source,
        generate=generate,
        read=read_all,
        prompt_of=lambda pair: pair.chosen.prompt,
        seed=seed,
    )


def _prompt_fields(source: Files | Hub) -> tuple[str, ...]:
    return (source.prompt_field,) if source.prompt_field else PROMPT_FIELDS


def _compared(row: Row, source: Files | Hub) -> tuple[list[Message], str, str]:
    """What is asked, the chosen answer and the rejected one."""
    asked = first_field(row, _prompt_fields(source))
    chosen, rejected = (checked(_conversation(row.get(side), side, asked)) for side in SIDES)
    if any(messages[-1].role != "assistant" for messages in (chosen, rejected)):
        raise BadRow("does not end in an answer")
    if chosen[:-1] != rejected[:-1]:
        raise BadRow("answers to different prompts")
    if chosen == rejected:
        raise BadRow("the same answer twice")
    return chosen[:-1], chosen[-1].content, rejected[-1].content


def _conversation(value: object, side: str, asked: object) -> list[Message]:
    """All messages up to the answer of one side."""
    if isinstance(value, str):
        said = [Message("assistant", value)] if asked else _dialogue(value)
    else:
        said = messages_of(value or None, f"{side} answer")
    return (
        said
        if said and said[0].role != "assistant"
        else (_dialogue(asked) or messages_of(asked)) + said
    )


def _dialogue(text: object) -> list[Message]:
    """The turns of a conversation that is written as text; none where it is not."""
    before, *pieces = (
        re.split(rf"\n\n({'|'.join(SPEAKERS)}):", text) if isinstance(text, str) else [""]
    )
    turns = [
        Message(SPEAKERS[who], said.strip())
        for who, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    # A prompt ends by naming who is to speak next.
    return [] if before else turns[:-1] if turns[-1:] == [Message("assistant", "")] else turns
