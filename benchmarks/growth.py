"""How time and memory grow with the size of a run: fitted exponents, and a plot.

    python benchmarks/growth.py [--only=TEXT] [--largest-gib=10]

Each curve is measured at sizes that double or more, and has the exponent of a power law fitted to
the upper half of them (least squares of logarithms): 1 is linear. Time is processor time of this
process, but for the trainer, where it is wall time; memory is what XLA compiles.

- trainer: an update of the tiny model of train_mfu.py, by packed tokens;
- decode memory: the program `generate` with its caches, by tokens of the KV cache;
- engines: routing and completing 16 requests for each engine, up to 4096 engines;
- queue: scheduling every request of a queue of up to a million, without a device;
- controller: groups through gate, simulated engines, grading and buffer, by groups;
- report, resume: reading all steps of a run, and checking them before it resumes, by steps up to
  100 000;
- samples, resume samples: indexing the samples for the report, and checking them before a run
  resumes, by bytes up to `--largest-gib`, of which 256 MiB are in samples.jsonl and the others in
  compressed parts; bytes of all parts on disk, and the peak of the process's memory.

Appends a line for each curve to results/growth.jsonl and draws results/growth.png. Expected: no
exponent above 1.2. About 20 minutes of two cores, and half of `--largest-gib` on the disk of
temporary files.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import simulator_speed
import train_mfu
from matplotlib.figure import Figure
from report_update import GROUPS, SAMPLES_PER_GROUP, Steps, open_run, tokens_of_size
from results import FOLDER, append

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.engine.batch import DecodeOutput
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.routing import Router
from areal_jax.engine.scheduler import Scheduler
from areal_jax.engine.sequence import SequenceGroup
from areal_jax.json_files import read_json
from areal_jax.metrics.consistency import UnusedGroups, check_rows
from areal_jax.metrics.sample_parts import is_part
from areal_jax.metrics.sinks import SAMPLES
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.compilation import peak_bytes
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Request, Sampling
from areal_jax.reports.sample_index import SampleIndex
from areal_jax.sim.clock import run

NAME = "growth"
Points = Iterator[tuple[int, float]]
"""Sizes, and seconds or bytes."""


def trainer() -> Points:
    for num_rows in (2, 4, 8, 16, 32):
        args = train_mfu.settings(["--tiny"])
        vars(args).update(row_tokens=512, segment_tokens=256, rows=1, micro_batches=num_rows)
        updates = train_mfu.measure(args)["update"]
        assert isinstance(updates, dict)
        yield 512 * num_rows, updates["seconds"]


def decode_memory() -> Points:
    policy = Policy(ModelConfig.from_hf(read_json(EMBEDDED / "config.json"), "the embedded policy"))
    for kv_tokens in (2**16, 2**18, 2**20, 2**22):
        config = EngineConfig(
            num_slots=64, max_prompt_tokens=512, max_new_tokens=512, kv_tokens=kv_tokens
        )
        mesh = make_meshes(PlacementConfig(), jax.devices()).rollout
        engine = DecodeEngine(policy, mesh, config, jnp.float32)
        programs = [each for each in engine.list_programs() if each[0].startswith("generate")]
        yield kv_tokens, peak_bytes(programs[-1][1]())


def engines() -> Points:
    for num_engines in (64, 256, 1024, 4096):
        router, prompt = Router(), np.arange(256, dtype=np.int32)
        for number in range(num_engines):
            router.add_engine(number, 64)
        start_s = time.process_time()
        chosen = [router.route(prompt + turn, 1) for turn in range(16 * num_engines)]
        for number in chosen:
            router.complete(number, 1)
        yield num_engines, time.process_time() - start_s


def queue() -> Points:
    config = EngineConfig(
        num_slots=64,
        max_prompt_tokens=16,
        max_new_tokens=8,
        steps_per_dispatch=8,
        page_tokens=16,
        kv_tokens=64 * 32,
    )
    for num_requests in (2**14, 2**16, 2**18, 2**20):
        scheduler = Scheduler(config, 1, config.kv_tokens // config.page_tokens, 2)
        prompt = np.arange(9, dtype=np.int32)
        for number in range(num_requests):
            request = Request(str(number), prompt, 1, Sampling(8), seed=0)
            scheduler.add(SequenceGroup(request, deadline_s=math.inf))
        start_s, num_finished = time.process_time(), 0
        while num_finished < num_requests:
            scheduler.admit(0)
            scheduler.start(scheduler.schedule_prefill()[1])
            scheduler.reserve_pages()
            for sequence, reason in scheduler.process_outputs(_sampled(scheduler), 0):
                scheduler.finish(sequence, reason)
                num_finished += 1
        yield num_requests, time.process_time() - start_s


def _sampled(scheduler: Scheduler) -> DecodeOutput:
    """What a dispatch of a policy that never stops returns."""
    records, steps = scheduler.slots.records(), 8
    counts = np.where(records["active"] > 0, np.minimum(records["remaining"], steps), 0)
    tokens = np.where(np.arange(steps)[:, None] < counts, 7, -1).astype(np.int32)
    return DecodeOutput(
        tokens,
        np.zeros(tokens.shape, np.float32),
        counts.astype(np.int32),
        counts < records["remaining"],
        np.zeros(len(counts), bool),
        np.full(len(counts), 7, np.int32),
    )


def controller() -> Points:
    for num_engines in (64, 256, 1024, 4096):
        in_flight, batches = 16 * num_engines, max(1, num_engines // 64)
        rate = simulator_speed.completions_per_s(in_flight, batches, num_engines)
        yield simulator_speed.BATCH * batches, simulator_speed.BATCH * batches / run(rate)


def report(folder: Path) -> Iterator[tuple[int, float, float]]:
    """Yield steps, seconds to read them for the report, and seconds to check them."""
    steps, num_steps = Steps(folder, 8), 0
    for size in (12_500, 25_000, 50_000, 100_000):
        for _ in range(size - num_steps):
            steps.add()
        steps.flush()
        num_steps = size
        start_s = time.process_time()
        open_run(folder)
        read_s = time.process_time() - start_s
        start_s = time.process_time()
        result = check_rows(
            folder, size, known_gaps={}, writes_samples=True, unused_groups=UnusedGroups()
        )
        assert not result.faults, result.faults
        yield size, read_s, time.process_time() - start_s


def samples(folder: Path, largest_bytes: float) -> Iterator[tuple[int, float, float, int, int]]:
    """Yield bytes of rows, seconds to index and to check them, bytes on disk, and peak bytes."""
    per_step, num_steps = 2**22, 0
    steps = Steps(folder, tokens_of_size(per_step / (GROUPS * SAMPLES_PER_GROUP)))
    index = SampleIndex(folder / SAMPLES)
    for share in (8, 4, 2, 1):
        while index.num_bytes < largest_bytes / share:
            steps.add()
            num_steps += 1
            steps.flush()
            steps.close_part()
            index.update()
        start_s = time.process_time()
        once = SampleIndex(folder / SAMPLES)
        once.update()
        read_s = time.process_time() - start_s
        start_s = time.process_time()
        result = check_rows(
            folder, num_steps, known_gaps={}, writes_samples=True, unused_groups=UnusedGroups()
        )
        assert not result.faults, result.faults
        check_s = time.process_time() - start_s
        on_disk = sum(path.stat().st_size for path in folder.iterdir() if is_part(path.name))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        yield once.num_bytes, read_s, check_s, on_disk, peak


def exponent(curve: dict[int, float]) -> float:
    """Fit a power law to the upper half of a curve."""
    points = list(curve.items())[len(curve) // 2 - 1 :]
    sizes, costs = np.log(np.array(points)).T
    return float(np.polyfit(sizes, costs, 1)[0])


def measure(largest_bytes: float, only: str) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield the curves whose names contain `only`."""
    curves: dict[str, Callable[[], Points]] = {
        "trainer, s by tokens": trainer,
        "decode memory, bytes by KV tokens": decode_memory,
        "engines, s by engines": engines,
        "queue, s by requests": queue,
        "controller, s by groups": controller,
    }
    for name, curve in curves.items():
        if only in name:
            yield name, dict(curve())
    with tempfile.TemporaryDirectory() as temporary:
        if only in "report, resume":
            rows = list(report(Path(temporary)))
            yield "report, s by steps", {size: read_s for size, read_s, _ in rows}
            yield "resume, s by steps", {size: check_s for size, _, check_s in rows}
    with tempfile.TemporaryDirectory() as temporary:
        if only in "samples, resume samples":
            sizes, *curves_of = zip(*samples(Path(temporary), largest_bytes), strict=True)
            names = ("samples, s", "resume samples, s", "samples on disk, bytes", "memory, bytes")
            for name, costs in zip(names, curves_of, strict=True):
                yield f"{name} by bytes", dict(zip(sizes, costs, strict=True))


def newest() -> dict[str, dict[int, float]]:
    """Return the newest stored points of each curve."""
    rows = [json.loads(line) for line in (FOLDER / f"{NAME}.jsonl").read_text().splitlines()]
    return {row["curve"]: {int(size): cost for size, cost in row["points"].items()} for row in rows}


def plot(curves: dict[str, dict[int, float]]) -> None:
    figure = Figure(figsize=(13, 9), dpi=110, layout="constrained")
    for axes, (name, curve) in zip(figure.subplots(3, 4).flat, curves.items(), strict=False):
        sizes, costs = np.array(list(curve.items()), np.float64).T
        axes.loglog(sizes, costs, "o-", color="#2563a8")
        axes.loglog(sizes, costs[-1] * sizes / sizes[-1], ":", color="#8a8f98", label="linear")
        what, units = name.split(", ")
        axes.set(title=f"{what}: exponent {exponent(curve):.2f}", xlabel=units.split(" by ")[1])
        axes.set_ylabel(units.split(" by ")[0])
        axes.legend(frameon=False)
    figure.savefig(FOLDER / f"{NAME}.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the name of a curve")
    parser.add_argument("--largest-gib", type=float, default=10, help="size of the samples")
    args = parser.parse_args()
    for name, points in measure(args.largest_gib * 2**30, args.only):
        append(
            NAME,
            {"label": "measured", "curve": name, "exponent": exponent(points), "points": points},
        )
    plot(newest())


if __name__ == "__main__":
    main()
