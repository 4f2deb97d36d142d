"""Preference pairs: two answers to the same prompt, one chosen and one rejected.

A row of a file has both under `chosen` and `rejected`: as text, with the prompt in its own field;
as messages, which continue the prompt or are complete conversations; or as dialogues in the text
form of Anthropic's hh-rlhf:

    {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    {"chosen": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
     "rejected": [...]}
    {"chosen": "\\n\\nHuman: 1+1?\\n\\nAssistant: 2",
     "rejected": "\\n\\nHuman: 1+1?\\n\\nAssistant: 3"}

The last answers are compared; everything before them is the prompt and must be the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from areal_jax.data.config import Files, Hub, PromptConfig, TaskSource
from areal_jax.data.examples import ExampleSet, load_example_sets
from areal_jax.data.exercises import GeneratedExercises
from areal_jax.data.problems import Problem
from areal_jax.data.reasoning_gym import Puzzles
from areal_jax.data.sft import SupervisedExample, check_conversation, encode_answer
from areal_jax.data.sources import (
    PROMPT_FIELDS,
    BadRow,
    LazySequence,
    Row,
    Skipped,
    first_field,
    parse_messages,
    read_rows,
)
from areal_jax.protocols import Tokenizer
from areal_jax.records import Message

SIDES = ("chosen", "rejected")

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
"""Role of each speaker in the text form of hh-rlhf."""

NO_PAIRS = (
    "examples: expected a source of answer pairs, found Exercises or ReasoningGym, which have "
    "single answers or conversations; set examples=Synthetic, Files or Hub"
)


@dataclass(frozen=True, slots=True, eq=False)
class PreferencePair:
    """Two conversations that differ in their last answer; each mask covers that answer alone."""

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
    """Load training and evaluation pairs (`load_example_sets`).

    The pair of a generated problem is its right solution and one of its wrong ones.

    Args:
        source: source of the training pairs.
        eval_source: source of the evaluation pairs; None for none.
        prompt: text around every prompt.
        tokenizer: tokenizer of the policy.
        seed: decides the wrong solutions and what is held out.
        max_tokens: rows with a longer conversation are skipped.
        max_pair_tokens: rows whose two conversations together are longer are skipped.

    Raises:
        FileNotFoundError: a source has no files.
        ValueError: no row can be a pair, or no prompt is left to train on.
    """

    def make_pair(messages: Sequence[Message], chosen: str, rejected: str) -> PreferencePair:
        return PreferencePair(
            *(encode_answer(tokenizer, messages, answer, prompt) for answer in (chosen, rejected))
        )

    def generate(
        problems: Sequence[Problem] | GeneratedExercises | Puzzles,
    ) -> Sequence[PreferencePair]:
        if isinstance(problems, GeneratedExercises | Puzzles):
            raise ValueError(NO_PAIRS)

        def make(index: int) -> PreferencePair:
            problem, rng = problems[index], random.Random(f"{seed}/{index}")
            return make_pair(
                [Message("user", problem.question)],
                problem.solution,
                rng.choice(problem.wrong_solutions),
            )

        return LazySequence(len(problems), make)

    def read(row: Row, source: Files | Hub) -> list[PreferencePair]:
        try:
            pair = make_pair(*_read_pair(row, source))
        except ValueError as error:
            raise BadRow(str(error)) from None
        lengths = len(pair.chosen.tokens), len(pair.rejected.tokens)
        if max(lengths) > max_tokens:
            raise BadRow(f"longer than {max_tokens} tokens")
        if sum(lengths) > max_pair_tokens:
            raise BadRow(f"pair longer than {max_pair_tokens} tokens")
        return [pair]

    def read_all(source: Files | Hub) -> tuple[list[list[PreferencePair]], Skipped]:
        fields = ", ".join(_prompt_fields(source))
        expected = f"answers in {' and '.join(SIDES)}, the prompt in them or in {fields}"
        return read_rows(
            source, lambda _, row: read(row, source), "a pair", expected, settings="prompt_field"
        )

    return load_example_sets(
        source,
        eval_source,
        generate=generate,
        read=read_all,
        prompt_of=lambda pair: pair.chosen.prompt,
        seed=seed,
    )


def _prompt_fields(source: Files | Hub) -> tuple[str, ...]:
    return (source.prompt_field,) if source.prompt_field else PROMPT_FIELDS


def _read_pair(row: Row, source: Files | Hub) -> tuple[list[Message], str, str]:
    """Read the prompt, the chosen answer and the rejected one."""
    prompt_value = first_field(row, _prompt_fields(source))
    chosen, rejected = (
        check_conversation(_read_conversation(row.get(side), side, prompt_value)) for side in SIDES
    )
    if any(messages[-1].role != "assistant" for messages in (chosen, rejected)):
        raise BadRow("does not end in an answer")
    if chosen[:-1] != rejected[:-1]:
        raise BadRow("answers to different prompts")
    if chosen == rejected:
        raise BadRow("the same answer twice")
    return chosen[:-1], chosen[-1].content, rejected[-1].content


def _read_conversation(value: object, side: str, prompt_value: object) -> list[Message]:
    """Read the conversation of one side, up to its answer."""
    if isinstance(value, str):
        messages = [Message("assistant", value)] if prompt_value else _parse_dialogue(value)
    else:
        messages = parse_messages(value or None, f"{side} answer")
    if messages and messages[0].role != "assistant":
        return messages
    return (_parse_dialogue(prompt_value) or parse_messages(prompt_value)) + messages


def _parse_dialogue(text: object) -> list[Message]:
    """Read the turns of a dialogue in text form; empty if it is none."""
    before, *pieces = (
        re.split(rf"\n\n({'|'.join(SPEAKERS)}):", text) if isinstance(text, str) else [""]
    )
    turns = [
        Message(SPEAKERS[speaker], words.strip())
        for speaker, words in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    # A prompt ends with the name of the next speaker.
    return [] if before else turns[:-1] if turns[-1:] == [Message("assistant", "")] else turns
