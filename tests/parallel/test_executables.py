"""Executables in a folder: round trips, and everything that must not be loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.errors import ConfigError
from areal_jax.parallel import executables
from areal_jax.parallel.executables import ExecutableFolder, fingerprint

pytestmark = pytest.mark.usefixtures("no_compilation_cache")

X = np.arange(16, dtype=np.float32)


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("data", "fsdp"))


def compile_sum(folder: ExecutableFolder, mesh: Mesh, scale: float = 2.0) -> jax.stages.Compiled:
    """Σ scale x² with the gradient, over a sharded x."""
    x = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    )
    run = jax.jit(jax.value_and_grad(lambda tree: (scale * tree["x"] ** 2).sum()))
    return folder(run.lower({"x": x}), mesh)


def check(program: jax.stages.Compiled, mesh: Mesh) -> None:
    placed = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    value, gradient = program({"x": jax.device_put(X, placed)})
    assert value == 2 * (X**2).sum() == 2480
    np.testing.assert_array_equal(gradient["x"], 4 * X)


def test_the_summary_says_what_differs_from_the_saved_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of(2, 2)

    def summary(devices: Mesh = mesh, scale: float = 2.0) -> str:
        folder = ExecutableFolder(tmp_path)
        compile_sum(folder, devices, scale)
        return folder.summary().removeprefix(f"executables in {tmp_path}: ")

    assert summary() == "0 loaded, 1 saved"
    assert summary() == "1 loaded, 0 saved"
    assert summary(mesh_of(4, 1)) == "0 loaded, 1 saved; those saved before have other mesh"
    assert summary(scale=3.0) == "0 loaded, 1 saved; those saved before have other programs"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    assert summary() == "0 loaded, 1 saved; those saved before have other flags"


def test_executables_are_loaded_by_another_process(tmp_path: Path) -> None:
    mesh, folder = mesh_of(2, 2), ExecutableFolder(tmp_path / "kept")
    check(compile_sum(folder, mesh), mesh)
    assert (folder.num_saved, folder.num_loaded) == (1, 0)
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax
def refuse(*_, **__):
    raise AssertionError("compiled")
jax.stages.Lowered.compile = refuse
from test_executables import ExecutableFolder, check, compile_sum, mesh_of
folder, mesh = ExecutableFolder(Path({str(tmp_path / "kept")!r})), mesh_of(2, 2)
program = compile_sum(folder, mesh)
assert (folder.num_saved, folder.num_loaded) == (0, 1)
check(program, mesh)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_another_program_mesh_flag_or_version_is_another_executable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ExecutableFolder(tmp_path)
    compile_sum(folder, mesh_of(2, 2))
    compile_sum(folder, mesh_of(2, 2), scale=3.0)
    compile_sum(folder, mesh_of(4, 1))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a_flag=true")
    compile_sum(folder, mesh_of(2, 2))
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    monkeypatch.setattr(executables, "version", lambda package: f"{package} 1")
    compile_sum(folder, mesh_of(2, 2))
    assert (folder.num_saved, folder.num_loaded) == (5, 0)


@pytest.mark.parametrize("damage", ["truncated", "no pickle", "another digest", "writable"])
def test_what_cannot_be_loaded_is_compiled_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, folder = mesh_of(2, 2), ExecutableFolder(tmp_path)
    compile_sum(folder, mesh)
    (file,), (record,) = tmp_path.glob("*.executable"), tmp_path.glob("*.json")
    content = file.read_bytes()
    if damage in ("truncated", "no pickle"):
        # With their digests, so that the runtime is asked to load them.
        content = content[: len(content) // 2] if damage == "truncated" else b"no pickle"
        digest = hashlib.sha256(content).hexdigest()
        record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": digest}))
    elif damage == "another digest":
        content = content[:-1] + bytes([content[-1] ^ 1])
    else:
        file.chmod(0o620)
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        check(compile_sum(folder, mesh), mesh)
    assert (folder.num_saved, folder.num_loaded) == (2, 0)
    assert "executable not loaded, compiling instead" in caplog.text
    # The new one replaces it.
    check(compile_sum(folder, mesh), mesh)
    assert folder.num_loaded == 1


def test_folders_that_others_may_write_are_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match="chmod go-w it, or name another folder"):
        ExecutableFolder(tmp_path)


def test_a_program_with_several_results_keeps_their_structure(tmp_path: Path) -> None:
    mesh, folder = mesh_of(1, 1), ExecutableFolder(tmp_path)
    lowered = jax.jit(lambda x, y: {"sum": x + y, "pair": (x, -y)}).lower(X, X)
    jax.tree.map(
        np.testing.assert_array_equal,
        folder(lowered, mesh)(X, jnp.asarray(X)),
        folder(lowered, mesh)(X, jnp.asarray(X)),
    )
    assert (folder.num_saved, folder.num_loaded) == (1, 1)


def test_fingerprint_ignores_names_and_copies_of_functions() -> None:
    def twice(x: jax.Array) -> jax.Array:
        return jnp.where(x > 0, x, 0) % 5 + jnp.where(x > 1, x, 0) % 5

    once = jax.jit(twice).lower(jax.ShapeDtypeStruct((4,), jnp.int32)).as_text()
    assert once.count("call @_where(") == 2
    # The function of the second call is lowered a second time, under another name.
    start = once.index("  func.func private @_where(")
    body = once[start : once.index("  func.func ", start + 1)]
    copy = body.replace("@_where(", "@_where_9(")
    head, tail = once[:start].rsplit("call @_where(", 1)
    again = f"{head}call @_where_9({tail}{copy}{once[start:]}"
    assert again != once
    assert fingerprint(again) == fingerprint(once)
    # Another computation of a function changes the program.
    assert fingerprint(
        again.replace(copy, copy.replace("select %arg0, %arg1", "select %arg0, %arg9"))
    ) != fingerprint(once)
    assert fingerprint(once.replace("dense<5>", "dense<7>")) != fingerprint(once)
