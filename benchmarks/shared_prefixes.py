"""Training on tokens that samples share: each once, or in every sample.

    python benchmarks/shared_prefixes.py
    # one GPU
    python benchmarks/shared_prefixes.py --model=qwen2.5-1.5b --row-tokens=8192 --prompts=2

The policy of rl_step_cpu.py (4 layers, width 128, vocabulary 512) or a published one with random
weights, in bfloat16 (float32 on a CPU), 8 samples of each prompt, two rows in a micro-batch, one
update per batch. Workloads: a long prompt, one as long as the answer, a short prompt, and
conversations of 4 calls, each exported with the conversation before it; their lengths are in
proportion to the rows. The two trainers take the same batches in turns. Tokens per second count
every token of every sample.

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
from train_mfu import model_config

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.models.known import KNOWN
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import NO_VERSION, Group, Sample, Task
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.step import TrainableModel

NAME = "shared_prefixes"
ROWS, ROW_TOKENS, NUM_SAMPLES = 2, 512, 8
WORKLOADS: dict[str, tuple[int, int, int]] = {
    "long prompt": (192, 64, 1),
    "equal parts": (64, 64, 1),
    "short prompt": (16, 64, 1),
    "conversations": (48, 32, 4),
}
"""Tokens of a prompt, most tokens of an answer, and calls of a conversation, for ROW_TOKENS."""


def draw(
    rng: np.random.Generator,
    vocab_size: int,
    num_prompts: int,
    sizes: tuple[int, int, int],
) -> list[Group]:
    """Draw a batch: answers have half to all of their most tokens."""
    prompt_tokens, most, calls = sizes

    def tokens(number: int) -> np.ndarray:
        return rng.integers(0, vocab_size, number, dtype=np.int32)

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
                    reward=float((answer < vocab_size // 2).mean()),
                    grade="correct",
                    stop_reason="stop",
                )
            )
            context = np.concatenate([context, tokens(most)])
        return samples

    groups = list[Group]()
    for number in range(num_prompts):
        prompt = tokens(prompt_tokens)
        samples = [each for _ in range(NUM_SAMPLES) for each in conversation(prompt)]
        groups.append(Group(number, Task(f"task-{number}", (), ""), tuple(samples)))
    return groups


def make_trainer(model: ModelConfig, row_tokens: int, *, shares_prefixes: bool) -> Trainer:
    policy, config = Policy(model), chz.replace(TRAINER, rows_per_micro_batch=ROWS)
    if model is not MODEL:
        config = chz.replace(config, remat="attention", logp_chunk_tokens=2048)
    on_cpu = jax.devices()[0].platform == "cpu"
    trained = TrainableModel(
        policy=policy,
        params=jax.jit(policy.init)(jax.random.key(0)),
        mesh=make_meshes(PlacementConfig(), jax.devices()[:1]).train,
        compute_dtype=jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16),
        row_tokens=row_tokens,
        shares_prefixes=shares_prefixes,
    )
    trainer = Trainer(
        config=config,
        limits=SampleLimits(max_staleness=None, max_new_tokens=row_tokens),
        policy=policy_learner(config, trained, num_updates=1000),
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
    parser.add_argument("--model", choices=list(KNOWN), help="default: that of rl_step_cpu.py")
    parser.add_argument("--row-tokens", type=int, default=ROW_TOKENS)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--only", choices=list(WORKLOADS), help="one workload")
    args = parser.parse_args()
    model = model_config(args.model, 0) if args.model else MODEL
    trainers = {
        name: make_trainer(model, args.row_tokens, shares_prefixes=name == "shared")
        for name in ("plain", "shared")
    }
    for workload, (prompt_tokens, most, calls) in WORKLOADS.items():
        if args.only not in (None, workload):
            continue
        longer = args.row_tokens // ROW_TOKENS
        sizes = prompt_tokens * longer, most * longer, calls
        rng, seconds = np.random.default_rng(0), {name: list[float]() for name in trainers}
        num_tokens, metrics = list[int](), dict[str, Mapping[str, Any]]()
        for _ in range(args.steps + 1):
            groups = draw(rng, model.vocab_size, args.prompts, sizes)
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
                "steps": args.steps,
                "model": args.model,
                "shared_token_fraction": shared / total,
                "micro_batches": {
                    name: places / (ROWS * args.row_tokens) for name, (_, places) in filled.items()
                },
                "filled": {name: tokens / places for name, (tokens, places) in filled.items()},
                "tokens_per_second": {name: median(each) for name, each in rates.items()},
                "ratio": median(ratios),
                "ratios": [min(ratios), max(ratios)],
            },
        )


if __name__ == "__main__":
    main()
