"""Run folders: new, unique, claimed, or to resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import newest_whole, saved_versions
from areal_jax.config.load import CONFIG_FILE
from areal_jax.errors import ConfigError
from areal_jax.metrics.config import METRICS
from areal_jax.run.claim import Claim, claimed, writable
from areal_jax.run.mirror import mirrored
from areal_jax.run.summary import shell_command
from areal_jax.storage import fetch_objects, shown

RUNS_FOLDER = Path("runs")


def new_folder(named: Path | None, name: str) -> Path:
    """The folder of a new run.

    Args:
        named: by the caller; None: one named after the experiment and the time.
        name: of the experiment.

    Raises:
        ConfigError: the folder holds a run, or another process has claimed it.
    """
    folder = named or RUNS_FOLDER / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    fetch_objects(shown(folder), newest_whole)
    if has_begun(folder):
        with (
            suppress(OSError),
            claimed(folder),
        ):  # FolderInUse names a process that still runs there
            pass
    _require_unused(folder)
    return folder


def folder_to_resume(named: Path | None, name: str = "*") -> Path:
    """The folder of the run to resume.

    Args:
        named: by the caller; None: the newest.
        name: of the experiment of the newest.

    Raises:
        ConfigError: there is none.
    """
    if named:
        fetch_objects(shown(named), newest_whole)
    begun = filter(has_begun, RUNS_FOLDER.glob(f"{name}-*"))
    runs = [named] if named else sorted(begun, key=lambda folder: folder.stat().st_mtime)
    runs = [folder for folder in runs if (folder / CONFIG_FILE).is_file()]
    if not runs:
        raise ConfigError(
            f"nothing to resume: expected the {CONFIG_FILE} of a run in "
            f"{shown(named or RUNS_FOLDER / f'{name}-*')}, found none; give --resume=DIR"
        )
    return runs[-1]


@contextmanager
def claimed_folder(
    run_folder: Path, *, is_named: bool, resume: bool
) -> Iterator[tuple[Path, Claim]]:
    """Make and claim a run folder, and store it where it is the copy of a URL.

    Args:
        is_named: False: a new folder gets a unique name.

    Raises:
        ConfigError: it cannot be written to, or another process has claimed it.
        NotSaved: the end of the run could not be stored.
    """
    with ExitStack() as stack:
        with writable(run_folder, "--run-folder"):
            if not resume and not is_named:
                run_folder = make_unique(run_folder)
            claim = stack.enter_context(claimed(run_folder))
        stack.enter_context(mirrored(run_folder))
        if not resume:
            _require_unused(run_folder)  # another run may have ended there since
        yield run_folder, claim


def make_unique(folder: Path) -> Path:
    """Make a new folder: `folder`, or the first of `folder-2`, `folder-3`, ... that does not
    exist.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        found = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            found.mkdir()
            return found
    raise AssertionError("counted to the end")


def resume_advice(run_folder: Path) -> str:
    """The command that resumes a run which ended early, and the version that it resumes from."""
    if not (versions := saved_versions(run_folder / CHECKPOINTS)):
        return "no checkpoint was saved, so there is nothing to resume"
    resume = shell_command("train", f"--resume={shown(run_folder)}")
    return f"{resume} resumes from the checkpoint of version {versions[-1]}"


def has_begun(folder: Path) -> bool:
    """Whether a folder has metrics or checkpoints; a failed start leaves its settings at most."""
    metrics = folder / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(
        saved_versions(folder / CHECKPOINTS)
    )


def _require_unused(folder: Path) -> None:
    if has_begun(folder):
        raise ConfigError(
            f"{shown(folder)} already holds a run; resume it with --resume={shown(folder)}, or "
            "give another --run-folder"
        )
