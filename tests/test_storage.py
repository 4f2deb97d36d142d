"""Local copies of what gs:// and s3:// URLs name, against emulators of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_jax.config.policy_names import named_policy
from areal_jax.data import policy_files
from areal_jax.data.benchmarks import find_benchmark
from areal_jax.data.config import Files
from areal_jax.data.sources import find_files, read_rows
from areal_jax.errors import ConfigError
from areal_jax.storage import (
    ObjectFolder,
    StorageError,
    fetch_objects,
    local_only,
    local_path,
    shown,
)


def write(url: str, **files: str) -> ObjectFolder:
    stored = ObjectFolder(url)
    for name, text in files.items():
        stored.write(name.replace("__", "/"), text.encode())
    return stored


def texts(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_paths_of_copies_name_their_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_JAX_CACHE", str(tmp_path))
    for url in ("gs://bucket", "s3://bucket/a", "gs://bucket/a b/c"):
        copy = local_path(url)
        assert copy.is_relative_to(tmp_path) and copy.name == url.rpartition("/")[2]
        assert (shown(copy), shown(copy / "x" / "y")) == (url, f"{url}/x/y")
    assert local_path("gs://bucket/a/") == local_path("gs://bucket/a")
    assert local_path("runs/a") == Path("runs/a") and shown(Path("runs/a")) == "runs/a"


def test_a_copy_equals_what_is_stored(bucket: str) -> None:
    stored = write(f"{bucket}/data", a="1", b__c="2", empty="")
    copy = fetch_objects(stored.url)
    assert texts(copy) == {"a": "1", "b/c": "2", "empty": ""}
    stored.write("a", b"one")
    stored.delete(["b/c"])
    assert texts(fetch_objects(stored.url)) == {"a": "one", "empty": ""}
    assert fetch_objects(f"{stored.url}/a").read_text() == "one"


def test_an_object_has_all_bytes_of_its_file(bucket: str, tmp_path: Path) -> None:
    stored, file = ObjectFolder(bucket), tmp_path / "file"
    for end in (b"", b"\r", b"\n", b"\r\n", b"\n\r", b"\n\n", b" ", b"\0", b"\x1a", b"\xff"):
        file.write_bytes(end + b"weights" + end)
        stored.upload(file, "uploaded")
        stored.write("written", file.read_bytes())
        assert stored.read("uploaded") == stored.read("written") == end + b"weights" + end


# The client of Amazon's store sends checksums without being asked.
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
@pytest.mark.slow
def test_an_object_that_lost_a_byte_is_an_error(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gcp_storage_emulator import server

    read, file = server._read_raw_data, tmp_path / "file"

    def lose(handler: object) -> bytes:
        return (read(handler) or b"").replace(b"weights", b"weight")

    monkeypatch.setattr(server, "_read_raw_data", lose)
    file.write_text("weights")
    stored = ObjectFolder(bucket)
    for store in (lambda: stored.upload(file, "a"), lambda: stored.write("a", b"weights")):
        with pytest.raises(StorageError, match="checksum"):
            store()


def test_only_what_changed_is_downloaded(bucket: str) -> None:
    stored = write(f"{bucket}/data", a="1", b="2")
    copy = fetch_objects(stored.url)
    times = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    stored.write("a", b"3")
    fetch_objects(stored.url)
    changed = {path.name for path in copy.iterdir() if path.stat().st_mtime_ns != times[path.name]}
    assert changed == {"a"}
    (copy / "b").write_text("edited")
    assert texts(fetch_objects(stored.url)) == {"a": "3", "b": "2"}


def test_parts_of_rows_are_joined_in_order(bucket: str) -> None:
    parts = {f"metrics.jsonl__{number:06d}": f"row {number}\n" for number in (1, 0, 11, 2)}
    # Of the ninth and the tenth file of rows after closed ones.
    parts |= {f"metrics.jsonl__{number}": f"row {number}\n" for number in (10**7, 9 * 10**6)}
    stored = write(f"{bucket}/data", **parts)
    rows = (0, 1, 2, 11, 9 * 10**6, 10**7)
    joined = "".join(f"row {number}\n" for number in rows)
    assert texts(fetch_objects(stored.url)) == {"metrics.jsonl": joined}


def test_tasks_are_read_from_object_storage(bucket: str) -> None:
    write(f"{bucket}/tasks", **{"train.jsonl": '{"question": "1+1?", "answer": "2"}\n'})
    for path in (f"{bucket}/tasks", f"{bucket}/tasks/train.jsonl"):
        (row,), _ = read_rows(Files(path=path), lambda _, row: row, "rows", "anything")
        assert row == {"question": "1+1?", "answer": "2"}
    assert find_benchmark(f"{bucket}/tasks/train.jsonl") == Files(
        path=f"{bucket}/tasks/train.jsonl"
    )
    assert find_files(fetch_objects(f"{bucket}/tasks"), "train")


def test_policies_are_read_from_object_storage(bucket: str) -> None:
    stored = ObjectFolder(f"{bucket}/policy")
    for name in ("config.json", "tokenizer.json"):
        stored.upload(policy_files.EMBEDDED / name, name)
    assert policy_files.resolve_policy_folder(stored.url) == local_path(stored.url)
    assert named_policy(stored.url, "checkpoint").settings["path"] == stored.url
    with pytest.raises(ConfigError, match="/none: expected an object or a folder, found none"):
        named_policy(f"{bucket}/none", "checkpoint")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_jax.storage.find_spec", lambda _: None)
    for url, extra in (("gs://bucket/a", "gcs"), ("s3://bucket/a", "s3")):
        with pytest.raises(ConfigError, match=rf"pip install 'areal-jax\[{extra}\]'"):
            fetch_objects(url)


@pytest.mark.parametrize("url", ["s3://key:hunter2@b/a", "gs://", "s3:///a", "gs://b/.."])
def test_wrong_urls_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(ConfigError, match="credentials belong into the environment") as refused:
        fetch_objects(url)
    assert "hunter2" not in str(refused.value)


# The emulator of Google's store does not list such names.
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
@pytest.mark.slow
def test_names_of_objects_do_not_lead_out_of_a_copy(bucket: str) -> None:
    stored = write(f"{bucket}/data", **{"a": "1", "b/../../../outside": "2"})
    outside = local_path(stored.url).parents[1] / "outside"
    with pytest.raises(StorageError, match=r"without '\.\.', found '.*data/b/\.\./"):
        fetch_objects(stored.url)
    assert not outside.exists() and not local_path(stored.url).exists()


def test_a_missing_bucket_is_one_sentence(bucket: str) -> None:
    url = bucket.replace("://bucket", "://nobucket")
    with pytest.raises(StorageError, match="check the bucket and this machine's credentials"):
        fetch_objects(f"{url}/a")


def test_urls_are_refused_where_a_path_of_this_machine_is_needed() -> None:
    with pytest.raises(ConfigError, match="expected a path on this machine"):
        local_only("gs://bucket/a")
