"""Memory and time of chunked log-probabilities (`token_logprobs`) versus all logits at once.

    python benchmarks/logprobs_memory.py

Forward and backward. Memory is XLA's temporary memory of the compiled program, besides arguments
and results (compiled.memory_analysis()), so that no size needs to fit into this machine. Its bound
is the float32 logits of one chunk. Time is measured in turns for sizes of at most 2^26 logits. Its
bound is 6 T D V floating-point operations (one product forward, two backward) at the best measured
rate of multiplying a chunk with the head. Chunks recompute their logits in the backward pass,
8 T D V in all: their time is at least 4/3 of the bound.

Width 128, chunks of 1024 tokens, float32. Appends to results/logprobs_memory.jsonl and plots
results/logprobs_memory.png.

Expected: at 32 768 tokens a sixtieth of the memory, two arrays of a chunk's logits, in less time
than the naive formula. On two CPU cores with other load: 1.2 GiB versus 74 GiB with the vocabulary
of Qwen2.5, and 70 to 75 % of the time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from results import FOLDER, append

from areal_jax.rl.logprobs import token_logprobs

NAME = "logprobs_memory"
WIDTH, CHUNK_TOKENS = 128, 1024
TOKENS, VOCABULARIES = (2048, 8192, 32_768), (8192, 32_768, 151_936)
MOST_LOGITS_TIMED = 2**26

LogProbs = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def naive(
    hidden: Float[Array, "1 T D"],
    head: Float[Array, "D V"],
    tokens: Int[Array, "1 T"],
    segment_ids: Int[Array, "1 T"],
) -> tuple[Float[Array, "1 T"], Float[Array, "1 T"]]:
    """Compute `token_logprobs` by its formula, a softmax over all logits at once."""
    log_softmax = jax.nn.log_softmax(hidden[:, :-1] @ head)
    logp = jnp.take_along_axis(log_softmax, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = jax.lax.stop_gradient(-jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1))
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    logp, entropy = (jnp.pad(jnp.where(same, x, 0.0), ((0, 0), (1, 0))) for x in (logp, entropy))
    return logp, entropy


WAYS: Mapping[str, LogProbs] = {
    "chunked": partial(token_logprobs, chunk_tokens=CHUNK_TOKENS),
    "naive": naive,
}


def compiled(way: LogProbs, num_tokens: int, vocabulary: int) -> jax.stages.Compiled:
    """Compile loss and mean entropy, with the loss's gradient for hidden states and head."""

    def loss(hidden: Array, head: Array, tokens: Array, segment_ids: Array) -> tuple[Array, Array]:
        logp, entropy = way(hidden, head, tokens, segment_ids)
        return -logp.mean(), entropy.mean()

    shapes = ((1, num_tokens, WIDTH), (WIDTH, vocabulary), (1, num_tokens), (1, num_tokens))
    dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.int32)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*arguments).compile()
    )


def temp_bytes(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def arguments(num_tokens: int, vocabulary: int) -> tuple[Array, Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (1, num_tokens, WIDTH)),
        jax.random.normal(keys[1], (WIDTH, vocabulary)) / WIDTH**0.5,
        jax.random.randint(keys[2], (1, num_tokens), 0, vocabulary),
        jnp.ones((1, num_tokens), jnp.int32),
    )


def seconds(program: Callable[..., Any], given: Sequence[Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*given))
    return time.perf_counter() - start


def time_in_turns(
    programs: Mapping[str, jax.stages.Compiled], num_tokens: int, vocabulary: int, rounds: int
) -> dict[str, Any]:
    """Measure seconds of every variant, and ratios: medians over rounds; the bound's minimum."""
    given = arguments(num_tokens, vocabulary)
    ours, theirs = (programs[name](*given) for name in ("chunked", "naive"))
    # Times are comparable only if the results are equal.
    jax.tree.map(partial(_assert_close, atol=1e-4), ours, theirs)
    product, chunk = jax.jit(jnp.matmul), given[0][0, :CHUNK_TOKENS]
    found = [
        {name: seconds(program, given) for name, program in programs.items()} for _ in range(rounds)
    ]
    product_s = min(seconds(product, (chunk, given[1])) for _ in range(4 * rounds))
    taken = {name: median(of_round[name] for of_round in found) for name in programs}
    taken["bound"] = 3 * product_s * num_tokens / CHUNK_TOKENS
    return {
        "seconds": taken,
        "chunked_to_naive": median(of_round["chunked"] / of_round["naive"] for of_round in found),
        "chunked_to_bound": taken["chunked"] / taken["bound"],
    }


def _assert_close(ours: Array, theirs: Array, atol: float) -> None:
    difference = float(jnp.max(jnp.abs(ours - theirs)))
    assert difference <= atol, f"chunked and naive differ by {difference}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sizes = list[dict[str, Any]]()
    print("tokens  vocabulary  temp MiB: naive  chunked  bound    seconds: naive  chunked  bound")
    for vocabulary in VOCABULARIES:
        for num_tokens in TOKENS:
            programs = {name: compiled(way, num_tokens, vocabulary) for name, way in WAYS.items()}
            size: dict[str, Any] = {
                "tokens": num_tokens,
                "vocabulary": vocabulary,
                "temp_bytes": {name: temp_bytes(program) for name, program in programs.items()}
                | {"bound": 4 * CHUNK_TOKENS * vocabulary},
            }
            if num_tokens * vocabulary <= MOST_LOGITS_TIMED:
                size |= time_in_turns(programs, num_tokens, vocabulary, args.rounds)
            sizes.append(size)
            order = ("naive", "chunked", "bound")
            mebibytes = "  ".join(f"{size['temp_bytes'][name] / 2**20:9,.0f}" for name in order)
            taken = (
                "  ".join(f"{size['seconds'][name]:7.2f}" for name in order)
                if "seconds" in size
                else "not timed"
            )
            print(f"{num_tokens:6}  {vocabulary:10}  {mebibytes}    {taken}", flush=True)
    append(
        NAME, {"width": WIDTH, "chunk_tokens": CHUNK_TOKENS, "rounds": args.rounds, "sizes": sizes}
    )
    plot(sizes)


def plot(sizes: Sequence[Mapping[str, Any]]) -> None:
    """Plot memory by tokens, a panel for each vocabulary, and times."""
    colors = {"naive": "#8a8f98", "chunked": "#2563a8", "bound": "#d9721f"}
    figure = Figure(figsize=(12.5, 3.9), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(VOCABULARIES) + 1)
    for axes, vocabulary in zip(panels, VOCABULARIES, strict=False):
        of_vocabulary = [size for size in sizes if size["vocabulary"] == vocabulary]
        for name, color in colors.items():
            memory = [size["temp_bytes"][name] / 2**30 for size in of_vocabulary]
            axes.loglog(
                [size["tokens"] for size in of_vocabulary],
                memory,
                color=color,
                marker="o",
                label=name,
                linestyle="--" if name == "bound" else "-",
            )
        axes.set_title(f"temporary GiB, vocabulary {vocabulary:,}", loc="left", fontsize=10)
        axes.set_xticks(TOKENS, [f"{tokens:,}" for tokens in TOKENS], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("tokens")
    panels[0].legend(frameon=False)
    timed = [size for size in sizes if "seconds" in size]
    for i, (name, color) in enumerate(colors.items()):
        places = [place + 0.27 * (i - 1) for place in range(len(timed))]
        panels[-1].bar(
            places, [size["seconds"][name] for size in timed], 0.27, color=color, label=name
        )
    panels[-1].set_xticks(
        range(len(timed)),
        [f"{size['tokens']:,}\nx {size['vocabulary']:,}" for size in timed],
        fontsize=7,
    )
    panels[-1].set_title("seconds, forward and backward", loc="left", fontsize=10)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / f"{NAME}.png")


if __name__ == "__main__":
    main()
