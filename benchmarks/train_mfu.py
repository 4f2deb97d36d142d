"""Training speed: tokens/s, TFLOP/s and MFU of a decoupled-PPO update, and of its forward pass.

    # all GPUs or TPUs
    python benchmarks/train_mfu.py --model=qwen2.5-1.5b
    # an adapter on every matrix of every layer
    python benchmarks/train_mfu.py --model=qwen2.5-7b --lora-rank=16
    # the proximal forward pass only
    python benchmarks/train_mfu.py --model=qwen2.5-1.5b --forward
    # smoke test on a CPU
    python benchmarks/train_mfu.py --tiny

Weights are random with the real shapes: float32 with AdamW, computing in bfloat16 (float32 on a
CPU); with an adapter they are frozen, in the compute dtype. Each packed row of --row-tokens holds
segments of --segment-tokens; all tokens but the first of a segment are trained on. An update is
--micro-batches micro-batches and one optimizer step. Reported is the median of --updates updates,
after a warm-up update.

Floating-point operations (PaLM, arXiv:2204.02311, appendix B), with `trained` and `frozen` the
numbers of parameters in matrix products (including the head, excluding the embedding), and
A = layers x heads x head size:

    forward   2 · (trained + frozen) · tokens      +  4 · A · sum(segment²) / 2
    update   (6 · trained + 4 · frozen) · tokens   + 12 · A · sum(segment²) / 2

A parameter costs 2 per token forward, 2 for the gradient of its input, and 2 for its own gradient
if it is trained; with an adapter the head is frozen. Attention is halved, because a causal query
attends to half of its segment on average. Not counted are recomputation by remat, padding, the
optimizer, norms and the softmax over the vocabulary. MFU is operations / seconds / devices / the
data-sheet peak of dense bfloat16 products; null for unknown devices. Appends one line to
benchmarks/results/train_mfu.jsonl.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray
from results import append

from areal_jax.models import lora
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import LoRA, Remat
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.known import KNOWN
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.records import PackedBatch
from areal_jax.rl.config import DecoupledPPO
from areal_jax.rl.losses import policy_loss
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.programs import Objective
from areal_jax.trainer.step import Learner, TrainableModel

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 FLOP/s by prefix of the device kind; the longest match counts."""

TINY = KNOWN["qwen2.5-1.5b"] | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MODELS = {"tiny": TINY, **KNOWN}


def model_config(name: str, num_layers: int) -> ModelConfig:
    """Return a policy of `MODELS`, with another number of layers unless that is 0."""
    shape = MODELS[name]
    if num_layers:
        shape = {**shape, "num_hidden_layers": num_layers}
    return ModelConfig.from_hf(shape, source=name)


class Work(NamedTuple):
    """Terms of the docstring's formulas."""

    trained: int
    frozen: int
    attention: int
    """A."""
    tokens: int
    pairs: float
    """sum(segment²) / 2."""

    @property
    def forward(self) -> float:
        return 2.0 * (self.trained + self.frozen) * self.tokens + 4.0 * self.attention * self.pairs

    @property
    def update(self) -> float:
        return (
            6.0 * self.trained + 4.0 * self.frozen
        ) * self.tokens + 12.0 * self.attention * self.pairs


COUNTED = {
    "forward": "2 (trained + frozen) tokens + 4 attention sum(segment^2) / 2",
    "update": "(6 trained + 4 frozen) tokens + 12 attention sum(segment^2) / 2",
}
"""Formulas of the operations, stored in the row."""


def work(policy: Policy, segment_lengths: Int[np.ndarray, "N"]) -> Work:
    """Compute the terms for segments of these lengths."""
    whole = policy.config.matmul_params
    adapter = (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(lora.abstract(policy)))
        if policy.lora
        else 0
    )
    return Work(
        trained=adapter if policy.lora else whole,
        frozen=whole if policy.lora else 0,
        attention=policy.config.attention_width,
        tokens=int(segment_lengths.sum()),
        pairs=float((segment_lengths.astype(float) ** 2).sum() / 2),
    )


def peak_flops(device_kind: str) -> float | None:
    """Return the peak of one device; None if it is unknown."""
    known = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def sample_batch(
    model: ModelConfig, rows: int, row_tokens: int, segment_tokens: int
) -> PackedBatch:
    chance, shape = np.random.default_rng(0), (rows, row_tokens)
    places = np.broadcast_to(np.arange(row_tokens, dtype=np.int32), shape)
    logp = chance.normal(-1.0, 0.1, shape).astype(np.float32)
    return PackedBatch(
        tokens=chance.integers(0, model.vocab_size, shape, dtype=np.int32),
        segment_ids=places // segment_tokens + 1,
        positions=places % segment_tokens,
        loss_mask=places % segment_tokens != 0,
        behave_logp=logp,
        age=np.zeros(shape, np.int32),
    )


def seconds(run: Callable[[], object], times: int) -> float:
    """Measure the median of `times` runs, after a warm-up run."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def make_learner(args: argparse.Namespace, devices: list[jax.Device]) -> Learner:
    """Make the model with random weights, or an adapter on it, ready to train."""
    adapter = LoRA(rank=args.lora_rank, alpha=2.0 * args.lora_rank) if args.lora_rank else None
    policy = Policy(model_config(args.model, args.layers), adapter)
    placement = PlacementConfig(train_context=args.context, train_tensor=args.tensor)
    mesh = make_train_mesh(placement, devices)
    dtype = jnp.dtype(jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16)
    weights = policy.abstract(dtype if adapter else jnp.float32)

    def fresh(key: PRNGKeyArray) -> Params:
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), policy.init(key), weights)

    placed = shardings(mesh, policy.axes(), weights, TRAIN_RULES)
    params, base = jax.jit(fresh, out_shardings=placed)(jax.random.key(0)), None
    if adapter:
        placed = shardings(mesh, lora.axes(policy), lora.abstract(policy), TRAIN_RULES)
        params, base = (
            jax.jit(partial(lora.init, policy), out_shardings=placed)(jax.random.key(1)),
            params,
        )
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-6, offload=args.offload),
        row_tokens=args.row_tokens,
        rows_per_micro_batch=args.rows,
        logp_chunk_tokens=args.chunk_tokens,
        remat=args.remat,
    )
    model = TrainableModel(
        policy=policy,
        params=params,
        mesh=mesh,
        compute_dtype=dtype,
        row_tokens=args.row_tokens,
        base=base,
    )
    objective = Objective(
        lambda logp, batch, num_tokens, _: policy_loss(
            DecoupledPPO(),
            logp,
            batch.proximal_logp,
            batch.behave_logp,
            batch.advantages,
            batch.loss_mask,
            batch.segment_ids,
            num_tokens=num_tokens,
        )
    )
    return Learner(config, model, objective, num_updates=1000)


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Measure one model on all devices; return the row."""
    learner = make_learner(args, jax.devices())
    model, device, num_devices = (
        learner.policy.config,
        learner.mesh.devices.flat[0],
        learner.mesh.size,
    )
    host_batch = sample_batch(model, learner.rows, args.row_tokens, args.segment_tokens)
    (advantages,) = learner.put_column(
        np.random.default_rng(1).normal(size=(1, *host_batch.tokens.shape)).astype(np.float32)
    )
    batch, micro_batches = learner.put(host_batch), args.micro_batches
    batch = batch._replace(proximal_logp=batch.behave_logp, advantages=advantages)
    num_tokens = micro_batches * int(host_batch.loss_mask.sum())
    _, lengths = np.unique(host_batch.segment_ids[0], return_counts=True)
    of_row, peak = work(learner.policy, lengths), peak_flops(device.device_kind)

    def update() -> object:
        learner.update([batch] * micro_batches, num_tokens, proximal_is_current=False)
        return learner.params

    row: dict[str, object] = {
        "model": args.model,
        "note": args.note,
        "num_params": model.num_params,
        "settings": {
            name: value
            for name, value in vars(args).items()
            if name not in ("tiny", "model", "note")
        },
        "mesh": dict(learner.mesh.shape),
        "attention": learner.forward.kernel,
        "compute_dtype": jnp.dtype(learner.compute_dtype).name,
        "peak_flops_per_device": peak,
        "counted": COUNTED
        | {"trained": of_row.trained, "frozen": of_row.frozen, "attention": of_row.attention},
    }
    runs: dict[str, tuple[Callable[[], object], float]] = {
        "update": (update, micro_batches * learner.rows * of_row.update),
        "forward": (lambda: learner.logprobs(batch), learner.rows * of_row.forward),
    }
    if args.forward:
        del runs["update"]
    for name, (run, flops) in runs.items():
        taken = seconds(run, args.updates)
        per_second = flops / taken / num_devices
        passes = micro_batches if name == "update" else 1
        row[name] = {
            "seconds": taken,
            "tokens_per_s": passes * learner.rows * args.row_tokens / taken,
            "tflops_per_s_per_device": per_second / 1e12,
            "mfu": peak and per_second / peak,
        }
    row["peak_bytes_in_use"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return row


def settings(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-1.5b")
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0: the model's")
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        help="rank of an adapter on every matrix of every layer; 0: train all parameters",
    )
    parser.add_argument(
        "--forward", action="store_true", help="measure only the proximal forward pass"
    )
    parser.add_argument("--row-tokens", type=int, default=32768)
    parser.add_argument("--segment-tokens", type=int, default=8192)
    parser.add_argument(
        "--rows", type=int, default=1, help="rows of a micro-batch per shard of the batch"
    )
    parser.add_argument("--micro-batches", type=int, default=4, help="of an update")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument(
        "--chunk-tokens", type=int, default=2048, help="chunk size of the logits, in tokens"
    )
    parser.add_argument("--remat", choices=get_args(Remat), default="attention")
    parser.add_argument(
        "--offload", action="store_true", help="keep optimizer moments in host memory"
    )
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument(
        "--note", default="", help="note for the row, such as other load of the machine"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="the tiny model, in rows of 2048 tokens"
    )
    args = parser.parse_args(arguments)
    if args.tiny:
        tiny = {
            "model": "tiny",
            "row_tokens": 2048,
            "segment_tokens": 512,
            "micro_batches": 2,
            "updates": 3,
        }
        vars(args).update(tiny)
    return args


def main() -> None:
    append("train_mfu", measure(settings()))


if __name__ == "__main__":
    main()
