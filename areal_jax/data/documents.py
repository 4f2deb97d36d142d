"""Split text documents into passages for search. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".txt", ".md", ".jsonl")
MAX_PASSAGE_CHARS = 800


def read_passages(path: Path) -> list[str]:
    """Read the passages of a file, or of all files of a folder in the order of their names.

    Each passage begins with the title of its document, if there is one.

    Raises:
        FileNotFoundError: the folder has no document.
        ValueError: a row has no text, or all documents are empty.
    """
    files = (
        [path]
        if path.is_file()
        else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    )
    if not files:
        raise FileNotFoundError(
            f"{path}: no document, expected a file or a folder of {', '.join(SUFFIXES)}"
        )
    passages = [
        passage
        for file in files
        for title, text in _documents(file)
        for passage in split_passages(title, text)
    ]
    if not passages:
        raise ValueError(f"{path}: expected text, found none in {len(files)} files")
    return passages


def _documents(file: Path) -> Iterator[tuple[str, str]]:
    """Yield title and text of each document of a file."""
    if file.suffix != ".jsonl":
        yield file.stem, file.read_text(encoding="utf-8", errors="replace")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                title, text = row.get("title", ""), row["text"]
            except (ValueError, KeyError, AttributeError, TypeError):
                title, text = None, None
            if not isinstance(title, str) or not isinstance(text, str):
                raise ValueError(
                    f'{file}:{number}: expected {{"text": ..., "title": ...}}, found '
                    f"{line[:80].strip()}"
                )
            yield title, text


def split_passages(title: str, text: str) -> Iterator[str]:
    """Split a text into passages of at most MAX_PASSAGE_CHARS characters, the title not counted.

    Short paragraphs are joined; long ones are split between words.
    """
    head, passage = f"{title}: " if title else "", ""
    for paragraph in (" ".join(each.split()) for each in text.split("\n\n")):
        while len(paragraph) > MAX_PASSAGE_CHARS:
            end = paragraph.rfind(" ", 1, MAX_PASSAGE_CHARS + 1)
            end = end if end > 0 else MAX_PASSAGE_CHARS
            if passage:
                yield head + passage
            passage, paragraph = paragraph[:end], paragraph[end:].lstrip()
        if passage and len(passage) + 1 + len(paragraph) > MAX_PASSAGE_CHARS:
            yield head + passage
            passage = ""
        passage = f"{passage} {paragraph}".strip()
    if passage:
        yield head + passage
