"""Reading of JSON files that other programs wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file of others holds. ValueError, which names the file, where it holds
    something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, came something else ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, came {type(found).__name__}")
    return found
