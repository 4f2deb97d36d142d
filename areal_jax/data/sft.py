"""Examples for supervised fine-tuning: tokens, and a mask that is true on what the policy shall learn to say.

The embedded policy learns from generated problems and from a mixture of answers to them: the right method, wrong methods
carried out without error, and guesses. So it becomes able, for nearly every step it writes is right, and undecided, for it
does not know which method is the right one. That is what reinforcement learning can then teach.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from jaxtyping import Bool, Int32

from areal_jax.data.config import Files, PromptConfig, Synthetic, TaskSource
from areal_jax.data.problems import Problem, SyntheticProblems
from areal_jax.data.sources import dress, find_files
from areal_jax.records import Message, Tokenizer

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


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedExample:
    """A conversation that ends in an answer of the assistant."""

    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    """True on that answer and on the token that ends it; in a drill, on the results of the steps."""


class ExampleSet(NamedTuple):
    """Examples, and the rows of which none could be made."""

    examples: Sequence[SupervisedExample]
    skipped: Mapping[str, int]
    """How many, by reason."""


def load_examples(source: TaskSource, prompt: PromptConfig, tokenizer: Tokenizer, *, seed: int, max_tokens: int) -> ExampleSet:
    """The examples of a source, in its order: generated problems with drawn answers, or conversations from jsonl files.

    A file's rows are {"messages": [{"role": ..., "content": ...}, ...]}; every answer of the assistant makes an example of what
    came before it. Args: seed: of the answers to generated problems. max_tokens: longer examples are skipped."""
    match source:
        case Synthetic():
            problems = SyntheticProblems(source.num_tasks, source.split, source.families, source.difficulty, source.seed)
            return ExampleSet(ProblemExamples(problems, tokenizer, prompt, seed), {})
        case Files():
            return _chat_examples(
                find_files(Path(source.path).expanduser(), source.split), source, prompt, tokenizer, max_tokens
            )
        case _:
            raise ValueError(f"examples: expected Synthetic or Files, came {type(source).__name__}")


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
        chance = random.Random(f"{self.seed}/{index % len(self)}")
        if chance.random() < DRILL_SHARE:
            return encode_drill(self.tokenizer, draw_steps(self.problems, chance), self.prompt)
        problem = self.problems[index]
        prompt = dress([Message("user", problem.question)], self.prompt)
        return encode_example(self.tokenizer, prompt, draw_answer(problem, chance))


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


def encode_example(tokenizer: Tokenizer, prompt: Sequence[Message], answer: str) -> SupervisedExample:
    """The prompt as the policy will see it, then the answer and the token that ends a turn."""
    before = tokenizer.render(prompt)
    after = np.append(tokenizer.encode(answer), np.int32(tokenizer.stop_token_ids[0]))
    tokens = np.concatenate([before, after])
    return SupervisedExample(tokens, np.arange(len(tokens)) >= len(before))


def _chat_examples(
    files: Sequence[Path], source: Files, prompt: PromptConfig, tokenizer: Tokenizer, max_tokens: int
) -> ExampleSet:
    examples, skipped = list[SupervisedExample](), Counter[str]()
    lines = (line for file in files for line in _lines(file))
    for line in islice(lines, source.max_tasks):
        messages = _conversation(line)
        answers = [i for i, message in enumerate(messages) if i and message.role == "assistant"]
        if not answers:
            skipped["no messages that end in an answer of the assistant"] += 1
        for i in answers:
            example = encode_example(tokenizer, dress(messages[:i], prompt), messages[i].content)
            if len(example.tokens) > max_tokens:
                skipped[f"longer than {max_tokens} tokens"] += 1
            else:
                examples.append(example)
    if not examples:
        reasons = ", ".join(f"{number} {reason}" for reason, number in skipped.items()) or "no rows"
        raise ValueError(f"{', '.join(map(str, files))}: no row can be an example ({reasons})")
    return ExampleSet(examples, skipped)


def _lines(file: Path) -> Iterator[str]:
    if file.suffix != ".jsonl":
        raise ValueError(f"{file}: expected conversations in .jsonl")
    with file.open(encoding="utf-8-sig") as lines:
        yield from lines


def _conversation(line: str) -> list[Message]:
    """The messages of a row, or none where the row is something else."""
    try:
        row = json.loads(line)
        return [Message(str(turn["role"]), str(turn["content"])) for turn in row["messages"]]
    except (json.JSONDecodeError, KeyError, TypeError):
        return []
