"""Functions of the user's own, named in settings."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def load_function(function: str) -> Callable[..., Any]:
    """The function called FILE.py:NAME or PACKAGE.MODULE:NAME; whatever is wrong with its file is raised."""
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
