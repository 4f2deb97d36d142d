"""Speed-up by interruptible generation, measured with the real engine (AReaL, figure 6b).

    python benchmarks/interruption_measured.py

The embedded policy decodes on a CPU: 32 slots, prompts of 16 tokens, an endless stream of answers
with log-normal lengths (median 50, sigma 1, at most 240). A weight update arrives after every 6400
sampled tokens, as many as a training step has; each update changes each matrix by 0.3 %. Variants,
in turns, with the same requests:

    wait        admit nothing, wait until running requests have ended, then update the weights
    recompute   update between two dispatches, and recompute the caches (as in the paper)
    keep        update between two dispatches, and keep the caches
    two engines of 16 slots each on their own device, recompute: both at once, and rolling

The table has:

- tokens/s: sampled between the first and the last weight update.
- stall_ms: duration of a swap, in which the engine does not decode.
- delay_ms: time from the arrival of weights until the last engine has them.
- drift: mean |difference| between log-probs of tokens sampled after a swap and those of a forward
  pass with the same weights.

Values are medians over rounds; ratios are computed per round. Two simulated devices share the same
cores. Appends to results/interruption.jsonl and plots results/interruption_measured.png. Paper:
arXiv:2505.24298.

Expected: interruption gains more than 12 % over waiting. On a CPU, where decoding is compute-bound,
recomputing caches is relatively expensive.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import mean, median
from typing import Any, Literal

import chz
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from results import FOLDER, append
from rich.console import Console
from rich.table import Table

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.fleet import Fleet
from areal_jax.errors import EngineStopped
from areal_jax.models import hf
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_rollout_mesh
from areal_jax.records import Completion, Request, Sampling, Weights
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.weights.rolling import RollingSource, rolling_sources

NUM_SLOTS, PROMPT_TOKENS, MOST_TOKENS = 32, 16, 240
MEDIAN_TOKENS, SIGMA = 50, 1.0
TOKENS_PER_VERSION, NUM_VERSIONS, MOVE = 6400, 24, 0.003
NUM_CHECKED = 32
"""Answers per round whose log-probs are compared with those of a forward pass."""


@dataclass(frozen=True)
class Variant:
    on_update: Literal["recompute", "keep"] = "recompute"
    waits: bool = False
    num_engines: int = 1
    rolls: bool = False


VARIANTS = {
    "wait": Variant(waits=True),
    "recompute": Variant(),
    "keep": Variant(on_update="keep"),
    "two engines at once": Variant(num_engines=2),
    "two engines rolling": Variant(num_engines=2, rolls=True),
}


class Waiting(EngineLoop):
    """An engine loop that updates weights after running requests end, and admits none before."""

    def _update_weights(self) -> None:
        if not self._scheduler.running:
            super()._update_weights()

    def _admit(self) -> None:
        if self._weights.newest(self.version) is None:
            super()._admit()


@dataclass
class Arrivals:
    """Weight updates after a fixed number of tokens sampled by all engines, and a record of events.

    The threads of the engine loops report their events, and request weights through a `Shelf` each.
    """

    versions: Sequence[Sequence[Any]]
    """Parameters of each engine by position in the walk."""
    tokens: int = 0
    arrived_s: list[float] = field(default_factory=lambda: [time.perf_counter()])
    swaps: list[tuple[int, float, float]] = field(default_factory=list)
    """Version, start and end of each swap."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def record(
        self, name: str, start_s: float, end_s: float, args: Mapping[str, int | float]
    ) -> None:
        with self.lock:
            if name == "swap":
                self.swaps.append((int(args["version"]), start_s, end_s))
            elif name == "dispatch":
                self.tokens += int(args["tokens"])
                if self.tokens >= len(self.arrived_s) * TOKENS_PER_VERSION:
                    self.arrived_s.append(end_s)


@dataclass(frozen=True)
class Shelf:
    """The `WeightSource` of one engine."""

    arrivals: Arrivals
    engine: int

    def newest(self, after: int) -> Weights | None:
        version = len(self.arrivals.arrived_s) - 1
        return (
            Weights(version, self.arrivals.versions[self.engine][turn(version)])
            if version > after
            else None
        )

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        time.sleep(timeout_s)
        raise TimeoutError(f"no version {at_least}")


def turn(version: int) -> int:
    """Return the index of a version's parameters, which alternate: 0 1 2 3 2 1 0 1 ..."""
    place = version % (2 * NUM_VERSIONS - 2)
    return min(place, 2 * NUM_VERSIONS - 2 - place)


def walk(params: Params) -> list[Params]:
    """Return parameters of successive versions, each a step from the previous one."""
    rng, found = np.random.default_rng(0), [params]
    for _ in range(NUM_VERSIONS - 1):
        found.append(
            jax.tree.map(
                lambda x: x + MOVE * x.std() * rng.normal(size=x.shape).astype(np.float32),
                found[-1],
            )
        )
    return found


def requests(seed: int, vocab_size: int) -> list[Request]:
    """Make more requests than can be completed in the time."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, 20_000), 1, MOST_TOKENS).astype(
        int
    )
    prompts = rng.integers(0, vocab_size, (len(lengths), PROMPT_TOKENS), dtype=np.int32)
    return [
        Request(str(i), prompts[i], 1, Sampling(int(length)), seed=i)
        for i, length in enumerate(lengths)
    ]


async def decode(
    variant: Variant,
    engines: Sequence[DecodeEngine],
    versions: Any,
    asked: Sequence[Request],
    num_versions: int,
) -> tuple[dict[str, float], dict[int, Completion]]:
    """Decode until `num_versions` versions have arrived.

    Returns:
        Measurements, and the finished answers by request.
    """
    arrivals = Arrivals(versions)
    sources: list[Any] = [Shelf(arrivals, number) for number in range(len(engines))]
    if variant.rolls:
        sources = rolling_sources(sources)
        callbacks = [partial(record_rolling, arrivals, source) for source in sources]
    else:
        callbacks = [arrivals.record for _ in engines]
    kind = Waiting if variant.waits else EngineLoop
    engine_loops = [
        kind(engine, source, on_event=on_event)
        for engine, source, on_event in zip(engines, sources, callbacks, strict=True)
    ]
    fleet, finished, places = Fleet(engine_loops), dict[int, Completion](), count()

    async def client() -> None:
        while True:
            place = next(places)
            (finished[place],) = await fleet.submit(asked[place])

    fleet.start()
    # Twice as many clients as slots, so that a request waits for every free slot.
    clients = [asyncio.create_task(client()) for _ in range(2 * NUM_SLOTS)]
    while len(arrivals.arrived_s) <= num_versions and not any(each.done() for each in clients):
        await asyncio.sleep(0.01)
    fleet.close()
    for ended in await asyncio.gather(*clients, return_exceptions=True):
        if not isinstance(ended, EngineStopped):
            raise RuntimeError("a client ended before the engine did") from ended
    swaps = [swap for swap in arrivals.swaps if swap[0] > 0]
    last = {version: end for version, _, end in swaps}
    delays = [
        last[version] - arrived
        for version, arrived in enumerate(arrivals.arrived_s)
        if version in last and version > 0
    ]
    return {
        "tokens_per_s": TOKENS_PER_VERSION
        * (num_versions - 1)
        / (arrivals.arrived_s[num_versions] - arrivals.arrived_s[1]),
        "swaps": len(swaps) / len(engines),
        "stall_ms": 1e3 * mean(end - begin for _, begin, end in swaps),
        "delay_ms": 1e3 * mean(delays),
    }, finished


def record_rolling(
    arrivals: Arrivals, source: RollingSource, name: str, start_s: float, end_s: float, args: Any
) -> None:
    """Record an event, and grant the next engine its turn after a swap."""
    if name == "swap":
        source.complete_swap()
    arrivals.record(name, start_s, end_s, args)


class Fresh:
    """Log-probs of whole sequences, computed as in training."""

    def __init__(self, policy: Policy, versions: Sequence[Params]):
        self._versions = versions

        def logprobs(params: Params, tokens: jax.Array) -> jax.Array:
            positions, ones = (
                jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
                jnp.ones_like(tokens),
            )
            hidden = policy.hidden(
                params, tokens, positions, packed_attention(ones), compute_dtype=jnp.float32
            )[0]
            return token_logprobs(hidden, policy.head(params), tokens, ones, chunk_tokens=1024)[0]

        self._logprobs = jax.jit(logprobs)

    def drift(self, asked: Sequence[Request], answers: Mapping[int, Completion]) -> float:
        """Compute the mean |difference| of tokens sampled after a swap during their sequence."""
        found: list[np.ndarray] = []
        for place, answer in answers.items():
            tokens = np.zeros((1, PROMPT_TOKENS + MOST_TOKENS), np.int32)
            whole = np.concatenate([asked[place].prompt_tokens, answer.tokens])
            tokens[0, : len(whole)] = whole
            for version in sorted(set(answer.versions.tolist()) - {int(answer.versions[0])}):
                fresh = np.asarray(self._logprobs(self._versions[turn(version)], tokens))[
                    0, PROMPT_TOKENS : len(whole)
                ]
                here = answer.versions == version
                found.append(np.abs(fresh - answer.logp)[here])
        return float(np.concatenate(found).mean()) if found else 0.0


def main() -> None:
    """Run the command line. More than 60 lines: it measures in the order of its docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--versions",
        type=int,
        default=8,
        help="weight updates per variant and round, at least 2",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--note", default="", help="note for the row, such as other load of the machine"
    )
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_platforms", "cpu")
    policy, devices = Policy(hf.read_config(EMBEDDED)), jax.devices()
    here = jax.sharding.SingleDeviceSharding(devices[0])
    versions = walk(hf.load(EMBEDDED, policy, jax.tree.map(lambda _: here, policy.abstract())))
    config = EngineConfig(
        num_slots=NUM_SLOTS, max_prompt_tokens=PROMPT_TOKENS, max_new_tokens=MOST_TOKENS
    )
    made: dict[int, tuple[list[DecodeEngine], list[list[Any]]]] = {}
    for number in (1, 2):
        meshes = [make_rollout_mesh(PlacementConfig(), [device]) for device in devices[:number]]
        share = chz.replace(config, num_slots=NUM_SLOTS // number)
        engines = [DecodeEngine(policy, mesh, share, jnp.float32) for mesh in meshes]
        for engine in engines:
            engine.warm_up()
        laid_out = [
            [jax.device_put(engine.layout(each), engine.param_shardings) for each in versions]
            for engine in engines
        ]
        made[number] = engines, laid_out
    fresh = Fresh(policy, versions)
    rounds: list[dict[str, dict[str, float]]] = []
    for seed in range(args.rounds):
        asked, found = requests(seed, policy.config.vocab_size), dict[str, dict[str, float]]()
        for name, variant in VARIANTS.items():
            engines, laid_out = made[variant.num_engines]
            for engine in engines:
                engine.config = chz.replace(engine.config, on_update=variant.on_update)
            measured, answers = asyncio.run(
                decode(variant, engines, laid_out, asked, args.versions)
            )
            # The last requests to end: weights were updated while they were sampled.
            checked = dict(list(answers.items())[-NUM_CHECKED:])
            found[name] = measured | {"drift": fresh.drift(asked, checked)}
            print(f"round {seed}, {name}: {found[name]}", flush=True)
        rounds.append(found)
    result = {
        name: {
            measure: median(each[name][measure] for each in rounds) for measure in rounds[0][name]
        }
        for name in VARIANTS
    }
    for name in VARIANTS:
        gains = [each[name]["tokens_per_s"] / each["wait"]["tokens_per_s"] - 1 for each in rounds]
        result[name]["gained_over_wait"] = median(gains)
    workload = {
        "slots": NUM_SLOTS,
        "median_tokens": MEDIAN_TOKENS,
        "sigma": SIGMA,
        "tokens_per_version": TOKENS_PER_VERSION,
    }
    append(
        "interruption",
        {"measured": result, "workload": workload, "rounds": rounds, "note": args.note},
    )
    plot(result)


def plot(result: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(
        "variant",
        "tokens/s",
        "over waiting",
        "stall, ms",
        "delay, ms",
        "drift",
        title="interruption, measured",
    )
    for name, of in result.items():
        table.add_row(
            name,
            f"{of['tokens_per_s']:,.0f}",
            f"{of['gained_over_wait']:+.0%}",
            f"{of['stall_ms']:.1f}",
            f"{of['delay_ms']:.0f}",
            f"{of['drift']:.1e}",
        )
    Console(width=120).print(table)
    figure = Figure(figsize=(7, 3.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(result), [of["tokens_per_s"] for of in result.values()])
    axes.bar_label(bars, [f"{of['gained_over_wait']:+.0%}" for of in result.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(title="speed-up by interruption, measured", xlabel="tokens/s")
    figure.savefig(FOLDER / "interruption_measured.png")


if __name__ == "__main__":
    main()
