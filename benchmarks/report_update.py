"""Time of an update of a run's report, and size of its page, at the end of a long run.

    python benchmarks/report_update.py

Writes the files of a run of 10 000 steps with 110 metrics each and 500 MB of samples to a temporary
folder, reads them once, and then adds steps and rewrites report.html after each, as a run does
every 10 s. Measured: seconds from the new rows to the new page on disk (median and longest of 20),
bytes of the page, seconds of the first read, and seconds of a search over all samples as the live
report makes it. Expected: updates below 0.5 s, a page below 2 MB. No device is used.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from results import append

from areal_jax.metrics.config import METRICS, MetricsConfig
from areal_jax.metrics.description import write_description
from areal_jax.metrics.jsonl import encode
from areal_jax.metrics.sample_parts import close_part, compress_parts
from areal_jax.metrics.samples import TokenTexts, TrainedSample, row
from areal_jax.metrics.sinks import SAMPLES
from areal_jax.metrics.table import TABLE
from areal_jax.reports.report import open_run, write_run
from areal_jax.reports.sample_index import compact_group

GROUPS, SAMPLES_PER_GROUP = 2, 8
UPDATES = 20
NUM_METRICS = 110


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--megabytes", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        per_step = arguments.megabytes * 10**6 / arguments.steps
        steps = Steps(folder, tokens_of_size(per_step / (GROUPS * SAMPLES_PER_GROUP)))
        for _ in range(arguments.steps):
            steps.add()
        steps.flush()
        append("report_update", measure(folder, steps))


def measure(folder: Path, steps: Steps) -> dict[str, object]:
    """Read the run, update its report, and search its samples."""
    process = psutil.Process()
    resident = process.memory_info().rss
    start_s = time.perf_counter()
    run = open_run(folder)
    first_read_s = time.perf_counter() - start_s
    page, seconds = write_run(run, "running"), []
    for _ in range(UPDATES):
        steps.add()
        steps.flush()
        start_s = time.perf_counter()
        run.update()
        write_run(run, "running")
        seconds.append(time.perf_counter() - start_s)
    start_s = time.perf_counter()
    found = run.samples.find(first=100, grade="mixed", task="7")
    compact_group(run.samples.rows(found[:1].tolist())[0], None)
    search_s = time.perf_counter() - start_s
    return {
        "label": "measured",
        "steps": run.metrics.last_version + 1,
        "metrics": len(run.metrics.names()),
        "samples": run.samples.grades.total(),
        "samples_bytes": run.samples.num_bytes,
        "update_s_median": statistics.median(seconds),
        "update_s_max": max(seconds),
        "page_bytes": page.stat().st_size,
        "first_read_s": first_read_s,
        "search_s": search_s,
        "resident_bytes": process.memory_info().rss - resident,
    }


class Steps:
    """Appends steps to the files of a run."""

    def __init__(self, folder: Path, num_tokens: int) -> None:
        self._folder, self._num_done = folder, 0
        self._rng = np.random.default_rng(0)
        self._names = [entry.name.replace("*", "x") for entry in TABLE][:NUM_METRICS]
        write_description(folder, "a long run", {"num_steps": 20_000}, "none")
        self._metrics = (folder / METRICS).open("a")
        self._samples = (folder / SAMPLES).open("ab")
        texts = TokenTexts(lambda tokens: "".join(f" w{token}" for token in tokens))
        # Rows to vary: encoding each anew would take most of the time.
        self._rows = [encode(row(a_sample(k, num_tokens), 0, texts))[1:] for k in range(64)]

    def add(self) -> None:
        """Add a step, its samples and, every 50 steps, an evaluation."""
        version, values = self._num_done, self._rng.normal(size=len(self._names))
        noise = dict(zip(self._names, (values + math.sin(version / 300)).tolist(), strict=True))
        noise["trainer/samples"] = GROUPS * SAMPLES_PER_GROUP
        self._metrics.write(f"{encode({'version': version, 'time_s': 1e9 + version, **noise})}\n")
        if version % 50 == 0:
            score = {"evaluation/pass@1": 0.5, "evaluation/pass@1_stderr": 0.01}
            self._metrics.write(f"{encode({'version': version, **score})}\n")
        for group in range(GROUPS * version, GROUPS * (version + 1)):
            first = SAMPLES_PER_GROUP * self._rng.integers(len(self._rows) // SAMPLES_PER_GROUP)
            for text in self._rows[first : first + SAMPLES_PER_GROUP]:
                of_group = text.replace('"group":0,', f'"group":{group},', 1)
                of_group = of_group.replace('"task":"t', f'"task":"t{group % 4096}-', 1)
                self._samples.write(f'{{"version":{version},{of_group}\n'.encode())
        self._num_done += 1

    def close_part(self) -> None:
        """Close and compress samples.jsonl, if it is as large as a run's."""
        path = self._folder / SAMPLES
        if path.stat().st_size >= MetricsConfig().samples_part_bytes:
            close_part(path)
            for _ in compress_parts(path):
                pass
            self._samples.close()
            self._samples = path.open("ab")

    def flush(self) -> None:
        """Hand what was added to the file system."""
        self._metrics.flush()
        self._samples.flush()


def a_sample(number: int, num_tokens: int) -> TrainedSample:
    rng = np.random.default_rng(number)
    is_sampled = np.arange(num_tokens) >= num_tokens // 5
    half = np.where(np.arange(num_tokens) < num_tokens // 2, 0, 1)
    return TrainedSample(
        task="t",
        group=0,
        number=number % SAMPLES_PER_GROUP,
        tokens=rng.integers(0, 1000, num_tokens, dtype=np.int32),
        loss_mask=is_sampled,
        behave_logp=np.where(is_sampled, -rng.exponential(size=num_tokens), 0).astype(np.float32),
        versions=np.where(is_sampled, half, -1).astype(np.int32),
        stale=np.zeros(num_tokens, np.bool_),
        reward=float(number % 2),
        grade="correct" if number % 2 else "wrong",
        stop_reason="stop",
        expected="42",
    )


def tokens_of_size(num_bytes: float) -> int:
    """Number of tokens whose row has about this size."""
    texts = TokenTexts(lambda tokens: "".join(f" w{token}" for token in tokens))
    short, long = (len(encode(row(a_sample(0, n), 0, texts))) for n in (100, 200))
    return max(8, round(100 + 100 * (num_bytes - short) / (long - short)))


if __name__ == "__main__":
    main()
