"""Tinker's client on areal_jax.tinker: loops that learn, and throughput against the own classes.

    python -m pip install -e ".[tinker]"
    python benchmarks/tinker_server.py [--rl-steps=60] [--sft-steps=60] [--rounds=5]

All with the embedded policy and adapters of rank 32, server and client on one machine.

Learning: supervised, on problems with an answer in a form that the policy does not know
(cross_entropy, loss per token of the answers in the first and the last five batches); reinforcement
learning, 16 generated problems x 8 samples a step with advantages centred in their group
(importance_sampling), pass@1 on 256 held-out problems before and after.

Throughput: forward_backward and optim_step of 64 sequences of 96 tokens against
`trainer.step.Learner.update` of the same packed batch; 16 prompts x 4 samples of exactly 64 tokens
against `EngineLoop.submit` of the same requests, also with the server's engine.batch_invariant.
Each round times all in turns; results are medians over rounds, ratios are computed per round, of
tokens per second and of processor time (that of server and client together). Appends one line to
benchmarks/results/tinker_server.jsonl. Needs idle cores.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import chz
import jax
import numpy as np
import psutil
import tinker
from results import append
from tinker import types

from areal_jax.data.config import PromptConfig, Synthetic
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.sft import SupervisedExample
from areal_jax.data.sources import load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import hf, lora
from areal_jax.models.config import LoRA, PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.parallel.sharding import ROLLOUT_RULES, TRAIN_RULES, shardings
from areal_jax.records import Request, Sampling, Task, Weights
from areal_jax.rewards.math_answers import extract_answer
from areal_jax.run.models import find_policy
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.step import TrainableModel
from areal_jax.weights.pinned import Pinned

KEY, RANK, REPEATS = "tml-benchmark", 32, 4
SEQUENCES, SEQUENCE_TOKENS = 64, 96
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 4, 24, 64
ENGINE = EngineConfig(num_slots=64, max_prompt_tokens=128, max_new_tokens=128, steps_per_dispatch=8)
MICRO_BATCH_TOKENS = 512
ADAM = types.AdamParams(learning_rate=1e-3)


@contextmanager
def serving(run_folder: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run the server; yields its URL and its process."""
    names = ("num_slots", "max_prompt_tokens", "max_new_tokens", "steps_per_dispatch")
    given = [f"engine.{name}={getattr(ENGINE, name)}" for name in names]
    given += [f"run_folder={run_folder}", "port=0", f"api_key={KEY}", "remat=none"]
    given += [f"micro_batch_tokens={MICRO_BATCH_TOKENS}", "max_tokens=255"]
    server = subprocess.Popen(
        [sys.executable, "-m", "areal_jax.tinker", *given], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip().partition(" trains at ")[2]
        yield url, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """Return a datum that predicts each next token."""
    columns = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": np.asarray(tokens[1:], np.int64), **columns},
    )


def new_client(service: Any) -> Any:
    return service.create_lora_training_client(base_model="embedded", rank=RANK, seed=0).result()


def supervised(service: Any, tokenizer: HFTokenizer, steps: int) -> dict[str, float]:
    """Fine-tune on batches of 32 answers; return the loss per token at the start and the end."""
    tasks = load_tasks(Synthetic(), PromptConfig()).tasks
    training, losses = new_client(service), list[float]()
    for step in range(steps):
        data, count = list[types.Datum](), 0
        for task in (tasks[32 * step + i] for i in range(32)):
            prompt = tokenizer.render(list(task.prompt)).tolist()
            text = f"Answer: {task.answer} is the answer."
            answer = tokenizer.render_answer(list(task.prompt), text).tolist()
            weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
            data.append(datum(prompt + answer, weights=weights))
            count += len(answer)
        future = training.forward_backward(data, "cross_entropy")
        training.optim_step(ADAM).result()
        losses.append(future.result().metrics["loss:sum"] / count)
    return {"first_loss": float(np.mean(losses[:5])), "last_loss": float(np.mean(losses[-5:]))}


def is_correct(task: Task, text: str) -> bool:
    return extract_answer(text) == task.answer


def sample(
    sampler: Any, tokenizer: HFTokenizer, tasks: Sequence[Task], num: int, seed: int
) -> list[tuple[Task, list[int], Any]]:
    """Sample answers to all tasks at the same time."""
    params = types.SamplingParams(max_tokens=96, seed=seed)
    prompts = [tokenizer.render(list(task.prompt)).tolist() for task in tasks]
    futures = [sampler.sample(types.ModelInput.from_ints(p), num, params) for p in prompts]
    return [
        (task, prompt, sequence)
        for task, prompt, future in zip(tasks, prompts, futures, strict=True)
        for sequence in future.result().sequences
    ]


def pass_rate(sampler: Any, tokenizer: HFTokenizer, tasks: Sequence[Task]) -> float:
    found = sample(sampler, tokenizer, tasks, 1, 1)
    return float(
        np.mean(
            [is_correct(t, tokenizer.decode(np.array(s.tokens, np.int32))) for t, _, s in found]
        )
    )


def reinforcement(service: Any, tokenizer: HFTokenizer, steps: int) -> dict[str, float]:
    """Train on generated problems; return pass@1 on held-out ones before and after."""
    tasks = load_tasks(Synthetic(), PromptConfig()).tasks
    held_out = load_tasks(Synthetic(split="heldout", num_tasks=256), PromptConfig()).tasks
    held_out = [held_out[i] for i in range(256)]
    training, start_s = new_client(service), time.perf_counter()
    sampler = training.save_weights_and_get_sampling_client()
    before = pass_rate(sampler, tokenizer, held_out)
    for step in range(steps):
        batch = [tasks[16 * step + i] for i in range(16)]
        found = sample(sampler, tokenizer, batch, 8, step)
        right = [
            is_correct(task, tokenizer.decode(np.array(sequence.tokens, np.int32)))
            for task, _, sequence in found
        ]
        rewards = np.array(right, float).reshape(16, 8)
        advantages = (rewards - rewards.mean(1, keepdims=True)).reshape(-1)
        data = [
            datum(
                prompt + sequence.tokens,
                logprobs=[0.0] * (len(prompt) - 1) + sequence.logprobs,
                advantages=[0.0] * (len(prompt) - 1) + [advantage] * len(sequence.tokens),
            )
            for (_, prompt, sequence), advantage in zip(found, advantages, strict=True)
            if advantage
        ]
        if data:
            training.forward_backward(data, "importance_sampling")
            training.optim_step(ADAM).result()
        sampler = training.save_weights_and_get_sampling_client()
        print(f"step {step}: reward {rewards.mean():.2f}", flush=True)
    seconds = time.perf_counter() - start_s
    after = pass_rate(sampler, tokenizer, held_out)
    return {"pass_at_1_before": before, "pass_at_1_after": after, "seconds": seconds}


class OwnClasses:
    """The project's learner and engines on the same work, in this process."""

    def __init__(self) -> None:
        meshes = make_meshes(PlacementConfig(), jax.devices()[:1])
        plain = find_policy(PolicyConfig(), EMBEDDED)
        policy = Policy(plain.config, LoRA(rank=RANK, alpha=32.0))
        params = lora.init(policy, jax.random.key(0))

        def base(mesh: Any, rules: Any) -> Any:
            return hf.load(EMBEDDED, plain, shardings(mesh, plain.axes(), plain.abstract(), rules))

        self.trainer = SupervisedTrainer(
            TrainerConfig(
                optimizer=OptimizerConfig(learning_rate=1e-3),
                rows_per_micro_batch=MICRO_BATCH_TOKENS // 128,
                remat="none",
            ),
            TrainableModel(
                policy=policy,
                params=params,
                base=base(meshes.train, TRAIN_RULES),
                mesh=meshes.train,
                compute_dtype=np.float32,
                row_tokens=128,
            ),
            num_updates=1000,
        )
        self.loops = dict[str, EngineLoop]()
        for invariance in ("off", "equal_views"):
            config = chz.replace(ENGINE, batch_invariant=invariance)
            engine = DecodeEngine(policy, meshes.rollout, config, np.float32)
            weights = lora.attach(
                policy, engine.layout(base(meshes.rollout, ROLLOUT_RULES)), engine.layout(params)
            )
            self.loops[invariance] = EngineLoop(engine, Pinned(Weights(0, weights)))
            self.loops[invariance].start()

    def train(self, sequences: Sequence[np.ndarray]) -> None:
        mask = np.arange(SEQUENCE_TOKENS) > 0
        self.trainer.step([SupervisedExample(tokens, mask) for tokens in sequences])

    async def _sample(self, loop: EngineLoop, prompts: Sequence[np.ndarray], seed: int) -> None:
        sampling = Sampling(NEW_TOKENS)
        requests = [
            Request(f"{seed}-{i}", prompt, SAMPLES, sampling, seed)
            for i, prompt in enumerate(prompts)
        ]
        for found in await asyncio.gather(*(loop.submit(each) for each in requests)):
            assert all(len(each.tokens) == NEW_TOKENS for each in found)

    def sample(self, invariance: str, prompts: Sequence[np.ndarray], seed: int) -> None:
        asyncio.run(self._sample(self.loops[invariance], prompts, seed))


def throughput(service: Any, server: psutil.Process, rounds: int) -> dict[str, float]:
    """Time all in turns; tokens per second, processor seconds, and ratios of the server to the own
    classes.
    """
    own, training = OwnClasses(), new_client(service)
    rng = np.random.default_rng(0)
    sequences = list(rng.integers(3, 700, (SEQUENCES, SEQUENCE_TOKENS)).astype(np.int32))
    prompts = list(rng.integers(3, 700, (PROMPTS, PROMPT_TOKENS)).astype(np.int32))
    data = [datum(tokens.tolist()) for tokens in sequences]
    inputs = [types.ModelInput.from_ints(prompt.tolist()) for prompt in prompts]
    sampler = training.save_weights_and_get_sampling_client().result()

    def train_by_client(_: int) -> None:
        future = training.forward_backward(data, "cross_entropy")
        training.optim_step(ADAM).result()
        future.result()

    def sample_by_client(seed: int) -> None:
        params = types.SamplingParams(max_tokens=NEW_TOKENS, seed=seed, stop=[])
        futures = [sampler.sample(prompt, SAMPLES, params) for prompt in inputs]
        for future in futures:
            assert all(len(each.tokens) == NEW_TOKENS for each in future.result().sequences)

    work = {
        "train": (
            {"server": train_by_client, "own": lambda _: own.train(sequences)},
            SEQUENCES * SEQUENCE_TOKENS,
        ),
        "sample": (
            {
                "server": sample_by_client,
                "own": lambda seed: own.sample("off", prompts, seed),
                "own_invariant": lambda seed: own.sample("equal_views", prompts, seed),
            },
            PROMPTS * SAMPLES * NEW_TOKENS,
        ),
    }

    def cpu_s() -> float:
        times = server.cpu_times()
        return time.process_time() + times.user + times.system

    found = dict[str, float]()
    for name, (sides, tokens) in work.items():
        rates, costs = ({side: list[float]() for side in sides} for _ in range(2))
        for run in sides.values():
            run(10_000)  # compiles
        for turn in range(rounds):
            for side, run in sides.items():
                start_s, start_cpu_s = time.perf_counter(), cpu_s()
                for repeat in range(REPEATS):
                    run(turn * REPEATS + repeat)
                rates[side].append(REPEATS * tokens / (time.perf_counter() - start_s))
                costs[side].append((cpu_s() - start_cpu_s) / REPEATS)
        for side in sides:
            found[f"{name}_tokens_per_s_{side}"] = median(rates[side])
            found[f"{name}_cpu_s_{side}"] = median(costs[side])
            if side != "server":
                ratios = [a / b for a, b in zip(rates["server"], rates[side], strict=True)]
                cpu_ratios = [a / b for a, b in zip(costs[side], costs["server"], strict=True)]
                found |= {
                    f"{name}_ratio_to_{side}": median(ratios),
                    f"{name}_ratio_to_{side}_lowest": min(ratios),
                    f"{name}_cpu_ratio_to_{side}": median(cpu_ratios),
                }
    for loop in own.loops.values():
        loop.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rl-steps", type=int, default=60)
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    tokenizer = HFTokenizer.from_folder(EMBEDDED)
    row: dict[str, Any] = {"label": "measured", "tinker": tinker.__version__, **vars(given)}
    with tempfile.TemporaryDirectory() as run_folder, serving(run_folder) as (url, server):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        if given.rounds:
            row["throughput"] = throughput(service, server, given.rounds)
        if given.sft_steps:
            row["supervised"] = supervised(service, tokenizer, given.sft_steps)
        if given.rl_steps:
            row["reinforcement"] = reinforcement(service, tokenizer, given.rl_steps)
    append("tinker_server", row)


if __name__ == "__main__":
    main()
