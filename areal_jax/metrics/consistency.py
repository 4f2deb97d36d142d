"""Consistency of a run's rows with the checkpoint that it resumes from, checked before rows are
cut.

Below the checkpoint's version every step has one row in metrics.jsonl, and each of its samples once
in samples.jsonl or an earlier part. Rows of that version and later are cut on resuming. Rows of
evaluations may be missing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from areal_jax.metrics.config import METRICS
from areal_jax.metrics.sample_parts import PARTS, DamagedSamples, SampleParts, is_part
from areal_jax.metrics.sinks import SAMPLES

_ROW = re.compile(rb'\{"version":(\d+)[,}]')
_IS_STEP = b',"trainer/'
_NUM_SAMPLES = re.compile(rb',"trainer/samples":(\d+)')
# Quotation marks inside texts are escaped, so that no task id matches this.
_PLACE = re.compile(rb',"group":(\d+),"number":(\d+),')

Gaps = dict[str, list[int]]
"""By file, the versions whose rows are known to be missing."""


class Fault(NamedTuple):
    """An inconsistency of a file of rows."""

    file: str
    version: int
    """First affected version."""
    text: str


class ConsistencyResult(NamedTuple):
    """Faults and gaps of a run's files."""

    faults: list[Fault]
    gaps: Gaps


def check_rows(
    run_folder: Path,
    version: int,
    *,
    known_gaps: Mapping[str, Collection[int]],
    writes_samples: bool,
    unused_groups: UnusedGroups,
) -> ConsistencyResult:
    """Check the rows below `version` against the checkpoint of `version`.

    The function has more than 60 lines because each check reads what the ones before it counted.

    Args:
        run_folder: the run's folder.
        version: the checkpoint's version.
        known_gaps: versions whose rows are known to be missing, by file.
        writes_samples: whether the run's last settings write samples.
        unused_groups: groups that the checkpoint has not trained on.
    """
    faults, gaps = list[Fault](), Gaps()
    counts, samples_of = Counter[int](), dict[int, int]()
    for at, line in _rows(METRICS, _lines(run_folder / METRICS), version, faults):
        if _IS_STEP in line:
            counts[at] += 1
            if match := _NUM_SAMPLES.search(line):
                samples_of[at] = int(match[1])
    expected = set(range(version))
    missing = expected - counts.keys()
    gaps[METRICS] = sorted(
        missing
        if not (run_folder / METRICS).exists()
        else missing & set(known_gaps.get(METRICS, ()))
    )
    if lost := missing - set(gaps[METRICS]):
        faults.append(Fault(METRICS, min(lost), f"has no rows of {format_ranges(lost)}"))
    if twice := {at for at, count in counts.items() if count > 1}:
        faults.append(
            Fault(
                METRICS,
                min(twice),
                f"has more than one row of {format_ranges(twice)}, as if two processes wrote there",
            )
        )

    if not any(is_part(path.name) for path in run_folder.iterdir()):
        gaps[SAMPLES] = sorted(expected)
        return ConsistencyResult(faults, gaps)
    written, places, version_of = Counter[int](), set[tuple[int, int]](), dict[int, int]()
    repeated, unused = set[int](), set[int]()
    lines = (line for _, line in SampleParts(run_folder / SAMPLES).read())
    for at, line in _rows(SAMPLES, lines, version, faults):
        written[at] += 1
        if match := _PLACE.search(line):
            group, number = int(match[1]), int(match[2])
            if (group, number) in places or version_of.setdefault(group, at) != at:
                repeated.add(at)
            places.add((group, number))
            if unused_groups.includes(group):
                unused.add(at)
    missing = expected - written.keys()
    if not writes_samples:
        # Samples were disabled after some steps, or from the start.
        gaps[SAMPLES] = [at for at in sorted(missing) if at > max(written, default=-1)]
    gaps[SAMPLES] = sorted({*gaps.get(SAMPLES, ()), *(missing & set(known_gaps.get(SAMPLES, ())))})
    if lost := missing - set(gaps[SAMPLES]):
        faults.append(Fault(SAMPLES, min(lost), f"has no samples of {format_ranges(lost)}"))
    if torn := {at for at, count in written.items() if samples_of.get(at, count) > count}:
        faults.append(
            Fault(
                SAMPLES,
                min(torn),
                f"has fewer samples of {format_ranges(torn)} than {METRICS} counts",
            )
        )
    if many := repeated | {
        at for at, count in written.items() if samples_of.get(at, count) < count
    }:
        faults.append(
            Fault(
                SAMPLES,
                min(many),
                f"has samples of {format_ranges(many)} twice, as if two processes wrote there",
            )
        )
    if unused:
        faults.append(
            Fault(
                SAMPLES,
                min(unused),
                f"has samples of {format_ranges(unused)} that the checkpoint has not trained on",
            )
        )
    return ConsistencyResult(faults, gaps)


class UnusedGroups(NamedTuple):
    """Groups that a checkpoint has not trained on."""

    waiting: Collection[int] = ()
    """Buffered or running groups."""
    next_id: int | None = None
    """Id of the first group that was not started; None: the run has no groups."""

    def includes(self, group: int) -> bool:
        """Return whether the checkpoint has not trained on a group."""
        return group in self.waiting or (self.next_id is not None and group >= self.next_id)


def suggest_remedy(run_folder: Path, fault: Fault, version: int, older: Iterable[int]) -> str:
    """Return what a user can do about a fault.

    Args:
        run_folder: the run's folder.
        fault: the fault.
        version: version of the checkpoint to resume from.
        older: versions of complete checkpoints.
    """
    files = run_folder / (PARTS if fault.file == SAMPLES else fault.file)
    away = f"move {files} away to resume without its rows"
    usable = [at for at in older if at <= fault.version and at < version]
    if not usable:
        return away
    return (
        f"{away}, or move the checkpoints after version {max(usable)} away to resume from that one"
    )


def format_ranges(versions: Iterable[int]) -> str:
    """Format versions as ranges, such as `versions 3 to 5, 9`."""
    found: list[list[int]] = []
    for version in sorted(versions):
        if found and version == found[-1][1] + 1:
            found[-1][1] = version
        else:
            found.append([version, version])
    text = ", ".join(
        f"{first}" if first == last else f"{first} to {last}" for first, last in found[:5]
    )
    one = len(found) == 1 and found[0][0] == found[0][1]
    return f"version{'' if one else 's'} {text}{', ...' if len(found) > 5 else ''}"


def read_gaps(description: Path) -> Gaps:
    """Read the known gaps from a run's description; none without a description."""
    try:
        return json.loads(description.read_text(encoding="utf-8")).get("missing_rows", {})
    except (OSError, ValueError):
        return {}


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file


def _rows(
    name: str, lines: Iterator[bytes], version: int, faults: list[Fault]
) -> Iterator[tuple[int, bytes]]:
    """Yield complete rows below a version. Only the last line may be incomplete, after a kill."""
    torn: int | None = None
    last = 0
    try:
        for number, line in enumerate(lines, start=1):
            match = _ROW.match(line)
            if match is None or not line.endswith(b"}\n"):
                torn = torn or number
                continue
            at = int(match[1])
            if at >= version:
                continue
            if torn is not None:
                faults.append(Fault(name, last, f"has an invalid line {torn}, with rows after it"))
                torn = None
            last = at
            yield at, line
    except DamagedSamples as error:
        faults.append(Fault(name, last, f"cannot be read: {error}"))
