"""Throughput of gate, buffer and controller, and CPU time of a simulated hour.

    python benchmarks/simulator_speed.py

512 simulated engines with 20 000 requests in flight, one answer each, under a simulated clock.
Throughput is the number of requests that pass gate, engine, grading and buffer, over the CPU time,
including that of the simulated engines. An hour of 7B with a context of 32k on 512 devices, with
the paper's recipe at full size, is extrapolated from a few steps. Appends to
results/simulator_speed.jsonl.

Expected: at least 5000 completions/s, and at most 60 s. On a core with other load: 5980/s.
"""

from __future__ import annotations

import argparse
import time

from papers_cluster import build
from results import append

from areal_jax.models.known import known_shape
from areal_jax.records import Sampling
from areal_jax.rollout.config import RolloutConfig
from areal_jax.rollout.controller import open_gate, run_rollouts
from areal_jax.sim.clock import run
from areal_jax.sim.costs import EngineCosts, Rewards
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.fleet import SimulatedFleet
from areal_jax.sim.hardware import DEVICES
from areal_jax.sim.lengths import LogNormal
from areal_jax.sim.simulation import GradingQueue, Numbered, OneTurn, simulate

ENGINES, BATCH = 512, 1024


async def completions_per_s(in_flight: int, num_batches: int, num_engines: int = ENGINES) -> float:
    costs = EngineCosts(known_shape("r1-distill-qwen-1.5b"), DEVICES["H800"])
    fleet = SimulatedFleet(
        costs, LogNormal(4915.0, 0.8), num_engines, EngineBehavior(tokens_per_entry=64)
    )
    config = RolloutConfig(
        groups_per_batch=BATCH,
        samples_per_group=1,
        max_staleness=None,
        max_running_groups=in_flight,
        batch_timeout_s=1e9,
    )
    gate, buffer = open_gate(config, 0)
    grader = GradingQueue(Rewards(4096, 0.05))
    turn, sampling = OneTurn(200, 1, grader), Sampling(27_648)
    async with run_rollouts(
        Numbered(), fleet, turn, grader, gate, buffer, config, sampling=sampling, seed=0
    ):
        await buffer.take(BATCH, 0)
        began_s = time.process_time()
        for version in range(1, num_batches + 1):
            await buffer.take(BATCH, version)
            gate.version = version
        return num_batches * BATCH / (time.process_time() - began_s)


def cpu_s_of_an_hour(num_steps: int) -> float:
    """Estimate the CPU time of simulating 3600 s of 512 devices."""
    began_s = time.process_time()
    outcome = simulate(*build("areal", "7b", 512, 31_744), num_steps=num_steps)
    return (time.process_time() - began_s) * 3600 / outcome.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-flight", type=int, default=20_000)
    parser.add_argument(
        "--batches",
        type=int,
        default=16,
        help=f"number of timed batches of {BATCH} requests, after a warm-up batch",
    )
    options = parser.parse_args()
    row = {
        "engines": ENGINES,
        "in_flight": options.in_flight,
        "completions_per_cpu_s": run(completions_per_s(options.in_flight, options.batches)),
        "cpu_s_of_an_hour_of_512_devices": cpu_s_of_an_hour(num_steps=4),
    }
    append("simulator_speed", row)


if __name__ == "__main__":
    main()
