"""Where tasks come from."""

from __future__ import annotations

from typing import Literal

import chz


@chz.chz
class TaskSource:
    """A finite, ordered set of tasks."""


@chz.chz
class Synthetic(TaskSource):
    """AIME-style problems (integer answers 000-999) from the seeded generator."""

    num_tasks: int = chz.field(default=4096, doc="how many problems")
    split: Literal["train", "heldout"] = chz.field(
        default="train", doc="the two never share a problem"
    )
    families: tuple[str, ...] = chz.field(
        default=(), doc="names of problem families, comma-separated; empty: all"
    )
    difficulty: Literal["easy", "medium", "hard"] = chz.field(
        default="easy", doc="size of the numbers and count of the steps"
    )
    seed: int = chz.field(default=0, doc="another seed, other problems")


@chz.chz
class Exercises(TaskSource):
    """Generated exercises for tools and programs: countdown, facts (to search for), calculations,
    programs."""

    num_tasks: int = chz.field(default=4096, doc="how many exercises")
    split: Literal["train", "heldout"] = chz.field(
        default="train", doc="the two never share an exercise"
    )
    families: tuple[str, ...] = chz.field(
        default=(), doc="names of exercise families, comma-separated; empty: all"
    )
    seed: int = chz.field(default=0, doc="another seed, other exercises")


@chz.chz
class Files(TaskSource):
    """Rows of a jsonl, json or parquet file, or of a folder with train/test files."""

    path: str = chz.field(doc="file or folder, relative to the working directory")
    split: str = chz.field(
        default="train", doc="which file of a folder: the one whose name starts with this"
    )
    prompt_field: str | None = chz.field(
        default=None, doc="field of the problem; none: problem, question or prompt, the first found"
    )
    answer_field: str = chz.field(
        default="answer",
        doc="field of the answer; what follows a last '####' counts where there is one",
    )
    max_tasks: int | None = chz.field(default=None, doc="read at most this many rows; none: all")
    success_rate_field: str = chz.field(
        default="success_rate",
        doc="field of how often a policy has solved the problem, from 0 to 1",
    )
    success_rate_above: float | None = chz.field(
        default=None,
        doc=(
            "leave out problems solved as seldom as this or less, such as 0.05; none: keep the "
            "hardest"
        ),
    )
    success_rate_below: float | None = chz.field(
        default=None,
        doc=(
            "leave out problems solved as often as this or more, such as 0.95; none: keep the "
            "easiest"
        ),
    )


@chz.chz
class Hub(TaskSource):
    """A data set of the Hugging Face hub, where one can be reached."""

    name: str = chz.field(doc="data set name, such as openai/gsm8k")
    split: str = chz.field(default="train", doc="which split")
    prompt_field: str | None = chz.field(default=None, doc="as for files")
    answer_field: str = chz.field(default="answer", doc="as for files")
    max_tasks: int | None = chz.field(default=None, doc="read at most this many rows; none: all")
    success_rate_field: str = chz.field(default="success_rate", doc="as for files")
    success_rate_above: float | None = chz.field(default=None, doc="as for files")
    success_rate_below: float | None = chz.field(default=None, doc="as for files")


@chz.chz
class HeldOut(TaskSource):
    """Only eval_examples: a share of the examples, which then are not trained on."""

    share: float = chz.field(
        default=0.05,
        doc="of the prompts, at least one; all examples that begin with the same prompt go together",
    )
    max_examples: int = chz.field(default=512, doc="at most so many prompts")


@chz.chz
class PromptConfig:
    system: str = chz.field(default="", doc="system message put before every prompt; empty: none")
    plain_text: bool = chz.field(
        default=False,
        doc=(
            "write conversations as plain text where the tokenizer has no chat template, instead "
            "of refusing it"
        ),
    )
    suffix: str = chz.field(
        default="", doc="text put after every problem, such as a request to box the answer"
    )
