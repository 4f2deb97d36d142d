"""Find complete checkpoints by the names of their folders."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from areal_jax.checkpoint.config import CHECKPOINTS

FILES = "files.json"
"""Name of the file with the checksums of a checkpoint, which is written last."""

_NAME = re.compile(r"(\d+)(?:\.(\d+))?")


def find_checkpoints(folder: Path) -> dict[tuple[int, int], Path]:
    """Find complete checkpoints in `folder`, by version and take.

    A version that is saved again (a run that stops right after it has resumed) becomes another take
    in its own folder, because a folder cannot be replaced atomically.
    """
    if not folder.is_dir():
        return {}
    named = ((_version_and_take(path.name), path) for path in folder.iterdir())
    return {which: path for which, path in named if which}


def saved_versions(folder: Path) -> list[int]:
    """List versions with a complete checkpoint in `folder`, oldest first."""
    return sorted({version for version, _ in find_checkpoints(folder)})


def newest_whole(names: Collection[str], version: int | None = None) -> set[str]:
    """Choose one checkpoint among the objects of a run folder, and all that is no checkpoint.

    A checkpoint without files.json was not uploaded completely, and is never chosen.

    Args:
        names: of the objects, relative to the run folder.
        version: of the checkpoint; None for the newest.
    """
    parts = {name: name.split("/") for name in names if name.startswith(f"{CHECKPOINTS}/")}
    whole = {
        which: found[1]
        for found in parts.values()
        if found[2:] == [FILES] and (which := _version_and_take(found[1]))
        if version in (None, which[0])
    }
    chosen = whole[max(whole)] if whole else None
    return {name for name in names if name not in parts or parts[name][1] == chosen}


def _version_and_take(name: str) -> tuple[int, int] | None:
    """Return what the name of a complete checkpoint says; None: it is none."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def without_checkpoints(names: Collection[str]) -> set[str]:
    """Choose all objects of a run folder that belong to no checkpoint."""
    return {name for name in names if not name.startswith(f"{CHECKPOINTS}/")}
