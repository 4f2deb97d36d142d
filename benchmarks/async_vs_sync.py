"""Asynchronous against synchronous, measured: the same run at max_staleness 0, 1 and 4, and what the simulator says of it.

    python benchmarks/async_vs_sync.py

Runs `python -m areal_jax.train --exp=aime` with one simulated device that decodes and one that trains. The policy is drawn at
random, so that an answer ends with any token by the same chance: lengths are geometric, about 350 tokens on average and 768 at
most, and since no answer is right no update changes them. A step is 128 answers. Tokens per second are those trained on, from
the fifth step on. The two devices share the machine's cores: what is gained tells of the system only where each has a core of
its own and nothing else runs.

The run at max_staleness 0 also tells the stages' times: of a decode step (by the trace's dispatches), of prefill and of
training on a token; and its samples tell the lengths. The simulator is given these, and no other measurement, and foretells all
three. A run that is finished is not run again. Appends to results/async_vs_sync.jsonl and draws results/async_vs_sync.png.

Expected with a device each: at least 1.5 times at 1 and 2 times at 4, and the simulator within 15 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from results import FOLDER, append
from rich.console import Console
from rich.table import Table
from runs import Rows, run_all, steps

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.metrics import trace
from areal_jax.models.architecture import ModelConfig
from areal_jax.sim.costs import Reached, Rewards, TrainerCosts
from areal_jax.sim.engine import EngineHabits
from areal_jax.sim.hardware import Device
from areal_jax.sim.lengths import Recorded
from areal_jax.sim.simulation import Cluster, Staged, Workload, simulate

NAME = "async_vs_sync"
STALENESS = (0, 1, 4)
GROUPS, SAMPLES, SLOTS, MAX_PROMPT, MAX_NEW, STEPS_PER_DISPATCH = 16, 8, 64, 64, 768, 8
FIRST_COUNTED = 4
SETTINGS = (
    *("--exp=aime", "policy.random_init=true", "placement.simulated_devices=2", "placement.rollout_devices=1"),
    *(f"rollout.groups_per_batch={GROUPS}", f"rollout.samples_per_group={SAMPLES}", f"rollout.max_running_groups={2 * GROUPS}"),
    *(f"engine.num_slots={SLOTS}", f"engine.max_prompt_tokens={MAX_PROMPT}", f"engine.max_new_tokens={MAX_NEW}"),
    *(f"engine.steps_per_dispatch={STEPS_PER_DISPATCH}", "evaluation.every_steps=0", "checkpoint.export_hf=false"),
)


def throughput(rows: Rows) -> float:
    """Tokens trained per second of wall-clock time."""
    timed = steps(rows)[FIRST_COUNTED:]
    return sum(row["trainer/tokens_trained"] for row in timed[1:]) / (timed[-1]["time_s"] - timed[0]["time_s"])


def measured_cluster(run_folder: Path, samples: Sequence[dict[str, int]]) -> tuple[Cluster, dict[str, float]]:
    """A cluster whose stages take what they took in a synchronous run, and these times."""
    spans = [event for event in trace.read(run_folder / "trace.json") if event.get("ph") == "X"]

    def seconds(name: str) -> list[tuple[float, int]]:
        found = [(event["dur"] / 1e6, event["args"].get("tokens", 0)) for event in spans if event["name"].startswith(name)]
        return found[len(found) // 4 :]  # without the beginning

    dispatches, prefills, trained = seconds("dispatch"), seconds("prefill"), seconds("step ")
    whole = [sample["num_tokens"] for sample in samples]
    per_step = GROUPS * SAMPLES / len(whole)
    tokens, pairs = sum(whole) * per_step, sum(length**2 for length in whole) / 2 * per_step
    step_s = fmean(duration for duration, _ in dispatches) / STEPS_PER_DISPATCH
    prefill_s = sum(duration for duration, _ in prefills) / sum(number for _, number in prefills)
    train_s = fmean(duration for duration, _ in trained)
    model = ModelConfig.from_hf(json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8")), "embedded")
    # A device that takes as long; where the roofline has no say its rates are beyond reach.
    training = TrainerCosts(model, Device(1e15, 1e18, 1.0, 1e18, 1e18, 1), 1, Reached(train_flops=1.0, update_s=0.0))
    flops = training.train_tokens_s(tokens, pairs) / train_s
    reached = Reached(1.0, 1e9, 2 * model.multiplied_params / prefill_s / flops, 1.0, 1.0, step_s, 0.0, 0.0)
    device = replace(training.device, flops_per_s=flops)
    habits = EngineHabits(num_slots=SLOTS)
    cluster = Cluster(model, device, 1, 1, 1, reached, habits, Staged(0.05), Rewards(num_workers=1, judge_s=0.001))
    return cluster, {"decode_step_s": step_s, "prefill_token_s": prefill_s, "train_step_s": train_s}


def foretold(cluster: Cluster, samples: Sequence[dict[str, int]], max_staleness: int, num_steps: int) -> float:
    """Tokens per second, as simulated."""
    prompt_tokens = round(fmean(sample["num_tokens"] - sample["num_drawn"] for sample in samples))
    workload = Workload(
        Recorded(tuple(sample["num_drawn"] for sample in samples)),
        MAX_NEW,
        prompt_tokens,
        GROUPS,
        SAMPLES,
        max_staleness,
        max_running_groups=2 * GROUPS,
    )
    return simulate(cluster, workload, num_steps, FIRST_COUNTED).tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--steps", type=int, default=25, help="trainer steps of each run")
    parser.add_argument("--note", default="", help="goes into the row: what else the machine did")
    options = parser.parse_args()
    names = {eta: f"staleness-{eta}" for eta in STALENESS}
    runs = {name: (*SETTINGS, f"rollout.max_staleness={eta}") for eta, name in names.items()}
    rows = run_all(runs, options.folder, options.steps)
    synchronous = options.folder / names[0]
    samples = [json.loads(line) for line in (synchronous / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    cluster, stages = measured_cluster(synchronous, samples)
    measured = {eta: throughput(rows[name]) for eta, name in names.items()}
    simulated = {eta: foretold(cluster, samples, eta, options.steps) for eta in STALENESS}
    table = Table("max_staleness", "tokens/s", "over that at 0", "simulated", "off by", title=NAME)
    for eta in STALENESS:
        off_by = simulated[eta] / measured[eta] - 1
        table.add_row(
            str(eta), f"{measured[eta]:,.0f}", f"{measured[eta] / measured[0]:.2f}", f"{simulated[eta]:,.0f}", f"{off_by:+.0%}"
        )
    result = {"note": options.note, "steps": options.steps, "settings": SETTINGS, "stages": stages}
    append(
        NAME,
        {
            **result,
            "mean_length": fmean(sample["num_drawn"] for sample in samples),
            "tokens_per_s": measured,
            "simulated_tokens_per_s": simulated,
        },
    )
    Console().print(table)
    figure = Figure(figsize=(6, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for shift, (name, speeds) in zip((-0.2, 0.2), {"measured": measured, "simulated": simulated}.items(), strict=True):
        axes.bar([x + shift for x in range(len(STALENESS))], list(speeds.values()), 0.4, label=name)
    axes.set_xticks(range(len(STALENESS)), [str(eta) for eta in STALENESS])
    axes.set(xlabel="max_staleness", ylabel="tokens trained per second")
    axes.legend(frameon=False)
    figure.savefig(FOLDER / f"{NAME}.png")


if __name__ == "__main__":
    main()
