"""Settings of task sources and prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import chz

from areal_jax.bounds import FRACTION, NOT_NEGATIVE, POSITIVE
from areal_jax.python_objects import PREFIX, PythonObject

# Texts of settings that Files and Hub share.
_PROMPT_FIELD = "field of the prompt; none: first of problem, question, prompt"
_ANSWER_FIELD = (
    "field of the answer; if it contains '####', only the text after the last one counts"
)
_MAX_TASKS = "maximum number of rows to read; none: all"
_SUCCESS_RATE_FIELD = "field of the share of attempts that solved the problem, from 0 to 1"
_SUCCESS_RATE_ABOVE = (
    "skip problems with this success rate or less, such as 0.05; none: keep the hardest"
)
_SUCCESS_RATE_BELOW = (
    "skip problems with this success rate or more, such as 0.95; none: keep the easiest"
)


@chz.chz
class TaskSource:
    """A finite, ordered set of tasks."""

    @classmethod
    def from_object(cls, value: Any) -> Any:
        """The source of what is given in place of one: the rows or tasks of an iterable."""
        return Rows(rows=value) if isinstance(value, Iterable) else value


@chz.chz
class Synthetic(TaskSource):
    """AIME-style problems (integer answers 000-999) from the seeded generator."""

    num_tasks: int = chz.field(validator=POSITIVE, default=4096, doc="number of problems")
    split: Literal["train", "heldout"] = chz.field(
        default="train", doc="problems of this split; the two splits share none"
    )
    families: tuple[str, ...] = chz.field(
        default=(), doc="problem families, comma-separated; empty: all"
    )
    difficulty: Literal["easy", "medium", "hard"] = chz.field(
        default="easy", doc="size of the numbers and number of steps"
    )
    seed: int = chz.field(validator=NOT_NEGATIVE, default=0, doc="seed of the order of problems")


@chz.chz
class Exercises(TaskSource):
    """Generated exercises: countdown, facts, calculations, programs, and count_shapes in images."""

    num_tasks: int = chz.field(validator=POSITIVE, default=4096, doc="number of exercises")
    split: Literal["train", "heldout"] = chz.field(
        default="train", doc="exercises of this split; the two splits share none"
    )
    families: tuple[str, ...] = chz.field(
        default=(), doc="exercise families, comma-separated; empty: all without images"
    )
    seed: int = chz.field(validator=NOT_NEGATIVE, default=0, doc="seed of the exercises")


@chz.chz
class ReasoningGym(TaskSource):
    """Puzzles of the generators of reasoning-gym, graded by their own scores (extra
    `reasoning-gym`).
    """

    names: tuple[str, ...] = chz.field(
        doc="generators, comma-separated, such as chain_sum,gcd; they alternate"
    )
    parameters: str = chz.field(
        default="{}",
        doc="parameters of the generators, such as their difficulty: a JSON object such as "
        '{"chain_sum": {"max_terms": 3}}; without a generator\'s name, of all',
    )
    num_tasks: int = chz.field(validator=POSITIVE, default=4096, doc="number of puzzles")
    split: Literal["train", "heldout"] = chz.field(
        default="train", doc="puzzles of this split; the two splits share no question"
    )
    seed: int = chz.field(validator=NOT_NEGATIVE, default=0, doc="seed of the puzzles")


@chz.chz
class Seeds(TaskSource):
    """Seeds of the episodes of workflow=Environment."""

    num_tasks: int = chz.field(validator=POSITIVE, default=4096, doc="number of seeds")
    first: int = chz.field(
        validator=NOT_NEGATIVE, default=0, doc="first seed; those of evaluation should be others"
    )


@chz.chz
class Repositories(TaskSource):
    """Small generated repositories with a fault in one line and a test that fails, for
    workflow=CodingAgent.
    """

    num_tasks: int = chz.field(validator=POSITIVE, default=4096, doc="number of repositories")
    split: Literal["train", "heldout"] = chz.field(
        default="train", doc="train, or heldout: the two share no repository"
    )
    seed: int = chz.field(validator=NOT_NEGATIVE, default=0, doc="seed of the repositories")


@chz.chz
class RemoteImagesConfig:
    """Images that requests or rows name by an http or https URL."""

    hosts: tuple[str, ...] = chz.field(
        default=(),
        doc="hosts to fetch images from, comma-separated, with or without port, such as "
        "images.example.com; a name needs public addresses, a private address can be listed "
        "itself; empty: none",
    )
    max_bytes: int = chz.field(
        validator=POSITIVE, default=4 << 20, doc="maximum size of a fetched image, in bytes"
    )
    timeout_s: float = chz.field(
        validator=POSITIVE,
        default=10.0,
        doc="time to fetch all images of a request or row, in seconds",
    )


@chz.chz
class Files(TaskSource):
    """Rows of a jsonl, json or parquet file, or of a folder with train/test files."""

    path: str = chz.field(
        doc="file or folder, relative to the working directory, or gs:// or s3:// URL"
    )
    split: str = chz.field(default="train", doc="prefix of the file names to read from a folder")
    prompt_field: str | None = chz.field(default=None, doc=_PROMPT_FIELD)
    answer_field: str = chz.field(
        default="answer",
        doc=_ANSWER_FIELD,
    )
    max_tasks: int | None = chz.field(validator=POSITIVE, default=None, doc=_MAX_TASKS)
    success_rate_field: str = chz.field(
        default="success_rate",
        doc=_SUCCESS_RATE_FIELD,
    )
    success_rate_above: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc=_SUCCESS_RATE_ABOVE,
    )
    success_rate_below: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc=_SUCCESS_RATE_BELOW,
    )
    images: RemoteImagesConfig = chz.field(
        default_factory=RemoteImagesConfig, doc="images that rows name by their URL"
    )


@chz.chz
class Hub(TaskSource):
    """A data set of the Hugging Face hub, downloaded or from its local cache."""

    name: str = chz.field(
        doc="data set as owner/name or owner/name/folder, such as openai/gsm8k/main"
    )
    split: str = chz.field(default="train", doc="prefix of the file names to read")
    prompt_field: str | None = chz.field(default=None, doc=_PROMPT_FIELD)
    answer_field: str = chz.field(default="answer", doc=_ANSWER_FIELD)
    max_tasks: int | None = chz.field(validator=POSITIVE, default=None, doc=_MAX_TASKS)
    success_rate_field: str = chz.field(default="success_rate", doc=_SUCCESS_RATE_FIELD)
    success_rate_above: float | None = chz.field(
        validator=FRACTION, default=None, doc=_SUCCESS_RATE_ABOVE
    )
    success_rate_below: float | None = chz.field(
        validator=FRACTION, default=None, doc=_SUCCESS_RATE_BELOW
    )
    images: RemoteImagesConfig = chz.field(
        default_factory=RemoteImagesConfig, doc="images that rows name by their URL"
    )


def _as_rows(value: Iterable[Any], *, chzself: object = None) -> Any:
    return value if isinstance(value, str) else PythonObject(tuple(value), f"{PREFIX}rows")


@chz.chz
class Rows(TaskSource):
    """Rows or tasks of a Python iterable, such as a list of dicts or a datasets.Dataset."""

    rows: str = chz.field(
        converter=_as_rows,
        doc="rows, with the fields of a jsonl file, or tasks; not on the command line",
    )
    prompt_field: str | None = chz.field(default=None, doc=_PROMPT_FIELD)
    answer_field: str = chz.field(default="answer", doc=_ANSWER_FIELD)
    max_tasks: int | None = chz.field(validator=POSITIVE, default=None, doc=_MAX_TASKS)
    success_rate_field: str = chz.field(default="success_rate", doc=_SUCCESS_RATE_FIELD)
    success_rate_above: float | None = chz.field(
        validator=FRACTION, default=None, doc=_SUCCESS_RATE_ABOVE
    )
    success_rate_below: float | None = chz.field(
        validator=FRACTION, default=None, doc=_SUCCESS_RATE_BELOW
    )
    images: RemoteImagesConfig = chz.field(
        default_factory=RemoteImagesConfig, doc="images that rows name by their URL"
    )


@chz.chz
class HeldOut(TaskSource):
    """For `eval_examples`: a share of the training examples, excluded from training."""

    share: float = chz.field(
        validator=FRACTION,
        default=0.05,
        doc="held-out share of the prompts, at least one prompt with all its examples",
    )
    max_examples: int = chz.field(
        validator=POSITIVE, default=512, doc="maximum number of held-out prompts"
    )


@chz.chz
class PromptConfig:
    """Text around every prompt."""

    system: str = chz.field(default="", doc="system message of every prompt; empty: none")
    plain_text: bool = chz.field(
        default=False,
        doc="plain text instead of an error if the tokenizer has no chat template",
    )
    suffix: str = chz.field(
        default="", doc="text appended to every problem, such as a request to box the answer"
    )
