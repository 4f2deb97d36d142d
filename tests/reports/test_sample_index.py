"""The index finds samples without parsing the others, and is extended as the file grows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_jax.metrics.jsonl import cut, encode
from areal_jax.metrics.sample_parts import close_part, closed_parts, compress_parts, cut_parts
from areal_jax.metrics.samples import SampleWriter, TokenTexts, TrainedSample, row
from areal_jax.reports.sample_index import SampleIndex, compact_group, compact_sample


def a_sample(grade: str = "correct", task: str = "t", group: int = 0, number: int = 0):
    """Two prompt tokens, then tokens of versions 3, 3, 4, 4, of which version 3 is stale."""
    versions = np.array([-1, -1, 3, 3, 4, 4], np.int32)
    return TrainedSample(
        task=task,
        group=group,
        number=number,
        tokens=np.arange(10, 16, dtype=np.int32),
        loss_mask=versions >= 0,
        # Probabilities 1, 1 (prompt), 0.99, 0.5, 0.2, 0.001.
        behave_logp=np.log(np.array([1, 1, 0.99, 0.5, 0.2, 0.001], np.float32)),
        versions=versions,
        stale=versions == 3,
        reward=1.0,
        grade=grade,
        stop_reason="stop",
        expected='4"2',
    )


def decode(tokens: np.ndarray) -> str:
    return "".join(f"<{token}>" for token in tokens)


def read(written: dict[str, object]) -> dict:
    """A row as it is read from the file."""
    return json.loads(encode({"version": 5, **written}))


class Run:
    """A samples.jsonl to which steps of two groups of two samples are added."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "samples.jsonl"
        self.num_groups = 0

    def add(self, *versions: int) -> None:
        writer = SampleWriter(self.path, decode)
        for version in versions:
            for task in ("easy", 'ha"rd'):
                grades = ("correct", "wrong") if self.num_groups % 3 == 0 else ("wrong", "wrong")
                samples = [
                    a_sample(grade, f"{task}-{version}", self.num_groups, number)
                    for number, grade in enumerate(grades)
                ]
                writer.write(version, samples)
                self.num_groups += 1
        writer.close()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_index_of_a_growing_file_equals_one_made_at_once(run: Run) -> None:
    growing = SampleIndex(run.path)
    growing.update()
    assert len(growing) == 0
    for version in range(4, 9):
        run.add(version)
        # The file ends within a row, which is read when it is complete.
        with run.path.open("r+b") as file:
            size = file.seek(0, 2)
            end = file.read() if file.seek(size - 9) else b""
            file.truncate(size - 9)
        growing.update()
        with run.path.open("ab") as file:
            file.write(end)
    growing.update()
    once = SampleIndex(run.path)
    once.update()
    assert len(growing) == len(once) == 10
    everything = list(range(10))
    assert growing.rows(everything) == once.rows(everything)
    assert [len(group) for group in once.rows(everything)] == [2] * 10
    assert growing.grades == once.grades == {"correct": 4, "wrong": 16}
    assert growing.staleness() == once.staleness()


def test_index_over_parts_equals_that_over_one_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "parts").mkdir()
    one, run = Run(tmp_path / "one"), Run(tmp_path / "parts")
    growing = SampleIndex(run.path)
    for version in range(4, 12):
        one.add(version)
        run.add(version)
        if version % 3 == 0:
            close_part(run.path)
            growing.update()
        if version % 3 == 1:
            list(compress_parts(run.path))
        assert not growing.update()
    expected, once = SampleIndex(one.path), SampleIndex(run.path)
    expected.update()
    once.update()
    everything = list(range(len(expected)))
    assert len(everything) == 16 and len(closed_parts(run.path)) == 2
    for index in (growing, once):
        assert index.rows(everything) == expected.rows(everything)
        assert index.find(grade="mixed").tolist() == expected.find(grade="mixed").tolist()
        assert (index.grades, index.num_bytes) == (expected.grades, expected.num_bytes)
        assert index.staleness() == expected.staleness()
    cut_parts(run.path, 6)
    cut(one.path, 6)
    assert growing.update() and expected.update()
    assert growing.rows(range(4)) == expected.rows(range(4)) and len(growing) == 4


def test_groups_are_found_by_step_grade_and_task(run: Run) -> None:
    run.add(4, 5, 6)
    index = SampleIndex(run.path)
    index.update()
    assert index.find().tolist() == [5, 4, 3, 2, 1, 0]  # newest first
    assert index.find(first=5).tolist() == [5, 4, 3, 2]
    assert index.find(first=5, last=5).tolist() == [3, 2]
    assert index.find(grade="correct").tolist() == index.find(grade="mixed").tolist() == [3, 0]
    assert index.find(grade="wrong").tolist() == [5, 4, 3, 2, 1, 0]
    assert index.find(grade="crashed").tolist() == []
    assert index.find(task='HA"RD').tolist() == [5, 3, 1]
    assert index.find(first=6, grade="wrong", task="easy").tolist() == [4]
    (group,) = index.rows([3])
    assert {(each["task"], each["group"], each["version"]) for each in group} == {('ha"rd-5', 3, 5)}


def test_staleness_counts_sampled_tokens_by_bin(run: Run) -> None:
    # Trained at 4, 8, 12 and 21: tokens of versions 3 and 4 have a staleness of
    # 1 and 0, of 5 and 4, of 9 and 8, of 18 and 17. A version has four samples, each with two
    # tokens of either.
    run.add(4, 8, 12, 21)
    index = SampleIndex(run.path)
    index.update()
    versions, counts = index.staleness()
    assert versions == [4, 8, 12, 21]
    assert np.array(counts).T.tolist() == [
        [8, 8, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 8, 8, 0, 0],
        [0, 0, 0, 0, 0, 8, 8, 0],
        [0, 0, 0, 0, 0, 0, 0, 16],
    ]
    # In two points, sums over 0 to 15 and 16 to 31.
    assert index.staleness(max_points=2) == (
        [12, 21],
        np.array([[8, 8, 0, 0, 8, 16, 8, 0], [0] * 7 + [16]]).T.tolist(),
    )


def test_representative_groups_stay_as_steps_are_added(run: Run) -> None:
    index, chosen = SampleIndex(run.path), set[int]()
    for version in range(4, 20):
        run.add(version)
        index.update()
        found = index.representative(8)
        assert len(found) <= 8 and found == sorted(found)
        if len(index) in (16, 32):
            # Parts of 2 or 4 groups, each with its first mixed group, if it has one.
            size = len(index) // 8
            assert all(place // size == part for part, place in enumerate(found))
            assert all(
                place % 3 == 0 or all(n % 3 for n in range(part * size, part * size + size))
                for part, place in enumerate(found)
            )
        chosen |= set(found)
    assert len(chosen) < len(index)


def test_rows_that_a_resumed_run_cuts_leave_the_index(run: Run) -> None:
    run.add(4, 5, 6)
    index = SampleIndex(run.path)
    assert not index.update()
    cut(run.path, 5)
    assert index.update()
    assert len(index) == 2 and index.grades.total() == 4


def test_group_in_the_page_has_prompt_answer_colours_and_expected_answer() -> None:
    texts = TokenTexts(decode)
    rows = [read(row(a_sample(number=n), 5, texts)) for n in range(2)]
    found = compact_group(rows, None)
    assert found["prompt"] == "<10><11>" and found["expected"] == '4"2'
    assert (found["version"], found["task"], len(found["samples"])) == (5, "t", 2)
    # 0.99 is above exp(-0.05); 0.5 lies between exp(-1) and exp(-0.5); 0.2 between exp(-2) and
    # exp(-1.5); 0.001 is below exp(-5).
    assert found["samples"][1]["spans"] == [
        [3, True, "<12><13>", [4, 4], "04"],
        [4, False, "<14><15>", [4, 4], "69"],
    ]


def test_long_answer_keeps_both_ends_and_unsampled_turns() -> None:
    tokens = 40
    versions = np.full(tokens, 3, np.int32)
    versions[:4] = versions[38] = -1  # the prompt, and a token of a tool
    sample = replace(
        a_sample(),
        tokens=np.arange(tokens, dtype=np.int32),
        loss_mask=versions >= 0,
        behave_logp=np.zeros(tokens, np.float32),
        versions=versions,
        stale=np.zeros(tokens, np.bool_),
    )
    found = compact_sample(read(row(sample, 3, TokenTexts(decode))), max_tokens=6)
    assert found["spans"] == [
        [3, False, "<4><5><6>", [3, 3, 3], "000"],
        None,
        [3, False, "<37>", [4], "0"],
        [-1, False, "<38>", [4], "-"],
        [3, False, "<39>", [4], "0"],
    ]
    without_text = read(row(sample, 3, None))
    assert compact_sample(without_text, max_tokens=2)["spans"][0] == [3, False, "4 ", [2], "0"]
