"""Seeded generator of small repositories with a fault in one line and a test that fails."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from hashlib import blake2b
from typing import Any, NamedTuple

from areal_jax.data.code_tasks import Repository, format_tests
from areal_jax.data.exercises import Demonstration, Exercise, GeneratedExercises, make_turns
from areal_jax.data.splits import HELDOUT_SHARE, Split

NUM_HIDDEN = 6
"""Assertions that grade the repaired program."""

CORRECT_SHARE = 0.35
"""Share of demonstrations that repair the fault."""


_PROGRAMS = "[!t]*.py"
"""For the shell: the files that are no tests. So a small policy need not copy a name."""


@dataclass(frozen=True, slots=True)
class GeneratedRepository(Exercise):
    """A repository and its repair."""

    patch: str = ""
    """The repair as a unified diff."""


class GeneratedRepositories(GeneratedExercises):
    """Lazy sequence of repositories; the two splits share none."""

    def __init__(self, num_repositories: int, split: Split, seed: int = 0) -> None:
        """Store length, split and seed."""
        super().__init__(num_repositories, split, seed=seed)

    @property
    def kinds(self) -> set[str]:
        """Graders that the repositories need."""
        return {"code"}

    def _make(self, index: int) -> GeneratedRepository:
        return make_repository(index, self._split, self._seed)


class _Family(NamedTuple):
    source: str
    """The right program; NAME and K are replaced."""
    faults: tuple[tuple[str, str], ...]
    """Parts of lines, which occur once, and what is wrong there instead."""
    arguments: Callable[[random.Random], tuple[Any, ...]]


def _numbers(rng: random.Random, least: int = 1) -> list[int]:
    return [rng.randint(-20, 20) for _ in range(rng.randint(least, 6))]


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdeiou") for _ in range(rng.randint(1, 8)))


_FAMILIES = {
    "clamp": _Family(
        "def NAME(x, low, high):\n    return max(low, min(x, high))\n",
        (("max(low, min", "min(low, min"), ("min(x, high)", "max(x, high)")),
        lambda rng: (rng.randint(-30, 30), rng.randint(-15, 0), rng.randint(1, 15)),
    ),
    "add": _Family(
        "def NAME(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n"
        "    return total + K\n",
        (
            ("total += number", "total -= number"),
            ("total + K", "total - K"),
            ("total = 0", "total = 1"),
        ),
        lambda rng: (_numbers(rng),),
    ),
    "largest": _Family(
        "def NAME(numbers):\n    best = numbers[0]\n    for number in numbers:\n"
        "        if number > best:\n            best = number\n    return best\n",
        (
            ("number > best", "number < best"),
            ("best = numbers[0]", "best = 0"),
            ("return best", "return number"),
        ),
        lambda rng: (_numbers(rng),),
    ),
    "count": _Family(
        "def NAME(word):\n    found = 0\n    for letter in word:\n        if letter in 'aeiou':\n"
        "            found += 1\n    return found\n",
        (
            ("letter in 'aeiou'", "letter not in 'aeiou'"),
            ("'aeiou'", "'aeio'"),
            ("found += 1", "found = 1"),
        ),
        lambda rng: (_word(rng),),
    ),
    "multiples": _Family(
        "def NAME(n):\n    return [i for i in range(1, n + 1) if i % K == 0]\n",
        (("1, n + 1)", "1, n)"), ("== 0", "!= 0"), ("range(1,", "range(0,")),
        lambda rng: (rng.randint(1, 40),),
    ),
    "last": _Family(
        "def NAME(items, n):\n    if n == 0:\n        return []\n    return items[-n:]\n",
        (("[-n:]", "[:n]"), ("n == 0", "n == 1"), ("[-n:]", "[-n + 1:]")),
        lambda rng: (_numbers(rng), rng.randint(0, 3)),
    ),
}


def make_repository(index: int, split: Split, seed: int = 0) -> GeneratedRepository:
    """Make the repository of a number.

    Its demonstrations, with calls as tags, read the file and repair the line with the fault, or
    spoil another one, or change nothing.
    """
    names = list(_FAMILIES)
    for attempt in range(1000):
        rng = random.Random(f"{seed}/{split}/{index}/{attempt}")
        found, digest = _draft(names[index % len(names)], rng)
        if (digest % HELDOUT_SHARE == 0) == (split == "heldout"):
            return found
    raise RuntimeError(f"no repository of split {split} in 1000 attempts")


def _draft(family: str, rng: random.Random) -> tuple[GeneratedRepository, int]:
    """Return a repository and the digest of its files."""
    source, faults, arguments = _FAMILIES[family]
    name = f"{family}_{rng.randint(10, 99)}"
    constant, (old, new) = str(rng.randint(2, 9)), rng.choice(faults)
    right, wrong = (
        text.replace("NAME", name).replace("K", constant)
        for text in (source, source.replace(old, new, 1))
    )
    # Which arguments show the fault is found by trying.
    correct, faulty = _function(right, name), _function(wrong, name)
    tried = [arguments(rng) for _ in range(200)]
    shown = [each for each in tried if _result(faulty, each) != correct(*each)]
    if not shown:
        return _draft(family, rng)
    hidden = [*shown[1:3], *tried[:NUM_HIDDEN]][:NUM_HIDDEN]
    write = lambda each: f"{name}(*{each!r}) == {correct(*each)!r}"  # noqa: E731
    module = f"{name}.py"
    test = (
        f"import unittest\n\nfrom {name} import {name}\n\n\nclass Test(unittest.TestCase):\n"
        f"    def test(self):\n        self.assertEqual({name}(*{shown[0]!r}), "
        f"{correct(*shown[0])!r})\n"
    )
    asserts = "\n".join(f"assert {write(each)}" for each in hidden)
    files = {module: wrong, f"test_{name}.py": test}
    question = (
        f"A test fails: python3 -m unittest test_{name}. One line of {module} is wrong. Repair it."
    )
    repair, *spoilt = (
        _demonstrate(wrong, before.replace("K", constant), after.replace("K", constant))
        for before, after in ((new, old), *faults)
        if before.replace("K", constant) in wrong
    )
    digest = _digest(files)
    repository = GeneratedRepository(
        f"repository-{name}-{digest:08x}",
        family,
        question,
        format_tests(Repository(asserts, [name], files=files, target=module)),
        "code",
        [repair],
        [*spoilt, (*repair[:2], repair[-1])],
        correct_share=CORRECT_SHARE,
        patch=_write_patch(module, wrong, right),
    )
    return repository, digest


def _write_patch(path: str, wrong: str, right: str) -> str:
    before, after = wrong.splitlines(keepends=True), right.splitlines(keepends=True)
    return "".join(unified_diff(before, after, f"a/{path}", f"b/{path}", n=0))


def _demonstrate(text: str, before: str, after: str) -> Demonstration:
    """Read the program and replace a part of a line."""
    pattern = re.sub(r"([\[\]*.])", r"\\\1", before)
    read, replace = f"cat {_PROGRAMS}", f'sed -i "s/{pattern}/{after}/" {_PROGRAMS}'
    turns = f"<shell>{read}</shell>", text, f"<shell>{replace}</shell>", "", "Done."
    return make_turns(*turns)


def _digest(files: Mapping[str, str]) -> int:
    return int.from_bytes(blake2b(repr(files).encode(), digest_size=4).digest(), "big")


def _function(source: str, name: str) -> Callable[..., Any]:
    """Return a function of this file's own programs."""
    defined: dict[str, Any] = {}
    exec(source, defined)
    return defined[name]


def _result(function: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    try:
        return function(*arguments)
    except Exception as error:  # of a faulty program
        return repr(error)
