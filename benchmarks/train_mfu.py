"""Training speed: tokens/s, TFLOP/s and MFU of a decoupled-PPO update, and of the proximal forward pass, in packed rows.

    python benchmarks/train_mfu.py --model=qwen2.5-1.5b            # one GPU or TPU, or all there are
    python benchmarks/train_mfu.py --model=qwen2.5-7b --tensor=2
    python benchmarks/train_mfu.py --tiny                          # a CPU: does it run, no more

Weights are random in the real shapes, float32 with AdamW, computing in bfloat16 (float32 on a CPU). Each row of --row-tokens
holds segments of --segment-tokens; every token but a segment's first is trained on. An update is --micro-batches micro-batches
and one optimizer step. The median of --updates updates counts, after one that is not timed.

What counts as work (PaLM, arXiv:2204.02311, appendix B), with N the parameters of matrix products, the head among them and the
embedding not, and A = L layers x heads x head size:

    update   6 · N · tokens + 12 · A · sum(segment²) / 2
    forward  2 · N · tokens +  4 · A · sum(segment²) / 2

Attention is halved, since a causal query sees half of its segment on average. What remat computes again does not count, nor do
padding, the optimizer or the softmax over the vocabulary. MFU is work / seconds / devices / the peak of dense products in
bfloat16 that the maker states; null for devices without one below. Appends one line to benchmarks/results/train_mfu.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from results import append

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import Remat
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.records import PackedBatch
from areal_jax.rl.config import DecoupledPPO
from areal_jax.rl.losses import policy_loss
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.step import Learner

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 FLOP/s by the beginning of a device's kind; the longest that fits."""

QWEN = {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "max_position_embeddings": 32768}
MODELS = {
    "tiny": QWEN
    | {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": QWEN
    | {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}


def work(model: ModelConfig, segment_lengths: np.ndarray) -> tuple[float, float]:
    """FLOPs of an update and of a forward pass over these segments, as the docstring counts them."""
    heads = (model.num_attention_heads, model.num_key_value_heads)
    of_layer = 2 * model.hidden_size * sum(heads) * model.head_dim + 3 * model.hidden_size * model.intermediate_size
    products = model.num_hidden_layers * of_layer + model.vocab_size * model.hidden_size
    width = model.num_hidden_layers * model.num_attention_heads * model.head_dim
    forward = 2.0 * products * segment_lengths.sum() + 4.0 * width * (segment_lengths.astype(float) ** 2).sum() / 2
    return 3 * forward, forward


def peak_flops(device_kind: str) -> float | None:
    """Of one device; None where nobody stated it."""
    known = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def draw_batch(model: ModelConfig, rows: int, row_tokens: int, segment_tokens: int) -> PackedBatch:
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
    """By the median of `times` runs, after one that compiles and warms up."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def measure(args: argparse.Namespace) -> dict[str, object]:
    """The row of one model on all devices."""
    model = ModelConfig.from_hf(MODELS[args.model], source=args.model)
    policy, devices = Policy(model), jax.devices()
    placement = PlacementConfig(train_context=args.context, train_tensor=args.tensor)
    if len(devices) > 1:
        # All train; the first stands for those that would decode.
        placement = PlacementConfig(
            train_devices=len(devices), rollout_devices=1, train_context=args.context, train_tensor=args.tensor
        )
        mesh = make_meshes(placement, [*devices, devices[0]]).train
    else:
        mesh = make_meshes(placement, devices).train
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-6, offload=args.offload),
        row_tokens=args.row_tokens,
        rows_per_micro_batch=args.rows,
        logp_chunk_tokens=args.chunk_tokens,
        remat=args.remat,
    )
    dtype = jnp.dtype(jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16)
    placed = shardings(mesh, policy.axes(), policy.abstract(), TRAIN_RULES)
    learner = Learner(
        config,
        policy,
        jax.jit(policy.init, out_shardings=placed)(jax.random.key(0)),
        mesh,
        dtype,
        num_updates=1000,
        objective=lambda logp, proximal_logp, batch, num_tokens: policy_loss(
            DecoupledPPO(), logp, proximal_logp, batch.behave_logp, batch.advantages, batch.loss_mask, num_tokens=num_tokens
        ),
        temperature=1.0,
        row_tokens=args.row_tokens,
    )
    host_batch = draw_batch(model, learner.rows, args.row_tokens, args.segment_tokens)
    (advantages,) = learner.put_column(np.random.default_rng(1).normal(size=(1, *host_batch.tokens.shape)).astype(np.float32))
    batch, micro_batches = learner.put(host_batch), args.micro_batches
    batch = batch._replace(proximal_logp=batch.behave_logp, advantages=advantages)
    num_tokens = micro_batches * int(host_batch.loss_mask.sum())
    _, lengths = np.unique(host_batch.segment_ids[0], return_counts=True)
    update_flops, forward_flops = (learner.rows * flops for flops in work(model, lengths))

    def update() -> object:
        learner.update([batch] * micro_batches, num_tokens, proximal_is_current=False)
        return learner.params

    peak = peak_flops(devices[0].device_kind)
    row: dict[str, object] = {
        "model": args.model,
        "note": args.note,
        "num_params": model.num_params,
        "settings": {name: value for name, value in vars(args).items() if name not in ("tiny", "model", "note")},
        "mesh": dict(mesh.shape),
        "attention": learner.forward.kernel,
        "compute_dtype": dtype.name,
        "peak_flops_per_device": peak,
    }
    for name, run, times, flops in (
        ("update", update, micro_batches, update_flops),
        ("forward", lambda: learner.logprobs(batch), 1, forward_flops),
    ):
        taken = seconds(run, args.updates)
        per_second = times * flops / taken
        row[name] = {
            "seconds": taken,
            "tokens_per_s": times * learner.rows * args.row_tokens / taken,
            "tflops_per_s_per_device": per_second / len(devices) / 1e12,
            "mfu": peak and per_second / len(devices) / peak,
        }
    row["peak_bytes_in_use"] = (devices[0].memory_stats() or {}).get("peak_bytes_in_use")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-1.5b")
    parser.add_argument("--row-tokens", type=int, default=32768)
    parser.add_argument("--segment-tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch on each shard of the batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of an update")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="tokens whose logits exist at the same time")
    parser.add_argument("--remat", choices=get_args(Remat), default="attention")
    parser.add_argument("--offload", action="store_true", help="keep moments in the host's memory")
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--note", default="", help="goes into the row: what else the machine did")
    parser.add_argument("--tiny", action="store_true", help="the tiny model, in rows of 2048 tokens")
    args = parser.parse_args()
    if args.tiny:
        tiny = {"model": "tiny", "row_tokens": 2048, "segment_tokens": 512, "micro_batches": 2, "updates": 3}
        vars(args).update(tiny)
    append("train_mfu", measure(args))


if __name__ == "__main__":
    main()
