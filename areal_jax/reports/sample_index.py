"""Index of samples.jsonl and its closed parts: where each group is, so that a page reads only what
it shows. Axes: G groups.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from areal_jax.metrics.sample_parts import SampleParts
from areal_jax.reports.series import MAX_POINTS

STALENESS_BINS = (0, 1, 2, 3, 4, 5, 9, 17)
"""Smallest staleness of each bin of the histogram."""

_HEAD = re.compile(
    rb'\{"version":(\d+),"grade":"(\w+)","stop_reason":"(\w+)","num_versions":\d+,"reward":[^,]+,'
    rb'"task":("(?:[^"\\]|\\.)*"),"group":(\d+),"number":\d+,"num_tokens":\d+,"num_sampled":\d+,'
    rb'"num_stale":\d+,"staleness":\[([\d,]*)\]'
)


class SampleIndex:
    """Index of the groups in the samples of a run, extended as they grow. For one thread."""

    def __init__(self, path: Path) -> None:
        self._parts = SampleParts(path)
        self._clear()

    def _clear(self) -> None:
        self.grades, self.stop_reasons = Counter[str](), Counter[str]()
        self.num_bytes = 0
        self._offsets, self._sizes = array("q"), array("q")
        self._versions, self._groups, self._tasks = array("q"), array("q"), array("q")
        # By group: bit k is set if a sample has the k-th grade.
        self._masks = array("q")
        self._grade_bits: dict[str, int] = {}
        self._task_numbers: dict[str, int] = {}
        # Tokens by staleness bin, of each trained version.
        self._staleness: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._offsets)

    def update(self) -> bool:
        """Read the rows that were appended; return whether earlier ones have changed."""
        if replaced := self._parts.is_replaced():
            self._clear()
        for offset, line in self._parts.read():
            if head := _HEAD.match(line):
                self._add(offset, len(line), head)
        self.num_bytes = self._parts.offset
        return replaced

    def _add(self, offset: int, size: int, head: re.Match[bytes]) -> None:
        version, group, grade = int(head[1]), int(head[5]), head[2].decode()
        self.grades[grade] += 1
        self.stop_reasons[head[3].decode()] += 1
        bit = self._grade_bits.setdefault(grade, 1 << len(self._grade_bits))
        if self._groups and self._groups[-1] == group and self._versions[-1] == version:
            self._sizes[-1] = offset + size - self._offsets[-1]
            self._masks[-1] |= bit
        else:
            task = json.loads(head[4])
            self._offsets.append(offset)
            self._sizes.append(size)
            self._versions.append(version)
            self._groups.append(group)
            self._masks.append(bit)
            self._tasks.append(self._task_numbers.setdefault(task, len(self._task_numbers)))
        bins = self._staleness.setdefault(version, [0] * len(STALENESS_BINS))
        for staleness, count in enumerate(head[6].split(b",") if head[6] else ()):
            bins[staleness if staleness < 5 else 5 + (staleness > 8) + (staleness > 16)] += int(
                count
            )

    def staleness(self, max_points: int = MAX_POINTS) -> tuple[list[int], list[list[int]]]:
        """Return versions, and for each bin of STALENESS_BINS the sampled tokens of each version.

        More than `max_points` versions are summed over ranges as in `series.reduce`.
        """
        if not self._staleness:
            return [], [[] for _ in STALENESS_BINS]
        versions = np.array(list(self._staleness), np.int64)
        counts = np.array(list(self._staleness.values()), np.int64)
        if len(versions) > max_points:
            size = 1
            while versions[-1] // size - versions[0] // size + 1 > max_points:
                size *= 2
            starts = np.flatnonzero(np.diff(versions // size, prepend=-1))
            counts = np.add.reduceat(counts, starts)
            versions = versions[np.append(starts[1:], len(versions)) - 1]
        return versions.tolist(), counts.T.tolist()

    def find(
        self, first: int = 0, last: int | None = None, grade: str = "", task: str = ""
    ) -> Int64[np.ndarray, "G"]:
        """Return the groups, newest first, that match all filters.

        Args:
            first: first trained version.
            last: last trained version; None: the newest.
            grade: grade of at least one sample; empty: any. `mixed`: samples differ in grade.
            task: part of the task's id, in any case; empty: any.
        """
        versions, masks = np.array(self._versions, np.int64), np.array(self._masks, np.int64)
        matches = versions >= first
        if last is not None:
            matches &= versions <= last
        if grade == "mixed":
            matches &= (masks & (masks - 1)) != 0
        elif grade:
            matches &= (masks & self._grade_bits.get(grade, 0)) != 0
        if task:
            wanted = task.casefold()
            numbers = [n for name, n in self._task_numbers.items() if wanted in name.casefold()]
            matches &= np.isin(np.array(self._tasks, np.int64), numbers)
        return np.flatnonzero(matches)[::-1]

    def offset_of(self, places: Int64[np.ndarray, "G"], group: int) -> int | None:
        """Return where a group is among `places`; None if it is not there."""
        found = np.flatnonzero(np.array(self._groups, np.int64)[places] == group)
        return int(found[0]) if len(found) else None

    def representative(self, num_windows: int) -> list[int]:
        """Return one group of each of at most `num_windows` equal parts of the run, oldest first.

        Parts have a power of two of groups and are complete, so that groups stay when rows are
        added. Groups whose samples differ in grade are preferred.
        """
        size = 1
        while len(self) // size > num_windows:
            size *= 2
        count = len(self) // size
        masks = np.array(self._masks[: count * size], np.int64).reshape(count, size)
        is_mixed = (masks & (masks - 1)) != 0
        return (np.arange(count) * size + is_mixed.argmax(axis=1)).tolist() if count else []

    def size(self, place: int) -> int:
        """Return the bytes of a group's rows."""
        return self._sizes[place]

    def rows(self, places: Sequence[int]) -> list[list[dict[str, Any]]]:
        """Read the rows of groups."""
        return [
            [json.loads(row) for row in self._parts.rows(self._offsets[place], self._sizes[place])]
            for place in places
        ]


def logp_levels(logp: Sequence[float], loss_mask: Sequence[int]) -> str:
    """Return a digit per token: 0 for the likeliest to 9 for the least likely tokens, and `-` for
    tokens that the policy did not sample.
    """
    levels = np.searchsorted(LOGP_BOUNDS, -np.array(logp, np.float64))
    return "".join(
        str(level) if sampled else "-"
        for level, sampled in zip(levels.tolist(), loss_mask, strict=True)
    )


LOGP_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)
"""Negative log-probs between two levels, in nats."""


def compact_group(rows: Sequence[Mapping[str, Any]], max_tokens: int | None) -> dict[str, Any]:
    """Return what the page shows of a group.

    Args:
        rows: the group's rows.
        max_tokens: tokens of an answer to keep, half from each end; None: all.
    """
    first = rows[0]
    samples = [compact_sample(row, max_tokens) for row in rows]
    return {
        "version": first["version"],
        "group": first["group"],
        "task": first["task"],
        "expected": first["expected"],
        "prompt": _prompt(first)[0],
        "images": first.get("images", []),
        "samples": samples,
    }


def _prompt(row: Mapping[str, Any]) -> tuple[str, int]:
    """Return the text and the tokens before the first sampled token."""
    mask = row["loss_mask"]
    end = mask.index(1) if 1 in mask else len(mask)
    text = "".join(text for _, _, text in row["text"]) if "text" in row else ""
    if "text" not in row:
        return " ".join(map(str, row["tokens"][:end])), end
    return text[: sum(row["chars_per_token"][:end])], end


def compact_sample(row: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """Return what the page shows of a sample.

    `spans` lists [version, is stale, text, characters of each token, log-prob levels] of
    consecutive tokens that share version and staleness; None stands for tokens left out.
    """
    if "text" in row:
        text, chars = "".join(text for _, _, text in row["text"]), row["chars_per_token"]
    else:
        words = [f"{token} " for token in row["tokens"]]
        text, chars = "".join(words), [len(word) for word in words]
    prompt_tokens = _prompt(row)[1]
    ends = np.cumsum([0, *chars])
    levels = logp_levels(row["behave_logp"], row["loss_mask"])
    stale, versions = set(row["stale"]), row["versions"]
    total = len(chars)
    parts = [(prompt_tokens, total)]
    if max_tokens is not None and total - prompt_tokens > max_tokens:
        half = max_tokens // 2
        parts = [(prompt_tokens, prompt_tokens + half), (total - half, total)]
    spans: list[list[Any] | None] = []
    for start, end in parts:
        if spans:
            spans.append(None)
        while start < end:
            kind = versions[start], start in stale
            stop = start + 1
            while stop < end and (versions[stop], stop in stale) == kind:
                stop += 1
            inner = text[ends[start] : ends[stop]]
            spans.append([*kind, inner, chars[start:stop], levels[start:stop]])
            start = stop
    return {
        "number": row["number"],
        "grade": row["grade"],
        "stop": row["stop_reason"],
        "reward": row["reward"],
        "tokens": row["num_sampled"],
        "spans": spans,
    }
