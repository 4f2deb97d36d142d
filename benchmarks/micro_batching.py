"""Algorithm 1 versus fixed micro-batches on long-tailed lengths (AReaL, figure 6a).

    python benchmarks/micro_batching.py            # measured
    python benchmarks/micro_batching.py --cluster  # simulated, on the paper's GPUs

Measured: tokens/s and padding. Lengths are the paper's (arXiv:2505.24298), log-normal with a mean
of about 4915 tokens and sigma 0.8, at most 28 672, divided by 64 for the CPU; so are the 32 768
tokens of a micro-batch.
The fixed strategy cuts a mini-batch of 128 sequences, in order, into 32 micro-batches of 4, each
padded to its longest sequence (rounded up to 32 tokens, because shapes are compiled). The project's
trainer trains both, in turns; tokens/s exclude padding.

A trainer has one shape, so the fixed strategy uses one trainer for each micro-batch length, and
each makes its own update; the time of all these updates but one is measured and subtracted. The
model is that of rl_step_cpu.py. Ratios are medians over rounds, of wall-clock time and of CPU time,
which depends less on other load. Appends to results/micro_batching.jsonl and plots
results/micro_batching.png.

Expected: at least 25 % more tokens/s, padding of at most 5 %, and 8192 lengths allocated in less
than 0.3 s. On two CPU cores with other load: 42 % more, padding of 2.0 % versus 48 %, and 0.05 s.

Simulated: the paper's cluster has no padding; Algorithm 1 reduces the wait for the rank with the
longest micro-batches. A mini-batch of 2048 sequences of full length is split over RANKS ranks of
one, two and eight GPUs. With the fixed strategy, each rank cuts its share into 32 micro-batches of
equal sequence counts; Algorithm 1 makes rows of 32 768 tokens and gives each rank the same number.
`sim/costs.py` estimates the time of a micro-batch from its tokens and attention pairs. The paper
does not give its sharding; assumed is that ranks synchronize once per update if each holds the
whole policy (1.5B), and in every micro-batch if it is sharded. Nothing is fitted. Appends to
results/micro_batching_cluster.jsonl and plots results/micro_batching_cluster.png.

Expected: gains of 8 %, 54 % and 52 %; the paper reports 6 %, 50 % and 37 %.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import FOLDER, append
from rl_step_cpu import MODEL

from areal_jax.data.packing import allocate, lay_out
from areal_jax.data.sft import SupervisedExample
from areal_jax.models.decoder import Policy
from areal_jax.models.known import known_shape
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.sim.costs import Efficiency, TrainerCosts
from areal_jax.sim.hardware import DEVICES
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.step import TrainableModel

NAME = "micro_batching"
SCALE = 64
ROW_TOKENS = 32_768 // SCALE
NUM_SEQUENCES, NUM_FIXED = 128, 32
PER_FIXED = NUM_SEQUENCES // NUM_FIXED
ROUND_TO = 32

FIGURE_6A = {"1.5b": (8, 404.4, 427.4), "7b": (16, 303.1, 454.7), "32b": (64, 283.0, 387.7)}
"""Number of GPUs, and TFLOP/s per GPU with fixed micro-batches and with Algorithm 1 (figure 6a, in
which the first policy is 1B)."""
RANKS = 8
MINI_BATCH = 2048
BUDGET = 32_768


def papers_lengths(seed: int, num_sequences: int) -> Int[np.ndarray, "N"]:
    sampled = np.random.default_rng(seed).lognormal(8.5, 0.8, num_sequences)
    return np.clip(sampled, 64, 28_672).astype(np.int64)


def make_examples(lengths: Int[np.ndarray, "N"]) -> list[SupervisedExample]:
    chance = np.random.default_rng(0)
    return [
        SupervisedExample(
            chance.integers(0, MODEL.vocab_size, length).astype(np.int32), np.arange(length) > 0
        )
        for length in lengths
    ]


def padded(example: SupervisedExample, length: int) -> SupervisedExample:
    behind = (0, length - len(example.tokens))
    return SupervisedExample(np.pad(example.tokens, behind), np.pad(example.loss_mask, behind))


def fixed_micro_batches(
    examples: Sequence[SupervisedExample],
) -> dict[int, list[SupervisedExample]]:
    """Group padded examples by their padded length; those of a micro-batch are adjacent."""
    by_length = defaultdict[int, list[SupervisedExample]](list)
    for start in range(0, len(examples), PER_FIXED):
        registry = examples[start : start + PER_FIXED]
        longest = -(-max(len(example.tokens) for example in registry) // ROUND_TO) * ROUND_TO
        by_length[longest] += [padded(example, longest) for example in registry]
    return by_length


def make_trainer(rows: int, row_tokens: int) -> SupervisedTrainer:
    """Make a compiled trainer. A padded example fills its row: a micro-batch has `rows` of them."""
    policy = Policy(MODEL)
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).train
    config = TrainerConfig(rows_per_micro_batch=rows, remat="none")
    model = TrainableModel(
        policy=policy,
        params=policy.init(jax.random.key(0)),
        mesh=mesh,
        compute_dtype=jnp.float32,
        row_tokens=row_tokens,
    )
    trainer = SupervisedTrainer(config, model, num_updates=1000)
    trainer.warm_up()
    return trainer


def seconds(trainer: SupervisedTrainer, examples: Sequence[SupervisedExample]) -> np.ndarray:
    """Measure the wall-clock and CPU seconds of an update."""
    start = np.array([time.perf_counter(), time.process_time()])
    trainer.step(examples)
    jax.block_until_ready(trainer.params)
    return np.array([time.perf_counter(), time.process_time()]) - start


def allocation_seconds(num_rounds: int) -> float:
    """Measure Algorithm 1 on a batch of the paper's size, with full lengths."""

    def once(seed: int) -> float:
        lengths = papers_lengths(seed, 8192)
        start = time.perf_counter()
        allocate(lengths, 32_768)
        return time.perf_counter() - start

    return median(once(seed) for seed in range(num_rounds))


def seconds_on_ranks(
    work: Callable[[float, float], float], lengths: Int[np.ndarray, "N"], *, meet: bool
) -> tuple[float, float]:
    """Simulate the seconds of a mini-batch with fixed micro-batches, and with Algorithm 1.

    Args:
        work: seconds of a rank for tokens and pairs.
        meet: whether ranks synchronize in every micro-batch.
    """

    def took(tokens: np.ndarray, pairs: np.ndarray) -> float:
        each = np.vectorize(work)(tokens, pairs)  # by rank and micro-batch
        return float(each.max(0).sum() if meet else each.sum(1).max())

    fixed = lengths.reshape(RANKS, NUM_FIXED, -1).astype(np.float64)
    rows = allocate(lengths, BUDGET)
    rows += [[]] * (-len(rows) % RANKS)
    pairs = np.sort([(lengths[row].astype(np.float64) ** 2).sum() / 2 for row in rows])
    full = np.full(len(rows), BUDGET).reshape(-1, RANKS).T
    return took(fixed.sum(-1), (fixed**2).sum(-1) / 2), took(full, pairs.reshape(-1, RANKS).T)


def gain_on_cluster(model: str, num_devices: int, num_seeds: int) -> float:
    """Simulate the speed-up by Algorithm 1, the mean over mini-batches."""
    trainer = TrainerCosts(
        known_shape(f"r1-distill-qwen-{model}"),
        DEVICES["H800"],
        num_devices // RANKS,
        Efficiency(update_s=0.0),
    )
    took = [
        seconds_on_ranks(
            trainer.train_tokens_s, papers_lengths(seed, MINI_BATCH), meet=num_devices > RANKS
        )
        for seed in range(num_seeds)
    ]
    return fmean(fixed / packed for fixed, packed in took) - 1


def simulate() -> None:
    """Simulate all of figure 6a."""
    papers = {model: dynamic / fixed - 1 for model, (_, fixed, dynamic) in FIGURE_6A.items()}
    found = {
        model: gain_on_cluster(model, num_devices, 5)
        for model, (num_devices, _, _) in FIGURE_6A.items()
    }
    off_by = {model: (1 + found[model]) / (1 + papers[model]) - 1 for model in found}
    append(
        f"{NAME}_cluster",
        {
            "ranks": RANKS,
            "mini_batch": MINI_BATCH,
            "gain": found,
            "papers_gain": papers,
            "off_by": off_by,
        },
    )
    figure = Figure(figsize=(6, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for shift, colour, (name, gains) in zip(
        (-0.2, 0.2),
        ("#8a8f98", "#2563a8"),
        {"paper": papers, "simulated": found}.items(),
        strict=True,
    ):
        axes.bar(
            [x + shift for x in range(len(gains))],
            [100 * gain for gain in gains.values()],
            0.4,
            label=name,
            color=colour,
        )
    axes.set_xticks(
        range(len(found)), [f"{model}, {num} GPUs" for model, (num, _, _) in FIGURE_6A.items()]
    )
    axes.set(title="speed-up by Algorithm 1 (figure 6a)", ylabel="%")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / f"{NAME}_cluster.png")


def main() -> None:
    """Run the command line. More than 60 lines: it measures in the order of its docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cluster", action="store_true", help="simulate the paper's cluster instead of measuring"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    args = parser.parse_args()
    if args.cluster:
        simulate()
        return
    lengths = np.maximum(papers_lengths(args.seed, NUM_SEQUENCES) // SCALE, 2)
    examples = make_examples(lengths)
    num_tokens = int(lengths.sum())
    fixed = fixed_micro_batches(examples)
    fixed_places = sum(length * len(registry) for length, registry in fixed.items())
    layout = lay_out(lengths, rows=1, row_tokens=ROW_TOKENS)

    packing = make_trainer(1, ROW_TOKENS)
    padding = {length: make_trainer(PER_FIXED, length) for length in fixed}
    rounds: list[tuple[np.ndarray, np.ndarray]] = []
    for number in range(args.rounds + 1):
        nothing_s = np.median([seconds(packing, []) for _ in range(3)], axis=0)
        fixed_s = np.sum(
            [seconds(padding[length], registry) for length, registry in fixed.items()], axis=0
        )
        fixed_s -= (len(fixed) - 1) * nothing_s
        packed_s = seconds(packing, examples)
        if number:  # the first warms up
            rounds.append((num_tokens / fixed_s, num_tokens / packed_s))
            rates = "  ".join(
                f"{name} {rate[0]:,.0f}"
                for name, rate in zip(("fixed", "Algorithm 1"), rounds[-1], strict=True)
            )
            print(f"round {number}/{args.rounds}  {rates} tokens/s", flush=True)
    fixed_rate, packed_rate = np.median(rounds, axis=0)
    ratios = [packed / fixed for fixed, packed in rounds]
    ratio, cpu_ratio = np.median(ratios, axis=0)
    papers = lay_out(papers_lengths(args.seed, 2048), rows=1, row_tokens=32_768)
    append(
        NAME,
        {
            "rounds": args.rounds,
            "seed": args.seed,
            "num_sequences": NUM_SEQUENCES,
            "tokens": num_tokens,
            "longest": int(lengths.max()),
            "fixed": {
                "tokens_per_s": fixed_rate[0],
                "tokens_per_cpu_s": fixed_rate[1],
                "padding": 1 - num_tokens / fixed_places,
                "micro_batches": NUM_FIXED,
                "largest_micro_batch_tokens": PER_FIXED * max(fixed),
            },
            "algorithm_1": {
                "tokens_per_s": packed_rate[0],
                "tokens_per_cpu_s": packed_rate[1],
                "padding": 1 - layout.efficiency,
                "micro_batches": layout.shape[0],
                "largest_micro_batch_tokens": ROW_TOKENS,
            },
            "ratio": ratio,
            "ratio_of_cpu_time": cpu_ratio,
            "ratio_by_round": [round_ratio[0] for round_ratio in ratios],
            "padding_of_2048_at_full_length": 1 - papers.efficiency,
            "seconds_to_allocate_8192": allocation_seconds(args.rounds),
        },
    )
    plot(lengths, fixed_rate[0], packed_rate[0], ratio)


def plot(
    lengths: Int[np.ndarray, "N"], fixed_rate: float, packed_rate: float, ratio: float
) -> None:
    """Both cuts of the mini-batch, place by place, and how fast they train."""
    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(4, 4, 1.4))
    by_fours = [lengths[start : start + PER_FIXED] for start in range(0, len(lengths), PER_FIXED)]
    fixed = [
        (registry.sum(), PER_FIXED * (-(-registry.max() // ROUND_TO) * ROUND_TO))
        for registry in by_fours
    ]
    _plot_cut(left, "fixed micro-batches of 4, padded", fixed)
    packed = [(lengths[registry].sum(), ROW_TOKENS) for registry in allocate(lengths, ROW_TOKENS)]
    _plot_cut(middle, "Algorithm 1", packed)
    for axes in (left, middle):
        axes.set_ylim(0, 1.15 * max(places for _, places in fixed))
    right.bar(["fixed", "Alg. 1"], [fixed_rate, packed_rate], color=["#8a8f98", "#2563a8"])
    right.set_title(f"tokens/s: {ratio - 1:+.0%}", loc="left", fontsize=10)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / f"{NAME}.png")


def _plot_cut(axes: Axes, title: str, micro_batches: Sequence[tuple[int, int]]) -> None:
    tokens, places = np.array(micro_batches).T
    order = np.argsort(-places, kind="stable")
    axes.bar(np.arange(len(places)), places[order], color="#f0c9a8", label="padding")
    axes.bar(np.arange(len(places)), tokens[order], color="#2563a8", label="tokens")
    axes.set_title(
        f"{title}: {1 - tokens.sum() / places.sum():.1%} padding", loc="left", fontsize=10
    )
    axes.set_xlabel("micro-batch, largest first")
    axes.legend(frameon=False, loc="upper right")


if __name__ == "__main__":
    main()
