"""Examples for supervised fine-tuning: tokens, and a mask of the tokens to learn.

A row of a file is a conversation, {"messages": [{"role": ..., "content": ...}, ...]}, or a prompt
and its answer.

The embedded policy learns from generated problems with a mixture of answers: the right method,
wrong methods without slips, and guesses. So it becomes capable (nearly every step that it writes is
right) and undecided (it does not know the right method). Reinforcement learning can then improve
the choice of methods.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Int32

from areal_jax.data.config import Files, Hub, PromptConfig, TaskSource
from areal_jax.data.examples import ExampleSet, load_example_sets
from areal_jax.data.exercises import Exercise, GeneratedExercises, sample_demonstration
from areal_jax.data.problems import Problem
from areal_jax.data.reasoning_gym import Puzzle, Puzzles
from areal_jax.data.sources import (
    PROMPT_FIELDS,
    BadRow,
    LazySequence,
    Row,
    Skipped,
    apply_prompt_template,
    first_field,
    parse_messages,
    read_messages,
    read_rows,
)
from areal_jax.image_files import ImageFile
from areal_jax.protocols import Tokenizer
from areal_jax.records import Message

DRILL_SHARE = 0.3
"""Share of drills among all examples: a drill has steps of many problems instead of an answer to
one, so that steps are learnt sooner than from answers alone."""

DRILL_STEPS = 8
"""Steps of a drill, which makes it little longer than an answer with its prompt."""

GUESS_SHARE = 0.15
"""Share of guesses among all answers: a number near the right one, boxed without a step."""

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
"""Share of the right method among all other answers, by family; the wrong methods share the rest
evenly. The families differ, so that reinforcement learning finds some methods soon and others
late."""

ANSWER_FIELDS = ("response", "completion")
"""Fields that are read after the source's answer_field."""

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedExample:
    """A conversation that ends with an answer of the assistant."""

    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    """True on answers and their stop tokens; in a drill, on the results of the steps."""
    images: tuple[ImageFile, ...] = ()
    """Images of the conversation, in order."""

    @property
    def prompt(self) -> Int32[np.ndarray, "P"]:
        """Tokens before the first one to learn."""
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
    """Load training and evaluation examples (`load_example_sets`); a row may give several.

    Args:
        source: source of the training examples.
        eval_source: source of the evaluation examples; None for none.
        prompt: text around every prompt.
        tokenizer: tokenizer of the policy.
        seed: decides the answers to generated problems and what is held out.
        max_tokens: rows with a longer example are skipped.

    Raises:
        FileNotFoundError: a source has no files.
        ValueError: no row can be an example, or no prompt is left to train on.
    """

    def generate(
        problems: Sequence[Problem] | GeneratedExercises | Puzzles,
    ) -> Sequence[SupervisedExample]:
        if isinstance(problems, Puzzles):
            return LazySequence(
                len(problems), lambda index: _answer_puzzle(problems[index], tokenizer, prompt)
            )
        if isinstance(problems, GeneratedExercises):
            return LazySequence(
                len(problems),
                lambda index: _make_demonstration(problems[index], index, tokenizer, prompt, seed),
            )
        return LazySequence(
            len(problems), lambda index: _make_answer(problems, index, tokenizer, prompt, seed)
        )

    return load_example_sets(
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
    """Read the examples of each row."""
    conversation = source.prompt_field or "messages"
    prompts = source.prompt_field or ", ".join(PROMPT_FIELDS)
    answers = ", ".join((source.answer_field, *ANSWER_FIELDS))
    expected = (
        f"a conversation in {conversation}, or a prompt in {prompts} and its answer in {answers}"
    )

    def read(place: str, row: Row) -> list[SupervisedExample]:
        messages = _read_conversation(row, source)
        try:
            examples = encode_conversation(tokenizer, messages, prompt)
        except ValueError as error:
            raise BadRow(str(error)) from None
        if any(len(example.tokens) > max_tokens for example in examples):
            raise BadRow(f"longer than {max_tokens} tokens")
        return examples

    return read_rows(source, read, "an example", expected)


def _make_answer(
    problems: Sequence[Problem], index: int, tokenizer: Tokenizer, prompt: PromptConfig, seed: int
) -> SupervisedExample:
    """Make an example from a problem; a repeated problem gets another answer."""
    problem = problems[index]
    rng = random.Random(f"{seed}/{index}")
    if rng.random() < DRILL_SHARE and (steps := sample_steps(problems, rng)):
        return encode_drill(tokenizer, steps, prompt)
    return encode_answer(
        tokenizer, [Message("user", problem.question)], sample_answer(problem, rng), prompt
    )


def _answer_puzzle(puzzle: Puzzle, tokenizer: Tokenizer, prompt: PromptConfig) -> SupervisedExample:
    """Make an example from a puzzle: its answer in a box, without steps.

    Raises:
        ValueError: its generator gives no answers.
    """
    if not puzzle.answer:
        raise ValueError(
            f"{puzzle.generator} of reasoning-gym has no answers to learn from; leave it out of "
            "examples.names"
        )
    question = [Message("user", puzzle.question)]
    return encode_answer(tokenizer, question, f"\\boxed{{{puzzle.answer}}}", prompt)


def _make_demonstration(
    exercise: Exercise, index: int, tokenizer: Tokenizer, prompt: PromptConfig, seed: int
) -> SupervisedExample:
    """Make an example from an exercise: its drill, or one of its demonstrations."""
    rng = random.Random(f"{seed}/{index}")
    if exercise.drill is not None and rng.random() < DRILL_SHARE:
        question, answer = exercise.drill
        return encode_answer(
            tokenizer, [Message("user", question, exercise.images)], answer, prompt
        )
    turns = sample_demonstration(exercise, rng)
    # Only the policy's own turns are learnt; tool output is context, as in RL training.
    messages = [*apply_prompt_template([exercise.message], prompt), *turns]
    return encode_conversation(tokenizer, messages, PromptConfig())[-1]


def sample_steps(problems: Sequence[Problem], rng: random.Random) -> list[str]:
    """Sample steps from all methods of some problems.

    Steps of at most 6 characters are left out, because they are easy enough without drills. The
    result has fewer than DRILL_STEPS steps if len(problems) samples have no more.
    """
    steps = set[str]()
    for _ in range(len(problems)):
        if len(steps) >= 2 * DRILL_STEPS:
            break
        problem = problems[rng.randrange(len(problems))]
        for text in (problem.solution, *problem.wrong_solutions):
            steps.update(step for step in text.split("\n") if len(step) > 6 and "=" in step)
    return rng.sample(sorted(steps), min(DRILL_STEPS, len(steps)))


def encode_drill(
    tokenizer: Tokenizer, steps: Sequence[str], prompt: PromptConfig
) -> SupervisedExample:
    """Encode steps in sequence; only their results are learnt, since the next step is random."""
    pieces = [
        (tokenizer.render(apply_prompt_template([Message("user", "Practice.")], prompt)), False)
    ]
    for step in steps:
        # Of a division with remainder, 83=7*11+6, the result is 11+6; else it follows the "=".
        left, _, right = step.partition("=")
        context = f"{left}={right.partition('*')[0]}*" if "*" in right else f"{left}="
        pieces += [
            (tokenizer.encode(context), False),
            (tokenizer.encode(step.removeprefix(context) + "\n"), True),
        ]
    tokens = np.concatenate([piece for piece, _ in pieces])
    return SupervisedExample(
        tokens, np.concatenate([np.full(len(piece), is_learnt) for piece, is_learnt in pieces])
    )


def sample_answer(problem: Problem, rng: random.Random) -> str:
    """Sample an answer: by the right method, by a wrong one, or a guess."""
    if rng.random() < GUESS_SHARE:
        near = range(max(0, problem.answer - 9), min(999, problem.answer + 9) + 1)
        return f"\\boxed{{{rng.choice([number for number in near if number != problem.answer])}}}"
    if rng.random() < RIGHT_SHARE[problem.family]:
        return problem.solution
    return rng.choice(problem.wrong_solutions)


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], prompt: PromptConfig
) -> list[SupervisedExample]:
    """Encode every answer of the assistant in exactly the context in which a policy generates it.

    An answer joins the example of the previous answer if its context starts with that example, as
    with most templates. Otherwise (templates of reasoning models remove earlier reasoning) it
    starts a new example.

    Raises:
        ValueError: the chat template refuses the conversation.
    """
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
    """Encode one answer to a conversation; only the answer is learnt.

    Raises:
        ValueError: the chat template refuses the conversation.
    """
    templated = apply_prompt_template(messages, prompt)
    prompt_tokens = tokenizer.render(templated)
    tokens = np.concatenate([prompt_tokens, tokenizer.render_answer(templated, answer)])
    images = tuple(image for message in templated for image in message.images)
    return SupervisedExample(tokens, np.arange(len(tokens)) >= len(prompt_tokens), images)


def _read_conversation(row: Row, source: Files | Hub) -> list[Message]:
    names = (source.prompt_field,) if source.prompt_field else ("messages", *PROMPT_FIELDS)
    messages = read_messages(row, names, source)
    if not any(message.role == "assistant" for message in messages):
        answer = first_field(row, (source.answer_field, *ANSWER_FIELDS))
        if isinstance(answer, str):
            messages.append(Message("assistant", answer))
        elif answer:
            messages += parse_messages(answer)
    return check_conversation(messages)


def check_conversation(messages: list[Message]) -> list[Message]:
    """Return the conversation if it has answers to learn from.

    Raises:
        BadRow: it has none, or its roles or contents are not usable.
    """
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
