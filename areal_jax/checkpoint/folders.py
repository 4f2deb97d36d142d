"""Find complete checkpoints by the names of their folders."""

from __future__ import annotations

import re
from pathlib import Path


def find_checkpoints(folder: Path) -> dict[tuple[int, int], Path]:
    """Find complete checkpoints in `folder`, by version and take.

    A version that is saved again (a run that stops right after it has resumed) becomes another take
    in its own folder, because a folder cannot be replaced atomically.
    """
    if not folder.is_dir():
        return {}
    names = ((re.fullmatch(r"(\d+)(?:\.(\d+))?", path.name), path) for path in folder.iterdir())
    return {(int(match[1]), int(match[2] or 0)): path for match, path in names if match}


def saved_versions(folder: Path) -> list[int]:
    """List versions with a complete checkpoint in `folder`, oldest first."""
    return sorted({version for version, _ in find_checkpoints(folder)})
