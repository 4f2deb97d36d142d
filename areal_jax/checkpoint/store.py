"""Asynchronous checkpoints of a run: train state (sharded arrays) and rollout state.

A checkpoint is a folder named after its version. Orbax writes it under a temporary name and renames
it when it is complete, so a folder with the name of a version is complete. Its `files.json` has the
size and CRC-32 of every file.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from areal_jax.checkpoint.checksums import (
    CheckpointError,
    describe_damage,
    first_line,
    verify,
    write_checksums,
)
from areal_jax.checkpoint.folders import find_checkpoints, saved_versions
from areal_jax.checkpoint.recovery import Columns, deserialize, serialize

SAVE_TIMEOUT_S = 1200.0
"""Deadline of one save; also Orbax's own."""

Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct


class CheckpointStore:
    """The `keep` newest checkpoints in `folder`.

    One thread saves, waits and restores; any thread may list versions.

    It has more than 200 lines because saving, waiting, checking and restoring share one order of
    files on disk, which is easier to verify in one place.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        """Open the store; the folder is made by the first save.

        Args:
            folder: folder of the checkpoints.
            keep: number of newest checkpoints to keep.

        Raises:
            ValueError: `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError(f"expected checkpoint.keep to be at least 1, found {keep}")
        self.folder = folder.absolute()
        self.keep = keep
        # One thread of this store finishes one save at a time: it waits for Orbax, writes
        # files.json and deletes old checkpoints. `save` submits a save after it has collected the
        # previous one; `close` ends the thread.
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: tuple[str, int, Future[None]] | None = None
        logging.getLogger("absl").addFilter(_not_orbax)

    def save(self, version: int, train_state: Any, rollout: Columns) -> None:
        """Start to write a checkpoint, after the previous save has ended.

        Returns when `train_state` is copied to the host, so that it may be donated.

        Args:
            version: version of the policy.
            train_state: pytree of jax or numpy arrays.
            rollout: encoded rollout state.

        Raises:
            CheckpointError: this save cannot start; or it has started, but the previous one failed.
                Training can continue, and earlier checkpoints are not affected.
            TypeError: a leaf is no array.
        """
        arrays: dict[str, jax.Array | np.ndarray] = {}
        for name, leaf in _by_name(train_state).items():
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                raise TypeError(
                    f"train state: expected {name} to be an array, found {leaf!r}; save plain "
                    "numbers in the rollout's notes"
                )
            # numpy's arithmetic converts arrays of shape () to scalars.
            arrays[name] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
        packed = serialize(rollout)
        num_bytes = packed.nbytes + sum(array.nbytes for array in arrays.values())
        failure = self._collect(SAVE_TIMEOUT_S)
        try:
            self._start(version, {"train_state": arrays, "rollout": packed}, num_bytes)
        except CheckpointError as error:
            raise error from failure
        if failure is not None:
            raise failure

    def wait(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Wait until the current save, if there is one, is on disk.

        Raises:
            CheckpointError: the save failed, or takes longer than `timeout_s`.
        """
        failure = self._collect(timeout_s)
        if failure is not None:
            raise failure

    def close(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Wait for the current save and end the store's thread."""
        try:
            self.wait(timeout_s)
        finally:
            self._finisher.shutdown(wait=False)

    def versions(self) -> list[int]:
        """List versions with a complete checkpoint, oldest first."""
        return saved_versions(self.folder)

    def latest_version(self) -> int | None:
        """Return the newest version with a complete checkpoint, or None."""
        return max(self.versions(), default=None)

    def folder_of(self, version: int | None) -> Path:
        """Find the folder of a checkpoint.

        Args:
            version: version of the checkpoint; None for the newest.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        checkpoints = find_checkpoints(self.folder)
        candidates = [key for key in checkpoints if version in (None, key[0])]
        if not candidates:
            found = ", ".join(map(str, self.versions())) or "none"
            name = "a checkpoint" if version is None else f"checkpoint {version}"
            raise CheckpointError(
                f"expected {name} in {self.folder}, found {found}; set --run-folder to the run to "
                "resume"
            )
        return checkpoints[max(candidates)]

    def restore(self, version: int | None, abstract: Any) -> tuple[Any, Columns]:
        """Read train state and rollout state.

        Args:
            version: version of the checkpoint; None for the newest.
            abstract: pytree like the train state, of ShapeDtypeStructs (or arrays) with the
                sharding of each leaf, on any mesh. A leaf without sharding becomes a numpy array.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged or unreadable, or its leaves
                differ from `abstract`.
        """
        checkpoint = self.folder_of(version)
        expected = _by_name(abstract)
        with _reading(checkpoint):
            found = ocp.metadata(str(checkpoint)).metadata
            _check_leaves(checkpoint, expected, found["train_state"])
            target = {
                "train_state": {name: _target(leaf) for name, leaf in expected.items()},
                "rollout": np.empty(found["rollout"].shape, np.uint8),
            }
            tree = ocp.load(str(checkpoint), target)
            rollout = deserialize(tree["rollout"])
        leaves = [tree["train_state"][name] for name in expected]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), rollout

    def restore_field(self, version: int | None, field: str, abstract: Any) -> Any:
        """Read one field of the train state, and nothing else.

        Args:
            version: version of the checkpoint; None for the newest.
            field: name of the field, such as `params`.
            abstract: pytree like the field, as in `restore`.

        Raises:
            CheckpointError: as `restore`.
        """
        checkpoint = self.folder_of(version)
        expected = _by_name({field: abstract})
        with _reading(checkpoint):
            found = ocp.metadata(str(checkpoint)).metadata["train_state"]
            _check_leaves(
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

    def _start(self, version: int, tree: Mapping[str, Any], num_bytes: int) -> None:
        takes = [take for other, take in find_checkpoints(self.folder) if other == version]
        name = f"{version}.{max(takes) + 1}" if takes else str(version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._delete_remnants()
            # Checked first, because Orbax's threads hang for minutes if its folder cannot be made,
            # and because a full disk is better reported early.
            tempfile.TemporaryDirectory(dir=self.folder, prefix=".writable-").cleanup()
            free_bytes = shutil.disk_usage(self.folder).free
            if free_bytes < num_bytes:
                raise OSError(f"only {free_bytes:,} bytes are free")
            context = ocp.Context()
            # Folders are made before Orbax starts its threads, for the same reason.
            context.async_options.create_directories_asynchronously = False
            # Compression hardly shrinks weights, and would use the cores that training needs.
            context.array_options.saving.use_compression = False
            with context:
                response = ocp.save_async(str(self.folder / name), tree)
        except (OSError, ValueError) as error:  # tensorstore raises ValueError for a full disk
            raise CheckpointError(self._describe_failure(name, num_bytes, error)) from error
        self._saving = (name, num_bytes, self._finisher.submit(self._finish, name, response.result))

    def _finish(self, name: str, wait_for_orbax: Callable[[float], None]) -> None:
        wait_for_orbax(SAVE_TIMEOUT_S)
        if jax.process_index() == 0:
            write_checksums(self.folder / name)
            checkpoints = find_checkpoints(self.folder)
            newest_takes = {version: (version, take) for version, take in sorted(checkpoints)}
            kept = {newest_takes[version] for version in sorted(newest_takes)[-self.keep :]}
            for key in checkpoints.keys() - kept:
                _delete(checkpoints[key])

    def _collect(self, timeout_s: float) -> CheckpointError | None:
        """Wait for the current save, and return its error."""
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
        self._delete_remnants()
        failure = CheckpointError(self._describe_failure(name, num_bytes, error))
        failure.__cause__ = error
        return failure

    def _describe_failure(self, name: str, num_bytes: int, error: BaseException) -> str:
        intact = self.latest_version()
        earlier = (
            "There is no earlier checkpoint" if intact is None else f"Checkpoint {intact} is intact"
        )
        return (
            f"checkpoint {name} could not be written to {self.folder}, which needs {num_bytes:,} "
            f"bytes: {first_line(error)}. {earlier}. Free space or set --run-folder to another "
            "disk; training can continue meanwhile"
        )

    def _delete_remnants(self) -> None:
        """Delete remnants of killed or failed saves and deletions, while no save is running."""
        if jax.process_index() == 0:
            for path in itertools.chain(
                self.folder.glob("*.orbax-checkpoint-tmp*"), self.folder.glob("*.deleting")
            ):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Convert errors to CheckpointError.

    It reports damage only if nothing else explains the error.
    """
    is_verified = False
    try:
        is_verified = verify(checkpoint)
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Orbax reads in threads of its own and hands on whatever they raise: it and tensorstore
        # document no error types. Every error is raised again as CheckpointError.
        is_local = isinstance(error, OSError | MemoryError | jax.errors.JaxRuntimeError)
        if is_verified or (is_local and not isinstance(error, FileNotFoundError)):
            raise CheckpointError(
                f"checkpoint {checkpoint} could not be restored: {type(error).__name__}: "
                f"{first_line(error)}. There is no sign of damage, so keep it; check that this "
                "process can read it and that its devices have enough memory"
            ) from error
        raise CheckpointError(describe_damage(checkpoint, str(error))) from error


def _by_name(tree: Any) -> dict[str, Any]:
    """Return leaves by path, such as `params.layers.query`, independent of node classes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_name = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves
    }
    if len(by_name) != len(leaves):
        raise ValueError(
            "train state: expected distinct names of leaves, found duplicates; remove dots from "
            "the keys of its dicts"
        )
    return by_name


def _target(leaf: Leaf) -> jax.ShapeDtypeStruct | np.ndarray:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return np.empty(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_leaves(checkpoint: Path, expected: Mapping[str, Leaf], found: Mapping[str, Any]) -> None:
    """Raise CheckpointError if leaves are missing, unknown, or of another shape or dtype."""

    def describe(leaf: Any) -> str:
        return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"

    def format_list(texts: list[str]) -> str:
        return f"{len(texts)} ({'; '.join(texts[:3])}{'; ...' if len(texts) > 3 else ''})"

    missing = [f"{name} {describe(leaf)}" for name, leaf in expected.items() if name not in found]
    unknown = [f"{name} {describe(leaf)}" for name, leaf in found.items() if name not in expected]
    different = [
        f"{name}: expected {describe(leaf)}, found {describe(found[name])}"
        for name, leaf in expected.items()
        if name in found and describe(leaf) != describe(found[name])
    ]
    if missing or unknown or different:
        reasons = {
            "expected but not found": missing,
            "found but not expected": unknown,
            "of another shape or dtype": different,
        }
        raise CheckpointError(
            f"checkpoint {checkpoint} holds another policy or optimizer than this run; leaves "
            + ", ".join(f"{why}: {format_list(texts)}" for why, texts in reasons.items() if texts)
            + ". Set policy.path, policy.lora, trainer.optimizer, trainer.advantages and "
            "trainer.critic as at the start of the run, or set --run-folder to a new folder"
        )


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill leaves no folder that looks complete."""
    renamed = checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.deleting"))
    shutil.rmtree(renamed)


def _not_orbax(record: logging.LogRecord) -> bool:
    """Drop Orbax's log records, one per thread for each failure that the store raises once."""
    return "/orbax/" not in record.pathname
