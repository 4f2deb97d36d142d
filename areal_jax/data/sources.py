"""Load tasks from the generators, files, or the hub; rows that cannot be tasks are skipped.

The file has more than 400 lines because it reads every format of rows.
"""

from __future__ import annotations

import asyncio
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import pyarrow as pa
import pyarrow.parquet as pq

from areal_jax.data import swe_rows
from areal_jax.data.code_tasks import format_tests, read_code_problem
from areal_jax.data.config import (
    Exercises,
    Files,
    Hub,
    PromptConfig,
    ReasoningGym,
    RemoteImagesConfig,
    Repositories,
    Rows,
    Seeds,
    Synthetic,
    TaskSource,
)
from areal_jax.data.exercises import Exercise, GeneratedExercises
from areal_jax.data.hub import NAME, fetch
from areal_jax.data.image_urls import FetchError, fetch_images
from areal_jax.data.problems import Problem, SyntheticProblems
from areal_jax.data.reasoning_gym import Puzzle, Puzzles
from areal_jax.data.repositories import GeneratedRepositories
from areal_jax.image_files import ImageFile, read_image
from areal_jax.python_objects import PythonObject
from areal_jax.records import ENVIRONMENT, IMAGE, PUZZLE, Message, Task
from areal_jax.storage import fetch_objects, local_path

MAX_MEASURED = 4096
"""Maximum number of tasks whose prompts are measured, which takes about a second."""

PROMPT_FIELDS = ("problem", "question", "prompt")
IMAGE_FIELDS = ("image", "images")
URL = re.compile(r"https?://", re.IGNORECASE)
FAMILY_FIELDS = ("family", "subject", "difficulty")
SUFFIXES = (".jsonl", ".json", ".parquet")

MAX_NAMED = 3
"""Skipped rows to name for each reason; the others are only counted."""

T = TypeVar("T")

Row: TypeAlias = dict[str, Any]
"""A row as in its file."""

Skipped: TypeAlias = Mapping[str, Sequence[str]]
"""Skipped rows as FILE:LINE, by reason."""


class TaskSet(NamedTuple):
    """Tasks, and the rows that were skipped."""

    tasks: Sequence[Task]
    skipped: Skipped

    @property
    def kinds(self) -> set[str]:
        """Graders that the tasks need."""
        return (
            set(self.tasks.kinds)
            if isinstance(self.tasks, LazySequence)
            else {task.kind for task in self.tasks}
        )


class BadRow(Exception):
    """The row is not usable; the message is the reason under which such rows are counted."""


def load_tasks(source: TaskSource, prompt: PromptConfig) -> TaskSet:
    """Load the tasks of a source, in its order.

    Args:
        source: source of the tasks.
        prompt: text around every prompt.

    Raises:
        FileNotFoundError: the source has no files.
        ValueError: no row can be a task.
    """
    match source:
        case Synthetic():
            problems = SyntheticProblems(
                source.num_tasks, source.split, source.families, source.difficulty, source.seed
            )
            tasks = LazySequence(
                len(problems), lambda index: _problem_task(problems[index], prompt)
            )
        case Exercises() | Repositories():
            exercises = generate_exercises(source)
            tasks = LazySequence(
                len(exercises),
                lambda index: _exercise_task(exercises[index], prompt),
                exercises.kinds,
                num_measured=64 if isinstance(source, Repositories) else MAX_MEASURED,
            )
        case ReasoningGym():
            puzzles = generate_puzzles(source)
            tasks = LazySequence(
                len(puzzles),
                lambda index: _puzzle_task(puzzles[index], prompt),
                (PUZZLE,),
                num_measured=256,
            )
        case Seeds(num_tasks=num_tasks, first=first):
            system = (Message("system", prompt.system),) if prompt.system else ()
            tasks = LazySequence(
                num_tasks,
                lambda index: Task(
                    f"seed-{first + index}", system, str(first + index), ENVIRONMENT
                ),
                (ENVIRONMENT,),
            )
        case Files() | Hub() | Rows():
            return _read_tasks(source, prompt)
        case _:
            raise ValueError(
                "expected Synthetic, Exercises, ReasoningGym, Repositories, Seeds, Files, Hub or "
                f"Rows, found {type(source).__name__}"
            )
    return TaskSet(tasks, {})


def _read_tasks(source: Files | Hub | Rows, prompt: PromptConfig) -> TaskSet:
    fields = source.prompt_field or ", ".join(PROMPT_FIELDS)

    def read(place: str, row: Row | Task) -> Task:
        return row if isinstance(row, Task) else _make_task(place, row, source, prompt)

    expected = f"the prompt in {fields}, the answer in {source.answer_field}"
    return TaskSet(*read_rows(source, read, "a task", expected))


class LazySequence(Sequence[T]):
    """Sequence whose items are made on access."""

    def __init__(
        self,
        count: int,
        make: Callable[[int], T],
        kinds: Collection[str] = ("math",),
        num_measured: int = MAX_MEASURED,
    ) -> None:
        """Store the factory.

        Args:
            count: length of the sequence.
            make: makes the item at an index, deterministically.
            kinds: if the items are tasks, the graders that they need.
            num_measured: if the items are tasks, the number whose prompts are measured, which
                should take a second or two.
        """
        self._count, self._make, self.kinds = count, make, kinds
        self.num_measured = num_measured

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        selected = range(self._count)[index]
        return (
            self._make(selected)
            if isinstance(selected, int)
            else [self._make(each) for each in selected]
        )


def generate_exercises(source: Exercises | Repositories) -> GeneratedExercises:
    """Generate the exercises that the settings describe."""
    if isinstance(source, Repositories):
        return GeneratedRepositories(source.num_tasks, source.split, source.seed)
    return GeneratedExercises(source.num_tasks, source.split, source.families, source.seed)


def generate_puzzles(source: ReasoningGym) -> Puzzles:
    """Generate the puzzles that the settings describe.

    Raises:
        ValueError: the package is missing, or the settings are not its own.
    """
    return Puzzles(source.names, source.parameters, source.num_tasks, source.split, source.seed)


def _puzzle_task(puzzle: Puzzle, prompt: PromptConfig) -> Task:
    messages = apply_prompt_template([Message("user", puzzle.question)], prompt)
    return Task(puzzle.id, messages, puzzle.reference, PUZZLE, puzzle.generator)


def _exercise_task(exercise: Exercise, prompt: PromptConfig) -> Task:
    messages = apply_prompt_template([exercise.message], prompt)
    return Task(exercise.id, messages, exercise.answer, exercise.kind, exercise.family)


def _problem_task(problem: Problem, prompt: PromptConfig) -> Task:
    messages = apply_prompt_template([Message("user", problem.question)], prompt)
    return Task(problem.id, messages, str(problem.answer), family=problem.family)


def apply_prompt_template(messages: Sequence[Message], prompt: PromptConfig) -> tuple[Message, ...]:
    """Replace the system message of a conversation, and append the suffix to its last message."""
    last = messages[-1]
    templated = [*messages[:-1], replace(last, content=last.content + prompt.suffix)]
    if prompt.system:
        return (
            Message("system", prompt.system),
            *(message for message in templated if message.role != "system"),
        )
    return tuple(templated)


def find_files(path: Path, split: str) -> list[Path]:
    """Find the files to read.

    Args:
        path: a file; or a folder which, itself or in one subfolder, has files of the split.
        split: prefix of the file names to read from a folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format, or several subfolders have files of the split.
    """
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: expected a file name that ends in {', '.join(SUFFIXES)}")
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder (working directory: {Path.cwd()})")
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    of_split = [file for file in files if file.name.startswith(split)]
    folders = sorted(
        {file.parent for file in of_split}, key=lambda folder: (len(folder.parts), folder)
    )
    if not folders:
        names = ", ".join(str(file.relative_to(path)) for file in files[:10]) or "none"
        raise FileNotFoundError(
            f"{path}: expected files named {split}*.jsonl, .json or .parquet, found {names}"
        )
    if path not in folders and len(folders) > 1:
        names = ", ".join(str(folder.relative_to(path)) for folder in folders)
        raise ValueError(
            f"{path}: expected files named {split}* in one folder, found them in {names}; name one "
            "of these"
        )
    return [file for file in of_split if file.parent == folders[0]]


def _download_split(source: Hub) -> list[Path]:
    """Download the split; a name may include a folder of the repository: openai/gsm8k/main."""
    parts = source.name.split("/")
    owner_and_name, folder = "/".join(parts[:2]), "/".join(parts[2:])
    if not NAME.fullmatch(owner_and_name):
        raise ValueError(
            f"name={source.name}: expected a data set of the hub, owner/name or owner/name/folder"
        )
    patterns = [f"{prefix}{source.split}*{suffix}" for prefix in ("", "*/") for suffix in SUFFIXES]
    return find_files(fetch(owner_and_name, "dataset", patterns) / folder, source.split)


def _number_rows(source: Files | Hub | Rows) -> tuple[str, Iterator[tuple[str, Any]]]:
    """Where the rows of a source are, and the rows with their places."""
    if isinstance(source, Rows):
        assert isinstance(source.rows, PythonObject)  # else the settings are refused
        rows = source.rows.object
        return "the given rows", ((f"row {number}", row) for number, row in enumerate(rows, 1))
    files = (
        find_files(fetch_objects(source.path), source.split)
        if isinstance(source, Files)
        else _download_split(source)
    )
    numbered = (
        (f"{file.name}:{number}", row) for file in files for number, row in _read_file(file)
    )
    return ", ".join(map(str, files)), numbered


def read_rows(
    source: Files | Hub | Rows,
    read: Callable[[str, Any], T],
    what: str,
    expected: str,
    settings: str = "prompt_field and answer_field",
) -> tuple[list[T], dict[str, list[str]]]:
    """Read each row of a source.

    Args:
        source: source of the rows.
        read: reads a row, given its place (FILE:LINE) and fields; raises BadRow to skip it.
        what: what a row is read into, for the error.
        expected: the fields that `read` needs, for the error.
        settings: settings that name other fields, for the error.

    Returns:
        Results of `read`, and the places of skipped rows by reason.

    Raises:
        FileNotFoundError: the source has no files.
        ValueError: no row is usable.
    """
    where, numbered = _number_rows(source)
    made, skipped, fields = list[T](), dict[str, list[str]](), dict[str, None]()
    for place, row in islice(numbered, source.max_tasks):
        try:
            if not isinstance(row, dict | Task):
                raise BadRow("not a JSON object")
            fields.update(dict.fromkeys(row if isinstance(row, dict) else ()))
            made.append(read(place, row))
        except BadRow as reason:
            skipped.setdefault(str(reason), []).append(place)
    if not made:
        raise ValueError(
            f"{where}: no row can be {what} "
            f"({format_skipped(skipped) or 'no rows'}); expected {expected}; "
            f"found fields {', '.join(fields) or 'none'}; set {settings}"
        )
    return made, skipped


def format_skipped(skipped: Skipped) -> str:
    """Format the number of skipped rows by reason, with the places of the first ones."""
    return ", ".join(
        (
            f"{len(places)} {reason} "
            f"({', '.join([*places[:MAX_NAMED], *(['...'] if len(places) > MAX_NAMED else [])])})"
        )
        for reason, places in skipped.items()
    )


def _read_file(file: Path) -> Iterator[tuple[int, object]]:
    """Yield the rows of a file with their numbers, or line numbers, from 1.

    A line that is not JSON is yielded as text.

    Raises:
        ValueError: the file is not of its format.
    """
    if file.suffix == ".parquet":
        try:
            with pq.ParquetFile(file) as table:
                yield from enumerate(
                    chain.from_iterable(batch.to_pylist() for batch in table.iter_batches()), 1
                )
        except pa.ArrowException as error:
            raise ValueError(f"{file}: expected a parquet file ({error})") from error
        return
    with file.open("rb") as lines:
        # Many files named .json contain one row per line.
        if file.suffix == ".json" and lines.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
            try:
                yield from enumerate(json.loads(file.read_text(encoding="utf-8-sig")), 1)
            except ValueError as error:
                raise ValueError(f"{file}: expected a JSON array of rows ({error})") from error
            return
        lines.seek(0)
        yield from _read_lines(file, lines)


def _read_lines(file: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}:{number}: expected UTF-8 ({error})") from error
        if text.strip():
            try:
                yield number, json.loads(text)
            except json.JSONDecodeError:
                yield number, text


def _make_task(id: str, row: Row, source: Files | Hub | Rows, prompt: PromptConfig) -> Task:
    _check_success_rate(row, source)
    try:
        if all(field in row for field in swe_rows.FIELDS):
            problem = swe_rows.read_repository_row(row, folder_of_paths(source))
        else:
            problem = read_code_problem(row)
    except ValueError as error:
        raise BadRow(str(error)) from error
    if problem is not None:
        question, tests = problem
        return Task(
            id,
            apply_prompt_template([Message("user", question)], prompt),
            format_tests(tests),
            "code",
            _find_family(row),
        )
    if {"nums", "target"} <= row.keys():
        question, answer = _read_countdown(row["nums"], row["target"])
        return Task(
            id,
            apply_prompt_template([Message("user", question)], prompt),
            answer,
            "countdown",
            _find_family(row),
        )
    names = (source.prompt_field,) if source.prompt_field else PROMPT_FIELDS
    messages = read_messages(row, names, source)
    answer = _read_answer(_get_field(row, source.answer_field))
    return Task(id, apply_prompt_template(messages, prompt), answer, family=_find_family(row))


def _check_success_rate(row: Row, source: Files | Hub | Rows) -> None:
    """Raise BadRow if the source has bounds and the row's success rate is not between them."""
    above, below = source.success_rate_above, source.success_rate_below
    if above is None and below is None:
        return
    rate = _get_field(row, source.success_rate_field)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise BadRow(f"no {source.success_rate_field} from 0 to 1")
    if above is not None and rate <= above:
        raise BadRow(f"success rate at most {above:g}")
    if below is not None and rate >= below:
        raise BadRow(f"success rate at least {below:g}")


def _read_countdown(numbers: object, target: object) -> tuple[str, str]:
    """Make question and answer from a row in the format of Countdown-Tasks-3to4."""
    if (
        not isinstance(numbers, list)
        or not numbers
        or any(type(number) is not int for number in [*numbers, target])
    ):
        raise BadRow("nums or target are not integers")
    question = (
        f"Make {target} from the numbers {', '.join(map(str, numbers))}, with + - * / and "
        "brackets, each used exactly once. Give the expression in \\boxed{}."
    )
    return question, json.dumps({"numbers": numbers, "target": target})


def _find_family(row: Row) -> str:
    return next((value for value in map(row.get, FAMILY_FIELDS) if isinstance(value, str)), "")


def first_field(row: Row, names: Sequence[str]) -> object:
    """Return the first field that is neither missing nor empty, or None.

    a.b is field b of field a.
    """
    return next((value for value in (_get_field(row, name) for name in names) if value), None)


def _get_field(row: Row, name: str) -> object:
    """Return a field; a.b is field b of field a, unless a field is called a.b."""
    first, _, rest = name.partition(".")
    if name in row or not rest:
        return row.get(name)
    inner = row.get(first)
    return _get_field(inner, rest) if isinstance(inner, dict) else None


def read_messages(row: Row, names: Sequence[str], source: Files | Hub | Rows) -> list[Message]:
    """Read the conversation of a row, with its images.

    Images of the fields `image` and `images` replace each `<image>` of the conversation; without
    any, they precede the first message of the user.

    Raises:
        BadRow: the row has no conversation, or its images cannot be read.
    """
    messages = parse_messages(first_field(row, names))
    found = [each for name in IMAGE_FIELDS if (each := row.get(name)) is not None]
    sources = [each for value in found for each in (value if isinstance(value, list) else [value])]
    if not sources:
        return messages
    try:
        fetched = _fetch_images(sources, source.images)
        folder = folder_of_paths(source)
        images = [
            fetched[each] if isinstance(each, str) and each in fetched else read_image(each, folder)
            for each in sources
        ]
    except (OSError, ValueError) as error:
        if isinstance(error, FetchError) and error.is_temporary:
            # Other rows would wait for the same server.
            raise
        raise BadRow(f"an image that cannot be read: {error}") from error
    counts = [message.content.count(IMAGE) for message in messages]
    if not sum(counts):
        roles = [message.role for message in messages]
        counts[roles.index("user") if "user" in roles else 0] = len(images)
    if sum(counts) != len(images):
        raise BadRow(f"{len(images)} images for {sum(counts)} {IMAGE}")
    rest = iter(images)
    return [
        replace(message, images=tuple(islice(rest, count)))
        for message, count in zip(messages, counts, strict=True)
    ]


def _fetch_images(sources: Sequence[object], config: RemoteImagesConfig) -> dict[str, ImageFile]:
    """Fetch the images of a row that are given by their URL."""
    urls = [each for each in sources if isinstance(each, str) and URL.match(each)]
    if not urls:
        return {}
    # In a thread, because the caller's may run an event loop.
    with ThreadPoolExecutor(1) as thread:
        return dict(
            zip(urls, thread.submit(asyncio.run, fetch_images(urls, config)).result(), strict=True)
        )


def folder_of_paths(source: Files | Hub | Rows) -> Path:
    """Folder of the relative paths of images and repositories: that of the rows' file, or the
    working directory.
    """
    if isinstance(source, Files):
        path = local_path(source.path)
        return path if path.is_dir() else path.parent
    return Path()


def parse_messages(value: object, name: str = "prompt") -> list[Message]:
    """Read text as a user message, or a list of {role, content} as a conversation.

    Args:
        value: value of the field.
        name: what the field is, for the error.

    Raises:
        BadRow: the value is neither.
    """
    if isinstance(value, str) and value.strip():
        return [Message("user", value)]
    if not isinstance(value, list):
        raise BadRow(f"no {name}")
    messages = list[Message]()
    for turn in value:
        role, content = (
            (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        )
        if not (isinstance(role, str) and isinstance(content, str)):
            raise BadRow(f"{name} is neither text nor messages")
        messages.append(Message(role, content))
    return messages


def _read_answer(value: object) -> str:
    """Format an answer as text: the part after the last '####', 142.0 as 142, [x] as x."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        raise BadRow("no answer")
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise BadRow("answer is neither text nor a number")
    answer = str(value).rpartition("####")[2].strip()
    if not answer:
        raise BadRow("no answer")
    return answer
