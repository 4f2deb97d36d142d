"""The page is made from the run's folder only, needs nothing else, and stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_runs import EVIL, RunFolder

from areal_jax.metrics import names
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.description import FILE, write_description
from areal_jax.reports.report import (
    LEARNING_CURVE,
    REPORT,
    ReportWriter,
    encode_runs,
    open_run,
    write_report,
)
from areal_jax.reports.run_report import MAX_SAMPLE_BYTES, RunReport


class Page(HTMLParser):
    """Collects tags with their attributes, the text, and the contents of scripts."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.style, self.open = "", ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.open = ""

    def handle_data(self, data):
        if self.open == "script":
            self.scripts[-1] += data
        elif self.open == "style":
            self.style += data

    def data(self) -> dict:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    run = RunFolder(tmp_path_factory.mktemp("run"))
    run.evaluate(0.1)
    run.step(30)
    run.evaluate(0.6)
    run.close()
    return run.path


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(write_report(folder, "stopped").read_text())


def test_page_refers_to_nothing_outside(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object", "base", "img")
        for name in ("src", "href", "srcset", "data", "action"):
            assert re.match("data:|#", attributes.get(name) or "#"), (tag, attributes)
    assert "url(" not in page.style and "@import" not in page.style


def test_only_the_scripts_of_the_page_may_run(page: Page) -> None:
    (policy,) = (
        attributes["content"] or ""
        for tag, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    _, *code = page.scripts
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in code]
    assert len(hashes) == 3
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    assert f"script-src {allowed};" in policy
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy


def test_text_of_the_run_adds_no_tag(page: Page) -> None:
    kinds = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    assert kinds == ["application/json", None, None, None]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    (run,) = page.data()["runs"]
    assert run["headline"] == f"policy {EVIL}"
    assert run["configuration"]["policy.path"] == EVIL
    assert EVIL in run["groups"][0]["samples"][0]["spans"][0][2]


def test_page_has_figures_counts_and_environment(page: Page, folder: Path) -> None:
    (run,) = page.data()["runs"]
    assert (run["name"], run["steps_done"], run["num_steps"]) == (folder.name, 30, 100)
    assert (run["state"], run["left_s"]) == ("stopped", None)
    assert run["command"] == shlex.join(sys.orig_argv) and run["started_s"] > 1.7e9
    assert run["environment"]["devices"] == "8 x cpu"
    assert ["pass@1, first and last", "10.0% → 60.0%"] in run["summary"]
    # Of six samples of a step one is wrong.
    assert run["samples"]["grades"] == {"wrong": 30, "correct": 150}
    assert run["samples"]["groups"] == 60
    assert run["ranges"]["trainer/entropy"][:2] == [0.5, pytest.approx(0.5 / (1 + 29 / 20))]
    assert run["metrics"]["trainer/entropy"][1:] == ["nats", "above 0.01"]


def test_health_lists_findings_first_with_value_range_and_remedy(page: Page) -> None:
    (run,) = page.data()["runs"]
    first, *rest = run["health"]
    assert {
        key: first[key] for key in ("name", "status", "value", "healthy", "first", "steps")
    } == {
        "name": "no_signal",
        "status": "finding",
        "value": "100.0%",
        "healthy": "below 95%",
        "first": 10,
        "steps": 20,
    }
    assert "rollout.samples_per_group" in first["remedy"]
    assert {check["status"] for check in rest} == {"healthy"}
    assert {check["name"]: check["value"] for check in rest}["no_gradient"] == "0.1"


def test_time_left_follows_the_pace_of_the_last_steps(tmp_path: Path) -> None:
    # 10 s a step at first, then 2 s: of 100 steps 60 are left after step 39.
    times = [10.0 * min(v, 15) + 2.0 * max(0, v - 15) for v in range(40)]
    rows = [{"version": v, "time_s": 1e9 + s, names.REWARD: 0.0} for v, s in enumerate(times)]
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_description(tmp_path, "", {"num_steps": 100}, "")
    run = json.loads(open_run(tmp_path).encode("running"))
    assert (run["state"], run["step_s"], run["left_s"]) == ("running", 2.0, 120.0)
    write_description(tmp_path, "", {"num_steps": 40}, "")
    assert json.loads(open_run(tmp_path).encode("stopped"))["state"] == "finished"


def test_page_of_a_growing_run_equals_one_made_at_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    growing = RunReport(tmp_path)
    for _ in range(12):
        run.step(5)
        growing.update()
        growing.encode("running")
    run.close()

    def encoded(report: RunReport) -> dict:
        return json.loads(report.encode("stopped")) | {"updated_s": 0}

    assert encoded(growing) == encoded(open_run(tmp_path))


def test_page_contains_a_bounded_part_of_the_samples(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.step(1500)
    run.close()
    report = open_run(tmp_path)
    encoded = report.encode("stopped")
    found = json.loads(encoded)
    groups = [group["group"] for group in found["groups"]]
    size = len(json.dumps(found["groups"], ensure_ascii=False).encode())
    assert MAX_SAMPLE_BYTES // 3 < size < 1.1 * MAX_SAMPLE_BYTES
    assert found["samples"]["groups"] == 3000 > len(groups)
    # The newest groups without a gap, and one of each of 24 parts of 128 groups.
    assert groups == sorted(set(groups))
    assert groups[-100:] == list(range(2900, 3000))
    assert {group // 128 for group in groups} == set(range(24))
    assert len(encoded.encode()) < 1_500_000


def test_minimal_run_has_a_report(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics.jsonl expected, found none; name the"):
        write_report(tmp_path, "stopped")
    (tmp_path / METRICS).write_text("")
    assert Page(write_report(tmp_path, "running").read_text()).data()["runs"][0]["ranges"] == {}
    (tmp_path / METRICS).write_text(
        '{"version":0,"time_s":1.0,"evaluation/pass@1":0.0}\n{"version":1,"tor'
    )
    (run,) = Page(write_report(tmp_path, "stopped").read_text()).data()["runs"]
    assert run["summary"] == [["pass@1, first and last", "0.0% → 0.0%"]]
    assert (tmp_path / LEARNING_CURVE).read_bytes().startswith(b"\x89PNG\r\n")
    assert not list(tmp_path.glob("*.writing"))


def test_comparison_has_every_run_with_fewer_points(folder: Path, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    other.step(600)
    other.close()
    runs = [open_run(each) for each in (folder, other.path) * 2]
    found = json.loads(encode_runs([(run, "stopped") for run in runs], live=False))
    assert [run["name"] for run in found["runs"]] == [folder.name, "other"] * 2
    (column, *_) = found["runs"][1]["frames"][0]["columns"]["trainer/entropy"]
    assert 64 < len(base64.b64decode(column)) // 4 <= 256


def test_report_is_rewritten_during_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    writer = ReportWriter(tmp_path, interval_s=0.05)

    def steps_in_page() -> int:
        path = tmp_path / REPORT
        return Page(path.read_text()).data()["runs"][0]["steps_done"] if path.exists() else 0

    for expected in (1, 2):
        run.step()
        writer.notify()
        deadline_s = time.monotonic() + 60
        while steps_in_page() != expected and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert steps_in_page() == expected
    assert Page((tmp_path / REPORT).read_text()).data()["runs"][0]["state"] == "running"
    run.close()
    writer.notify()  # what is due must not follow the last page
    writer.finish("stopped")
    writer.notify()
    writer.close()
    assert Page((tmp_path / REPORT).read_text()).data()["runs"][0]["state"] == "stopped"
    assert not any(thread.name == "report" for thread in threading.enumerate())


def test_page_of_a_run_that_fails_says_that_it_has_stopped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    writer = ReportWriter(tmp_path)
    run.step(3)
    run.close()
    writer.close()
    (found,) = Page((tmp_path / REPORT).read_text()).data()["runs"]
    assert (found["state"], found["steps_done"]) == ("stopped", 3)


def test_page_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder(tmp_path)
    run.step()
    (tmp_path / REPORT).mkdir()  # a file cannot replace it
    writer = ReportWriter(tmp_path, interval_s=0.0)
    writer.notify()
    deadline_s = time.monotonic() + 60
    while not caplog.records and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert "report not updated" in caplog.text
    with pytest.raises(OSError, match=REPORT):
        writer.finish("stopped")
    run.close()


def test_description_is_valid_json_for_any_values(tmp_path: Path) -> None:
    write_description(
        tmp_path,
        "policy",
        {"a": np.float32(1), "b": float("inf"), "c": (1, 2), "d": None},
        "1 x cpu",
    )
    found = json.loads((tmp_path / FILE).read_text())
    assert found["configuration"] == {"a": 1.0, "b": None, "c": [1, 2], "d": None}
    assert found["environment"]["devices"] == "1 x cpu"
    assert re.fullmatch(r"none|[0-9a-f]{40}(-dirty)?", found["environment"]["commit"])
