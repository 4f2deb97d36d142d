"""Checkpoints are restored exactly, on any mesh, despite failures during writes."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.checkpoint.checksums import CheckpointError, write_checksums
from areal_jax.checkpoint.recovery import Columns
from areal_jax.checkpoint.store import CheckpointStore


class Moments(NamedTuple):
    mu: dict
    steps: jax.Array


class State(NamedTuple):
    params: dict
    opt_state: tuple


ROLLOUT = Columns(
    {"next_group_id": 3},
    {"tokens": np.arange(5, dtype=np.int32), "none": np.zeros((0, 2), np.float32)},
)


def mesh_of(num_devices: int) -> Mesh:
    return jax.make_mesh(
        (num_devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices]
    )


def state_on(mesh: Mesh, seed: int = 0, rows: int = 8) -> State:
    """Make sharded, replicated, scalar and half-precision leaves that need a bit-exact copy."""
    rng = np.random.default_rng(seed)
    sharded, replicated = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    weight = (
        rng.integers(-(2**31), 2**31, (rows, 6), np.int64).astype(np.int32).view(np.float32)
    )  # including nan and -0.0
    params = {
        "embed": jax.device_put(weight, sharded),
        "layers": [jax.device_put(jnp.asarray(rng.normal(size=(8, 2)), jnp.bfloat16), sharded)],
    }
    return State(
        params,
        (
            Moments(
                {"embed": jax.device_put(-weight, sharded)},
                jax.device_put(np.int32(seed), replicated),
            ),
            None,
        ),
    )


def abstract_of(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same_bits(state, other):
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert (x.dtype, x.shape, np.asarray(x).tobytes()) == (
            y.dtype,
            y.shape,
            np.asarray(y).tobytes(),
        )


def assert_same_columns(columns: Columns, other: Columns):
    assert columns.facts == other.facts
    assert columns.arrays.keys() == other.arrays.keys()
    for name, array in columns.arrays.items():
        assert (array.dtype, array.shape, array.tobytes()) == (
            other.arrays[name].dtype,
            other.arrays[name].shape,
            other.arrays[name].tobytes(),
        )


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


@pytest.mark.parametrize(("saved_on", "restored_on"), [(8, 8), (1, 8), (8, 1), (8, 4)])
def test_restore_is_bit_exact_on_any_number_of_devices(store, saved_on, restored_on):
    state = state_on(mesh_of(saved_on), seed=5)
    store.save(7, state, ROLLOUT)
    store.wait()
    abstract = abstract_of(state_on(mesh_of(restored_on)))
    restored, rollout = store.restore(7, abstract)
    assert_same_bits(restored, state)
    assert_same_columns(rollout, ROLLOUT)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, abstract
    )


@pytest.mark.parametrize("restored_on", [8, 1])
def test_restore_field_reads_one_field(store, restored_on):
    state = state_on(mesh_of(8), seed=5)
    store.save(7, state, ROLLOUT)
    store.wait()
    abstract = abstract_of(state_on(mesh_of(restored_on))).params
    restored = store.restore_field(None, "params", abstract)
    assert_same_bits(restored, state.params)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, abstract
    )
    with pytest.raises(CheckpointError, match=r"expected but not found: 1 \(params\.head float64"):
        store.restore_field(7, "params", {**abstract, "head": np.zeros(2)})


@pytest.mark.slow
def test_arrays_can_be_donated_after_save_returns(store):
    # 8 leaves of 8 MiB take far longer to write than a step takes to overwrite them.
    mesh = mesh_of(8)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    for version in range(1, 4):
        values = np.full((8, 1 << 18), version, np.float32)
        state = {
            f"leaf{i}": jax.device_put(values, NamedSharding(mesh, P("fsdp") if i % 2 else P()))
            for i in range(8)
        }
        abstract = abstract_of(state)
        store.save(version, state, ROLLOUT)
        jax.block_until_ready(overwrite(state))
        store.wait()
        restored, _ = store.restore(version, abstract)
        assert all((np.asarray(leaf) == version).all() for leaf in restored.values())


def test_numpy_leaves_can_be_changed_after_save_returns(store):
    array = np.ones(1 << 20)
    store.save(1, {"x": array, "version": np.array(7, np.int32), "sum": np.array(7) + 1}, ROLLOUT)
    array[:] = 0
    store.wait()
    abstract = {"x": array, "version": jax.ShapeDtypeStruct((), np.int32), "sum": np.array(0)}
    restored, _ = store.restore(1, abstract)
    assert [type(leaf) for leaf in restored.values()] == [np.ndarray] * 3
    assert (restored["x"] == 1).all()
    assert (restored["version"].item(), restored["sum"].item()) == (7, 8)


def test_newest_are_kept_and_a_version_can_be_saved_again(store):
    assert store.latest_version() is None
    mesh = mesh_of(1)
    for seed, version in enumerate([10, 20, 30, 30]):
        store.save(version, state_on(mesh, seed), ROLLOUT)
    store.wait()
    assert store.versions() == [20, 30]
    assert store.latest_version() == 30
    assert_same_bits(store.restore(None, abstract_of(state_on(mesh)))[0], state_on(mesh, seed=3))
    assert_same_bits(store.restore(20, abstract_of(state_on(mesh)))[0], state_on(mesh, seed=1))


def test_missing_checkpoint_is_reported_with_existing_ones(store):
    abstract = abstract_of(state_on(mesh_of(1)))
    with pytest.raises(
        CheckpointError,
        match=r"expected a checkpoint in .*/checkpoints, found none; set --run-folder",
    ):
        store.restore(None, abstract)
    store.save(4, state_on(mesh_of(1)), ROLLOUT)
    store.wait()
    with pytest.raises(
        CheckpointError,
        match=r"expected checkpoint 5 in .*/checkpoints, found 4; set --run-folder",
    ):
        store.restore(5, abstract)


def test_checkpoint_of_another_policy_is_refused(store):
    mesh = mesh_of(8)
    store.save(1, state_on(mesh), ROLLOUT)
    store.wait()
    with pytest.raises(
        CheckpointError,
        match=r"params.embed: expected float32\[16, 6\], found float32\[8, 6\].* Set policy.path",
    ):
        store.restore(1, abstract_of(state_on(mesh, rows=16)))
    params, opt_state = abstract_of(state_on(mesh))
    with pytest.raises(
        CheckpointError,
        match=r"but not expected: 2 \(opt_state.0.mu.embed float32\[8, 6\]; opt_state.0.steps",
    ):
        store.restore(1, State(params, ()))
    params["bias"] = params["embed"]
    with pytest.raises(
        CheckpointError, match=r"expected but not found: 1 \(params.bias float32\[8, 6\]\)"
    ):
        store.restore(1, State(params, opt_state))
    half = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding),
        abstract_of(state_on(mesh)),
    )
    with pytest.raises(
        CheckpointError, match=r"params.embed: expected bfloat16\[8, 6\], found float32\[8, 6\]"
    ):
        store.restore(1, half)


@pytest.mark.parametrize("damage", ["cut", "flipped", "deleted"])
def test_damaged_checkpoint_names_the_file_and_others(store, damage):
    for version in (1, 2):
        store.save(version, state_on(mesh_of(1)), ROLLOUT)
    store.wait()
    largest = max(
        (path for path in (store.folder / "2").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "deleted":
        largest.unlink()
    else:
        largest.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    with pytest.raises(
        CheckpointError,
        match=rf"/2 cannot be read: .*{largest.name}.* found .* from another checkpoint \(1\)",
    ):
        store.restore(None, abstract_of(state_on(mesh_of(1))))


def test_unreadable_unverified_checkpoint_is_reported_damaged(store):
    store.save(1, state_on(mesh_of(1)), ROLLOUT)
    store.wait()
    # As after a kill between the commit and the write of files.json.
    (store.folder / "1" / "files.json").unlink()
    assert_same_bits(store.restore(1, abstract_of(state_on(mesh_of(1))))[0], state_on(mesh_of(1)))
    (store.folder / "1" / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(
        CheckpointError, match=r"/1 cannot be read: .* Delete this folder and start again"
    ):
        store.restore(1, abstract_of(state_on(mesh_of(1))))


def test_verified_checkpoint_is_never_reported_damaged(store):
    store.save(1, state_on(mesh_of(8)), ROLLOUT)
    store.wait()
    # All files match files.json, so that the missing file was never there: another release of Orbax
    # may be able to read the checkpoint.
    (store.folder / "1" / "_CHECKPOINT_METADATA").unlink()
    write_checksums(store.folder / "1")
    with pytest.raises(CheckpointError, match=r"/1 could not be restored: .*keep it") as raised:
        store.restore(1, abstract_of(state_on(mesh_of(8))))
    assert "Delete" not in str(raised.value)
    # A failing disk: reading this file raises an I/O error.
    (store.folder / "1" / "manifest.ocdbt").unlink(missing_ok=True)
    (store.folder / "1" / "manifest.ocdbt").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"/1 could not be restored: OSError: .*keep it"):
        store.restore(1, abstract_of(state_on(mesh_of(8))))


@pytest.mark.parametrize("content", ["", '{"_CHECKPOINT_METADATA": ['])
def test_broken_checksum_file_loses_no_checkpoint(store, content):
    store.save(1, state_on(mesh_of(1)), ROLLOUT)
    store.wait()
    (store.folder / "1" / "files.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"/1/files\.json cannot be read .*Delete this file alone"
    ):
        store.restore(1, abstract_of(state_on(mesh_of(1))))
    (store.folder / "1" / "files.json").unlink()
    assert_same_bits(store.restore(1, abstract_of(state_on(mesh_of(1))))[0], state_on(mesh_of(1)))


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    store = CheckpointStore(tmp_path / "file" / "checkpoints", keep=1)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint 1 could not be written to .*/file/checkpoints, which needs [\d,]+ bytes",
    ):
        store.save(1, state_on(mesh_of(1)), ROLLOUT)
    store.close()


def test_non_arrays_and_duplicate_names_are_refused(store):
    with pytest.raises(TypeError, match="expected version to be an array, found 3"):
        store.save(1, {"version": 3}, ROLLOUT)
    with pytest.raises(ValueError, match="found duplicates"):
        store.save(1, {"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, ROLLOUT)
    with pytest.raises(ValueError, match=r"checkpoint\.keep to be at least 1, found 0"):
        CheckpointStore(store.folder, keep=0)


CHILD = """
    import os, resource, signal, sys
    from pathlib import Path
    import jax, numpy as np
    from areal_jax.checkpoint.recovery import Columns
    from areal_jax.checkpoint.checksums import CheckpointError
    from areal_jax.checkpoint.store import CheckpointStore

    ROLLOUT = Columns({}, {})
    folder = Path(sys.argv[1])
    store = CheckpointStore(folder, keep=2)
    def state(version, num_floats=1 << 20):
        return {"x": jax.numpy.full(num_floats, version, jax.numpy.float32)}
    def values():
        return float(store.restore(None, state(0))[0]["x"].min()), store.versions()
"""


def run_child(code: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """Run CHILD and `code` in a process with one device; `before` may mount a file system."""
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    source = textwrap.dedent(CHILD) + textwrap.dedent(code)
    command = [*before, sys.executable, "-W", "error", "-c", source, str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("delay_s", [0.0, 0.03])
@pytest.mark.slow
def test_kill_during_save_leaves_the_previous_checkpoint(tmp_path, delay_s):
    # Writing and checksumming 256 MiB takes longer than either delay.
    child = run_child(
        f"""
        import time
        store.save(1, state(1), ROLLOUT)
        store.wait()
        big = state(2, 1 << 26)
        big["x"].block_until_ready()
        store.save(2, big, ROLLOUT)
        time.sleep({delay_s})
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert [path.name.split("-")[0] for path in tmp_path.iterdir() if path.name != "1"] == [
        "2.orbax"
    ]
    store = CheckpointStore(tmp_path, keep=1)
    assert store.latest_version() == 1
    restored, _ = store.restore(None, {"x": np.empty(1 << 20, np.float32)})
    assert (restored["x"] == 1).all()
    # The next save deletes the remnants of the killed one.
    store.save(3, {"x": np.ones(1)}, ROLLOUT)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


@pytest.mark.slow
def test_failed_write_is_reported_and_training_continues(tmp_path):
    child = run_child(
        """
        store.save(1, state(1), ROLLOUT)
        store.wait()
        # files of at most 1 MiB
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        store.save(2, state(2), ROLLOUT)
        try:
            store.wait()
        except CheckpointError as error:
            print(error)
        print(sorted(os.listdir(folder)), *values())
        store.save(3, state(3), ROLLOUT)
        store._saving[2].exception(60)  # ended, but not yet collected
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            store.save(4, state(4), ROLLOUT)
        except CheckpointError as error:
            print(error)
        store.close()
        print(*values())
        """,
        tmp_path,
    )
    assert child.returncode == 0, child.stderr
    error, after, later_error, end = child.stdout.splitlines()
    # 1 Mi floats, and the rollout state: 8 bytes with the length of its header, and the 27 bytes of
    # {"facts": {}, "layout": []}.
    assert error.startswith(
        f"checkpoint 2 could not be written to {tmp_path}, which needs {(4 << 20) + 35:,} bytes: "
    )
    assert "File too large" in error and "Checkpoint 1 is intact" in error
    assert after == "['1'] 1.0 [1]"
    assert later_error.startswith("checkpoint 3 could not be written")
    assert end == "4.0 [1, 4]"


SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
CAN_MOUNT = (
    subprocess.run([*SMALL_DISK, "mount -t tmpfs tmpfs /mnt"], capture_output=True).returncode == 0
)


@pytest.mark.skipif(not CAN_MOUNT, reason="needs a mount namespace for a disk of 10 MiB")
@pytest.mark.slow
def test_full_disk_is_reported_and_training_continues(tmp_path):
    (tmp_path / "disk").mkdir()
    script = f'mount -t tmpfs -o size=10m,nr_inodes=200 tmpfs {tmp_path}/disk && exec "$0" "$@"'
    child = run_child(
        """
        def attempt(version):
            try:
                store.save(version, state(version), ROLLOUT)
                store.wait()
            except CheckpointError as error:
                print(error)
        attempt(1)
        filler = folder.parent / "filler"
        filler.write_bytes(bytes(3 << 20))  # 4 + 3 of 10 MiB are taken
        attempt(2)
        filler.unlink()
        fillers = [folder.parent / str(number) for number in range(1000)]
        try:
            for path in fillers:
                path.touch()  # takes an inode, no space
        except OSError:
            for path in fillers[:6]:
                path.unlink()
        attempt(3)
        for path in fillers:
            path.unlink(missing_ok=True)
        attempt(4)
        print(*values(), sorted(os.listdir(folder)))
        """,
        tmp_path / "disk" / "checkpoints",
        *SMALL_DISK,
        script,
    )
    assert child.returncode == 0, child.stderr
    no_space, no_inodes, end = child.stdout.splitlines()
    assert (
        f"checkpoint 2 could not be written to {tmp_path}/disk/checkpoints, which needs "
        f"{(4 << 20) + 35:,} bytes"
    ) in no_space
    assert "bytes are free" in no_space and "Checkpoint 1 is intact" in no_space
    assert "No space left on device" in no_inodes and "Checkpoint 1 is intact" in no_inodes
    assert end == "4.0 [1, 4] ['1', '4']"
