"""Training on tokens that samples share: each once, or in every sample.

    python benchmarks/shared_prefixes.py

The policy of rl_step_cpu.py (4 layers, width 128, vocabulary 512, float32), 8 prompts x 8 samples,
rows of 512 tokens, one update per batch. Workloads: a long prompt, one as long as the answer, a
short prompt, and conversations of 4 calls, each exported with the conversation before it. The two
trainers take the same batches in turns. Tokens per second count every token of every sample.

Appends a row per workload to results/shared_prefixes.jsonl: medians, the micro-batches of a step
(all of one shape, so that floating-point operations are in proportion to them), and the shares of
row positions that are filled. Needs idle cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
from results import append
from rl_step_cpu import MODEL, TRAINER

from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import NO_VERSION, Group, Sample, Task
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.step import TrainableModel

NAME = "shared_prefixes"
ROWS, ROW_TOKENS, NUM_PROMPTS, NUM_SAMPLES = 2, 512, 8, 8
WORKLOADS: dict[str, tuple[int, int, int]] = {
    "long prompt": (192, 64, 1),
    "equal parts": (64, 64, 1),
    "short prompt": (16, 64, 1),
    "conversations": (48, 32, 4),
}
"""Tokens of a prompt, most tokens of an answer, and calls of a conversation."""


def draw(rng: np.random.Generator, prompt_tokens: int, most: int, calls: int) -> list[Group]:
    """Draw a batch: answers have half to all of their most tokens."""

    def tokens(number: int) -> np.ndarray:
        return rng.integers(0, MODEL.vocab_size, number, dtype=np.int32)

    def conversation(prompt: np.ndarray) -> list[Sample]:
        samples, context = list[Sample](), prompt
        for _ in range(calls):
            answer = tokens(int(rng.integers(most // 2, most + 1)))
            mask = np.arange(len(context) + len(answer)) >= len(context)
            context = np.concatenate([context, answer])
            samples.append(
                Sample(
                    tokens=context,
                    loss_mask=mask,
                    behave_logp=np.where(mask, -6.2, 0.0).astype(np.float32),
                    versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                    reward=float((answer < MODEL.vocab_size // 2).mean()),
                    grade="correct",
                    stop_reason="stop",
                )
            )
            context = np.concatenate([context, tokens(most)])
        return samples

    groups = list[Group]()
    for number in range(NUM_PROMPTS):
        prompt = tokens(prompt_tokens)
        samples = [each for _ in range(NUM_SAMPLES) for each in conversation(prompt)]
        groups.append(Group(number, Task(f"task-{number}", (), ""), tuple(samples)))
    return groups


def make_trainer(*, shares_prefixes: bool, num_updates: int) -> Trainer:
    policy, config = Policy(MODEL), chz.replace(TRAINER, rows_per_micro_batch=ROWS)
    model = TrainableModel(
        policy=policy,
        params=policy.init(jax.random.key(0)),
        mesh=make_meshes(PlacementConfig(), jax.devices()[:1]).train,
        compute_dtype=jnp.dtype(jnp.float32),
        row_tokens=ROW_TOKENS,
        shares_prefixes=shares_prefixes,
    )
    trainer = Trainer(
        config=config,
        limits=SampleLimits(max_staleness=None, max_new_tokens=ROW_TOKENS),
        policy=policy_learner(config, model, num_updates=num_updates),
    )
    trainer.warm_up()
    return trainer


def step(trainer: Trainer, groups: Sequence[Group]) -> tuple[float, Mapping[str, Any]]:
    """Return seconds and metrics of a step."""
    start = time.perf_counter()
    result = trainer.step(groups)
    jax.block_until_ready(trainer.params)
    return time.perf_counter() - start, result.metrics


def main() -> None:
    """Time all workloads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=7)
    num_steps = parser.parse_args().steps
    trainers = {
        name: make_trainer(shares_prefixes=name == "shared", num_updates=1000)
        for name in ("plain", "shared")
    }
    for workload, sizes in WORKLOADS.items():
        rng, seconds = np.random.default_rng(0), {name: list[float]() for name in trainers}
        num_tokens, metrics = list[int](), dict[str, Mapping[str, Any]]()
        for _ in range(num_steps + 1):
            groups = draw(rng, *sizes)
            num_tokens.append(sum(len(each.tokens) for group in groups for each in group.samples))
            for name, trainer in trainers.items():
                taken_s, metrics[name] = step(trainer, groups)
                seconds[name].append(taken_s)
        rates = {
            name: [n / s for n, s in zip(num_tokens, each, strict=True)][1:]
            for name, each in seconds.items()
        }
        ratios = [b / a for a, b in zip(rates["plain"], rates["shared"], strict=True)]
        filled = {name: each["packing_efficiency"] for name, each in metrics.items()}
        shared, total = metrics["shared"]["shared_token_fraction"]
        append(
            NAME,
            {
                "workload": workload,
                "prompt_tokens, answer_tokens, calls": sizes,
                "steps": num_steps,
                "shared_token_fraction": shared / total,
                "micro_batches": {
                    name: places / (ROWS * ROW_TOKENS) for name, (_, places) in filled.items()
                },
                "filled": {name: tokens / places for name, (tokens, places) in filled.items()},
                "tokens_per_second": {name: median(each) for name, each in rates.items()},
                "ratio": median(ratios),
                "ratios": [min(ratios), max(ratios)],
            },
        )


if __name__ == "__main__":
    main()
