"""Presets of algorithms: learning of the embedded policy in 30 steps, and cost versus GRPO.

    python benchmarks/presets.py            # learning: runs what is missing
    python benchmarks/presets.py --costs

Learning: `areal-train --exp=aime algorithm=NAME num_steps=30`, with pass@1 on 512
held-out problems before and after. Cost: one optimizer update on the batch of rl_step_cpu.py (32
sequences of 80 tokens, 4 layers), the presets in turns, without reference policies and critics.
M2POClip needs the log-probabilities of a whole mini-batch before its update, and SPO those of each
prompt's last answer: one more forward pass. VCPO needs the gradient norm of every sample.

Every run appends one row to results/presets.jsonl; presets that have a row are not repeated. All
take about 40 minutes on two idle CPU cores, the costs eight.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
from peers.workload import (
    NEW_TOKENS,
    NUM_PROMPTS,
    NUM_SEQUENCES,
    PROMPT_TOKENS,
    SAMPLES_PER_PROMPT,
    TRAIN_TOKENS_PER_STEP,
)
from results import FOLDER, append
from rich.console import Console
from rich.table import Table
from rl_step_cpu import MODEL, TRAINER
from runs import pass_at_1, run_all

from areal_jax.metrics import jsonl
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import NO_VERSION, Group, Sample, Task
from areal_jax.rl.config import GAE, GDPO, SPO, MaxRL
from areal_jax.rl.presets import PRESETS
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.step import TrainableModel

NAME = "presets"
NUM_STEPS = 30
NUM_TURNS = 30
COMPONENTS = (
    f"rewards.function={Path(__file__).parent / 'component_rewards.py'}:boxed_and_short",
    "trainer.advantages.weights=short:0.1",
)


def settings_of(name: str) -> tuple[str, ...]:
    """Return the settings of a preset's run."""
    preset = PRESETS[name]
    return (
        "--exp=aime",
        f"algorithm={name}",
        f"evaluation.every_steps={NUM_STEPS}",
        "checkpoint.export_hf=false",
        *(["rewards.wrong=0"] if isinstance(preset.advantages, MaxRL | SPO) else []),
        *(["rewards.correct=1"] if isinstance(preset.advantages, SPO) else []),
        *(COMPONENTS if isinstance(preset.advantages, GDPO) else []),
    )


def stored() -> dict[str, Mapping[str, Any]]:
    """Return the newest row of each preset."""
    return {row["preset"]: row for row in jsonl.read(FOLDER / f"{NAME}.jsonl") if "preset" in row}


def run_missing(folder: Path) -> None:
    """Train with the presets that have no row, and store a row of each."""
    for name in [name for name in PRESETS if name not in stored()]:
        rows = run_all({name: settings_of(name)}, folder, NUM_STEPS)[name]
        before, *_, after = pass_at_1(rows)
        print(f"{name}: {before:.1%} -> {after:.1%}", flush=True)
        append(NAME, {"preset": name, "num_steps": NUM_STEPS, "before": before, "after": after})


def train_tokens_per_s() -> dict[str, float]:
    """Measure tokens/s of a trainer step by preset, the median over rounds."""
    trainers = {
        name: trainer_of(name)
        for name, preset in PRESETS.items()
        if not isinstance(preset.advantages, GAE)
    }
    seconds = defaultdict[str, list[float]](list)
    for turn in range(NUM_TURNS + 3):
        for name, trainer in trainers.items():
            groups = batch(turn)
            started = time.perf_counter()
            trainer.step(groups)
            jax.block_until_ready(trainer.params)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - started)
    return {name: TRAIN_TOKENS_PER_STEP / median(taken) for name, taken in seconds.items()}


def trainer_of(name: str) -> Trainer:
    preset, policy = PRESETS[name], Policy(MODEL)
    config = chz.replace(
        TRAINER,
        loss=preset.loss,
        loss_mean=preset.loss_mean,
        advantages=preset.advantages,
        shaping=preset.shaping,
    )
    model = TrainableModel(
        policy=policy,
        params=policy.init(jax.random.key(0)),
        mesh=make_meshes(PlacementConfig(), jax.devices()[:1]).train,
        compute_dtype=jnp.float32,
        row_tokens=PROMPT_TOKENS + NEW_TOKENS,
    )
    trainer = Trainer(
        config=config,
        limits=SampleLimits(max_staleness=None, max_new_tokens=NEW_TOKENS),
        policy=policy_learner(config, model, num_updates=NUM_TURNS),
    )
    trainer.warm_up()
    return trainer


def batch(seed: int) -> list[Group]:
    """Make groups as a fresh policy samples them, nearly uniformly from the vocabulary."""
    chance, num_tokens = np.random.default_rng(seed), PROMPT_TOKENS + NEW_TOKENS
    mask = np.arange(num_tokens) >= PROMPT_TOKENS

    def sample() -> Sample:
        logp = np.where(mask, chance.normal(-np.log(MODEL.vocab_size), 0.05, num_tokens), 0.0)
        return Sample(
            tokens=chance.integers(0, MODEL.vocab_size, num_tokens).astype(np.int32),
            loss_mask=mask,
            behave_logp=logp.astype(np.float32),
            versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
            reward=float(chance.integers(0, 2)),
            grade="correct",
            stop_reason="stop",
            components={"correct": float(chance.integers(0, 2)), "short": float(chance.random())},
        )

    return [
        Group(i, Task(str(i), (), ""), tuple(sample() for _ in range(SAMPLES_PER_PROMPT)))
        for i in range(NUM_PROMPTS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--costs", action="store_true", help="measure the costs, train nothing")
    options = parser.parse_args()
    if options.costs:
        speed = train_tokens_per_s()
        cost = {name: speed["grpo"] / of - 1.0 for name, of in speed.items()}
        append(
            NAME,
            {"sequences": NUM_SEQUENCES, "train_tokens_per_s": speed, "cost_over_grpo": cost},
        )
        table = Table("algorithm", "train tokens/s", "time over GRPO's", title=NAME)
        for name, of in speed.items():
            table.add_row(name, f"{of:,.0f}", f"{cost[name]:+.1%}")
    else:
        run_missing(options.folder)
        table = Table("algorithm", "pass@1 before", f"after {NUM_STEPS} steps", title=NAME)
        for name, row in stored().items():
            table.add_row(name, f"{row['before']:.1%}", f"{row['after']:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
