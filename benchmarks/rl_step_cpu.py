"""One RL step on CPUs versus other projects: rollout tokens/s, train tokens/s and steps/s.

    python benchmarks/rl_step_cpu.py
    python benchmarks/rl_step_cpu.py --rounds=5 \\
        --peer=TRL_ENV/bin/python:benchmarks/peers/trl_rl_step.py \\
        --peer=TUNIX_ENV/bin/python:benchmarks/peers/tunix_rl_step.py

Workload: Qwen2 with 4 layers, width 128, 4 heads, 2 KV heads, MLP 512, vocabulary 512, untied,
float32; 8 prompts x 4 samples, 16 prompt tokens and exactly 64 new tokens, one update per batch, no
remat. Rollout tokens are the 2048 sampled ones, train tokens all 2560. Steps are synchronous, so
that each stage is timed alone: sample the batch, train on it, transfer the weights.

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
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from results import append

from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import NO_VERSION, Completion, Group, Request, Sample, Sampling, Task
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.step import TrainableModel
from areal_jax.weights.local import WeightChannel

MODEL = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
)
NUM_PROMPTS, SAMPLES_PER_PROMPT, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 16, 64
NUM_SEQUENCES = NUM_PROMPTS * SAMPLES_PER_PROMPT
ROLLOUT_TOKENS, TRAIN_TOKENS = (
    NUM_SEQUENCES * NEW_TOKENS,
    NUM_SEQUENCES * (PROMPT_TOKENS + NEW_TOKENS),
)

TRAINER = TrainerConfig(
    optimizer=OptimizerConfig(learning_rate=1e-4),
    num_mini_batches=1,
    rows_per_micro_batch=NUM_SEQUENCES,
    logp_chunk_tokens=TRAIN_TOKENS,
    remat="none",
)
RATES = ("rollout_tokens_per_s", "train_tokens_per_s", "steps_per_s")


async def measure(warmup_steps: int, num_steps: int) -> dict[str, object]:
    """Measure this project's engine and trainer; rates of the median step.

    More than 60 lines: it builds both from their settings, in one place for comparison with peers.
    """
    policy = Policy(MODEL)
    meshes = make_meshes(PlacementConfig(), jax.devices()[:1])
    dtype = jnp.dtype(jnp.float32)
    model = TrainableModel(
        policy=policy,
        params=policy.init(jax.random.key(0)),
        mesh=meshes.train,
        compute_dtype=dtype,
        row_tokens=PROMPT_TOKENS + NEW_TOKENS,
    )
    trainer = Trainer(
        config=TRAINER,
        limits=SampleLimits(max_staleness=0, max_new_tokens=NEW_TOKENS),
        policy=policy_learner(TRAINER, model, num_updates=warmup_steps + num_steps),
    )
    engine = DecodeEngine(
        policy,
        meshes.rollout,
        EngineConfig(
            num_slots=NUM_SEQUENCES,
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=NEW_TOKENS,
            steps_per_dispatch=32,
        ),
        dtype,
    )
    weight_channel = WeightChannel(engine.layout, [engine.param_shardings], meshes.train)
    engine_loop = EngineLoop(engine, weight_channel)
    trainer.warm_up()
    engine.warm_up()
    weight_channel.publish(0, trainer.params)
    engine_loop.start()
    chance = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"rollout_s": [], "train_s": [], "step_s": [], "cpu_s": []}
    try:
        for version in range(warmup_steps + num_steps):
            if version == warmup_steps:
                engine_loop.metrics()
            cpu_s, start = _cpu_seconds(), time.perf_counter()
            prompts = chance.integers(
                0, MODEL.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), dtype=np.int32
            )
            answers = await asyncio.gather(
                *(
                    engine_loop.submit(_request(version, i, prompt))
                    for i, prompt in enumerate(prompts)
                )
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
            weight_channel.wait(version + 1, 60.0)
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
        gap_sum_us, gaps = engine_loop.metrics()["host_gap_us"]
    finally:
        engine_loop.close()
        weight_channel.close()
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "peer": "areal_jax",
        "threads": len(os.sched_getaffinity(0)),
        "num_params": MODEL.num_params,
        "steps": num_steps,
        "rollout_tokens_per_s": ROLLOUT_TOKENS / medians["rollout_s"],
        "train_tokens_per_s": TRAIN_TOKENS / medians["train_s"],
        "steps_per_s": 1 / medians["step_s"],
        "cpu_seconds_per_step": medians["cpu_s"],
        "host_gap_us": gap_sum_us / gaps,
        **medians,
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
    mask = np.arange(PROMPT_TOKENS + NEW_TOKENS) >= PROMPT_TOKENS
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
    assert all(len(sample.tokens) == PROMPT_TOKENS + NEW_TOKENS for sample in samples)
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
    parser.add_argument("--peer", action="append", default=[], metavar="PYTHON:SCRIPT")
    parser.add_argument(
        "--once",
        action="store_true",
        help="measure only this project, in this process, and print one line",
    )
    args = parser.parse_args()
    if args.once:
        print(json.dumps(asyncio.run(measure(args.warmup_steps, args.steps))))
        return
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
        "rounds": args.rounds,
        "median": {
            name: {
                rate: median(results[i][rate] for results in rounds)
                for rate in (*RATES, "cpu_seconds_per_step")
            }
            for i, name in enumerate(contestants)
        },
        "host_gap_us": median(results[0]["host_gap_us"] for results in rounds),
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
