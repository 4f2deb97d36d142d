"""One RL step on CPUs versus other projects: rollout tokens/s, train tokens/s and steps/s.

    python benchmarks/rl_step_cpu.py
    python benchmarks/rl_step_cpu.py --rounds=5 \\
        --peer=TRL_ENV/bin/python:benchmarks/peers/trl_rl_step.py \\
        --peer=TUNIX_ENV/bin/python:benchmarks/peers/tunix_rl_step.py
    python benchmarks/rl_step_cpu.py --shape=24m --steps=2 --warmup-steps=1
    python benchmarks/rl_step_cpu.py --compute-dtype=bfloat16

Workload (`peers/workload.py`): untied Qwen2 with 4 layers of width 128; 8 prompts x 4 samples, 16
prompt tokens and exactly 64 new tokens, one update per batch, no remat. Rollout tokens are the 2048
sampled ones, train tokens all 2560. With --shape=24m: 24 layers of width 256, and 256 + 256 tokens.
Steps are synchronous, so that each stage is timed alone: sample the batch, train on it, transfer
the weights. Micro-batches have four rows of 80 tokens. With --shape=24m, where prompts are as long
as answers, they have one row with the four samples of a prompt, which share it. Two engines share
the device. Parameters are float32; --compute-dtype is the type of products, TRL's autocast and
Tunix' `dtype`. Memory is in huge pages here, as in a command of this project; peers get the pages
that their programs ask for, or in huge ones too where GLIBC_TUNABLES=glibc.malloc.hugetlb=1 is set.

The limit is the rate at which XLA multiplies matrices of this type on all cores (2048 x 2048, sums
in float32), measured in the same process. `share_of_limit` counts only products that no
implementation can leave out: those with weights and of attention, which training needs three times,
without padding, and with each prompt once.

Each round runs all programs in turns, in separate processes. Results are medians over rounds;
ratios are computed per round. Appends one line to benchmarks/results/rl_step_cpu.jsonl. Needs idle
cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from peers import workload
from peers.workload import (
    NEW_TOKENS,
    NUM_PROMPTS,
    NUM_SEQUENCES,
    PROMPT_TOKENS,
    SAMPLES_PER_PROMPT,
)
from results import append

from areal_jax.cluster.environment import use_huge_pages
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.fleet import Fleet
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import engine_meshes, make_meshes
from areal_jax.records import NO_VERSION, Completion, Group, Request, Sample, Sampling, Task
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.step import TrainableModel
from areal_jax.weights.local import WeightChannel

MODEL = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=workload.VOCAB_SIZE,
    hidden_size=workload.HIDDEN_SIZE,
    intermediate_size=workload.MLP_SIZE,
    num_hidden_layers=workload.NUM_LAYERS,
    num_attention_heads=workload.NUM_HEADS,
    num_key_value_heads=workload.NUM_KV_HEADS,
    head_dim=workload.HEAD_DIM,
    rope_theta=float(workload.ROPE_THETA),
    rms_norm_eps=workload.RMS_NORM_EPS,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
)
SAMPLE_TOKENS = PROMPT_TOKENS + NEW_TOKENS
SHARES_PROMPTS = PROMPT_TOKENS >= NEW_TOKENS
# Each branch repeats the last token of the prompt.
GROUP_TOKENS = PROMPT_TOKENS + SAMPLES_PER_PROMPT * NEW_TOKENS + SAMPLES_PER_PROMPT - 1
NUM_ENGINES = 2

TRAINER = TrainerConfig(
    optimizer=OptimizerConfig(learning_rate=workload.LEARNING_RATE),
    num_mini_batches=1,
    rows_per_micro_batch=1 if SHARES_PROMPTS else 4,
    remat="none",
)
RATES = ("rollout_tokens_per_s", "train_tokens_per_s", "steps_per_s")


async def measure(warmup_steps: int, num_steps: int) -> dict[str, object]:
    """Measure this project's engine and trainer; rates of the median step.

    More than 60 lines: it builds both from their settings, in one place for comparison with peers.
    """
    policy = Policy(MODEL)
    meshes = make_meshes(PlacementConfig(), jax.devices()[:1])
    dtype = jnp.dtype(workload.COMPUTE_DTYPE)
    model = TrainableModel(
        policy=policy,
        params=policy.init(jax.random.key(0)),
        mesh=meshes.train,
        compute_dtype=dtype,
        row_tokens=GROUP_TOKENS if SHARES_PROMPTS else SAMPLE_TOKENS,
        shares_prefixes=SHARES_PROMPTS,
    )
    trainer = Trainer(
        config=TRAINER,
        limits=SampleLimits(max_staleness=0, max_new_tokens=NEW_TOKENS),
        policy=policy_learner(TRAINER, model, num_updates=warmup_steps + num_steps),
    )
    config = EngineConfig(
        num_slots=NUM_SEQUENCES // NUM_ENGINES,
        max_prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS,
        steps_per_dispatch=32,
    )
    engines = [
        DecodeEngine(policy, mesh, config, dtype)
        for mesh in engine_meshes(meshes.rollout, NUM_ENGINES)
    ]
    weight_channel = WeightChannel(
        engines[0].layout, [engine.param_shardings for engine in engines], meshes.train
    )
    fleet = Fleet(
        [EngineLoop(engine, weight_channel.source(i)) for i, engine in enumerate(engines)]
    )
    trainer.warm_up()
    for engine in engines:
        engine.warm_up()
    weight_channel.publish(0, trainer.params)
    fleet.start()
    chance = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"rollout_s": [], "train_s": [], "step_s": [], "cpu_s": []}
    try:
        for version in range(warmup_steps + num_steps):
            if version == warmup_steps:
                fleet.metrics()
            cpu_s, start = _cpu_seconds(), time.perf_counter()
            prompts = chance.integers(
                0, MODEL.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), dtype=np.int32
            )
            answers = await asyncio.gather(
                *(fleet.submit(_request(version, i, prompt)) for i, prompt in enumerate(prompts))
            )
            sampled = time.perf_counter()
            groups = [
                _group(version, i, prompt, answer)
                for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
            began = time.perf_counter()
            trainer.step(groups)
            jax.block_until_ready(trainer.params)
            trained = time.perf_counter()
            weight_channel.publish(version + 1, trainer.params)
            weight_channel.wait_all_engines(version + 1, 60.0)
            if version >= warmup_steps:
                for name, value in zip(
                    seconds,
                    (
                        sampled - start,
                        trained - began,
                        time.perf_counter() - start,
                        _cpu_seconds() - cpu_s,
                    ),
                    strict=True,
                ):
                    seconds[name].append(value)
        gap_sum_us, gaps = fleet.metrics()["host_gap_us"]
    finally:
        fleet.close()
        weight_channel.close()
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "peer": "areal_jax",
        "threads": len(os.sched_getaffinity(0)),
        "num_params": MODEL.num_params,
        "steps": num_steps,
        "rollout_tokens_per_s": workload.ROLLOUT_TOKENS_PER_STEP / medians["rollout_s"],
        "train_tokens_per_s": workload.TRAIN_TOKENS_PER_STEP / medians["train_s"],
        "steps_per_s": 1 / medians["step_s"],
        "cpu_seconds_per_step": medians["cpu_s"],
        "host_gap_us": gap_sum_us / gaps,
        **_limits(medians),
        **medians,
    }


def _limits(seconds: dict[str, float]) -> dict[str, float]:
    """Return the rate of matrix products, and the share of it that each stage reaches."""
    size = 2048
    square = jnp.ones((size, size), workload.COMPUTE_DTYPE)
    multiply = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    jax.block_until_ready(multiply(square, square))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(multiply(square, square))
        times.append(time.perf_counter() - start)
    flops_per_s = 2 * size**3 / min(times)
    num_weights = MODEL.num_params - MODEL.vocab_size * MODEL.hidden_size  # without the embedding
    prompt_tokens = NUM_PROMPTS * PROMPT_TOKENS
    prompt_keys = prompt_tokens * (PROMPT_TOKENS + 1) / 2
    answer_keys = workload.ROLLOUT_TOKENS_PER_STEP * (PROMPT_TOKENS + (NEW_TOKENS + 1) / 2)
    pair = 4 * MODEL.num_attention_heads * MODEL.head_dim * MODEL.num_hidden_layers
    rollout = 2 * num_weights * workload.ROLLOUT_TOKENS_PER_STEP + pair * answer_keys
    train = 3 * (rollout + 2 * num_weights * prompt_tokens + pair * prompt_keys)
    return {
        "matrix_gflops_per_s": flops_per_s / 1e9,
        "rollout_share_of_limit": rollout / flops_per_s / seconds["rollout_s"],
        "train_share_of_limit": train / flops_per_s / seconds["train_s"],
    }


def _request(version: int, place: int, prompt: np.ndarray) -> Request:
    return Request(
        f"{version}.{place}",
        prompt,
        SAMPLES_PER_PROMPT,
        Sampling(NEW_TOKENS),
        seed=version * NUM_PROMPTS + place,
        min_version=version,
    )


def _group(version: int, place: int, prompt: np.ndarray, answer: list[Completion]) -> Group:
    """Make a group whose rewards are the shares of low token ids: learnable, cheap to compute."""
    mask = np.arange(SAMPLE_TOKENS) >= PROMPT_TOKENS
    samples = tuple(
        Sample(
            tokens=np.concatenate([prompt, sampled.tokens]),
            loss_mask=mask,
            behave_logp=np.concatenate([np.zeros(PROMPT_TOKENS, np.float32), sampled.logp]),
            versions=np.concatenate(
                [np.full(PROMPT_TOKENS, NO_VERSION, np.int32), sampled.versions]
            ),
            reward=float((sampled.tokens < MODEL.vocab_size // 2).mean()),
            grade="correct",
            stop_reason=sampled.stop_reason,
        )
        for sampled in answer
    )
    assert all(len(sample.tokens) == SAMPLE_TOKENS for sample in samples)
    return Group(version * NUM_PROMPTS + place, Task(f"{version}.{place}", (), ""), samples)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_one(command: list[str]) -> dict[str, float]:
    """Run a program and parse the last line of its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} exited with status {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="1m")
    parser.add_argument(
        "--compute-dtype", choices=workload.COMPUTE_DTYPES, default=workload.COMPUTE_DTYPES[0]
    )
    parser.add_argument("--peer", action="append", default=[], metavar="PYTHON:SCRIPT")
    parser.add_argument(
        "--once",
        action="store_true",
        help="measure only this project, in this process, and print one line",
    )
    args = parser.parse_args()
    if args.once:
        use_huge_pages()
        print(json.dumps(asyncio.run(measure(args.warmup_steps, args.steps))))
        return
    # Of the processes below.
    os.environ["RL_STEP_SHAPE"], os.environ["RL_STEP_DTYPE"] = args.shape, args.compute_dtype
    steps = [f"--warmup-steps={args.warmup_steps}", f"--steps={args.steps}"]
    commands = [
        [sys.executable, __file__, "--once", *steps],
        *([*peer.split(":"), *steps] for peer in args.peer),
    ]
    rounds: list[list[dict[str, float]]] = []
    for number in range(args.rounds):
        rounds.append([run_one(command) for command in commands])
        for result in rounds[-1]:
            rates = "  ".join(
                f"{name} {result[name]:,.2f}" for name in (*RATES, "cpu_seconds_per_step")
            )
            print(f"round {number + 1}/{args.rounds}  {result['peer']:<10} {rates}", flush=True)
    contestants = [str(result["peer"]) for result in rounds[0]]
    row = {
        "shape": args.shape,
        "compute_dtype": args.compute_dtype,
        "rounds": args.rounds,
        "versions": {str(result["peer"]): result.get("version") for result in rounds[0][1:]},
        "median": {
            name: {
                rate: median(results[i][rate] for results in rounds)
                for rate in (*RATES, "cpu_seconds_per_step")
            }
            for i, name in enumerate(contestants)
        },
        **{
            name: median(results[0][name] for results in rounds)
            for name in (
                "host_gap_us",
                "matrix_gflops_per_s",
                "rollout_share_of_limit",
                "train_share_of_limit",
            )
        },
        "ratio": {
            name: {
                rate: median(results[0][rate] / results[i][rate] for results in rounds)
                for rate in RATES
            }
            for i, name in enumerate(contestants)
            if i
        },
    }
    append("rl_step_cpu", row)


if __name__ == "__main__":
    main()
