"""Asynchronous versus synchronous training, measured and simulated, at max_staleness 0, 1 and 4.

    python benchmarks/async_vs_sync.py

Three runs of the training loop train in turns in one process. Each has one simulated device for
decoding and one for training. The policy is the embedded one with random weights. Completion
lengths are log-normal with sigma = 1, cut at MAX_NEW tokens, and equal in all runs by their seeds.
The reward is random, so that every update changes the weights and caches are rebuilt. A step trains
on GROUPS x SAMPLES completions, and the engine has a slot for each of them: without staleness, the
batch waits for the longest completion.

XLA computes for both devices with a pool of two threads. The machine needs two idle cores: if other
processes use them, the ratios fall towards 1 or below. Tokens per second are trained tokens per
second from step FIRST_COUNTED of a round on, the median of all rounds.

The simulator gets the stage times from the trace of each run (`sim/measured.py`), the same lengths
and the same gate. With the stage times of the synchronous run alone it predicts the other runs.
Appends to results/async_vs_sync.jsonl and plots results/async_vs_sync.png.

Expected with two idle cores: speed-up of at least 1.5 at 1 and 2 at 4; simulator within 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import chz
from matplotlib.figure import Figure
from results import FOLDER, append
from rich.console import Console
from rich.table import Table

from areal_jax import loop
from areal_jax.checkpoint.config import CheckpointConfig
from areal_jax.cluster.environment import environment
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import load_experiment
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.metrics import jsonl
from areal_jax.metrics.config import MetricsConfig
from areal_jax.models.config import PolicyConfig
from areal_jax.parallel.config import PlacementConfig
from areal_jax.protocols import MeasuredEngine
from areal_jax.records import Completion, Request, derive_seed
from areal_jax.rollout.config import RolloutConfig
from areal_jax.run.build import Run, build_run
from areal_jax.run.make_plan import make_plan
from areal_jax.run.trainer import rl_trainer
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.lengths import LogNormal
from areal_jax.sim.measured import MeasuredStages, StageTimes, stage_times
from areal_jax.sim.simulation import Workload, simulate
from areal_jax.trainer.ppo import Trainer

NAME = "async_vs_sync"
STALENESS = (0, 1, 4)
GROUPS, SAMPLES, MAX_PROMPT, MAX_NEW, STEPS_PER_DISPATCH = 8, 4, 64, 768, 8
LENGTHS = LogNormal(96.0, 1.0)
FIRST_COUNTED = 3
PLACEMENT = PlacementConfig(simulated_devices=2, rollout_devices=1)
POOL = {"NPROC": "2"}
"""Number of XLA's threads. Meshes of several devices need more, for their collectives."""


def experiment(max_staleness: int) -> Experiment:
    """Return the experiment at `max_staleness`, with unlimited steps."""
    aime = load_experiment("aime")
    assert isinstance(aime, Experiment)
    return chz.replace(
        aime,
        num_steps=1 << 20,
        policy=PolicyConfig(random_init=True),
        placement=PLACEMENT,
        rollout=RolloutConfig(
            groups_per_batch=GROUPS,
            samples_per_group=SAMPLES,
            max_staleness=max_staleness,
            max_running_groups=(max_staleness + 1) * GROUPS,
        ),
        engine=EngineConfig(
            num_slots=GROUPS * SAMPLES,
            max_prompt_tokens=MAX_PROMPT,
            max_new_tokens=MAX_NEW,
            steps_per_dispatch=STEPS_PER_DISPATCH,
        ),
        rewards=chz.replace(aime.rewards, function=f"{Path(__file__).with_name('coin.py')}:coin"),
        evaluation=EvaluationConfig(every_steps=0),
        checkpoint=CheckpointConfig(export_hf=False),
        metrics=MetricsConfig(samples=False, progress=False),
    )


class LongTailed:
    """An engine with the completion lengths of the simulator.

    No token ends a completion; each has its own limit of new tokens.
    """

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self.metrics = engine.metrics

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Submit each sample as a request of its own."""
        return asyncio.ensure_future(self._answer(request))

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """Return nothing: requests that were split are sampled again."""
        return {}

    async def _answer(self, request: Request) -> list[Completion]:
        lengths = LENGTHS.sample_lengths(random.Random(request.seed), request.num_samples)
        parts = [
            replace(
                request,
                id=f"{request.id}/{number}",
                num_samples=1,
                sampling=replace(
                    request.sampling, max_new_tokens=min(length, MAX_NEW), stop_token_ids=()
                ),
                seed=derive_seed(request.seed, str(number)),
            )
            for number, length in enumerate(lengths)
        ]
        return [
            completion
            for (completion,) in await asyncio.gather(
                *(self._engine.submit(part) for part in parts)
            )
        ]


async def train_in_turns(folder: Path, num_rounds: int, steps_per_round: int) -> None:
    """Train all runs in rounds of `steps_per_round` steps, each in its own folder."""
    async with AsyncExitStack() as stack:
        runs: dict[int, Run[Trainer]] = {}
        for eta in STALENESS:
            plan, where = make_plan(experiment(eta)), folder / str(eta)
            where.mkdir()
            run = await stack.enter_async_context(
                build_run(plan, where, resume=False, make_trainer=rl_trainer)
            )
            runs[eta] = replace(run, engine=LongTailed(run.engine))
        for number in range(1, num_rounds + 1):
            for eta, run in runs.items():
                await loop.train(
                    run, chz.replace(experiment(eta), num_steps=number * steps_per_round)
                )
                print(
                    (
                        f"round {number}/{num_rounds}  max_staleness {eta}: "
                        f"{rounds(run.folder, steps_per_round)[-1]}"
                    ),
                    flush=True,
                )


def rounds(run_folder: Path, steps_per_round: int) -> list[dict[str, float]]:
    """Compute tokens and trainer steps per second of each round, from step FIRST_COUNTED on."""
    by_round = defaultdict[int, list[dict[str, float]]](list)
    for row in jsonl.read(run_folder / "metrics.jsonl"):
        by_round[int(row["version"]) // steps_per_round].append(row)
    found: list[dict[str, float]] = []
    for rows in by_round.values():
        before, *timed = rows[FIRST_COUNTED - 1 :]
        seconds = timed[-1]["time_s"] - before["time_s"]
        tokens = sum(row["trainer/tokens_trained"] for row in timed)
        found.append({"tokens_per_s": tokens / seconds, "steps_per_s": len(timed) / seconds})
    return found


def simulated(
    times: StageTimes, max_staleness: int, num_steps: int, prompt_tokens: int
) -> dict[str, float]:
    """Predict the rates of a round with these stage times."""
    workload = Workload(
        LENGTHS,
        MAX_NEW,
        prompt_tokens,
        GROUPS,
        SAMPLES,
        max_staleness,
        max_running_groups=(max_staleness + 1) * GROUPS,
    )
    behavior = EngineBehavior(
        num_slots=GROUPS * SAMPLES, shares_prompts=False, steps_per_dispatch=STEPS_PER_DISPATCH
    )
    seed = experiment(max_staleness).seed  # of the lengths too
    outcome = simulate(MeasuredStages(times, behavior), workload, num_steps, FIRST_COUNTED, seed)
    return {"tokens_per_s": outcome.trained_per_s, "steps_per_s": 1 / outcome.step_s}


def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asyncio.run(train_in_turns(folder, options.rounds, options.steps))
        found = {eta: rounds(folder / str(eta), options.steps) for eta in STALENESS}
        times = {eta: stage_times(folder / str(eta), STEPS_PER_DISPATCH) for eta in STALENESS}
        rows = [row for row in jsonl.read(folder / "0" / "metrics.jsonl")]
    # A token of a batch is trained in this time, so that what is not sampled of a step's tokens are
    # prompts.
    prefilled = sum(row["rollout/prefill_tokens"] for row in rows)
    prompt_tokens = round(prefilled / len(rows) / GROUPS / SAMPLES)
    medians = {
        eta: {name: median(each[name] for each in of) for name in of[0]}
        for eta, of in found.items()
    }
    own = {eta: simulated(times[eta], eta, options.steps, prompt_tokens) for eta in STALENESS}
    estimated = {eta: simulated(times[0], eta, options.steps, prompt_tokens) for eta in STALENESS}
    append(
        NAME,
        {
            "note": options.note,
            "rounds": options.rounds,
            "steps_per_round": options.steps,
            "batch": [GROUPS, SAMPLES],
            "lengths": {"median": LENGTHS.median, "sigma": LENGTHS.sigma, "longest": MAX_NEW},
            "stage_times": {eta: of._asdict() for eta, of in times.items()},
            "by_round": found,
            "measured": medians,
            "ratio": {
                eta: medians[eta]["tokens_per_s"] / medians[0]["tokens_per_s"] for eta in STALENESS
            },
            "simulated": own,
            "simulated_off_by": {
                eta: own[eta]["tokens_per_s"] / medians[eta]["tokens_per_s"] - 1
                for eta in STALENESS
            },
            "predicted_from_synchronous_times": estimated,
        },
    )
    show(medians, own, estimated)
    plot(medians, own, estimated)


Speeds = Mapping[int, Mapping[str, float]]


def show(measured: Speeds, own: Speeds, estimated: Speeds) -> None:
    table = Table(
        "max_staleness",
        "tokens/s",
        "over that at 0",
        "simulated",
        "off by",
        "from times at 0",
        "off by",
        title=NAME,
    )
    for eta in STALENESS:
        speed, *said = (of[eta]["tokens_per_s"] for of in (measured, own, estimated))
        compared = (text for each in said for text in (f"{each:,.0f}", f"{each / speed - 1:+.0%}"))
        table.add_row(
            str(eta), f"{speed:,.0f}", f"{speed / measured[0]['tokens_per_s']:.2f}", *compared
        )
    Console(width=120).print(table)


def plot(*speeds: Speeds) -> None:
    figure = Figure(figsize=(6.5, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    names: Sequence[tuple[str, str]] = (
        ("measured", "#c2410c"),
        ("simulated, its own stage times", "#2563a8"),
        ("simulated, stage times at 0", "#9db8d9"),
    )
    for number, ((name, colour), of) in enumerate(zip(names, speeds, strict=True)):
        places = [x + 0.27 * (number - 1) for x in range(len(STALENESS))]
        axes.bar(
            places, [each["tokens_per_s"] for each in of.values()], 0.27, label=name, color=colour
        )
    axes.set_xticks(range(len(STALENESS)), [str(eta) for eta in STALENESS])
    axes.set(xlabel="max_staleness", ylabel="tokens trained per second")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / f"{NAME}.png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="trainer steps per round")
    parser.add_argument(
        "--note", default="", help="note for the row, such as other load of the machine"
    )
    options = parser.parse_args()
    if os.environ.get("NPROC") != POOL["NPROC"]:
        # XLA reads it when jax is imported, which has happened here.
        env = os.environ | environment(PLACEMENT, os.environ) | POOL
        return subprocess.run([sys.executable, *sys.argv], env=env).returncode
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
