"""Which checkpoints there are, as their folders' names tell it."""

from __future__ import annotations

import re
from pathlib import Path


def whole_checkpoints(folder: Path) -> dict[tuple[int, int], Path]:
    """Whole checkpoints under `folder` by version and take.

    A version saved again (a run stopped right after it resumed) becomes a further take beside the
    first: replacing a folder could not be atomic."""
    if not folder.is_dir():
        return {}
    names = ((re.fullmatch(r"(\d+)(?:\.(\d+))?", path.name), path) for path in folder.iterdir())
    return {(int(match[1]), int(match[2] or 0)): path for match, path in names if match}


def saved_versions(folder: Path) -> list[int]:
    """Versions with a whole checkpoint under `folder`, oldest first."""
    return sorted({version for version, _ in whole_checkpoints(folder)})
