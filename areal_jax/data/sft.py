"""Examples for supervised fine-tuning: tokens, and a mask that is true on what the policy shall
learn to say.

A row of a file is a conversation, {"messages": [{"role": ..., "content": ...}, ...]}, or a prompt
and the answer to it.

The embedded policy learns from generated problems and from a mixture of answers to them: the right
method, wrong methods carried out without error, and guesses. So it becomes able, for nearly every
step it writes is right, and undecided, for it does not know which method is the right one. That is
what reinforcement learning can then teach.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Int32

from areal_jax.data.config import Files, Hub, PromptConfig, TaskSource
from areal_jax.data.examples import ExampleSet, load_both
from areal_jax.data.exercises import Exercise, GeneratedExercises, sample_method
from areal_jax.data.problems import Problem
from areal_jax.data.sources import (
    PROMPT_FIELDS,
    BadRow,
    LazySequence,
    Row,
    Skipped,
    apply_prompt_template,
    first_field,
    messages_of,
    read_rows,
)
from areal_jax.protocols import Tokenizer
from areal_jax.records import Message

DRILL_SHARE = 0.3
"""Of all examples: no answer to a problem but steps of many, so that steps are learnt sooner than
from answers alone."""

DRILL_STEPS = 8
"""Steps in a drill: little longer than an answer with its prompt."""

GUESS_SHARE = 0.15
"""Of all answers: a number near the right one, boxed at once."""

RIGHT_SHARE = {
    "sequence": 0.4,
    "remainder": 0.6,
    "units_digit": 0.3,
    "gcd": 0.5,
    "lcm": 0.5,
    "digit_sum": 0.6,
    "linear": 0.5,
    "system": 0.3,
    "composition": 0.4,
    "base": 0.3,
    "counting": 0.2,
    "weekday": 0.2,
    "ages": 0.3,
    "percentage": 0.3,
    "average": 0.4,
    "rectangle": 0.2,
}
"""Of all other answers, by family: the right method; the wrong ones share the rest evenly. The
families differ, so that reinforcement learning finds some methods soon and others late."""


ANSWER_FIELDS = ("response", "completion")
"""Looked into after the source's answer_field."""

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedExample:
    """A conversation that ends in an answer of the assistant."""

    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    """True on answers and on the tokens that end them; in a drill, on the results of the steps."""

    @property
    def prompt(self) -> Int32[np.ndarray, "P"]:
        """All before the first token that is learnt."""
        return self.tokens[: self.loss_mask.argmax()]


def load_examples(
    source: TaskSource,
    eval_source: TaskSource | None,
    prompt: PromptConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_tokens: int,
) -> tuple[ExampleSet[SupervisedExample], ExampleSet[SupervisedExample]]:
    """The examples to train on and those to evaluate on, as `load_both` says; a row may give
    several.

    Args: seed: also of the answers to generated problems. max_tokens: rows with a longer example
        are skipped."""

    def generate(problems: Sequence[Problem] | GeneratedExercises) -> Sequence[SupervisedExample]:
        if isinstance(problems, GeneratedExercises):
            return LazySequence(
                len(problems),
                lambda index: _exercised(problems[index], index, tokenizer, prompt, seed),
            )
        return LazySequence(
            len(problems), lambda index: _generated(problems, index, tokenizer, prompt, seed)
        )

    return load_both(
        source,
        eval_source,
        generate=generate,
        read=partial(_read, prompt=prompt, tokenizer=tokenizer, max_tokens=max_tokens),
        prompt_of=lambda example: example.prompt,
        seed=seed,
    )


def _read(
    source: Files | Hub, *, prompt: PromptConfig, tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[list[SupervisedExample]], Skipped]:
    """The examples of each row."""
    conversation, asked = (
        source.prompt_field or "messages",
        source.prompt_field or ", ".join(PROMPT_FIELDS),
    )
    answered = ", ".join((source.answer_field, *ANSWER_FIELDS))
    looked_for = (
        f"a conversation in {conversation}, or a prompt in {asked} and its answer in {answered}"
    )

    def read(place: str, row: Row) -> list[SupervisedExample]:
        messages = _conversation(row, source)
        try:
            examples = encode_conversation(tokenizer, messages, prompt)
        except ValueError as refusal:
            raise BadRow(str(refusal)) from None
        if any(len(example.tokens) > max_tokens for example in examples):
            raise BadRow(f"longer than {max_tokens} tokens")
        return examples

    return read_rows(source, read, "an example", looked_for)


def _generated(
    problems: Sequence[Problem], index: int, tokenizer: Tokenizer, prompt: PromptConfig, seed: int
) -> SupervisedExample:
    """An example for a problem. A problem that comes again gets another answer."""
    problem = problems[index]
    chance = random.Random(f"{seed}/{index}")
    if chance.random() < DRILL_SHARE and (steps := sample_steps(problems, chance)):
        return encode_drill(tokenizer, steps, prompt)
    return encode_answer(
        tokenizer, [Message("user", problem.question)], sample_answer(problem, chance), prompt
    )


def _exercised(
    exercise: Exercise, index: int, tokenizer: Tokenizer, prompt: PromptConfig, seed: int
) -> SupervisedExample:
    """An example of an exercise, solved in one of its ways."""
    way = sample_method(exercise, random.Random(f"{seed}/{index}"))
    # What the policy says alone is learnt; what it is told is context, as in training.
    messages = [*apply_prompt_template([Message("user", exercise.question)], prompt), *way]
    return encode_conversation(tokenizer, messages, PromptConfig())[-1]


def sample_steps(problems: Sequence[Problem], chance: random.Random) -> list[str]:
    """Steps of all methods of some problems, in any order; sums and products of two digits are easy
    enough without. Fewer than DRILL_STEPS where as many draws as there are problems find no
    more."""
    steps = set[str]()
    for _ in range(len(problems)):
        if len(steps) >= 2 * DRILL_STEPS:
            break
        problem = problems[chance.randrange(len(problems))]
        for text in (problem.solution, *problem.wrong_solutions):
            steps.update(step for step in text.split("\n") if len(step) > 6 and "=" in step)
    return chance.sample(sorted(steps), min(DRILL_STEPS, len(steps)))


def encode_drill(
    tokenizer: Tokenizer, steps: Sequence[str], prompt: PromptConfig
) -> SupervisedExample:
    """Steps one after another, of which only the results are learnt: nobody can know what is asked
    next."""
    pieces = [
        (tokenizer.render(apply_prompt_template([Message("user", "Practice.")], prompt)), False)
    ]
    for step in steps:
        # A division with remainder, 83=7*11+6, asks for 83=7* and is answered 11+6; all others are
        # answered behind the sign.
        left, _, right = step.partition("=")
        asked = f"{left}={right.partition('*')[0]}*" if "*" in right else f"{left}="
        pieces += [
            (tokenizer.encode(asked), False),
            (tokenizer.encode(step.removeprefix(asked) + "\n"), True),
        ]
    tokens = np.concatenate([piece for piece, _ in pieces])
    return SupervisedExample(
        tokens, np.concatenate([np.full(len(piece), learnt) for piece, learnt in pieces])
    )


def sample_answer(problem: Problem, chance: random.Random) -> str:
    """Answer as an undecided solver would: by the right method, by a wrong one, or by guessing."""
    if chance.random() < GUESS_SHARE:
        near = range(max(0, problem.answer - 9), min(999, problem.answer + 9) + 1)
        return (
            f"\\boxed{{{chance.choice([number for number in near if number != problem.answer])}}}"
        )
    if chance.random() < RIGHT_SHARE[problem.family]:
        return problem.solution
    return chance.choice(problem.wrong_solutions)


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], prompt: PromptConfig
) -> list[SupervisedExample]:
    """Examples that teach every answer of the assistant in exactly the context in which a policy
    would be asked for it.

    An answer joins the example of the answer before where its context begins with all of that, as
    most templates have it. Where it does not (templates of reasoning models cut earlier reasoning
    out), another example begins."""
    examples = list[SupervisedExample]()
    for i, message in enumerate(messages):
        if message.role == "assistant":
            example = encode_answer(tokenizer, messages[:i], message.content, prompt)
            if examples and np.array_equal(
                example.prompt[: len(examples[-1].tokens)], examples[-1].tokens
            ):
                earlier = examples.pop().loss_mask
                example.loss_mask[: len(earlier)] = earlier
            examples.append(example)
    return examples


def encode_answer(
    tokenizer: Tokenizer, messages: Sequence[Message], answer: str, prompt: PromptConfig
) -> SupervisedExample:
    """An example that teaches one answer to a conversation. ValueError where the chat template
    refuses it."""
    asked = apply_prompt_template(messages, prompt)
    before, said = tokenizer.render(asked), tokenizer.render_answer(asked, answer)
    tokens = np.concatenate([before, said])
    return SupervisedExample(tokens, np.arange(len(tokens)) >= len(before))


def _conversation(row: Row, source: Files | Hub) -> list[Message]:
    messages = messages_of(
        first_field(
            row, (source.prompt_field,) if source.prompt_field else ("messages", *PROMPT_FIELDS)
        )
    )
    if not any(message.role == "assistant" for message in messages):
        answer = first_field(row, (source.answer_field, *ANSWER_FIELDS))
        messages += (
            [Message("assistant", answer)]
            if isinstance(answer, str)
            else messages_of(answer)
            if answer
            else []
        )
    return checked(messages)


def checked(messages: list[Message]) -> list[Message]:
    """A conversation with answers to learn from; BadRow says why another one is none."""
    roles = [message.role for message in messages]
    if unknown := [role for role in roles if role not in ROLES]:
        raise BadRow(f"role {unknown[0]}, expected {', '.join(ROLES)}")
    if "assistant" not in roles:
        raise BadRow("no answer of the assistant")
    if roles[0] == "assistant":
        raise BadRow("begins with an answer")
    if any(not message.content.strip() for message in messages if message.role == "assistant"):
        raise BadRow("an empty answer")
    return messages
