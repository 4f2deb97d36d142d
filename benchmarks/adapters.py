"""Decoding with several adapters in one batch, against one adapter.

    python benchmarks/adapters.py [--rounds=5]

The embedded policy with adapters of rank 32: 16 prompts x 4 samples of exactly 64 tokens. `single`
is an engine whose policy has one adapter; the others are one engine with room for 8 adapters
(`AdapterStack`, the programs of `areal_jax.tinker`), whose sequences have 1, 2, 4 or 8 of them.
Each round runs all in turns; medians over rounds of processor seconds and tokens per second, and
ratios to `single` by round. Appends one line to benchmarks/results/adapters.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from results import append

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import hf, lora
from areal_jax.models.config import LoRA, PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.parallel.sharding import ROLLOUT_RULES, shardings
from areal_jax.records import Request, Sampling, Weights
from areal_jax.run.models import find_policy
from areal_jax.weights.pinned import Pinned

RANK, CAPACITY, USED = 32, 8, (1, 2, 4, 8)
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 4, 24, 64
ENGINE = EngineConfig(
    num_slots=PROMPTS * SAMPLES,
    max_prompt_tokens=128,
    max_new_tokens=128,
    steps_per_dispatch=8,
    batch_invariant="equal_views",
)


def make_loops() -> tuple[EngineLoop, EngineLoop]:
    """Return an engine with one adapter, and one with several."""
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    plain = find_policy(PolicyConfig(), EMBEDDED)
    policy = Policy(plain.config, LoRA(rank=RANK, alpha=32.0))
    single = DecodeEngine(policy, mesh, ENGINE, np.float32)
    several = DecodeEngine(policy, mesh, ENGINE, np.float32, num_adapters=CAPACITY)
    placed = shardings(mesh, plain.axes(), plain.abstract(), ROLLOUT_RULES)
    base = single.layout(hf.load(EMBEDDED, plain, placed))
    adapters = [single.layout(lora.init(policy, jax.random.key(i))) for i in range(CAPACITY)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters)
    scales = jnp.ones(CAPACITY, jnp.float32)
    loops = (
        EngineLoop(single, Pinned(Weights(0, lora.attach(policy, base, adapters[0])))),
        EngineLoop(several, Pinned(Weights(0, lora.attach_stack(base, stack, scales)))),
    )
    for loop in loops:
        loop.start()
    return loops


async def sample(loop: EngineLoop, num_adapters: int, turn: int) -> None:
    """Sample from that many adapters at the same time."""
    rng = np.random.default_rng(turn)
    futures = [
        loop.submit(
            Request(
                f"{turn}-{i}",
                rng.integers(3, 700, PROMPT_TOKENS).astype(np.int32),
                SAMPLES,
                Sampling(NEW_TOKENS),
                turn,
                adapter=i % num_adapters,
            )
        )
        for i in range(PROMPTS)
    ]
    for found in await asyncio.gather(*futures):
        assert all(len(each.tokens) == NEW_TOKENS for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    single, several = make_loops()
    sides = {"single": (single, 1)} | {f"{n} of {CAPACITY}": (several, n) for n in USED}
    costs, rates = ({name: list[float]() for name in sides} for _ in range(2))
    for turn in range(given.rounds + 1):
        for name, (loop, count) in sides.items():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            asyncio.run(sample(loop, count, turn))
            if turn:  # the first one compiles
                costs[name].append(time.process_time() - start_cpu_s)
                tokens = PROMPTS * SAMPLES * NEW_TOKENS
                rates[name].append(tokens / (time.perf_counter() - start_s))
    row: dict[str, Any] = {"label": "measured", "rounds": given.rounds}
    for name in sides:
        row[name] = {
            "cpu_s": median(costs[name]),
            "tokens_per_s": median(rates[name]),
            "cpu_ratio": median(a / b for a, b in zip(costs["single"], costs[name], strict=True)),
            "ratio": median(a / b for a, b in zip(rates[name], rates["single"], strict=True)),
        }
        print(name, row[name], flush=True)
    single.close()
    several.close()
    append("adapters", row)


if __name__ == "__main__":
    main()
