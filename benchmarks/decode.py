"""Decoding speed: tokens/s relative to the memory roofline, host bubble, compilation, weight swaps.

    # one GPU or TPU
    python benchmarks/decode.py --shape=qwen2.5-1.5b --slots=256 --mean-tokens=1536
    python benchmarks/decode.py --shape=qwen2.5-7b --slots=128 --mean-tokens=4096
    # a CPU
    python benchmarks/decode.py --shape=tiny --slots=64 --mean-tokens=160

Weights are random with the real shapes, in bfloat16 (float32 on a CPU). Every slot holds its own
sequence, with a prompt of 0.5 to 1.5 times the mean, so that the mean length is --mean-tokens when
half of --new-tokens are sampled. Tokens and seconds are counted over the dispatches after the first
two, in which all slots decode; prefill comes before them.

A decode step reads every weight, except embedding rows of absent tokens, and the KV cache of all
running sequences. The roofline is

    tokens/s = slots · bandwidth / (weight bytes + mean tokens · slots · KV bytes per token)

with the bandwidth of a copy of 2 GiB (256 MiB on a CPU), read and write counted. The row has:

- `share`: tokens/s relative to the roofline.
- `host_bubble`: share of the time in which the device waits for the host between dispatches.
- Compilation time of all programs for such requests, with an empty and with a filled disk cache.
- Stall of a weight swap while all slots decode, with kept and with rebuilt caches.
- `stream`, with --requests=N: slot utilization and tokens/s for N completions of log-normal length,
  at most --new-tokens, until no request waits.

Appends one line to benchmarks/results/decode.jsonl. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import chz
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from results import append
from train_mfu import MODELS, model_config

from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Request, Sampling, Weights


@dataclass
class Shelf:
    """A `WeightSource` that delivers the weights assigned to it."""

    newest_weights: Weights

    def newest(self, after: int) -> Weights | None:
        return self.newest_weights if self.newest_weights.version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        time.sleep(timeout_s)
        raise TimeoutError(f"no version {at_least}")


@dataclass
class Events:
    """Recorded events of the engine loop: (name, start, end, tokens)."""

    seen: list[tuple[str, float, float, float]] = field(default_factory=list)

    def __call__(
        self, name: str, start_s: float, end_s: float, args: Mapping[str, int | float]
    ) -> None:
        self.seen.append((name, start_s, end_s, args.get("tokens", 0)))

    def of(self, name: str) -> list[tuple[float, float, float]]:
        return [(start, end, tokens) for seen, start, end, tokens in self.seen if seen == name]


def bandwidth() -> float:
    """Measure the bytes per second of a copy, read and write counted; the best of several."""
    size = (256 if jax.devices()[0].platform == "cpu" else 2048) * 2**20
    source = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(source))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(copy(source))
        times.append(time.perf_counter() - start)
    return 2 * size / min(times)


def bytes_per_step(
    policy: Policy, engine: DecodeEngine, slots: int, mean_tokens: float
) -> tuple[int, float]:
    """Compute the bytes that a decode step reads: weights and KV cache."""
    shapes = jax.eval_shape(engine.layout, policy.abstract())
    weights = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    if not policy.config.tie_word_embeddings:
        weights -= math.prod(shapes["embed"].shape) * shapes["embed"].dtype.itemsize
    model = policy.config
    numbers = 2 * model.num_hidden_layers * model.num_key_value_heads
    of_token = numbers * (
        model.head_dim * engine.kv_dtype.itemsize + 4 * (engine.kv_dtype != engine.compute_dtype)
    )
    return weights, slots * mean_tokens * of_token


class Decoded(NamedTuple):
    events: Events
    gap_s: float
    """Time in which the device waited for the host."""
    finished_s: list[float]
    """End of each request, in order."""


async def decode(
    engine: DecodeEngine, weights: list[Weights], requests: list[Request], num_swaps: int
) -> Decoded:
    """Complete all requests at once, with `num_swaps` weight updates."""
    events, shelf, finished_s = Events(), Shelf(weights[0]), list[float]()
    engine_loop = EngineLoop(engine, shelf, on_event=events)
    engine_loop.start()
    try:
        futures = [engine_loop.submit(request) for request in requests]
        for future in futures:
            future.add_done_callback(lambda _: finished_s.append(time.perf_counter()))
        while not all(future.done() for future in futures):
            await asyncio.sleep(0.01)
            swaps, dispatches = len(events.of("swap")), len(events.of("dispatch"))
            if swaps <= num_swaps and dispatches > 3 * swaps:
                shelf.newest_weights = weights[swaps % 2]._replace(version=swaps)
        await asyncio.gather(*futures)
        gap_us, _ = engine_loop.metrics().get("host_gap_us", (0.0, 0.0))
    finally:
        engine_loop.close()
    return Decoded(events, gap_us / 1e6, finished_s)


def stream(decoded: Decoded, slots: int, steps: int) -> dict[str, float]:
    """Compute slot utilization and tokens/s while more requests are unfinished than slots exist."""
    tail_s = decoded.finished_s[-slots]
    dispatches = [each for each in decoded.events.of("dispatch") if each[1] <= tail_s]
    tokens = sum(sampled for _, _, sampled in dispatches)
    seconds = dispatches[-1][1] - dispatches[0][0]
    return {
        "occupancy": tokens / (len(dispatches) * slots * steps),
        "tokens_per_s": tokens / seconds,
    }


def main() -> None:
    """Run the command line. More than 60 lines: it measures in the order of its docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(MODELS), default="qwen2.5-1.5b")
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0: the shape's")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--mean-tokens", type=int, default=1536)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--steps-per-dispatch", type=int, default=8)
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument(
        "--kv-dtype", choices=["compute", "int8", "float8_e4m3fn"], default="compute"
    )
    parser.add_argument(
        "--weights-dtype", choices=["compute", "int8", "float8_e4m3fn"], default="compute"
    )
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        help="number of requests of the stream, above --slots; 0: no stream",
    )
    parser.add_argument("--swaps", type=int, default=3, help="weight swaps of a run; 0: none")
    parser.add_argument(
        "--no-compile-times",
        action="store_true",
        help="compile lazily, without timing compilation",
    )
    parser.add_argument(
        "--note", default="", help="note for the row, such as other load of the machine"
    )
    args = parser.parse_args()

    policy = Policy(model_config(args.shape, args.layers))
    on_cpu = jax.devices()[0].platform == "cpu"
    dtype = jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16)
    devices = jax.devices()
    placement = (
        PlacementConfig() if len(devices) == 1 else PlacementConfig(rollout_tensor=args.tensor)
    )
    mesh = make_meshes(placement, devices).rollout
    rng = np.random.default_rng(0)
    middle = args.mean_tokens - args.new_tokens // 2
    lengths = rng.integers(max(middle // 2, 1), max(3 * middle // 2, 2), args.slots)
    config = EngineConfig(
        num_slots=args.slots,
        max_prompt_tokens=int(lengths.max()),
        max_new_tokens=args.new_tokens,
        steps_per_dispatch=args.steps_per_dispatch,
        page_tokens=args.page_tokens,
        kv_dtype=args.kv_dtype,
        weights_dtype=args.weights_dtype,
        prefill_chunk_tokens=int(lengths.max()),
        on_update="keep",
    )
    compile_s: list[float] = []
    with tempfile.TemporaryDirectory() as cache:
        if not args.no_compile_times:
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            for _ in range(2):
                jax.clear_caches()
                compile_s.append(DecodeEngine(policy, mesh, config, dtype).warm_up())
        engine = DecodeEngine(policy, mesh, config, dtype)
        if not args.no_compile_times:
            engine.warm_up()
            # The folder is deleted: later compilations must not look for it.
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()
    # In one program, which slices random numbers, XLA for GPUs took more than two minutes.
    init = jax.jit(policy.init)
    lay_out = jax.jit(engine.layout, out_shardings=engine.param_shardings, donate_argnums=0)
    weights = [
        Weights(0, jax.block_until_ready(lay_out(init(jax.random.key(seed))))) for seed in (0, 1)
    ]
    vocab_size = policy.config.vocab_size
    requests = [
        Request(
            str(i),
            rng.integers(0, vocab_size, int(length), dtype=np.int32),
            1,
            Sampling(args.new_tokens),
            seed=i,
        )
        for i, length in enumerate(lengths)
    ]
    if args.no_compile_times:
        asyncio.run(decode(engine, weights, requests, num_swaps=0))
    events, gap_s, _ = asyncio.run(decode(engine, weights, requests, num_swaps=0))
    dispatches = events.of("dispatch")[2:]
    seconds, tokens = (
        dispatches[-1][1] - dispatches[0][0],
        sum(sampled for _, _, sampled in dispatches),
    )
    swap_ms: dict[str, float] = {}
    for on_update in ("keep", "recompute") if args.swaps else ():
        engine.config = chz.replace(config, on_update=on_update)
        # May compile programs that rebuild caches.
        asyncio.run(decode(engine, weights, requests, args.swaps))
        swaps = asyncio.run(decode(engine, weights, requests, args.swaps)).events.of("swap")[1:]
        swap_ms[on_update] = median(1e3 * (end - start) for start, end, _ in swaps)
    streamed: dict[str, float] = {}
    if args.requests:
        budgets = np.clip(
            rng.lognormal(math.log(args.new_tokens / 4), 1, args.requests), 1, args.new_tokens
        ).astype(int)
        requests = [
            Request(
                str(i),
                rng.integers(0, vocab_size, int(rng.choice(lengths)), dtype=np.int32),
                1,
                Sampling(int(most)),
                seed=i,
            )
            for i, most in enumerate(budgets)
        ]
        streamed = stream(
            asyncio.run(decode(engine, weights, requests, num_swaps=0)),
            args.slots,
            args.steps_per_dispatch,
        )
    weight_bytes, kv_bytes = bytes_per_step(
        policy, engine, args.slots, float(lengths.mean()) + args.new_tokens / 2
    )
    bytes_per_s = bandwidth()
    roofline = args.slots * bytes_per_s / (weight_bytes + kv_bytes)
    row = {
        **{name: value for name, value in vars(args).items() if name != "no_compile_times"},
        "reader": engine.reader,
        "tokens_per_s": tokens / seconds,
        "roofline_tokens_per_s": roofline,
        "share": tokens / seconds / roofline,
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "bandwidth_bytes_per_s": bytes_per_s,
        "host_bubble": gap_s / (dispatches[-1][1] - events.of("dispatch")[0][0]),
        "compile_s": dict(zip(("cold", "cached"), compile_s, strict=False)),
        "swap_ms": swap_ms,
        "stream": streamed,
    }
    append("decode", row)


if __name__ == "__main__":
    main()
