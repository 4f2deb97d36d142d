from __future__ import annotations

from pathlib import Path

import pytest

from areal_jax.data.documents import MAX_PASSAGE_CHARS, read_passages, split_passages


def test_documents_are_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("# First\n\nof all")
    (tmp_path / "c.jsonl").write_text('{"text": "third", "title": "T"}\n{"text": "fourth"}\n')
    (tmp_path / "d.pdf").write_text("nothing")
    assert read_passages(tmp_path) == ["a: # First of all", "b: second", "T: third", "fourth"]
    assert read_passages(tmp_path / "b.txt") == ["b: second"]


def test_long_texts_are_split_between_words_without_loss() -> None:
    words = [f"w{i}" for i in range(2000)]
    text = "\n\n".join(" ".join(words[i : i + 90]) for i in range(0, 2000, 90))
    passages = list(split_passages("", text))
    assert " ".join(passages).split() == words
    assert all(len(passage) <= MAX_PASSAGE_CHARS for passage in passages)
    # Short paragraphs share a passage: two of 90 words of 4 to 5 letters do not fit, so that each
    # is filled from the next.
    assert len(passages) < 2 * -(-len(text) // MAX_PASSAGE_CHARS)
    assert (
        list(split_passages("T", "x" * 2 * MAX_PASSAGE_CHARS))
        == ["T: " + "x" * MAX_PASSAGE_CHARS] * 2
    )


def test_invalid_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no document, expected a file or a folder of .txt, .md, .jsonl"
    ):
        read_passages(tmp_path)
    bad = tmp_path / "bad.jsonl"
    for line in ("no json", "[1]", '{"title": "T"}', '{"text": 1}'):
        bad.write_text('{"text": "fine"}\n' + line)
        with pytest.raises(ValueError, match=r"bad\.jsonl:2: expected"):
            read_passages(bad)
    (tmp_path / "bad.jsonl").write_text("")
    with pytest.raises(ValueError, match="found none in 1 files"):
        read_passages(tmp_path)
