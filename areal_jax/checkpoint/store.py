"""Checkpoints of a run: train state (sharded arrays) and rollout state, written while training goes
on.

A checkpoint is one folder, named after its version. Orbax writes it under a temporary name and
renames it when all of it is there, so a folder with a version's name is whole. Beside the data lies
`files.json`: size and CRC-32 of every file.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from areal_jax.checkpoint.folders import saved_versions, whole_checkpoints
from areal_jax.checkpoint.recovery import Columns, pack, unpack

SAVE_TIMEOUT_S = 1200.0
"""Orbax's own deadline for one save, too."""

FILES = "files.json"

Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what to
    change."""


class CheckpointStore:
    """The `keep` newest checkpoints under `folder`. One thread saves, waits and restores; any may
    look up versions."""

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, got checkpoint.keep={keep}")
        self.folder = folder.absolute()
        self.keep = keep
        # One thread, owned by this store, that finishes one save at a time: it waits for orbax,
        # writes files.json and deletes old checkpoints. `save` puts a save in after it has taken
        # the one before out; it ends after its last save.
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: tuple[str, int, Future[None]] | None = None
        logging.getLogger("absl").addFilter(_not_orbax)

    def save(self, version: int, train_state: Any, rollout: Columns) -> None:
        """Begin to write a checkpoint; return once all of `train_state` is copied to the host, so
        that it may be donated.

        `train_state` is a pytree of jax or numpy arrays. A save that is still under way is waited
        for first. CheckpointError where this one cannot begin, or, after it has begun, where the
        save before it failed; training may go on either way, and no earlier checkpoint is
        touched."""
        arrays: dict[str, jax.Array | np.ndarray] = {}
        for name, leaf in _by_name(train_state).items():
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                raise TypeError(
                    f"{name} of the train state must be an array, it is {leaf!r}; plain "
                    "numbers "
                    "belong into the notes"
                )
            # numpy turns arrays without axes into numbers whenever it computes with them.
            arrays[name] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
        packed = pack(rollout)
        num_bytes = packed.nbytes + sum(array.nbytes for array in arrays.values())
        failure = self._collect(SAVE_TIMEOUT_S)
        try:
            self._begin(version, {"train_state": arrays, "rollout": packed}, num_bytes)
        except CheckpointError as error:
            raise error from failure
        if failure is not None:
            raise failure

    def wait(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Wait until the save under way is on disk, if there is one. CheckpointError where it
        failed or takes longer."""
        failure = self._collect(timeout_s)
        if failure is not None:
            raise failure

    def close(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Wait for the save under way and end the store's thread."""
        try:
            self.wait(timeout_s)
        finally:
            self._finisher.shutdown(wait=False)

    def versions(self) -> list[int]:
        """Versions with a whole checkpoint, oldest first."""
        return saved_versions(self.folder)

    def latest_version(self) -> int | None:
        """The newest version with a whole checkpoint; None where there is none."""
        return max(self.versions(), default=None)

    def folder_of(self, version: int | None) -> Path:
        """Where the checkpoint of `version` lies, None being the newest. CheckpointError where
        there is none."""
        checkpoints = whole_checkpoints(self.folder)
        wanted = [key for key in checkpoints if version in (None, key[0])]
        if not wanted:
            found = ", ".join(map(str, self.versions())) or "none"
            name = "a checkpoint" if version is None else f"checkpoint {version}"
            raise CheckpointError(
                f"{name} was expected in {self.folder}, found {found}; name the folder of the "
                "run to go on with"
            )
        return checkpoints[max(wanted)]

    def restore(self, version: int | None, abstract: Any) -> tuple[Any, Columns]:
        """Train state and rollout state of `version`, None being the newest.

        Args: abstract: pytree like the train state, of ShapeDtypeStructs (or arrays) that say where
            each leaf shall lie: any mesh, not only the one it was saved from. A leaf without
            sharding becomes a numpy array. CheckpointError where there is no such checkpoint, where
            it is damaged or cannot be brought there, or where it holds other leaves than asked."""
        checkpoint = self.folder_of(version)
        expected = _by_name(abstract)
        with _read(checkpoint):
            found = ocp.metadata(str(checkpoint)).metadata
            _require_same(checkpoint, expected, found["train_state"])
            target = {
                "train_state": {name: _target(leaf) for name, leaf in expected.items()},
                "rollout": np.empty(found["rollout"].shape, np.uint8),
            }
            tree = ocp.load(str(checkpoint), target)
            rollout = unpack(tree["rollout"])
        leaves = [tree["train_state"][name] for name in expected]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), rollout

    def restore_field(self, version: int | None, field: str, abstract: Any) -> Any:
        """One field of the train state, such as `params`, of `version`, None being the newest;
        nothing else is read.

        Args: abstract: pytree like the field, as for `restore`. CheckpointError where `restore`
            raises one."""
        checkpoint = self.folder_of(version)
        expected = _by_name({field: abstract})
        with _read(checkpoint):
            found = ocp.metadata(str(checkpoint)).metadata["train_state"]
            _require_same(
                checkpoint,
                expected,
                {name: leaf for name, leaf in found.items() if name.startswith(f"{field}.")},
            )
            context = ocp.Context()
            context.pytree_options.loading.partial_load = True
            with context:
                target = {"train_state": {name: _target(leaf) for name, leaf in expected.items()}}
                leaves = ocp.load(str(checkpoint), target)["train_state"]
        return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in expected])

    def _begin(self, version: int, tree: Mapping[str, Any], num_bytes: int) -> None:
        takes = [take for other, take in whole_checkpoints(self.folder) if other == version]
        name = f"{version}.{max(takes) + 1}" if takes else str(version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            # Orbax's threads would hang for minutes where its folder cannot be made; and a full
            # disk is better told at once.
            tempfile.TemporaryDirectory(dir=self.folder, prefix=".writable-").cleanup()
            free_bytes = shutil.disk_usage(self.folder).free
            if free_bytes < num_bytes:
                raise OSError(f"only {free_bytes:,} bytes are free")
            context = ocp.Context()
            # Made before orbax starts its threads, for the reason above.
            context.async_options.create_directories_asynchronously = False
            # Weights hardly shrink, and compressing them would take the cores that training needs.
            context.array_options.saving.use_compression = False
            with context:
                response = ocp.save_async(str(self.folder / name), tree)
        except (OSError, ValueError) as error:  # tensorstore tells a full disk as a ValueError
            raise CheckpointError(self._not_written(name, num_bytes, error)) from error
        self._saving = (name, num_bytes, self._finisher.submit(self._finish, name, response.result))

    def _finish(self, name: str, wait_for_orbax: Callable[[float], None]) -> None:
        wait_for_orbax(SAVE_TIMEOUT_S)
        if jax.process_index() == 0:
            _write_sums(self.folder / name)
            checkpoints = whole_checkpoints(self.folder)
            newest_takes = {version: (version, take) for version, take in sorted(checkpoints)}
            kept = {newest_takes[version] for version in sorted(newest_takes)[-self.keep :]}
            for key in checkpoints.keys() - kept:
                _delete(checkpoints[key])

    def _collect(self, timeout_s: float) -> CheckpointError | None:
        """Wait for the save under way; what became of it."""
        if self._saving is None:
            return None
        name, num_bytes, future = self._saving
        try:
            error = future.exception(timeout_s)
        except TimeoutError as late:
            raise CheckpointError(
                f"checkpoint {name} is still being written to {self.folder} after {timeout_s:g} s"
            ) from late
        self._saving = None
        if error is None:
            return None
        self._sweep()
        failure = CheckpointError(self._not_written(name, num_bytes, error))
        failure.__cause__ = error
        return failure

    def _not_written(self, name: str, num_bytes: int, error: BaseException) -> str:
        intact = self.latest_version()
        return (
            (
                f"checkpoint {name} could not be written to {self.folder}, which needs "
                f"{num_bytes:,} "
                f"bytes: {_first_line(error)}. "
            )
            + (
                "There is no earlier checkpoint. "
                if intact is None
                else f"Checkpoint {intact} is intact. "
            )
            + "Free space or set --run-folder to another disk; training can go on meanwhile"
        )

    def _sweep(self) -> None:
        """Delete what killed or failed saves and deletions have left behind. Called while this
        process saves nothing."""
        if jax.process_index() == 0:
            for path in itertools.chain(
                self.folder.glob("*.orbax-checkpoint-tmp*"), self.folder.glob("*.deleting")
            ):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _read(checkpoint: Path) -> Iterator[None]:
    """What fails inside is a CheckpointError, which calls the checkpoint damaged only where nothing
    else explains it."""
    is_whole = False
    try:
        is_whole = _verify(checkpoint)
        yield
    except CheckpointError:
        raise
    except (
        Exception
    ) as error:  # Orbax and tensorstore promise no types of error, Exception itself is among them.
        of_this_machine = isinstance(error, OSError | MemoryError | jax.errors.JaxRuntimeError)
        if is_whole or (of_this_machine and not isinstance(error, FileNotFoundError)):
            raise CheckpointError(
                f"checkpoint {checkpoint} could not be restored: {type(error).__name__}: "
                f"{_first_line(error)}. Nothing "
                "says that it is damaged, so keep it; see whether this process may read it and "
                "its devices have the memory"
            ) from error
        raise CheckpointError(_damaged(checkpoint, str(error))) from error


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by their path, such as `params.layers.query`: what is stored knows nothing of the
    classes of the tree's nodes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError(
            "two leaves of the train state bear the same name; keys of its dicts must not "
            "contain dots"
        )
    return named


def _target(leaf: Leaf) -> jax.ShapeDtypeStruct | np.ndarray:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return np.empty(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _require_same(checkpoint: Path, expected: Mapping[str, Leaf], found: Mapping[str, Any]) -> None:
    """Raise CheckpointError that tells the leaves which only one side has, or which differ in shape
    or dtype."""

    def shape(leaf: Any) -> str:
        return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"

    def listing(texts: list[str]) -> str:
        return f"{len(texts)} ({'; '.join(texts[:3])}{'; ...' if len(texts) > 3 else ''})"

    missing = [f"{name} {shape(leaf)}" for name, leaf in expected.items() if name not in found]
    unknown = [f"{name} {shape(leaf)}" for name, leaf in found.items() if name not in expected]
    other = [
        f"{name}: expected {shape(leaf)}, found {shape(found[name])}"
        for name, leaf in expected.items()
        if name in found and shape(leaf) != shape(found[name])
    ]
    if missing or unknown or other:
        reported = {
            "expected but not found": missing,
            "found but not expected": unknown,
            "of another shape or dtype": other,
        }
        raise CheckpointError(
            f"checkpoint {checkpoint} holds another policy or optimizer than this run; leaves "
            + ", ".join(f"{what}: {listing(texts)}" for what, texts in reported.items() if texts)
            + ". Set policy.path, policy.lora, trainer.optimizer, trainer.advantages and "
            "trainer.critic to what the run was "
            "started with, or set --run-folder to a new folder"
        )


def _sums(checkpoint: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file of a checkpoint, by its path within."""
    sums: dict[str, list[int]] = {}
    for path in sorted(
        path for path in checkpoint.rglob("*") if path.is_file() and path.name != FILES
    ):
        crc = 0
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                crc = zlib.crc32(block, crc)
        sums[path.relative_to(checkpoint).as_posix()] = [path.stat().st_size, crc]
    return sums


def _write_sums(checkpoint: Path) -> None:
    text, unfinished = json.dumps(_sums(checkpoint), indent=1), checkpoint / f"{FILES}.writing"
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        # A machine that fails could else leave the new name to an empty file.
        os.fsync(file.fileno())
    unfinished.replace(checkpoint / FILES)


def _verify(checkpoint: Path) -> bool:
    """Whether all files are as they were written. Damaged weights would train on without a word:
    CheckpointError.

    A run killed between the commit of a checkpoint and the writing of its files.json leaves none:
    then there is nothing to compare with, and nobody knows."""
    if not (checkpoint / FILES).is_file():
        return False
    try:
        expected: dict[str, list[int]] = json.loads((checkpoint / FILES).read_bytes())
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint / FILES} cannot be read ({error}), so that nothing tells whether the "
            "checkpoint is as it was "
            "written. Delete this file alone to resume from the checkpoint nevertheless"
        ) from error
    found = _sums(checkpoint)
    for name, (num_bytes, crc) in expected.items():
        if name not in found:
            raise CheckpointError(
                _damaged(checkpoint, f"{name} expected, {num_bytes:,} bytes, found none")
            )
        if found[name] != [num_bytes, crc]:
            came = f"{found[name][0]:,} bytes with CRC-32 {found[name][1]:08x}"
            raise CheckpointError(
                _damaged(
                    checkpoint,
                    f"{name}: {num_bytes:,} bytes with CRC-32 {crc:08x} expected, found {came}",
                )
            )
    return True


def _damaged(checkpoint: Path, what: str) -> str:
    others = [
        path.name
        for _, path in sorted(whole_checkpoints(checkpoint.parent).items())
        if path != checkpoint
    ]
    return (
        f"checkpoint {checkpoint} cannot be read: "
        f"{what.splitlines()[0] if what else 'unknown cause'}. Delete this folder "
    ) + (
        f"to resume from another (there: {', '.join(others)})"
        if others
        else "and begin anew: there is no other"
    )


def _delete(checkpoint: Path) -> None:
    """Renamed first, so that a kill in between leaves no folder that looks whole."""
    doomed = checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.deleting"))
    shutil.rmtree(doomed)


def _first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0].removesuffix(".")


def _not_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs what fails in each of its threads, with a trace; the store raises it once, with
    what to do about it."""
    return "/orbax/" not in record.pathname
