"""Loading of the user's functions that settings name, and the meaning of their results and
errors.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

MAX_TRACE_CHARS = 4000

_CALLERS = (
    str(Path(__file__).parent),
    str(Path(asyncio.__file__).parent),
    str(Path(importlib.__file__).parent),
    "<frozen importlib",
)
"""Start of the files of frames between this project and the user's code."""


def load_function(function: str) -> Callable[..., Any]:
    """Load the function FILE.py:NAME or PACKAGE.MODULE:NAME. Errors of its file are raised."""
    where, _, name = function.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"functions of {where}", where)
        if spec is None or spec.loader is None:
            raise ValueError(f"{where} is no Python file")
        module = importlib.util.module_from_spec(spec)
        # chz looks the module up when it reads the annotations of classes that the file defines.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return getattr(module, name)


class Graded(NamedTuple):
    """What the result of a reward function (or an agent) means."""

    kind: Literal["correct", "wrong", "scored"]
    score: float
    components: dict[str, float]
    """Named parts of the score."""


def graded(found: object, scale: Literal["unit", "raw"]) -> Graded:
    """Return grade and score of the result of a reward function (or an agent).

    A dict names the components of a reward: its entry "score" is the reward, or, without one, the
    sum of all.

    Raises:
        TypeError: The result is not a reward; the message says what was expected.
        ValueError: Its number is out of range.
    """
    if isinstance(found, Mapping):
        parts = {str(name): _number(part, "raw") for name, part in found.items()}
        if not parts:
            raise TypeError("expected a reward or named components of it, found an empty dict")
        score = parts.pop("score", None)
        total = sum(parts.values()) if score is None else score
        return Graded(*_grade(total, found, scale), parts)
    return Graded(*_grade(_number(found, scale), found, scale), {})


def _number(found: object, scale: Literal["unit", "raw"]) -> float:
    value = found
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # pyright: ignore[reportAttributeAccessIssue] # a number of numpy, torch or jax
    if not isinstance(value, numbers.Real):
        hint = ""
        if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
            hint = "; return a number instead of something that is yet to be run"
        elif isinstance(value, list | tuple) or getattr(value, "shape", ()):
            hint = "; it is called for one answer at a time"
        expected = "a bool or a number from 0 to 1" if scale == "unit" else "a finite number"
        raise TypeError(
            f"expected {expected}, found {shown(found)} of type {type(found).__name__}{hint}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, found {number}")
    return number


def reward_number(found: object) -> float:
    """Return a finite number.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite.
    """
    return _number(found, "raw")


def _grade(
    score: float, found: object, scale: Literal["unit", "raw"]
) -> tuple[Literal["correct", "wrong", "scored"], float]:
    if scale == "raw":
        return "scored", score
    if not 0 <= score <= 1:
        raise ValueError(
            f"expected a bool or a number from 0 to 1, found {shown(found)}; set "
            "rewards.scale=raw if it is the reward itself"
        )
    return "correct" if score == 1 else "wrong", score


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error from its first frame of the user's code; empty without
    one.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_CALLERS):
        frame = frame.tb_next
    if frame is None:
        return ""
    text = "".join(traceback.format_exception(type(error), error, frame)).rstrip()
    if len(text) > MAX_TRACE_CHARS:
        text = f"{text[: MAX_TRACE_CHARS // 4]}\n  ...\n{text[-3 * MAX_TRACE_CHARS // 4 :]}"
    return text


def shown(found: object) -> str:
    """Format a value for an error message, shortened."""
    text = repr(found)
    return text if len(text) <= 100 else f"{text[:100]} ..."
