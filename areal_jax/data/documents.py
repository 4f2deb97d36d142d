"""Documents of one's own, as passages that a search can find. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".txt", ".md", ".jsonl")
MAX_PASSAGE_CHARS = 800


def read_passages(path: Path) -> list[str]:
    """The passages of a file, or of all files in a folder, in the order of their names; the title,
    where there is one, before each. FileNotFoundError says what was looked for; ValueError where a
    row has no text, or all is empty."""
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
        for passage in cut(title, text)
    ]
    if not passages:
        raise ValueError(f"{path}: expected text, came none in {len(files)} files")
    return passages


def _documents(file: Path) -> Iterator[tuple[str, str]]:
    """Title and text of each document of a file."""
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
                    f'{file}:{number}: expected {{"text": ..., "title": ...}}, came '
                    f"{line[:80].strip()}"
                )
            yield title, text


def cut(title: str, text: str) -> Iterator[str]:
    """Paragraphs of a text, short ones together and long ones cut between words, so that each
    passage has at most MAX_PASSAGE_CHARS beside its title."""
    head, held = f"{title}: " if title else "", ""
    for paragraph in (" ".join(each.split()) for each in text.split("\n\n")):
        while len(paragraph) > MAX_PASSAGE_CHARS:
            end = paragraph.rfind(" ", 1, MAX_PASSAGE_CHARS + 1)
            end = end if end > 0 else MAX_PASSAGE_CHARS
            if held:
                yield head + held
            held, paragraph = paragraph[:end], paragraph[end:].lstrip()
        if held and len(held) + 1 + len(paragraph) > MAX_PASSAGE_CHARS:
            yield head + held
            held = ""
        held = f"{held} {paragraph}".strip()
    if held:
        yield head + held
