"""Python objects as values of settings that are text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = "python:"
"""What the text of an object without import path begins with."""


class PythonObject(str):
    """The text of a setting, with the Python object that it names.

    The text is the import path of the object, FILE.py:NAME or PACKAGE.MODULE:NAME, which other
    processes and a resumed run import. A lambda, a closure or a function of a notebook or of
    __main__ has none: its text is `python:NAME`, and a resumed run must be given it again.
    """

    object: Any

    def __new__(cls, value: Any, text: str | None = None) -> PythonObject:
        """Wrap an object.

        Args:
            value: the object.
            text: its name; None: its import path, or where it has none its own name.
        """
        name = getattr(value, "__qualname__", type(value).__qualname__)
        made = super().__new__(cls, text or _import_path(value) or f"{PREFIX}{name}")
        made.object = value
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> PythonObject:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # other processes import the object by its text

    @property
    def has_import_path(self) -> bool:
        return not self.startswith(PREFIX)


def as_text_setting(value: str | Callable[..., Any] | None, *, chzself: object = None) -> Any:
    """The value of a text setting that may also be given as a Python object: a callable becomes a
    PythonObject, all else stays.
    """
    return PythonObject(value) if callable(value) and not isinstance(value, str) else value


def is_missing(value: str | None) -> bool:
    """Whether a text names an object without import path that is not given."""
    return value is not None and value.startswith(PREFIX) and not isinstance(value, PythonObject)


def _import_path(value: Any) -> str | None:
    name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
    found = sys.modules.get(str(module))
    if found is None or found.__name__ == "__main__" or getattr(found, name, None) is not value:
        return None  # also what is defined in a function or a class
    parts = found.__name__.split(".")  # files that are loaded by path have other names
    if len(parts) > 1 and all(part.isidentifier() for part in parts):
        return f"{found.__name__}:{name}"
    file = getattr(found, "__file__", None)
    return f"{Path(file).resolve()}:{name}" if file and file.endswith(".py") else None
