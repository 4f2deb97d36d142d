"""Examples for supervised fine-tuning: tokens, and a mask that is true on what the policy shall learn to say.

A row of a file is a conversation, {"messages": [{"role": ..., "content": ...}, ...]}, or a prompt and the answer to it.

The embedded policy learns from generated problems and from a mixture of answers to them: the right method, wrong methods
carried out without error, and guesses. So it becomes able, for nearly every step it writes is right, and undecided, for it
does not know which method is the right one. That is what reinforcement learning can then teach.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, overload

import chz
import numpy as np
from jaxtyping import Bool, Int32

from areal_jax.data.config import Files, HeldOut, Hub, PromptConfig, Synthetic, TaskSource
from areal_jax.data.problems import Problem, SyntheticProblems
from areal_jax.data.sources import PROMPT_FIELDS, BadRow, Row, Skipped, dress, first_field, messages_of, read_rows
from areal_jax.records import Message, Tokenizer, derive_seed

DRILL_SHARE = 0.3
"""Of all examples: no answer to a problem but steps of many, so that steps are learnt sooner than from answers alone."""

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
"""Of all other answers, by family: the right method; the wrong ones share the rest evenly. The families differ, so that
reinforcement learning finds some methods soon and others late."""


ANSWER_FIELDS = ("response", "completion")
"""Looked into after the source's answer_field."""

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedExample:
    """A conversation that ends in an answer of the assistant."""

    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    """True on answers and on the tokens that end them; in a drill, on the results of the steps."""


class ExampleSet(NamedTuple):
    """Examples, and the rows of which none could be made."""

    examples: Sequence[SupervisedExample]
    skipped: Skipped


def load_examples(
    source: TaskSource,
    eval_source: TaskSource | None,
    prompt: PromptConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_tokens: int,
) -> tuple[ExampleSet, ExampleSet]:
    """The examples to train on and those to evaluate on, each in the order of its source.

    FileNotFoundError says what was looked for; ValueError where nothing is left. Args: eval_source: None for no evaluation.
    seed: of the answers to generated problems, and of what is held out. max_tokens: rows with a longer example are skipped."""
    read = partial(_read, prompt=prompt, tokenizer=tokenizer, max_tokens=max_tokens)

    def whole(source: TaskSource) -> ExampleSet:
        if isinstance(source, Synthetic):
            problems = SyntheticProblems(source.num_tasks, source.split, source.families, source.difficulty, source.seed)
            return ExampleSet(ProblemExamples(problems, tokenizer, prompt, seed), {})
        rows, skipped = read(source)
        return ExampleSet([example for row in rows for example in row], skipped)

    match source, eval_source:
        case _, None:
            return whole(source), ExampleSet((), {})
        case Synthetic(), HeldOut():
            return whole(source), whole(chz.replace(source, split="heldout", num_tasks=eval_source.max_examples))
        case _, HeldOut():
            rows, skipped = read(source)
            train, apart = _set_apart(rows, eval_source, seed)
            return ExampleSet(train, skipped), ExampleSet(apart, {})
        case _:
            return whole(source), whole(eval_source)


def _read(
    source: TaskSource, *, prompt: PromptConfig, tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[list[SupervisedExample]], Skipped]:
    """The examples of each row."""
    if not isinstance(source, Files | Hub):
        raise ValueError(f"examples: expected Synthetic, Files or Hub, came {type(source).__name__}")
    conversation, asked = source.prompt_field or "messages", source.prompt_field or ", ".join(PROMPT_FIELDS)
    answered = ", ".join((source.answer_field, *ANSWER_FIELDS))
    looked_for = f"a conversation in {conversation}, or a prompt in {asked} and its answer in {answered}"

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


def _set_apart(
    rows: Sequence[Sequence[SupervisedExample]], held_out: HeldOut, seed: int
) -> tuple[list[SupervisedExample], list[SupervisedExample]]:
    """Examples to train on, and the others. What decides is what a row asks first, not its place: copies of a row and other
    answers to its question stay together."""
    prompts = [derive_seed(seed, row[0].tokens[: row[0].loss_mask.argmax()].tobytes().hex()) for row in rows]
    drawn = sorted(set(prompts))
    apart = set(drawn[: min(held_out.max_examples, max(1, round(held_out.share * len(drawn))))])
    if len(apart) == len(drawn):
        raise ValueError(
            f"eval_examples=HeldOut leaves none of {len(drawn)} prompts to train on; lower eval_examples.share, take "
            "eval_examples=Files, or set perplexity_every_steps=0"
        )
    parts: tuple[list[SupervisedExample], list[SupervisedExample]] = [], []
    for row, prompt in zip(rows, prompts, strict=True):
        parts[prompt in apart].extend(row)
    return parts


class ProblemExamples(Sequence[SupervisedExample]):
    """An example for every problem, made when asked for. A problem that comes again gets another answer."""

    def __init__(self, problems: Sequence[Problem], tokenizer: Tokenizer, prompt: PromptConfig, seed: int) -> None:
        self.problems, self.tokenizer, self.prompt, self.seed = problems, tokenizer, prompt, seed

    def __len__(self) -> int:
        return len(self.problems)

    @overload
    def __getitem__(self, index: int) -> SupervisedExample: ...
    @overload
    def __getitem__(self, index: slice) -> list[SupervisedExample]: ...
    def __getitem__(self, index: int | slice) -> SupervisedExample | list[SupervisedExample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        problem = self.problems[index]
        chance = random.Random(f"{self.seed}/{index % len(self)}")
        if chance.random() < DRILL_SHARE:
            return encode_drill(self.tokenizer, draw_steps(self.problems, chance), self.prompt)
        turns = [Message("user", problem.question), Message("assistant", draw_answer(problem, chance))]
        return encode_conversation(self.tokenizer, turns, self.prompt)[0]


def draw_steps(problems: Sequence[Problem], chance: random.Random) -> list[str]:
    """Steps of all methods of some problems, in any order; sums and products of two digits are easy enough without."""
    steps = set[str]()
    while len(steps) < 2 * DRILL_STEPS:
        problem = problems[chance.randrange(len(problems))]
        for text in (problem.solution, *problem.wrong_solutions):
            steps.update(step for step in text.split("\n") if len(step) > 6 and "=" in step)
    return chance.sample(sorted(steps), DRILL_STEPS)


def encode_drill(tokenizer: Tokenizer, steps: Sequence[str], prompt: PromptConfig) -> SupervisedExample:
    """Steps one after another, of which only the results are learnt: nobody can know what is asked next."""
    pieces = [(tokenizer.render(dress([Message("user", "Practice.")], prompt)), False)]
    for step in steps:
        # A division with remainder, 83=7*11+6, asks for 83=7* and is answered 11+6; all others are answered behind the sign.
        left, _, right = step.partition("=")
        asked = f"{left}={right.partition('*')[0]}*" if "*" in right else f"{left}="
        pieces += [(tokenizer.encode(asked), False), (tokenizer.encode(step.removeprefix(asked) + "\n"), True)]
    tokens = np.concatenate([piece for piece, _ in pieces])
    return SupervisedExample(tokens, np.concatenate([np.full(len(piece), learnt) for piece, learnt in pieces]))


def draw_answer(problem: Problem, chance: random.Random) -> str:
    """Answer as an undecided solver would: by the right method, by a wrong one, or by guessing."""
    if chance.random() < GUESS_SHARE:
        near = range(max(0, problem.answer - 9), min(999, problem.answer + 9) + 1)
        return f"\\boxed{{{chance.choice([number for number in near if number != problem.answer])}}}"
    if chance.random() < RIGHT_SHARE[problem.family]:
        return problem.solution
    return chance.choice(problem.wrong_solutions)


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message], prompt: PromptConfig) -> list[SupervisedExample]:
    """Examples that teach every answer of the assistant in exactly the context in which a policy would be asked for it.

    An answer joins the example of the answer before where its context begins with all of that, as most templates have it.
    Where it does not (templates of reasoning models cut earlier reasoning out), another example begins."""
    examples = list[SupervisedExample]()
    for i, message in enumerate(messages):
        if message.role == "assistant":
            asked = dress(messages[:i], prompt)
            before, answer = tokenizer.render(asked), tokenizer.render_answer(asked, message.content)
            mask = np.arange(len(before) + len(answer)) >= len(before)
            if examples and np.array_equal(before[: len(examples[-1].tokens)], examples[-1].tokens):
                earlier = examples.pop().loss_mask
                mask[: len(earlier)] = earlier
            examples.append(SupervisedExample(np.concatenate([before, answer]), mask))
    return examples


def _conversation(row: Row, source: Files | Hub) -> list[Message]:
    messages = messages_of(first_field(row, (source.prompt_field,) if source.prompt_field else ("messages", *PROMPT_FIELDS)))
    if not any(message.role == "assistant" for message in messages):
        answer = first_field(row, (source.answer_field, *ANSWER_FIELDS))
        messages += [Message("assistant", answer)] if isinstance(answer, str) else messages_of(answer) if answer else []
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
