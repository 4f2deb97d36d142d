"""Rows are complete and valid JSON, and neither lost nor repeated over a crash."""

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from areal_jax.metrics.config import METRICS, MetricsConfig
from areal_jax.metrics.jsonl import cut, read
from areal_jax.metrics.samples import SampleWriter, TokenTexts, TrainedSample, row
from areal_jax.metrics.sinks import SAMPLES, TENSORBOARD, Sinks

PLAIN = MetricsConfig(tensorboard=False)


def strict(path: Path) -> list:
    """Read rows with a strict parser: every line complete, no NaN."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")

    def refuse(word: str):
        raise ValueError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def a_sample(number: int = 0, num_tokens: int = 6) -> TrainedSample:
    """Two prompt tokens, then tokens of versions 3, 3, 4, 4, of which version 3 is stale."""
    sampled = np.arange(num_tokens) >= 2
    versions = np.where(sampled, 3 + (np.arange(num_tokens) - 2) // 2, -1).astype(np.int32)
    return TrainedSample(
        task="t",
        group=7,
        number=number,
        tokens=np.arange(10, 10 + num_tokens, dtype=np.int32),
        loss_mask=sampled,
        behave_logp=np.where(sampled, -0.1, 0.0).astype(np.float32),
        versions=versions,
        stale=versions == 3,
        reward=-5.0,
        grade="wrong",
        stop_reason="length",
        expected="42",
    )


def decode(tokens: np.ndarray) -> str:
    return "".join(f"<{token}>" for token in tokens)


def test_rows_are_valid_json_for_any_number(tmp_path):
    sinks = Sinks(tmp_path, PLAIN)
    sinks.write(
        0,
        {
            "loss": float("nan"),
            "grad": float("inf"),
            "reward": np.float64(0.1),
            "tokens": np.float64(-0.0),
        },
    )
    sinks.close()
    (found,) = strict(tmp_path / METRICS)
    assert found.pop("time_s") > 1.7e9  # seconds since 1970
    assert found == {"version": 0, "loss": None, "grad": None, "reward": 0.1, "tokens": -0.0}


def test_rows_are_in_the_file_when_write_returns(tmp_path):
    sinks = Sinks(tmp_path, PLAIN)
    for version in range(3):
        sinks.write(version, {"x": 1.0})
        assert len(strict(tmp_path / METRICS)) == version + 1
    sinks.close()


def test_sample_row_has_all_training_data(tmp_path):
    sinks = Sinks(tmp_path, PLAIN, decode=decode)
    sinks.write_samples(5, [a_sample()])
    sinks.flush()
    (found,) = strict(tmp_path / SAMPLES)
    sinks.close()
    assert found == {
        "version": 5,
        "grade": "wrong",
        "stop_reason": "length",
        "num_versions": 2,
        "reward": -5.0,
        "task": "t",
        "group": 7,
        "number": 0,
        "num_tokens": 6,
        "num_sampled": 4,
        "num_stale": 2,
        "staleness": [0, 2, 2],  # trained at version 5 on tokens of versions 3 and 4
        "expected": "42",
        "stale": [2, 3],
        "tokens": [10, 11, 12, 13, 14, 15],
        "loss_mask": [0, 0, 1, 1, 1, 1],
        "behave_logp": [
            0.0,
            0.0,
            *[-0.100000001] * 4,
        ],  # the float32 nearest to -0.1, to nine digits
        "versions": [-1, -1, 3, 3, 4, 4],
        "text": [[-1, False, "<10><11>"], [3, True, "<12><13>"], [4, False, "<14><15>"]],
        "chars_per_token": [4] * 6,
    }


def test_logprobs_are_restored_bit_for_bit():
    rng = np.random.default_rng(0)
    logp = -np.abs(rng.integers(1, 2**31 - 1, 4000, dtype=np.int32).view(np.float32))
    logp = np.where(np.isfinite(logp), logp, np.float32(-1))
    everywhere = np.ones(4000, np.bool_)
    zeros = np.zeros(4000, np.int32)
    sample = TrainedSample(
        "t", 0, 0, zeros, everywhere, logp, zeros, ~everywhere, 0.0, "wrong", "stop"
    )
    assert np.array(row(sample, 0, None)["behave_logp"], np.float32).tobytes() == logp.tobytes()


def test_sample_without_tokens_or_decoder_is_written(tmp_path):
    sinks = Sinks(tmp_path, PLAIN, decode=decode)
    sinks.write_samples(0, [a_sample(num_tokens=0)])
    sinks.close()
    assert strict(tmp_path / SAMPLES)[0]["text"] == []
    assert "text" not in row(a_sample(), 5, None)


@pytest.mark.parametrize(
    ("pieces", "text", "chars"),
    [
        ([b"ab", b"c", b""], "abc", [2, 1, 0]),
        # An emoji of four bytes in three tokens, between whole characters.
        ([b"a", b"\xf0\x9f", b"\x98", b"\x80", "é".encode()], "a😀é", [1, 1, 0, 0, 1]),
    ],
    ids=["whole", "split"],
)
def test_each_token_has_its_characters(pieces: list[bytes], text: str, chars: list[int]):
    texts = TokenTexts(lambda tokens: b"".join(pieces[t] for t in tokens).decode(errors="replace"))
    assert texts.decode(np.arange(len(pieces), dtype=np.int32)) == (text, chars)


def test_sentencepiece_tokens_have_their_spaces():
    words = ["▁two", "▁words", "es"]

    def decode(tokens: np.ndarray) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    assert TokenTexts(decode).decode(np.arange(3, dtype=np.int32)) == ("two wordses", [3, 6, 2])


def test_text_that_is_no_join_belongs_to_its_first_token():
    texts = TokenTexts(lambda tokens: "x" * len(tokens) ** 3)
    assert texts.decode(np.arange(3, dtype=np.int32)) == ("x" * 27, [27, 0, 0])


def test_long_reference_answer_is_shortened():
    sample = replace(a_sample(), expected="7" * 10_000)
    assert row(sample, 5, None)["expected"] == "7" * 1000


def test_resumed_run_has_every_row_once(tmp_path):
    sinks = Sinks(tmp_path, PLAIN)
    for version in range(5):
        sinks.write(version, {"x": float(version)})
        sinks.write_samples(version, [a_sample(0), a_sample(1)])
    sinks.write(2, {"evaluation/pass@1": 0.5})  # an evaluation of version 2 that ended after step 4
    sinks.write(4, {"evaluation/pass@1": 0.6})
    sinks.close()
    for path in (tmp_path / METRICS, tmp_path / SAMPLES):
        path.write_bytes(path.read_bytes() + b'{"version":4,"torn')
    resumed = Sinks(tmp_path, PLAIN, resume_version=3)
    for version in range(3, 5):
        resumed.write(version, {"x": float(version)})
        resumed.write_samples(version, [a_sample(0), a_sample(1)])
    resumed.close()
    # 0, 1, 2 and the evaluation of 2 remain; 3 and 4 are of the resumed run.
    assert [found["version"] for found in strict(tmp_path / METRICS)] == [0, 1, 2, 2, 3, 4]
    assert [(found["version"], found["number"]) for found in strict(tmp_path / SAMPLES)] == [
        (v, n) for v in range(5) for n in (0, 1)
    ]


def test_cut_beyond_the_last_row_keeps_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert cut(path, 3) == 0
    path.write_text('{"version":12}\n{"version":13,"x":1}\n')
    assert cut(path, 14) == 0
    assert list(read(path)) == [{"version": 12}, {"version": 13, "x": 1}]
    assert cut(path, 13) == 1
    path.write_text('{"version":12}\n{"version":12,"x":{}')  # killed while it wrote the second
    assert cut(path, 14) == 1
    assert path.read_text() == '{"version":12}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_new_run_refuses_the_rows_of_another(tmp_path):
    sinks = Sinks(tmp_path, PLAIN)
    sinks.write(0, {"x": 1.0})
    sinks.close()
    with pytest.raises(
        FileExistsError, match=r"metrics.jsonl holds the rows of another run; set --run-folder"
    ):
        Sinks(tmp_path, PLAIN)
    Sinks(tmp_path, PLAIN, resume_version=0).close()
    assert strict(tmp_path / METRICS) == []
    (tmp_path / "samples.00000.jsonl").write_text('{"version":0}\n')
    with pytest.raises(FileExistsError, match=r"samples.00000.jsonl holds the rows of another"):
        Sinks(tmp_path, PLAIN)


def test_metric_named_version_is_refused(tmp_path):
    sinks = Sinks(tmp_path, PLAIN)
    with pytest.raises(ValueError, match="expected a row without an entry `version`"):
        sinks.write(0, {"version": 1.0})
    sinks.close()


def run_child(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    imports = """
        import errno, os, resource, signal, sys
        from pathlib import Path
        from areal_jax.metrics.config import METRICS, MetricsConfig
        from areal_jax.metrics.sinks import Sinks
        from tests.metrics.test_sinks import a_sample
        folder = Path(sys.argv[1])
        sinks = Sinks(folder, MetricsConfig(tensorboard=False))
    """
    source = textwrap.dedent(imports) + textwrap.dedent(code)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", source, str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_kill_loses_no_flushed_rows(tmp_path):
    child = run_child(
        """
        for version in range(3):
            sinks.write(version, {"x": 1.0})
            sinks.write_samples(version, [a_sample(number) for number in range(50)])
        sinks.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert [found["version"] for found in strict(tmp_path / METRICS)] == [0, 1, 2]
    assert len(strict(tmp_path / SAMPLES)) == 150


def test_full_disk_raises_and_leaves_complete_rows(tmp_path):
    child = run_child(
        """
        for version in range(1000):
            sinks.write(version, {"x": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(folder / "metrics.jsonl") + 20, resource.RLIM_INFINITY))
        try:
            sinks.write(1000, {"x": 1.0})
        except OSError as error:
            print(error.errno == errno.EFBIG, error)
        sinks.write_samples(0, [a_sample(number) for number in range(500)])
        try:
            sinks.flush()
        except OSError as error:
            print(error.errno == errno.EFBIG, error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sinks.write(1000, {"x": 1.0})
        sinks.write_samples(1, [a_sample()])
        sinks.close()
        """,
        tmp_path,
    )
    assert child.returncode == 0, child.stderr
    metrics, samples = child.stdout.splitlines()
    assert metrics == (
        "True [Errno 27] File too large, so a row of version 1000 was not written: "
        f"'{tmp_path / METRICS}'"
    )
    assert samples == (
        "True [Errno 27] File too large, so a row of version 0 was not written: "
        f"'{tmp_path / SAMPLES}'"
    )
    assert [found["version"] for found in strict(tmp_path / METRICS)] == list(range(1001))
    written = strict(tmp_path / SAMPLES)
    assert 0 < len(written) < 500
    assert written[-1]["version"] == 1


def test_writer_thread_errors_are_raised_at_the_next_call(tmp_path):
    def fail(tokens: np.ndarray) -> str:
        raise KeyError("no such token")

    writer = SampleWriter(tmp_path / "samples.jsonl", fail)
    writer.write(0, [a_sample()])
    with pytest.raises(KeyError, match="no such token"):
        writer.flush()
    writer.write(1, [a_sample()])
    deadline_s = time.monotonic() + 10
    with pytest.raises(KeyError, match="no such token"):
        while time.monotonic() < deadline_s:
            writer.write(2, [])
    writer.close()


def test_hanging_writer_times_out_its_caller(tmp_path):
    release = threading.Event()

    def hang(tokens: np.ndarray) -> str:
        release.wait(30)
        return ""

    writer = SampleWriter(tmp_path / "samples.jsonl", hang, timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"samples.jsonl: 8 batches of samples waited for 0.1 s"):
        for version in range(10):  # one is being written, eight wait
            writer.write(version, [a_sample()])
    release.set()
    while writer._queue.full():
        time.sleep(0.01)
    writer.close()


def events(path: Path) -> Iterator[Any]:
    """Records of an event file: length, its checksum, data, its checksum (the TFRecord format)."""
    data, offset = path.read_bytes(), 0
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        # protobuf makes the class when it is imported
        yield event_pb2.Event.FromString(data[offset + 12 : offset + 12 + length])  # pyright: ignore[reportAttributeAccessIssue]
        offset += length + 16


def scalars(found: list[Any]) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in found
        for value in event.summary.value
    ]


@pytest.mark.slow
def test_tensorboard_writes_finite_values_and_hides_repeated_steps(tmp_path):
    for resume_version in (None, 1):
        sinks = Sinks(tmp_path, MetricsConfig(samples=False), resume_version)
        for version in range(resume_version or 0, 3):
            sinks.write(version, {"reward": 0.5 * version, "loss": float("nan")})
        sinks.close()
        time.sleep(1.1)  # files of events are named after the second
    assert not (tmp_path / SAMPLES).exists()
    first, second = ([*events(path)] for path in sorted((tmp_path / TENSORBOARD).iterdir()))
    assert scalars(first) == [(0, "reward", 0.0), (1, "reward", 0.5), (2, "reward", 1.0)]
    assert scalars(second) == [(1, "reward", 0.5), (2, "reward", 1.0)]
    # The writer records a start at step 1: TensorBoard drops what it read before of step 1 and
    # later.
    assert [event.step for event in second if event.HasField("session_log")] == [1]


def test_tensorboard_keeps_names_and_shows_samples(tmp_path):
    sinks = Sinks(tmp_path, MetricsConfig(samples=False), decode=decode)
    sinks.write(5, {"evaluation/pass@1": 0.5})
    sinks.write_samples(5, [a_sample(number) for number in range(3)])
    sinks.close()
    (path,) = (tmp_path / TENSORBOARD).iterdir()
    found = {value.tag: value for event in events(path) for value in event.summary.value}
    assert found["evaluation/pass@1"].simple_value == 0.5
    # Three samples of four sampled tokens each, two of version 3 and two of version 4.
    staleness = found["samples/token_staleness"].histo
    assert (staleness.num, staleness.min, staleness.max, staleness.sum) == (12, 1.0, 2.0, 18.0)
    assert found["samples/sampled_tokens"].histo.sum == 12
    assert found["samples/reward"].histo.num == 3
    (shown,) = found["samples/first/text_summary"].tensor.string_val
    title, _, text = shown.decode().partition("\n\n    ")
    assert title == "task t, reward -5, wrong"
    assert text == "<10><11><12><13><14><15>"
