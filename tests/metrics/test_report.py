"""The report is made from the run's folder only, and is self-contained."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from areal_jax.metrics import names
from areal_jax.metrics.config import METRICS, MetricsConfig
from areal_jax.metrics.description import FILE, write_description
from areal_jax.metrics.report import (
    LEARNING_CURVE,
    Series,
    collect,
    plot,
    summarize,
    survey,
    write_report,
)
from areal_jax.metrics.samples import TrainedSample
from areal_jax.metrics.sinks import SAMPLES, Sinks

EVIL = (
    "</pre><script>alert('https://evil.example/x')</script><img src=http://evil.example/y "
    "onerror=alert(1)>&amp;"
)


def a_sample(grade: str, num_versions: int, reward: float = 1.0) -> TrainedSample:
    versions = np.array([-1, *range(10, 10 + num_versions)], np.int32)
    sampled = versions >= 0
    logp = np.zeros(len(versions), np.float32)
    stale = versions == 10
    return TrainedSample(
        EVIL, 0, 0, versions, sampled, logp, versions, stale, reward, grade, "stop"
    )


def a_run(folder: Path, decode=lambda tokens: f"{EVIL} {tokens.tolist()}") -> Path:
    sinks = Sinks(folder, MetricsConfig(tensorboard=False), decode=decode)
    write_description(
        folder, f"policy {EVIL}", {"policy.path": EVIL, "trainer.epsilon": 0.2}, "8 x cpu"
    )
    for version in range(30):
        sinks.write(
            version,
            {names.REWARD: version / 10, "loss": float("nan") if version == 3 else 0.5, EVIL: 1.0},
        )
        sinks.write_samples(
            version,
            [a_sample("correct", 1 + version % 3), a_sample("wrong", 1, reward=float("nan"))],
        )
    sinks.write(0, {names.PASS_AT_1: 0.1, names.PASS_AT_1_ERROR: 0.02})
    sinks.write(30, {names.PASS_AT_1: 0.6, names.PASS_AT_1_ERROR: 0.03})
    sinks.close()
    return folder


class Page(HTMLParser):
    """Collects tags with their attributes, and the text between."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    folder = a_run(tmp_path_factory.mktemp("run"))
    return Page(write_report(folder).read_text())


def test_report_is_self_contained(page):
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "base", "a")
        for name in ("src", "href", "srcset", "data", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    style = "".join(page.text) + "".join(
        str(attributes.get("style")) for _, attributes in page.tags
    )
    assert "url(" not in style and "@import" not in style


def test_generated_text_is_escaped(page):
    assert {tag for tag, _ in page.tags} <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "h1",
            "h2",
            "div",
            "b",
            "span",
            "img",
            "table",
            "tr",
            "th",
            "td",
        ),
        *("p", "pre", "code", "details", "summary"),
    }
    assert [tag for tag, _ in page.tags].count("img") == 1
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    text = "".join(page.text)
    assert f"{EVIL} [-1]" in text  # the prompt
    assert f"policy {EVIL}" in text
    assert f"policy.path={EVIL}" in text


def test_tokens_are_coloured_by_version_and_stale_ones_marked(page):
    sampled = [
        attributes
        for tag, attributes in page.tags
        if tag == "span" and (attributes.get("class") or "").startswith("sampled")
    ]
    # Shown are two samples of each grade: correct ones of three versions, wrong ones of one, the
    # first version stale.
    assert [attributes["title"] for attributes in sampled[:3]] == [
        "version 10, too old to be trained on",
        "version 11",
        "version 12",
    ]
    assert len(sampled) == 3 + 3 + 1 + 1
    assert len({attributes["style"] for attributes in sampled}) == 3
    assert [attributes["class"] for attributes in sampled[:2]] == ["sampled stale", "sampled"]


def test_report_contains_numbers_counts_and_environment(page):
    text = "".join(page.text)
    words = re.sub(r"\s+", " ", " ".join(page.text))
    # First tenth of 0.0, 0.1 ... 2.9: mean of 0, 0.1, 0.2; the last of 2.7, 2.8, 2.9.
    assert "0.1 → 2.8" in text and "10.0% → 60.0%" in text
    assert "correct 30 50.0%" in words and "wrong 30 50.0%" in words
    assert "devices 8 x cpu" in words
    assert "trainer.epsilon=0.2" in text
    assert "reward None" in words  # a nan is not shown as a number


def test_picture_is_a_png_next_to_and_in_the_page(tmp_path):
    report = write_report(a_run(tmp_path))
    picture = (tmp_path / LEARNING_CURVE).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    (image,) = (attributes for tag, attributes in Page(report.read_text()).tags if tag == "img")
    assert (image["src"] or "").startswith("data:image/png;base64,iVBORw0KGgo")
    assert not list(tmp_path.glob("*.writing"))


def test_minimal_run_has_a_report(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"metrics.jsonl expected, found none; name the folder"
    ):
        write_report(tmp_path)
    (tmp_path / METRICS).write_text("")
    assert "not measured" not in write_report(tmp_path).read_text()
    (tmp_path / METRICS).write_text(
        '{"version":0,"time_s":1.0,"evaluation/pass@1":0.0}\n{"version":1,"tor'
    )
    assert "0.0%" in write_report(tmp_path).read_text()


def test_samples_without_text_show_their_tokens(tmp_path):
    report = write_report(a_run(tmp_path, decode=None))
    assert "-1 10 11 12" in report.read_text()


def test_rows_of_one_version_are_joined_and_nan_is_omitted():
    rows = [
        {"version": 0, "time_s": 5.0, "a": 1.0},
        {"version": 1, "a": None},
        {"version": 2, "a": 3.0},
        {"version": 0, "b": 7.0},
    ]
    assert collect(rows) == {"a": Series([0, 2], [1.0, 3.0]), "b": Series([0], [7.0])}
    assert summarize({}) == []


def test_supervised_run_is_summarised_by_its_loss():
    loss = Series([0, 1, 2], [3.0, 2.0, 1.0])
    assert summarize({names.LOSS: loss}) == [
        ("steps", "3"),
        ("loss, first and last tenth", "3 → 1"),
    ]
    reward = Series([0, 1], [-5.0, 5.0])
    assert summarize({names.LOSS: loss, names.REWARD: reward})[1] == (
        "reward, first and last tenth",
        "-5 → 5",
    )
    perplexity = Series([0, 2], [52_340.0, 103.5])
    assert summarize({names.LOSS: loss, names.PERPLEXITY: perplexity})[2] == (
        "perplexity, first and last",
        "5.234e+04 → 103.5",
    )


@pytest.mark.parametrize(
    "values", [[52_340.0, 135.0, 103.5], [1.9, 1.91, 1.9], [3.0]], ids=["steep", "flat", "one"]
)
@pytest.mark.parametrize(
    "also", [{}, {names.PASS_AT_1: Series([0], [0.5])}], ids=["alone", "with pass@1"]
)
def test_supervised_run_is_plotted_for_any_perplexity(values: list[float], also: dict[str, Series]):
    line = Series(list(range(len(values))), values)
    assert plot({names.LOSS: line, names.PERPLEXITY: line} | also).startswith(b"\x89PNG\r\n")


def test_grades_are_counted_and_samples_of_many_versions_picked(tmp_path):
    path = tmp_path / SAMPLES
    assert survey(path).shown == []
    sinks = Sinks(tmp_path, MetricsConfig(tensorboard=False))
    for version, num_versions in enumerate([1, 3, 2, 3, 1]):
        sinks.write_samples(version, [a_sample("correct", num_versions)])
    sinks.close()
    path.write_bytes(
        path.read_bytes()
        + b'{"version":9,"grade":"correct","stop_reason":"stop","num_versions":9,"torn'
    )
    found = survey(path)
    assert found.grades == {"correct": 5} and found.stop_reasons == {"stop": 5}
    assert [sample["version"] for sample in found.shown] == [3, 1]


def test_description_is_valid_json_for_any_values(tmp_path):
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
