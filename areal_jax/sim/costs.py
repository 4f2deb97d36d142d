"""What each stage costs in seconds: a roofline with stated shares of the makers' peaks.

With P parameters that a token is multiplied by, A the attention width, W bytes of weights, k bytes of KV cache a token, and an
engine or trainer of D devices:

    decode step   max(W / (D · bandwidth), 2 P N / (D · flops)) + k · context / (D · bandwidth) + host and all-reduces
    prefill       (2 P · tokens + 4 A · pairs) / (D · flops)
    train         ((6 + 2 · passes) P · tokens + (12 + 4 · passes) A · pairs) / (D · flops) + gradients over the network

where N sequences of `context` tokens in all take a step, a query and a key that it sees are a pair, and `passes` are forward
passes beside the update: one for the proximal policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple, Protocol, runtime_checkable

from areal_jax.models.architecture import ModelConfig
from areal_jax.sim.hardware import Device

BYTES_PER_WEIGHT = 2
BYTES_PER_TRAINED_WEIGHT = 16
"""Parameters, gradients and two moments, in float32."""
LEFT_TO_ACTIVATIONS = 0.35
"""Share of a train device's memory that activations of a micro-batch need."""


@dataclass(frozen=True)
class Reached:
    """Which share of the peaks is reached, and what the host takes. Every default says where it comes from."""

    decode_bandwidth: float = 0.75
    """Of memory bandwidth, by decode steps: middle of what TensorRT-LLM and SGLang publish for 8B (0.5 to 0.85)."""
    decode_flops: float = 0.6
    """Of peak, by the products of a decode step with many sequences."""
    prefill_flops: float = 0.45
    train_flops: float = 0.43
    """AReaL, figure 6a: 427, 455 and 388 of 989 TFLOP/s at 1.5B, 7B and 32B."""
    memory: float = 0.9
    """Of an engine's memory, filled by weights and caches: the rest is the program's and the runtime's."""
    network: float = 0.7
    step_s: float = 0.003
    """By decode step: the host's part and launching kernels."""
    all_reduce_s: float = 8e-6
    """Of a small message among the devices of a host; a layer of a cut engine has two."""
    update_s: float = 2.0
    """By trainer step: what does not shrink with more devices, such as packing and sending the batch."""


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
        """Tokens whose keys and values fit beside the weights; negative where not even those fit."""
        room = self.reached.memory * self.num_devices * self.device.memory_bytes - self.weight_bytes
        return int(room / (BYTES_PER_WEIGHT * self.model.cached_per_token))

    def step(self, num_sequences: int) -> Step:
        """Of a decode step of so many sequences."""
        model, reached = self.model, self.reached
        bandwidth = self.num_devices * self.device.bytes_per_s * reached.decode_bandwidth
        flops = self.num_devices * self.device.flops_per_s * reached.decode_flops
        # Every token asks for experts of its own: so many are read, up to all there are.
        read = min(self.model.num_params, num_sequences * model.multiplied_params)
        products_s = max(BYTES_PER_WEIGHT * read / bandwidth, 2 * model.multiplied_params * num_sequences / flops)
        reduces_s = 0.0
        if self.num_devices > 1:
            message = BYTES_PER_WEIGHT * num_sequences * model.hidden_size / self.device.link_bytes_per_s
            reduces_s = 2 * model.num_hidden_layers * (reached.all_reduce_s + message)
        return Step(products_s + reduces_s + reached.step_s, BYTES_PER_WEIGHT * model.cached_per_token / bandwidth)

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """Of filling the caches of so many tokens."""
        flops = 2 * self.model.multiplied_params * tokens + 4 * self.model.attention_width * pairs
        return flops / (self.num_devices * self.device.flops_per_s * self.reached.prefill_flops)

    def recompute_s(self, tokens: float, pairs: float) -> float:
        """As prefill."""
        return self.prefill_s(tokens, pairs)

    @property
    def copy_s(self) -> float:
        """Of putting weights that have arrived in the place of others, in the device's own memory."""
        return 2 * self.weight_bytes / (self.num_devices * self.device.bytes_per_s * self.reached.decode_bandwidth)


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

    @property
    def fits(self) -> bool:
        """Whether parameters, gradients and moments, cut over all devices, leave room for activations."""
        each = BYTES_PER_TRAINED_WEIGHT * self.model.num_params / self.num_devices
        return each <= (1 - LEFT_TO_ACTIVATIONS) * self.device.memory_bytes

    def train_s(self, lengths: Sequence[int]) -> float:
        """Of a trainer step on sequences of these lengths."""
        tokens, pairs = float(sum(lengths)), sum(float(length) ** 2 for length in lengths) / 2
        return self.train_tokens_s(tokens, pairs)

    def train_tokens_s(self, tokens: float, pairs: float) -> float:
        """Of a trainer step on so many tokens that see so many keys."""
        flops = (6 + 2 * self.passes) * self.model.multiplied_params * tokens
        flops += (12 + 4 * self.passes) * self.model.attention_width * pairs
        work_s = flops / (self.num_devices * self.device.flops_per_s * self.reached.train_flops)
        # A ring passes gradients on, and parameters back, once for each update.
        hosts = ceil(self.num_devices / self.device.per_host)
        reduce_bytes = 2 * BYTES_PER_WEIGHT * self.model.num_params / min(self.num_devices, self.device.per_host)
        reduce_s = self.num_mini_batches * reduce_bytes / (self.device.network_bytes_per_s * self.reached.network)
        return work_s + (reduce_s if hosts > 1 else 0.0) + self.reached.update_s


@dataclass(frozen=True)
class Rewards:
    """Workers that judge one answer at a time."""

    num_workers: int = 256
    judge_s: float = 0.05
