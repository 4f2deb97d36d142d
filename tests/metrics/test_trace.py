"""Traces are readable after any end of a run, and spans of a row never cross."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.metrics.trace import LANES, Trace, read


def spans(events: list[dict]) -> list[dict]:
    return [event for event in events if event["ph"] == "X"]


def rows(events: list[dict]) -> dict[int, str]:
    """Return the names of the rows by number."""
    return {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }


def assert_none_across(events: list[dict]) -> None:
    """On each row, any two spans are disjoint or nested."""
    by_row: dict[int, list[tuple[float, float]]] = {}
    for span in spans(events):
        by_row.setdefault(span["tid"], []).append((span["ts"], span["ts"] + span["dur"]))
    for placed in by_row.values():
        for i, (start, end) in enumerate(placed):
            for other_start, other_end in placed[:i]:
                apart = end <= other_start or other_end <= start
                assert (
                    apart
                    or (start <= other_start and other_end <= end)
                    or (other_start <= start and end <= other_end)
                )


def test_span_is_on_its_lane_in_microseconds(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    trace.span("trainer", "step", 1.5, 1.75, {"version": np.int32(3), "loss": float("nan")})
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    (span,) = spans(events)
    assert (span["ts"], span["dur"], span["name"]) == (1_500_000, 250_000, "step")
    assert span["args"] == {"version": 3, "loss": None}
    assert rows(events)[span["tid"]] == "trainer"
    order = {
        event["tid"]: event["args"]["sort_index"]
        for event in events
        if event["name"] == "thread_sort_index"
    }
    assert [rows(events)[number] for number in sorted(order, key=order.__getitem__)] == list(LANES)


def test_every_prefix_of_a_trace_can_be_read(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    for number in range(3):
        trace.span("trainer", f"step {number}", float(number), float(number + 1))
    trace.close()
    whole = (tmp_path / "trace.json").read_bytes()
    torn = tmp_path / "torn.json"
    counts = []
    for num_bytes in [*range(0, len(whole) - 400, 17), *range(len(whole) - 400, len(whole) + 1)]:
        torn.write_bytes(whole[:num_bytes])
        counts.append(len(spans(read(torn))))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}


@pytest.mark.parametrize("num_bytes", [0, 1, -1, -3, -30, None])
def test_existing_trace_is_continued_as_another_process(tmp_path, num_bytes):
    path = tmp_path / "trace.json"
    first = Trace(path)
    first.span("trainer", "before", 0.0, 1.0)
    first.close()
    path.write_bytes(path.read_bytes()[:num_bytes])
    before = read(path)
    second = Trace(path)
    second.span("trainer", "after", 2.0, 3.0)
    second.close()
    events = json.loads(path.read_text())
    assert events[: len(before)] == before
    assert [(span["name"], span["pid"]) for span in spans(events[len(before) :])] == [
        ("after", 2 if before else 1)
    ]


def test_trace_of_a_killed_run_is_an_unterminated_json_array(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from areal_jax.metrics.trace import Trace
        trace = Trace(Path(sys.argv[1]))
        for number in range(1000):
            trace.span("weight channel", "publish", number, number + 0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    path = tmp_path / "trace.json"
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], env=env, timeout=60
    )
    assert child.returncode == -signal.SIGKILL
    assert len(spans(json.loads(path.read_text() + "]"))) == 1000


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 30).map(float), st.integers(0, 10).map(float)), max_size=40)
)
def test_spans_of_one_row_are_disjoint_or_nested(tmp_path_factory, sampled):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace = Trace(path)
    for start, length in sampled:
        trace.span("rewards", "grader", start, start + length)
    trace.close()
    events = read(path)
    assert len(spans(events)) == len(sampled)
    assert_none_across(events)


def test_nested_spans_share_a_row_and_overlapping_ones_do_not(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    for start in (0.0, 10.0):
        trace.span("trainer", "proximal", start, start + 2)
        trace.span("trainer", "update", start + 2, start + 8)
        trace.span("trainer", "step", start, start + 8)
    trace.span("rewards", "a", 0.0, 5.0)
    trace.span("rewards", "b", 4.0, 6.0)
    trace.span("rewards", "c", 5.0, 7.0)
    trace.close()
    events = read(tmp_path / "trace.json")
    names = rows(events)
    assert [names[span["tid"]] for span in spans(events)] == ["trainer"] * 6 + [
        "rewards",
        "rewards 2",
        "rewards",
    ]


def test_late_old_span_takes_another_row(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    for number in range(300):  # more than a row remembers
        trace.span("trainer", "step", 10.0 * number, 10.0 * number + 8)
    trace.span("trainer", "late", 5.0, 4000.0)  # across the first, around all others
    trace.close()
    assert_none_across(read(tmp_path / "trace.json"))


def test_threads_may_add_spans_concurrently(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    starts = np.random.default_rng(0).uniform(0, 50, 800).tolist()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda start: trace.span("rewards", "grader", start, start + 1), starts))
    finally:
        sys.setswitchinterval(interval_s)
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert len(spans(events)) == 800
    names = list(rows(events).values())
    assert len(set(names)) == len(names)
    assert_none_across(events)


def test_trace_without_a_file_drops_its_spans(tmp_path):
    trace = Trace(None)
    trace.span("trainer", "step", 0.0, 1.0)
    trace.close()
    assert not list(tmp_path.iterdir())


def test_full_disk_stops_the_trace_not_the_run(tmp_path):
    code = """
        import logging, resource, sys
        from pathlib import Path
        from areal_jax.metrics.trace import Trace
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        trace = Trace(Path(sys.argv[1]))
        for number in range(1000):
            trace.span("trainer", "step", number, number + 1)
        trace.close()
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    path = tmp_path / "trace.json"
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    (reported,) = child.stdout.splitlines()
    assert reported == f"trace stopped: cannot write {path}: [Errno 27] File too large"
    assert 10 < len(spans(read(path))) < 1000
