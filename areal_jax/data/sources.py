"""Tasks from where they are: the problem generator, files, or the hub. Rows that cannot be tasks
are skipped and named."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import pyarrow as pa
import pyarrow.parquet as pq

from areal_jax.data.code_tasks import as_answer, code_problem
from areal_jax.data.config import Exercises, Files, Hub, PromptConfig, Synthetic, TaskSource
from areal_jax.data.exercises import Exercise, GeneratedExercises
from areal_jax.data.hub import NAME, fetch
from areal_jax.data.problems import Problem, SyntheticProblems
from areal_jax.records import Message, Task

PROMPT_FIELDS = ("problem", "question", "prompt")
FAMILY_FIELDS = ("family", "subject", "difficulty")
SUFFIXES = (".jsonl", ".json", ".parquet")


MAX_NAMED = 3
"""Rows that are named for each reason why they are skipped; the others are counted."""

T = TypeVar("T")

Row: TypeAlias = dict[str, Any]
"""As its file has it."""

Skipped: TypeAlias = Mapping[str, Sequence[str]]
"""Rows of which nothing could be made, as FILE:LINE, by reason."""


class TaskSet(NamedTuple):
    """Tasks, and the rows of which none could be made."""

    tasks: Sequence[Task]
    skipped: Skipped

    @property
    def kinds(self) -> set[str]:
        """Of the tasks: which graders they need."""
        return (
            set(self.tasks.kinds)
            if isinstance(self.tasks, LazySequence)
            else {task.kind for task in self.tasks}
        )


class BadRow(Exception):
    """A row of which nothing can be made; says why in a few words, under which such rows are
    counted."""


def load_tasks(source: TaskSource, prompt: PromptConfig) -> TaskSet:
    """The tasks of a source, in its order, with what `prompt` puts around every problem.

    FileNotFoundError says what was looked for; ValueError where no row can be a task."""
    match source:
        case Synthetic():
            problems = SyntheticProblems(
                source.num_tasks, source.split, source.families, source.difficulty, source.seed
            )
            return TaskSet(
                LazySequence(len(problems), lambda index: _generated(problems[index], prompt)), {}
            )
        case Exercises():
            exercises = generated_exercises(source)
            return TaskSet(
                LazySequence(
                    len(exercises),
                    lambda index: _exercise(exercises[index], prompt),
                    exercises.kinds,
                ),
                {},
            )
        case Files() | Hub():
            looked_for = (
                f"the prompt in {source.prompt_field or ', '.join(PROMPT_FIELDS)}, the "
                f"answer in {source.answer_field}"
            )
            return TaskSet(
                *read_rows(
                    source,
                    lambda place, row: _task(place, row, source, prompt),
                    "a task",
                    looked_for,
                )
            )
        case _:
            raise ValueError(
                f"expected Synthetic, Exercises, Files or Hub, came {type(source).__name__}"
            )


class LazySequence(Sequence[T]):
    """So many things, each made when asked for."""

    def __init__(
        self, count: int, make: Callable[[int], T], kinds: Collection[str] = ("math",)
    ) -> None:
        """Args: make: makes the thing at a place, from 0; the same one whenever it is asked. kinds:
        of tasks."""
        self._count, self._make, self.kinds = count, make, kinds

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._count)[index]
        return (
            self._make(places)
            if isinstance(places, int)
            else [self._make(place) for place in places]
        )


def generated_exercises(source: Exercises) -> GeneratedExercises:
    """The exercises that the settings describe."""
    return GeneratedExercises(source.num_tasks, source.split, source.families, source.seed)


def _exercise(exercise: Exercise, prompt: PromptConfig) -> Task:
    messages = apply_prompt_template([Message("user", exercise.question)], prompt)
    return Task(exercise.id, messages, exercise.answer, exercise.kind, exercise.family)


def _generated(problem: Problem, prompt: PromptConfig) -> Task:
    messages = apply_prompt_template([Message("user", problem.question)], prompt)
    return Task(problem.id, messages, str(problem.answer), family=problem.family)


def apply_prompt_template(messages: Sequence[Message], prompt: PromptConfig) -> tuple[Message, ...]:
    """Put the system message before a conversation, in place of its own, and the suffix after its
    last message."""
    last = messages[-1]
    templated = [*messages[:-1], Message(last.role, last.content + prompt.suffix)]
    if prompt.system:
        return (
            Message("system", prompt.system),
            *(message for message in templated if message.role != "system"),
        )
    return tuple(templated)


def find_files(path: Path, split: str) -> list[Path]:
    """The file, or the files of a folder (or of its only subfolder that has any) whose names start
    with `split`."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder (working directory: {Path.cwd()})")
    held = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    of_split = [file for file in held if file.name.startswith(split)]
    folders = sorted(
        {file.parent for file in of_split}, key=lambda folder: (len(folder.parts), folder)
    )
    if not folders:
        names = ", ".join(str(file.relative_to(path)) for file in held[:10]) or "none at all"
        raise FileNotFoundError(
            f"{path}: no file named {split}*.jsonl, .json or .parquet; of these there are: {names}"
        )
    if path not in folders and len(folders) > 1:
        names = ", ".join(str(folder.relative_to(path)) for folder in folders)
        raise ValueError(
            f"{path}: files named {split}* lie in several folders, name one of them: {names}"
        )
    return [file for file in of_split if file.parent == folders[0]]


def _files_of_hub(source: Hub) -> list[Path]:
    """Download the split; a name may go on to a folder of the repository, as in
    openai/gsm8k/main."""
    owner_and_name, folder = (
        "/".join(source.name.split("/")[:2]),
        "/".join(source.name.split("/")[2:]),
    )
    if not NAME.fullmatch(owner_and_name):
        raise ValueError(
            f"name={source.name}: expected a data set of the hub, owner/name or owner/name/folder"
        )
    patterns = [f"{prefix}{source.split}*{suffix}" for prefix in ("", "*/") for suffix in SUFFIXES]
    return find_files(fetch(owner_and_name, "dataset", patterns) / folder, source.split)


def read_rows(
    source: Files | Hub,
    read: Callable[[str, Row], T],
    what: str,
    looked_for: str,
    knobs: str = "prompt_field and answer_field",
) -> tuple[list[T], dict[str, list[str]]]:
    """What `read(place, row)` makes of each row of a source, and the places of those it calls
    BadRow, by reason.

    ValueError where nothing is left. Args: what: is made. looked_for: what, in which fields. knobs:
    settings that name other fields; all three for that error."""
    files = (
        find_files(Path(source.path).expanduser(), source.split)
        if isinstance(source, Files)
        else _files_of_hub(source)
    )
    made, skipped, fields = list[T](), dict[str, list[str]](), dict[str, None]()
    numbered = ((f"{file.name}:{number}", row) for file in files for number, row in _rows(file))
    for place, row in islice(numbered, source.max_tasks):
        try:
            if not isinstance(row, dict):
                raise BadRow("not a JSON object")
            fields.update(dict.fromkeys(row))
            made.append(read(place, row))
        except BadRow as reason:
            skipped.setdefault(str(reason), []).append(place)
    if not made:
        raise ValueError(
            f"{', '.join(map(str, files))}: no row can be {what} "
            f"({format_skipped(skipped) or 'no rows'}); looked for {looked_for}; "
            f"fields seen: {', '.join(fields) or 'none'}. Set {knobs}"
        )
    return made, skipped


def format_skipped(skipped: Skipped) -> str:
    """How many rows were skipped and why, with the places of the first ones."""
    return ", ".join(
        (
            f"{len(places)} {reason} "
            f"({', '.join([*places[:MAX_NAMED], *(['...'] if len(places) > MAX_NAMED else [])])})"
        )
        for reason, places in skipped.items()
    )


def _rows(file: Path) -> Iterator[tuple[int, object]]:
    """Rows of a file with their numbers, from 1, or those of their lines; lines that are no JSON
    come as their text.

    ValueError, which names the file, where it is none of its format."""
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
        # Many a file called .json holds a row in each line.
        if file.suffix == ".json" and lines.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"[":
            try:
                yield from enumerate(json.loads(file.read_text(encoding="utf-8-sig")), 1)
            except ValueError as error:
                raise ValueError(f"{file}: expected a JSON array of rows ({error})") from error
            return
        lines.seek(0)
        yield from _rows_of_lines(file, lines)


def _rows_of_lines(file: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, object]]:
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


def _task(id: str, row: Row, source: Files | Hub, prompt: PromptConfig) -> Task:
    _check_success_rate(row, source)
    try:
        problem = code_problem(row)
    except ValueError as error:
        raise BadRow(str(error)) from error
    if problem is not None:
        question, tests = problem
        return Task(
            id,
            apply_prompt_template([Message("user", question)], prompt),
            as_answer(tests),
            "code",
            _family(row),
        )
    if {"nums", "target"} <= row.keys():
        question, answer = _countdown(row["nums"], row["target"])
        return Task(
            id,
            apply_prompt_template([Message("user", question)], prompt),
            answer,
            "countdown",
            _family(row),
        )
    messages = messages_of(
        first_field(row, (source.prompt_field,) if source.prompt_field else PROMPT_FIELDS)
    )
    answer = _answer(_field(row, source.answer_field))
    return Task(id, apply_prompt_template(messages, prompt), answer, family=_family(row))


def _check_success_rate(row: Row, source: Files | Hub) -> None:
    """BadRow where the source has bounds and the row is not known to lie between them."""
    above, below = source.success_rate_above, source.success_rate_below
    if above is None and below is None:
        return
    rate = _field(row, source.success_rate_field)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise BadRow(f"no {source.success_rate_field} from 0 to 1")
    if above is not None and rate <= above:
        raise BadRow(f"solved as seldom as {above:g} or less")
    if below is not None and rate >= below:
        raise BadRow(f"solved as often as {below:g} or more")


def _countdown(numbers: object, target: object) -> tuple[str, str]:
    """Question and answer of a row as Countdown-Tasks-3to4 has it."""
    if (
        not isinstance(numbers, list)
        or not numbers
        or any(type(number) is not int for number in [*numbers, target])
    ):
        raise BadRow("nums and target that are no whole numbers")
    question = (
        f"Make {target} from the numbers {', '.join(map(str, numbers))}, with + - * / and "
        "brackets, each used exactly once. "
        "Give the expression in \\boxed{}."
    )
    return question, json.dumps({"numbers": numbers, "target": target})


def _family(row: Row) -> str:
    return next((value for value in map(row.get, FAMILY_FIELDS) if isinstance(value, str)), "")


def first_field(row: Row, names: Sequence[str]) -> object:
    """The first of the fields that is neither missing nor empty, or None; a.b is field b of field
    a."""
    return next((value for value in (_field(row, name) for name in names) if value), None)


def _field(row: Row, name: str) -> object:
    """A field; a.b is field b of field a, where no field is called a.b."""
    first, _, rest = name.partition(".")
    if name in row or not rest:
        return row.get(name)
    inner = row.get(first)
    return _field(inner, rest) if isinstance(inner, dict) else None


def messages_of(value: object, name: str = "prompt") -> list[Message]:
    """A prompt that is text, or a conversation of {role, content}. BadRow calls it by `name`."""
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


def _answer(value: object) -> str:
    """An answer as text: what follows a last '####', 142.0 as 142, [x] as x."""
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
