"""What each stage costs in seconds: a roofline with stated shares of the makers' peaks.

With P parameters that a token is multiplied by, A the attention width, W bytes of weights, k bytes
of KV cache a token, and an engine or trainer of D devices:

    decode step   max(W / (D · bandwidth), 2 P N / (D · flops)) + k · context / (D · bandwidth) +
    host and all-reduces prefill       (2 P · tokens + 4 A · pairs) / (D · flops) train         (3 +
    passes) (2 P · tokens + 4 A · pairs) / (D · flops) + waiting + gradients over the network + host

where N sequences of `context` tokens in all take a step, a query and a key that it sees are a pair,
and `passes` are forward passes beside the update, which is worth three: one for the proximal
policy. How long devices wait for each other is what `Packed` and `Dealt` say.
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
"""Share of a train device's memory that activations of a micro-batch need."""


@dataclass(frozen=True)
class Reached:
    """Which share of the peaks is reached, and what the host takes. Every default says where it
    comes from."""

    decode_bandwidth: float = 0.75
    """Of memory bandwidth, by decode steps: middle of what TensorRT-LLM and SGLang publish for 8B
    (0.5 to 0.85)."""
    decode_flops: float = 0.6
    """Of peak, by the products of a decode step with many sequences."""
    prefill_flops: float = 0.45
    train_flops: float = 0.43
    """AReaL, figure 6a: 427, 455 and 388 of 989 TFLOP/s at 1.5B, 7B and 32B."""
    memory: float = 0.9
    """Of an engine's memory, filled by weights and caches: the rest is the program's and the
    runtime's."""
    network: float = 0.7
    step_s: float = 0.003
    """By decode step: the host's part and launching kernels."""
    all_reduce_s: float = 8e-6
    """Of a small message among the devices of a host; a layer of a cut engine has two."""
    update_s: float = 2.0
    """By trainer step: what does not shrink with more devices, such as packing and sending the
    batch."""


class Step(NamedTuple):
    """A decode step of some sequences takes `fixed_s + context_s * tokens in their caches`."""

    fixed_s: float
    context_s: float


@runtime_checkable
class DecodeCosts(Protocol):
    """What one engine takes for what it does."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values there is room for."""
        ...

    @property
    def copy_s(self) -> float:
        """Of putting weights that have arrived in the place of others."""
        ...

    def step(self, num_sequences: int) -> Step:
        """Of a decode step of so many sequences."""
        ...

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """Of filling the caches of a prompt of so many tokens."""
        ...

    def recompute_s(self, tokens: float, pairs: float) -> float:
        """Of filling the caches of all live sequences anew, of so many tokens together."""
        ...


@dataclass(frozen=True)
class EngineCosts:
    """One engine of `num_devices` devices, by the roofline."""

    model: ModelConfig
    device: Device
    num_devices: int = 1
    reached: Reached = field(default_factory=Reached)

    @property
    def weight_bytes(self) -> float:
        return float(BYTES_PER_WEIGHT * self.model.num_params)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights; negative where not even those
        fit."""
        room = self.reached.memory * self.num_devices * self.device.memory_bytes - self.weight_bytes
        return int(room / (BYTES_PER_WEIGHT * self.model.cached_per_token))

    def step(self, num_sequences: int) -> Step:
        """Of a decode step of so many sequences."""
        model, reached = self.model, self.reached
        bandwidth = self.num_devices * self.device.bytes_per_s * reached.decode_bandwidth
        flops = self.num_devices * self.device.flops_per_s * reached.decode_flops
        # Every token asks for experts of its own: so many are read, up to all there are.
        read = min(self.model.num_params, num_sequences * model.matmul_params)
        products_s = max(
            BYTES_PER_WEIGHT * read / bandwidth, 2 * model.matmul_params * num_sequences / flops
        )
        reduces_s = 0.0
        if self.num_devices > 1:
            message = (
                BYTES_PER_WEIGHT * num_sequences * model.hidden_size / self.device.link_bytes_per_s
            )
            reduces_s = 2 * model.num_hidden_layers * (reached.all_reduce_s + message)
        return Step(
            products_s + reduces_s + reached.step_s,
            BYTES_PER_WEIGHT * model.cached_per_token / bandwidth,
        )

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """Of filling the caches of so many tokens."""
        flops = 2 * self.model.matmul_params * tokens + 4 * self.model.attention_width * pairs
        return flops / (self.num_devices * self.device.flops_per_s * self.reached.prefill_flops)

    def recompute_s(self, tokens: float, pairs: float) -> float:
        """As prefill."""
        return self.prefill_s(tokens, pairs)

    @property
    def copy_s(self) -> float:
        """Of putting weights that have arrived in the place of others, in the device's own
        memory."""
        return (
            2
            * self.weight_bytes
            / (self.num_devices * self.device.bytes_per_s * self.reached.decode_bandwidth)
        )


@dataclass(frozen=True)
class Packed:
    """Micro-batches hold as many tokens each, so that devices wait for none but the stages of their
    pipeline.

    Stages hold equally many parameters. The first has the embedding, which multiplies nothing, so
    that all others have more than their share to do; and a pipeline of p stages fills and drains
    once for every update and pass: for p - 1 micro-batches a stage has nothing to do, however many
    devices there are beside it."""

    pipeline: int = 1
    """Over how many devices layers are dealt out."""
    tensor: int = 1
    """Over how many each layer is cut."""
    micro_batch_tokens: int = 32_768


@dataclass(frozen=True)
class Dealt:
    """Every device gets as many whole sequences of a mini-batch as the others, and all wait for the
    one whose are longest.

    The passes beside the update are dealt out for the batch as a whole, by length, so that they end
    together."""


@dataclass(frozen=True)
class TrainerCosts:
    """All devices that train."""

    model: ModelConfig
    device: Device
    num_devices: int
    reached: Reached = field(default_factory=Reached)
    passes: int = 1
    """Forward passes beside the update."""
    num_mini_batches: int = 4
    layout: Packed | Dealt = field(default_factory=Packed)

    @property
    def fits(self) -> bool:
        """Whether parameters, gradients and moments, cut over all devices, leave room for
        activations."""
        each = BYTES_PER_TRAINED_WEIGHT * self.model.num_params / self.num_devices
        return each <= (1 - LEFT_TO_ACTIVATIONS) * self.device.memory_bytes

    def train_s(self, lengths: Float[np.ndarray, "N"]) -> float:
        """Of a trainer step on sequences of these lengths."""
        tokens, pairs = float(lengths.sum()), float((lengths**2).sum() / 2)
        return self.train_tokens_s(tokens, pairs) + self._waiting_s(lengths)

    def train_tokens_s(self, tokens: float, pairs: float) -> float:
        """Of a trainer step on so many tokens that see so many keys, where no device waits for
        another."""
        work_s = (3 + self.passes) * self._forward_s(tokens, pairs, self.num_devices)
        # A ring passes gradients on, and parameters back, once for each update.
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
            / (self.device.network_bytes_per_s * self.reached.network)
        )
        return work_s + (reduce_s if hosts > 1 else 0.0) + self.reached.update_s

    def _forward_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        flops = 2 * self.model.matmul_params * tokens + 4 * self.model.attention_width * pairs
        if isinstance(self.layout, Packed) and self.layout.pipeline > 1:
            embedding = self.model.vocab_size * self.model.hidden_size
            flops *= 1 + embedding / (
                self.model.num_params - (0 if self.model.tie_word_embeddings else embedding)
            )
        return flops / (num_devices * self.device.flops_per_s * self.reached.train_flops)

    def _waiting_s(self, lengths: Float[np.ndarray, "N"]) -> float:
        match self.layout:
            case Packed(pipeline, tensor, size):
                pairs = size * float((lengths**2).sum() / 2 / lengths.sum())
                stage_s = self._forward_s(float(size), pairs, pipeline * tensor)
                return (pipeline - 1) * (3 * self.num_mini_batches + self.passes) * stage_s
            case Dealt():
                share = -(-len(lengths) // (self.num_mini_batches * self.num_devices))
                dealt = np.zeros(self.num_mini_batches * self.num_devices * share)
                dealt[: len(lengths)] = lengths
                hands = dealt.reshape(self.num_mini_batches, self.num_devices, share)
                took = [
                    [
                        self._forward_s(float(hand.sum()), float((hand**2).sum() / 2), 1)
                        for hand in all_
                    ]
                    for all_ in hands
                ]
                return 3 * sum(max(each) - fmean(each) for each in took)


@dataclass(frozen=True)
class Rewards:
    """Workers that grader one answer at a time."""

    num_workers: int = 256
    grading_s: float = 0.05
