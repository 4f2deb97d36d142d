"""Compiled programs in a folder: compiled once, on any machine, and loaded where the devices are.

An executable is machine code, and jax stores it as a pickle: to load one is to run what its file
says. A folder is therefore trusted like the code itself. Only files are loaded that belong to this
user, that nobody else may write, and whose digest is in the record that the saving run wrote beside
them; a digest finds damage, not forgery by somebody who can write both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from areal_jax.errors import ConfigError
from areal_jax.json_files import read_json
from areal_jax.parallel.compilation import compile_lowered, compiler_options

PACKAGES = (
    *("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt"),
)
"""What compiles programs, where it is installed."""

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that the compiler reads."""

logger = logging.getLogger(__name__)


class ExecutableFolder:
    """Executables by what they were compiled from, by what, and for which devices.

    Several threads may compile at the same time.

    Attributes:
        num_loaded: Programs that were loaded instead of compiled.
        num_saved: Programs that were compiled and saved.
    """

    def __init__(self, path: Path):
        """
        Args:
            path: Folder; made if it does not exist.

        Raises:
            ConfigError: It is no folder, or not this user's alone to write.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--save-executables={path}: {error.strerror}") from None
        if not _is_trusted(path):
            raise ConfigError(
                f"--save-executables={path}: expected a folder that belongs to this user and that "
                "nobody else may write, because executables are run without further checks; "
                "chmod go-w it, or name another folder"
            )
        # Kernels contain the places in source files that they were traced from: a program that was
        # compiled from files elsewhere would match no other.
        jax.config.update("jax_traceback_in_locations_limit", 0)
        self._path = path
        self.num_loaded = self.num_saved = 0
        self._lock = threading.Lock()
        # Of the programs of this process, and of the last one without the program.
        self._keys, self._made_of = set[str](), dict[str, object]()

    def __call__(self, lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
        """Load a program that was saved for the same devices by the same compiler, or compile and
        save it.
        """
        made_of = describe(lowered, mesh)
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
        with self._lock:
            self._keys.add(key)
            self._made_of = {name: part for name, part in made_of.items() if name != "program"}
        compiled = self._load(key, lowered, mesh)
        if compiled is None:
            compiled = compile_lowered(lowered, mesh)
            self._save(key, compiled, made_of)
        return compiled

    def summary(self) -> str:
        """Return what a person reads when all programs are there; if none was loaded, what differs
        from those that were saved before.
        """
        text = f"executables in {self._path}: {self.num_loaded} loaded, {self.num_saved} saved"
        if self.num_loaded == 0 and (found := self._differences()):
            text += f"; those saved before have other {', '.join(found)}"
        return text

    def _differences(self) -> list[str]:
        """Return in what the most similar program of those saved before differs from this run's."""
        found = list[list[str]]()
        for path in self._path.glob("*.json"):
            if path.stem in self._keys:
                continue
            try:
                record = read_json(path)
            except ValueError as error:
                logger.warning("record of an executable not read: %s", error)
                continue
            found.append([name for name, own in self._made_of.items() if record.get(name) != own])
        return (min(found, key=len) or ["programs"]) if found else []

    def _load(
        self, key: str, lowered: jax.stages.Lowered, mesh: Mesh
    ) -> jax.stages.Compiled | None:
        """Return the saved program; None where there is none that can be loaded."""
        file, record = self._files(key)
        devices = list(mesh.devices.flat)
        if not (file.exists() and record.exists()) or not _can_run(devices):
            return None
        try:
            for each in (file, record):
                if not _is_trusted(each):
                    raise ValueError(f"{each} is not this user's alone to write")
            content = file.read_bytes()
            if hashlib.sha256(content).hexdigest() != read_json(record).get("sha256"):
                raise ValueError(f"{file} does not have the digest that {record.name} records")
            compiled = deserialize_and_load(
                content,
                lowered.in_tree,
                lowered.out_tree,
                backend=devices[0].client,
                execution_devices=devices,
            )
        # Whatever the runtime or the pickle raises: the program can be compiled.
        except Exception as error:
            logger.warning("executable not loaded, compiling instead: %s", error, exc_info=True)
            return None
        with self._lock:
            self.num_loaded += 1
        logger.info("executable loaded: %s bytes=%d", file.name, len(content))
        return compiled

    def _save(self, key: str, compiled: jax.stages.Compiled, made_of: dict[str, object]) -> None:
        file, record = self._files(key)
        try:
            content, *_ = serialize(compiled)
        # The runtime of this platform cannot, or the program closes over constants.
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            logger.warning("executable not saved: %s", error)
            return
        digest = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        _write(file, content)
        # The record comes last, so that there is no file without its digest.
        _write(record, json.dumps({**digest, **made_of}, indent=1).encode())
        with self._lock:
            self.num_saved += 1
        logger.info("executable saved: %s bytes=%d", file.name, len(content))

    def _files(self, key: str) -> tuple[Path, Path]:
        """Return the files of an executable and of its record."""
        return self._path / f"{key}.executable", self._path / f"{key}.json"


def describe(lowered: jax.stages.Lowered, mesh: Mesh) -> dict[str, object]:
    """Return what an executable depends on: program, compiler, flags and devices."""
    devices = mesh.devices.flat
    return {
        "program": fingerprint(lowered.as_text()),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "flags": {name: os.environ.get(name, "") for name in FLAGS},
        "options": compiler_options(mesh),
        "mesh": dict(mesh.shape),
        "devices": [
            [each.device_kind, each.id, each.process_index, list(_coordinates(each))]
            for each in devices
        ],
    }


def fingerprint(program: str) -> str:
    """Return the SHA-256 of a lowered program, whatever the names of its functions.

    jax lowers equal functions once or several times, by what it has traced before.
    """
    header, *parts = re.split(r"^(?=  func\.func )", program, flags=re.M)
    functions = {re.findall(r"@([\w.]+)\(", part)[0]: part for part in parts}

    @cache
    def digest(name: str) -> str:
        body = re.sub(
            r"@([\w.]+)",
            lambda found: digest(found[1]) if found[1] in functions else found[0],
            functions[name].replace(f"@{name}(", "(", 1),
        )
        return hashlib.sha256(body.encode()).hexdigest()

    return hashlib.sha256((header + digest("main")).encode()).hexdigest()


def _coordinates(device: jax.Device) -> Sequence[int]:
    """Return the place of a TPU in its slice; a GPU is known by its number."""
    return getattr(device, "coords", ()) if device.platform == "tpu" else ()


def _can_run(devices: list[jax.Device]) -> bool:
    """Return whether this process can run programs on these devices: compile-only ones run none."""
    return {*devices} <= {*jax.devices()}


def _is_trusted(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write(path: Path, content: bytes) -> None:
    """Write a file that only this user may read and write, all of it or nothing."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    partial.replace(path)
