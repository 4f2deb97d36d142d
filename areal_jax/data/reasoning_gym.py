"""Puzzles of reasoning-gym (https://github.com/open-thought/reasoning-gym, extra `reasoning-gym`):
its generators as tasks, graded by their own `score_answer`.

A task holds the entry of its puzzle with its metadata, so that another process can grade it. Some
scores of the package evaluate answers as Python: they get functions that evaluate plain values.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, overload

from areal_jax.data.splits import Split, digest_of, is_in_split
from areal_jax.records import derive_seed

MAX_TRIES = 128
"""Number of puzzles that are made for one of a split; 1 of 25 million has none held out by then."""

TRIES_PER_SEED = 8
"""Number of them in one set of a generator: some sets take long to make."""

FIRST_PUZZLE_S = 300.0
"""Longest time to make the first puzzle of each generator."""

_OF_THE_SOURCE = ("seed", "size")

_PLAIN = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator),
)
"""Syntax that `evaluate_plainly` evaluates."""

_FUNCTIONS = {
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "abs", "pi"),
}
"""Words that an expression may have."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One puzzle."""

    id: str
    """Name of the generator, and digest of the question."""
    generator: str
    question: str
    answer: str
    """Empty where the generator gives none."""
    reference: str
    """JSON object with what `score_answer` needs."""


class Puzzles(Sequence[Puzzle]):
    """Lazy sequence of puzzles; the generators alternate.

    The two splits share no question, whatever their seeds; within a split questions may repeat.
    """

    def __init__(
        self, names: Sequence[str], parameters: str, num_puzzles: int, split: Split, seed: int
    ) -> None:
        """Make the first puzzle of each generator.

        Args:
            names: names of generators.
            parameters: JSON object with parameters of all of them, or of one under its name.
            num_puzzles: length of the sequence.
            split: split of the puzzles.
            seed: seed of the puzzles.

        Raises:
            ValueError: the package is missing, or a name or a parameter is unknown, or a generator
                makes no puzzle.
        """
        known = _import().factory.DATASETS
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"names: expected generators of reasoning-gym, found {', '.join(unknown)}; known "
                f"are {', '.join(sorted(known))}"
            )
        if not names:
            raise ValueError("names: expected generators of reasoning-gym, found none")
        self._names, self._count, self._seed = tuple(names), num_puzzles, seed
        self._split: Split = split
        self._parameters = _parameters_by_name(names, parameters)
        self._size = TRIES_PER_SEED * -(-num_puzzles // len(names))
        failures = list[Exception]()

        def make_first() -> None:
            try:
                _ = self[: len(names)]
            except Exception as error:  # of a generator; raised below
                failures.append(error)

        # A generator may search forever for a puzzle with impossible parameters.
        thread = threading.Thread(target=make_first, daemon=True)
        thread.start()
        thread.join(FIRST_PUZZLE_S)
        if thread.is_alive():
            raise ValueError(
                f"parameters={parameters}: {', '.join(names)} of reasoning-gym made no puzzle in "
                f"{FIRST_PUZZLE_S:g} s; expected parameters with which puzzles exist"
            )
        if failures:
            raise failures[0]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Puzzle: ...
    @overload
    def __getitem__(self, index: slice) -> list[Puzzle]: ...
    def __getitem__(self, index: int | slice) -> Puzzle | list[Puzzle]:
        selected = range(self._count)[index]
        if isinstance(selected, int):
            return self._make(selected)
        return [self._make(each) for each in selected]

    def _make(self, index: int) -> Puzzle:
        """Make puzzles until one is of the split."""
        round_, place = divmod(index, len(self._names))
        name, failure = self._names[place], None
        for attempt in range(MAX_TRIES):
            turn, block = divmod(attempt, TRIES_PER_SEED)
            seed = derive_seed(self._seed, f"{name}/{self._split}/{turn}")
            generator = _generator(name, self._parameters[name], seed, self._size)
            number = round_ + block * (self._size // TRIES_PER_SEED)
            try:
                entry = generator[number]
            except Exception as error:  # some generators fail on some seeds
                failure = error
                continue
            digest = digest_of(entry["question"])
            if is_in_split(digest, self._split):
                return Puzzle(
                    f"{name}-{digest}",
                    name,
                    entry["question"],
                    entry["answer"] or "",
                    _reference(name, self._parameters[name], entry),
                )
        raise ValueError(
            f"{name} of reasoning-gym with parameters={self._parameters[name]} made no puzzle of "
            f"split={self._split} in {MAX_TRIES} tries; expected parameters with more questions"
            + (f" (last error: {type(failure).__name__}: {failure})" if failure else "")
        )


def _parameters_by_name(names: Sequence[str], parameters: str) -> dict[str, str]:
    """Return the parameters of each generator, as JSON."""
    try:
        given = json.loads(parameters)
    except ValueError as error:
        given = error
    if not isinstance(given, dict):
        raise ValueError(
            "parameters: expected a JSON object such as "
            f'\'{{"chain_sum": {{"max_terms": 3}}}}\', found {parameters!r}'
        )
    generators = _import().factory.DATASETS
    common = {key: value for key, value in given.items() if key not in generators}
    return {name: json.dumps({**common, **given.get(name, {})}) for name in names}


@lru_cache(maxsize=256)
def _generator(name: str, parameters: str, seed: int, size: int) -> Any:
    """Make the generator of a set of puzzles.

    Raises:
        ValueError: a parameter is unknown, or has a value that the generator refuses.
    """
    package, given = _import(), json.loads(parameters)
    known = [field.name for field in fields(package.factory.DATASETS[name][1])]
    known = [field for field in known if field not in _OF_THE_SOURCE]
    if unknown := given.keys() - set(known):
        raise ValueError(
            f"parameters: {name} of reasoning-gym has no {', '.join(sorted(unknown))}; expected "
            f"{', '.join(known) or 'none'}"
        )
    if name == "composite" and isinstance(given.get("datasets"), list):
        spec = package.composite.DatasetSpec
        given["datasets"] = [
            spec(**{"weight": 1.0, "config": {}, **each}) for each in given["datasets"]
        ]
    try:
        return package.create_dataset(name, seed=seed, size=size, **given)
    except Exception as error:  # the package checks parameters by assert and by use
        raise ValueError(
            f"parameters: {name} of reasoning-gym refuses {parameters}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _reference(name: str, parameters: str, entry: Mapping[str, Any]) -> str:
    """Return what scores answers to a puzzle, as JSON.

    Raises:
        ValueError: the puzzle has metadata that JSON cannot hold.
    """
    encoded = json.loads(json.dumps(_encode(entry), default=repr))
    if _decode(encoded) != entry:
        raise ValueError(
            f"{name} of reasoning-gym with parameters={parameters} made a puzzle whose metadata "
            "cannot be sent to the grading processes; expected numbers, texts, lists and tuples"
        )
    return json.dumps(
        {
            "generator": name,
            "parameters": parameters,
            "entry": encoded,
            "answer": entry["answer"] or "",
        }
    )


def _encode(value: Any) -> Any:
    """Mark what JSON would turn into something else."""
    match value:
        case dict():
            return {"dict": [[_encode(key), _encode(each)] for key, each in value.items()]}
        case tuple():
            return {"tuple": [_encode(each) for each in value]}
        case list():
            return [_encode(each) for each in value]
        case _:
            return value


def _decode(value: Any) -> Any:
    match value:
        case {"dict": pairs}:
            return {_decode(key): _decode(each) for key, each in pairs}
        case {"tuple": items}:
            return tuple(_decode(each) for each in items)
        case list():
            return [_decode(each) for each in value]
        case _:
            return value


@lru_cache(maxsize=64)
def _puzzle_of(reference: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the generator of a puzzle, and the puzzle's entry."""
    given = json.loads(reference)
    return _generator(given["generator"], given["parameters"], 0, 1), _decode(given["entry"])


def score_answer(reference: str, answer: str) -> tuple[float, str]:
    """Score an answer as the puzzle's generator does.

    Args:
        reference: `Puzzle.reference`.
        answer: the answer without the text around it.

    Returns:
        A score from 0 to 1, and why the generator could not read the answer, if so.
    """
    generator, entry = _puzzle_of(reference)
    try:
        return float(generator.score_answer(answer, entry)), ""
    except Exception as error:  # many generators raise on texts that they cannot parse
        return 0.0, f"unreadable: {type(error).__name__}: {error}"


def load() -> None:
    """Import the package.

    Raises:
        ValueError: it is not installed.
    """
    _import()


def evaluate_plainly(source: str, *_: object) -> Any:
    """Evaluate numbers, texts, lists and arithmetic without powers; in place of `eval`.

    Raises:
        ValueError: there is anything else in it.
        SyntaxError: it is not Python.
    """
    tree = ast.parse(source.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _PLAIN) or isinstance(node, ast.Pow):
            raise ValueError(f"expected numbers, texts and lists, found {type(node).__name__}")
    return eval(compile(tree, "answer", "eval"), {"__builtins__": {}})


def parse_expression(text: str, *arguments: Any, **named: Any) -> Any:
    """Parse an expression of numbers, variables of one letter and known functions; in place of
    `sympy.parse_expr`, which evaluates any Python.

    Raises:
        ValueError: there is anything else in it.
    """
    import sympy

    words = set(re.findall(r"\b[^\W\d]\w*", text)) - _FUNCTIONS
    if unknown := sorted(word for word in words if len(word) > 1 or word == "_"):
        raise ValueError(f"expected an expression, found {', '.join(unknown)}")
    if re.search(r"[^\w\s.,+*/^()!-]|\.\s*[^\W\d]", text):
        raise ValueError("expected an expression of numbers, variables and functions")
    return sympy.parse_expr(text, *arguments, **named)


class _Sympy:
    """The module, with a parser that evaluates no other Python."""

    parse_expr = sympify = staticmethod(parse_expression)

    def __getattr__(self, name: str) -> Any:
        import sympy

        return getattr(sympy, name)


def _guard() -> None:
    """Replace what evaluates answers as Python in the modules of the package."""
    import sympy

    replaced = {
        id(sympy): _Sympy(),
        id(sympy.parse_expr): parse_expression,
        id(sympy.sympify): parse_expression,
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym":
            found = vars(module)
            found["eval"] = evaluate_plainly
            found.update(
                {key: replaced[id(each)] for key, each in found.items() if id(each) in replaced}
            )


@cache
def _import() -> ModuleType:
    """Import the package, and replace what evaluates answers."""
    try:
        with warnings.catch_warnings():
            # Of libraries that it imports, where they are compiled for the first time.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym  # pyright: ignore[reportMissingImports]
            import reasoning_gym.factory  # pyright: ignore[reportMissingImports]

        _guard()
    except ImportError as error:
        raise ValueError(
            f"ReasoningGym needs the package reasoning-gym ({error}); install it with "
            'pip install "areal-jax[reasoning-gym]"'
        ) from error
    return reasoning_gym
