"""Training and evaluation examples of any kind: generated, read from rows, or held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import chz
import numpy as np
from jaxtyping import Int32

from areal_jax.data.config import (
    Exercises,
    Files,
    HeldOut,
    Hub,
    ReasoningGym,
    Repositories,
    Synthetic,
    TaskSource,
)
from areal_jax.data.exercises import GeneratedExercises
from areal_jax.data.problems import Problem, SyntheticProblems
from areal_jax.data.reasoning_gym import Puzzles
from areal_jax.data.sources import Skipped, generate_exercises, generate_puzzles
from areal_jax.records import derive_seed

T = TypeVar("T")


@dataclass(frozen=True)
class ExampleSet(Generic[T]):
    """Examples, and the rows that were skipped."""

    examples: Sequence[T]
    skipped: Skipped


def load_example_sets(
    source: TaskSource,
    eval_source: TaskSource | None,
    *,
    generate: Callable[[Sequence[Problem] | GeneratedExercises | Puzzles], Sequence[T]],
    read: Callable[[Files | Hub], tuple[list[list[T]], Skipped]],
    prompt_of: Callable[[T], Int32[np.ndarray, "_"]],
    seed: int,
) -> tuple[ExampleSet[T], ExampleSet[T]]:
    """Load the training and the evaluation examples, each in the order of its source.

    Args:
        source: source of the training examples.
        eval_source: source of the evaluation examples; None for none.
        generate: makes examples from generated problems, exercises or puzzles.
        read: reads the examples of each row.
        prompt_of: returns the prompt tokens of an example; `HeldOut` never splits a prompt.
        seed: decides which prompts are held out.

    Raises:
        FileNotFoundError: a source has no files.
        ValueError: no row can be an example, or no prompt is left to train on.
    """

    def load(source: TaskSource) -> ExampleSet[T]:
        match source:
            case Synthetic():
                problems = SyntheticProblems(
                    source.num_tasks, source.split, source.families, source.difficulty, source.seed
                )
                return ExampleSet(generate(problems), {})
            case Exercises() | Repositories():
                return ExampleSet(generate(generate_exercises(source)), {})
            case ReasoningGym():
                return ExampleSet(generate(generate_puzzles(source)), {})
            case Files() | Hub():
                rows, skipped = read(source)
                return ExampleSet([example for row in rows for example in row], skipped)
            case _:
                raise ValueError(
                    "examples: expected Synthetic, Exercises, Repositories, ReasoningGym, Files or "
                    f"Hub, found {type(source).__name__}"
                )

    match source, eval_source:
        case _, None:
            return load(source), ExampleSet((), {})
        case ((Synthetic() | Exercises() | Repositories() | ReasoningGym()), HeldOut()):
            return load(source), load(
                chz.replace(source, split="heldout", num_tasks=eval_source.max_examples)
            )
        case ((Files() | Hub()), HeldOut()):
            rows, skipped = read(source)
            train, heldout = _hold_out(rows, prompt_of, eval_source, seed)
            return ExampleSet(train, skipped), ExampleSet(heldout, {})
        case _:
            return load(source), load(eval_source)


def _hold_out(
    rows: Sequence[Sequence[T]],
    prompt_of: Callable[[T], Int32[np.ndarray, "_"]],
    held_out: HeldOut,
    seed: int,
) -> tuple[list[T], list[T]]:
    """Split rows into training and held-out examples by a hash of their first prompt.

    Copies of a row and other answers to its prompt stay in the same set.
    """
    hashes = [derive_seed(seed, prompt_of(row[0]).tobytes().hex()) for row in rows]
    distinct = sorted(set(hashes))
    num_heldout = min(held_out.max_examples, max(1, round(held_out.share * len(distinct))))
    heldout = set(distinct[:num_heldout])
    if len(heldout) == len(distinct):
        raise ValueError(
            f"eval_examples=HeldOut leaves none of {len(distinct)} prompts to train on; lower "
            "eval_examples.share, set eval_examples=Files, or set heldout_every_steps=0"
        )
    sets: tuple[list[T], list[T]] = [], []
    for row, prompt_hash in zip(rows, hashes, strict=True):
        sets[prompt_hash in heldout].extend(row)
    return sets
