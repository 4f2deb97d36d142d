"""Stage costs in seconds: a roofline model with stated shares of the data sheets' peaks.

With P parameters that multiply a token, A the attention width, W bytes of weights, k bytes of KV
cache per token, and an engine or trainer of D devices:

    decode step  max(W / (D · bandwidth), 2 P N / (D · flops)) + k · context / (D · bandwidth)
                 + host and all-reduces
    prefill      (2 P · tokens + 4 A · pairs) / (D · flops)
    train        (3 + passes) (2 P · tokens + 4 A · pairs) / (D · flops)
                 + waiting + gradients over the network + host

A step decodes N sequences with `context` tokens in all. A pair is a query and a key that it
attends to. `passes` counts forward passes besides the update, which costs three: one for the
proximal policy. `PackedSchedule` and `EvenSplit` model how long devices wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from areal_jax.models.architecture import ModelConfig
from areal_jax.sim.hardware import Device

BYTES_PER_WEIGHT = 2
BYTES_PER_TRAINED_WEIGHT = 16
"""Parameters, gradients and two moments, in float32."""
LEFT_TO_ACTIVATIONS = 0.35
"""Share of a train device's memory for the activations of a micro-batch."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that programs reach, and host times; each default states its source."""

    decode_bandwidth: float = 0.75
    """Share of the memory bandwidth in decode steps: middle of what TensorRT-LLM and SGLang publish
    for 8B (0.5 to 0.85)."""
    decode_flops: float = 0.6
    """Share of the peak FLOP/s in decode steps with many sequences."""
    prefill_flops: float = 0.45
    train_flops: float = 0.43
    """AReaL, figure 6a: 427, 455 and 388 of 989 TFLOP/s at 1.5B, 7B and 32B."""
    memory: float = 0.9
    """Share of an engine's memory for weights and caches; the rest holds program and runtime."""
    network: float = 0.7
    step_s: float = 0.003
    """Host time and kernel launches per decode step."""
    all_reduce_s: float = 8e-6
    """Time of a small all-reduce within a host; a layer of a sharded engine has two."""
    update_s: float = 2.0
    """Time per trainer step that does not shrink with more devices: packing, sending the batch."""


class Step(NamedTuple):
    """A decode step of some sequences takes `fixed_s + context_s * tokens in their caches`."""

    fixed_s: float
    context_s: float


@runtime_checkable
class DecodeCosts(Protocol):
    """Costs of one engine."""

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache, in tokens."""
        ...

    @property
    def copy_s(self) -> float:
        """Time to replace the weights by a version that has arrived."""
        ...

    def step(self, num_sequences: int) -> Step:
        """Return the cost of a decode step of `num_sequences`."""
        ...

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """Return the time to prefill `tokens` with `pairs` of queries and keys."""
        ...

    def recompute_s(self, tokens: float, pairs: float) -> float:
        """Return the time to rebuild the caches of all running sequences."""
        ...


@dataclass(frozen=True)
class EngineCosts:
    """Roofline costs of an engine of `num_devices` devices."""

    model: ModelConfig
    device: Device
    num_devices: int = 1
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def weight_bytes(self) -> float:
        return float(BYTES_PER_WEIGHT * self.model.num_params)

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache, in tokens; negative if the weights alone do not fit."""
        return self.kv_tokens_beside(1)

    def kv_tokens_beside(self, num_versions: int) -> int:
        """Return the capacity of the KV cache beside several versions of the weights."""
        room = (
            self.efficiency.memory * self.num_devices * self.device.memory_bytes
            - num_versions * self.weight_bytes
        )
        return int(room / (BYTES_PER_WEIGHT * self.model.cached_per_token))

    def step(self, num_sequences: int) -> Step:
        """Return the cost of a decode step of `num_sequences`."""
        model, efficiency = self.model, self.efficiency
        bandwidth = self.num_devices * self.device.bytes_per_s * efficiency.decode_bandwidth
        flops = self.num_devices * self.device.flops_per_s * efficiency.decode_flops
        # Each token reads its own experts, at most all of them.
        read = min(self.model.num_params, num_sequences * model.matmul_params)
        products_s = max(
            BYTES_PER_WEIGHT * read / bandwidth, 2 * model.matmul_params * num_sequences / flops
        )
        reduces_s = 0.0
        if self.num_devices > 1:
            message = (
                BYTES_PER_WEIGHT * num_sequences * model.hidden_size / self.device.link_bytes_per_s
            )
            reduces_s = 2 * model.num_hidden_layers * (efficiency.all_reduce_s + message)
        return Step(
            products_s + reduces_s + efficiency.step_s,
            BYTES_PER_WEIGHT * model.cached_per_token / bandwidth,
        )

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """Return the time to prefill `tokens` with `pairs` of queries and keys."""
        flops = 2 * self.model.matmul_params * tokens + 4 * self.model.attention_width * pairs
        return flops / (self.num_devices * self.device.flops_per_s * self.efficiency.prefill_flops)

    def recompute_s(self, tokens: float, pairs: float) -> float:
        """Return the prefill time: a rebuild computes the same."""
        return self.prefill_s(tokens, pairs)

    @property
    def copy_s(self) -> float:
        """Time to replace the weights, within the device's own memory."""
        return (
            2
            * self.weight_bytes
            / (self.num_devices * self.device.bytes_per_s * self.efficiency.decode_bandwidth)
        )


@dataclass(frozen=True)
class PackedSchedule:
    """Micro-batches of equal token counts: devices wait only for their pipeline's stages.

    Stages hold equally many parameters. The first holds the embedding, which multiplies nothing, so
    that the others have more than their share of the work. A pipeline of p stages fills and drains
    once for every update and pass: each stage is idle for p - 1 micro-batches.
    """

    pipeline: int = 1
    """Pipeline-parallel degree."""
    tensor: int = 1
    """Tensor-parallel degree."""
    micro_batch_tokens: int = 32_768


@dataclass(frozen=True)
class EvenSplit:
    """Equally many whole sequences per device; all wait for the device with the longest ones.

    Passes besides the update are balanced by length over the whole batch, without waiting.
    """


@dataclass(frozen=True)
class TrainerCosts:
    """Costs of all training devices."""

    model: ModelConfig
    device: Device
    num_devices: int
    efficiency: Efficiency = field(default_factory=Efficiency)
    passes: int = 1
    """Forward passes besides the update."""
    num_mini_batches: int = 4
    layout: PackedSchedule | EvenSplit = field(default_factory=PackedSchedule)

    @property
    def fits(self) -> bool:
        """Whether sharded parameters, gradients and moments leave memory for activations."""
        each = BYTES_PER_TRAINED_WEIGHT * self.model.num_params / self.num_devices
        return each <= (1 - LEFT_TO_ACTIVATIONS) * self.device.memory_bytes

    def train_s(self, lengths: Float[np.ndarray, "N"]) -> float:
        """Return the time of a trainer step on sequences of these lengths."""
        tokens, pairs = float(lengths.sum()), float((lengths**2).sum() / 2)
        return self.train_tokens_s(tokens, pairs) + self._waiting_s(lengths)

    def train_tokens_s(self, tokens: float, pairs: float) -> float:
        """Return the time of a trainer step without waiting between devices."""
        work_s = (3 + self.passes) * self._forward_s(tokens, pairs, self.num_devices)
        # Ring all-reduce of the gradients, once for each update.
        hosts = ceil(self.num_devices / self.device.per_host)
        reduce_bytes = (
            2
            * BYTES_PER_WEIGHT
            * self.model.num_params
            / min(self.num_devices, self.device.per_host)
        )
        reduce_s = (
            self.num_mini_batches
            * reduce_bytes
            / (self.device.network_bytes_per_s * self.efficiency.network)
        )
        return work_s + (reduce_s if hosts > 1 else 0.0) + self.efficiency.update_s

    def _forward_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        flops = 2 * self.model.matmul_params * tokens + 4 * self.model.attention_width * pairs
        if isinstance(self.layout, PackedSchedule) and self.layout.pipeline > 1:
            embedding = self.model.vocab_size * self.model.hidden_size
            flops *= 1 + embedding / (
                self.model.num_params - (0 if self.model.tie_word_embeddings else embedding)
            )
        return flops / (num_devices * self.device.flops_per_s * self.efficiency.train_flops)

    def _waiting_s(self, lengths: Float[np.ndarray, "N"]) -> float:
        match self.layout:
            case PackedSchedule(pipeline, tensor, size):
                pairs = size * float((lengths**2).sum() / 2 / lengths.sum())
                stage_s = self._forward_s(float(size), pairs, pipeline * tensor)
                return (pipeline - 1) * (3 * self.num_mini_batches + self.passes) * stage_s
            case EvenSplit():
                share = -(-len(lengths) // (self.num_mini_batches * self.num_devices))
                padded = np.zeros(self.num_mini_batches * self.num_devices * share)
                padded[: len(lengths)] = lengths
                shares = padded.reshape(self.num_mini_batches, self.num_devices, share)
                times = [
                    [
                        self._forward_s(float(one.sum()), float((one**2).sum() / 2), 1)
                        for one in of_devices
                    ]
                    for of_devices in shares
                ]
                return 3 * sum(max(each) - fmean(each) for each in times)


@dataclass(frozen=True)
class Rewards:
    """Reward workers that grade one answer at a time."""

    num_workers: int = 256
    grading_s: float = 0.05
