"""Speculative decoding: tokens per step, and tokens/s with drafts and without.

    # the embedded policy on problems of `aime`, on a CPU
    python benchmarks/drafts.py
    # random weights of a real shape, on one GPU or TPU
    python benchmarks/drafts.py --shape=qwen2.5-1.5b --slots=8 --prompt-tokens=512 --new-tokens=512
    # also with the drafts of a draft policy: a folder, or random weights of a shape
    python benchmarks/drafts.py --draft-policy=runs/draft/policy
    python benchmarks/drafts.py --shape=qwen2.5-7b --draft-policy=qwen2.5-0.5b --slots=8
    # text instead of a policy: JSON lines with `question` and `answer`, and a tokenizer.json
    python benchmarks/drafts.py --text=test.jsonl --tokenizer=tokenizer.json

The numbers of drafts of --drafts take turns, --rounds times, with the same requests: groups of
--samples samples at --temperature. With --draft-policy each number takes a second turn, with its
drafts instead of those of n-grams. A row has for each the medians over rounds:

- `tokens_per_step`: tokens sampled by a slot in a decode step.
- `accepted`: share of verified drafts that were accepted.
- `step_ms`: time of a decode step; of a dispatch, divided by its steps.
- `tokens_per_s`, and `tokens_per_cpu_s`: tokens by time, and by processor time.

Random weights sample noise at temperature 1, in which almost no draft is right, and repeat
themselves at temperature 0: `tokens_per_step` and `accepted` say nothing of a trained policy, and
`step_ms` says what drafts cost.

A small draft policy of the embedded one is one with a smaller `config.json` that learns from the
same examples: `areal-train --exp=tiny_sft policy.path=FOLDER num_steps=1200`.

With --text, `tokens_per_step` is that of a policy which samples exactly these answers, with drafts
from prompt and answer alone; nothing is decoded.

Appends one line to benchmarks/results/drafts.jsonl. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import chz
import jax
import jax.numpy as jnp
import numpy as np
from decode import Events, Shelf
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from results import append
from tokenizers import Tokenizer
from train_mfu import MODELS

from areal_jax.data.config import PromptConfig, Synthetic
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.sources import load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.drafts import DraftPolicy, DraftState, draft_tokens
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import hf
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import PolicyConfig
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Request, Sampling, Weights
from areal_jax.run.draft_policies import find_draft_policy, random_draft_policy

TEXTS = 256
"""Answers of --text that are read."""


async def measure(
    engine: DecodeEngine, weights: Weights, requests: list[Request]
) -> dict[str, float]:
    """Complete all requests at once."""
    events = Events()
    engine_loop = EngineLoop(engine, Shelf(weights), on_event=events)
    futures = [engine_loop.submit(request) for request in requests]
    cpu_s = time.process_time()
    engine_loop.start()
    try:
        await asyncio.gather(*futures)
        metrics = engine_loop.metrics()
    finally:
        engine_loop.close()
    cpu_s = time.process_time() - cpu_s
    dispatches = events.of("dispatch")
    seconds = dispatches[-1][1] - dispatches[0][0]
    tokens, num_drafts = metrics["tokens"][0], metrics["draft_tokens"][0]
    return {
        "tokens": tokens,
        "tokens_per_step": tokens / metrics["occupancy"][0],
        "accepted": metrics["accepted_draft_tokens"][0] / max(num_drafts, 1),
        "step_ms": 1e3 * seconds / len(dispatches) / engine.config.steps_per_dispatch,
        "tokens_per_s": tokens / seconds,
        "tokens_per_cpu_s": tokens / cpu_s,
    }


class Workload(NamedTuple):
    """What is decoded."""

    policy: Policy
    params: Params
    prompts: list[np.ndarray]
    stop: tuple[int, ...] = ()


def trained_policy(folder: Path, num_prompts: int) -> Workload:
    """Return the policy of a folder and prompts of `aime`."""
    policy, tokenizer = Policy(hf.read_config(folder)), HFTokenizer.from_folder(folder)
    one = SingleDeviceSharding(jax.devices()[0])
    params = hf.load(folder, policy, jax.tree.map(lambda _: one, policy.abstract()))
    tasks = load_tasks(Synthetic(num_tasks=num_prompts), PromptConfig()).tasks
    prompts = [np.asarray(tokenizer.render(task.prompt), np.int32) for task in tasks]
    return Workload(policy, params, prompts, tokenizer.stop_token_ids)


def random_policy(shape: str, num_prompts: int, prompt_tokens: int) -> Workload:
    """Return a policy with random weights, and random prompts."""
    policy = Policy(ModelConfig.from_hf(MODELS[shape], source=shape))
    size = num_prompts, prompt_tokens
    prompts = np.random.default_rng(0).integers(0, policy.config.vocab_size, size, dtype=np.int32)
    return Workload(policy, jax.jit(policy.init)(jax.random.key(0)), list(prompts))


def find_draft(name: str, dtype: DTypeLike) -> DraftPolicy | None:
    """Return the draft policy of a folder, or of a shape with random weights; None if unnamed."""
    if name in MODELS:
        return random_draft_policy(ModelConfig.from_hf(MODELS[name], source=name), dtype)
    config = EngineConfig(draft_policy=name)
    return find_draft_policy(config, PolicyConfig(), HFTokenizer.from_folder(EMBEDDED), dtype)


def replay(path: Path, tokenizer: Path, counts: list[int]) -> dict[str, float]:
    """Return the tokens per step by number of drafts, of a policy that samples these answers."""
    encode = Tokenizer.from_file(str(tokenizer)).encode
    rows = [json.loads(line) for line in path.read_text().splitlines()[:TEXTS]]
    prompts = [encode(row["question"] + "\n").ids for row in rows]
    texts = [prompt + encode(row["answer"]).ids for prompt, row in zip(prompts, rows, strict=True)]
    history = np.zeros((len(texts), max(map(len, texts)) + max(counts) + 1), np.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts])
    state = DraftState(jnp.asarray(history), jnp.arange(len(texts), dtype=jnp.int32))
    found = {}
    for count in counts:
        draft = jax.jit(partial(draft_tokens, count=count))
        last, steps = np.array([len(prompt) for prompt in prompts]) - 1, 0
        while (runs := last < lengths - 1).any():
            drafts = np.asarray(draft(state, jnp.asarray(last, jnp.int32)))
            ahead = last[:, None] + 1 + np.arange(count)
            is_right = (drafts == np.take_along_axis(history, ahead, 1)) & (
                ahead < lengths[:, None] - 1
            )
            last += runs * (1 + np.cumprod(is_right, 1).sum(1))
            steps += int(runs.sum())
        found[str(count)] = (sum(map(len, texts)) - sum(map(len, prompts))) / steps
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["embedded", *MODELS], default="embedded")
    parser.add_argument("--policy", type=Path, help="folder instead of the embedded policy")
    parser.add_argument("--draft-policy", default="", help="folder, or one of the shapes")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 3, 7])
    parser.add_argument("--slots", type=int, default=48)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--steps-per-dispatch", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text", type=Path, help="JSON lines with question and answer")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for --text")
    parser.add_argument("--note", default="", help="note for the row")
    args = parser.parse_args()
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("text", "tokenizer")
    }
    if args.text is not None:
        counts = [count for count in args.drafts if count]
        append(
            "drafts",
            {"text": args.text.name, "tokens_per_step": replay(args.text, args.tokenizer, counts)},
        )
        return
    dtype = jnp.dtype(jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16)
    policy, params, prompts, stop = (
        trained_policy(args.policy or EMBEDDED, args.groups)
        if args.shape == "embedded"
        else random_policy(args.shape, args.groups, args.prompt_tokens)
    )
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    config = EngineConfig(
        num_slots=args.slots,
        max_prompt_tokens=max(map(len, prompts)),
        max_new_tokens=args.new_tokens,
        steps_per_dispatch=args.steps_per_dispatch,
    )
    engines = {
        str(count): DecodeEngine(policy, mesh, chz.replace(config, draft_tokens=count), dtype)
        for count in args.drafts
    }
    first = engines[str(args.drafts[0])]
    if draft := find_draft(args.draft_policy, dtype):
        config = chz.replace(config, draft_policy=args.draft_policy)
        engines |= {
            f"{count} of the draft policy": DecodeEngine(
                policy, mesh, chz.replace(config, draft_tokens=count), dtype, draft=draft
            )
            for count in filter(None, args.drafts)
        }
    weights = Weights(0, jax.jit(first.layout, out_shardings=first.param_shardings)(params))
    rounds = []
    for seed in range(args.rounds + 1):
        requests = [
            Request(
                str(i),
                prompt,
                args.samples,
                Sampling(args.new_tokens, args.temperature, 0, 1.0, stop),
                seed=seed * len(prompts) + i,
            )
            for i, prompt in enumerate(prompts)
        ]
        found = {
            name: asyncio.run(measure(engine, weights, requests))
            for name, engine in engines.items()
        }
        print(found, flush=True)
        rounds.append(found)
    # The first round compiles.
    medians = {
        name: {
            metric: median(each[name][metric] for each in rounds[1:]) for metric in rounds[0][name]
        }
        for name in engines
    }
    append("drafts", {**settings, "reader": first.reader, "by_drafts": medians})


if __name__ == "__main__":
    main()
