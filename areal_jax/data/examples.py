"""What there is to learn from and what to evaluate on, of any kind: made of generated problems,
read from rows, held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import chz
import numpy as np
from jaxtyping import Int32

from areal_jax.data.config import Exercises, Files, HeldOut, Hub, Synthetic, TaskSource
from areal_jax.data.exercises import GeneratedExercises
from areal_jax.data.problems import Problem, SyntheticProblems
from areal_jax.data.sources import Skipped, generated_exercises
from areal_jax.records import derive_seed

T = TypeVar("T")


@dataclass(frozen=True)
class ExampleSet(Generic[T]):
    """Examples, and the rows of which none could be made."""

    examples: Sequence[T]
    skipped: Skipped


def load_both(
    source: TaskSource,
    eval_source: TaskSource | None,
    *,
    generate: Callable[[Sequence[Problem] | GeneratedExercises], Sequence[T]],
    read: Callable[[Files | Hub], tuple[list[list[T]], Skipped]],
    prompt_of: Callable[[T], Int32[np.ndarray, "_"]],
    seed: int,
) -> tuple[ExampleSet[T], ExampleSet[T]]:
    """What to train on and what to evaluate on, each in the order of its source.

    FileNotFoundError says what was looked for; ValueError where nothing is left. Args: eval_source:
    None for no evaluation.
    generate: examples of problems or exercises. read: the examples of each row. prompt_of: the
        tokens that an example begins with, of which no two sets of examples share any. seed: of
        what is held out."""

    def whole(source: TaskSource) -> ExampleSet[T]:
        match source:
            case Synthetic():
                problems = SyntheticProblems(
                    source.num_tasks, source.split, source.families, source.difficulty, source.seed
                )
                return ExampleSet(generate(problems), {})
            case Exercises():
                return ExampleSet(generate(generated_exercises(source)), {})
            case Files() | Hub():
                rows, skipped = read(source)
                return ExampleSet([example for row in rows for example in row], skipped)
            case _:
                raise ValueError(
                    "examples: expected Synthetic, Exercises, Files or Hub, came "
                    f"{type(source).__name__}"
                )

    match source, eval_source:
        case _, None:
            return whole(source), ExampleSet((), {})
        case ((Synthetic() | Exercises()), HeldOut()):
            return whole(source), whole(
                chz.replace(source, split="heldout", num_tasks=eval_source.max_examples)
            )
        case ((Files() | Hub()), HeldOut()):
            rows, skipped = read(source)
            train, apart = _set_apart(rows, prompt_of, eval_source, seed)
            return ExampleSet(train, skipped), ExampleSet(apart, {})
        case _:
            return whole(source), whole(eval_source)


def _set_apart(
    rows: Sequence[Sequence[T]],
    prompt_of: Callable[[T], Int32[np.ndarray, "_"]],
    held_out: HeldOut,
    seed: int,
) -> tuple[list[T], list[T]]:
    """Examples to train on, and the others. What decides is what a row asks first, not its place:
    copies of a row and other answers to its question stay together."""
    prompts = [derive_seed(seed, prompt_of(row[0]).tobytes().hex()) for row in rows]
    sampled = sorted(set(prompts))
    apart = set(sampled[: min(held_out.max_examples, max(1, round(held_out.share * len(sampled))))])
    if len(apart) == len(sampled):
        raise ValueError(
            f"eval_examples=HeldOut leaves none of {len(sampled)} prompts to train on; lower "
            "eval_examples.share, take "
            "eval_examples=Files, or set heldout_every_steps=0"
        )
    parts: tuple[list[T], list[T]] = [], []
    for row, prompt in zip(rows, prompts, strict=True):
        parts[prompt in apart].extend(row)
    return parts
