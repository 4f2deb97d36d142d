"""Trained models, and the operations of their clients on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from areal_jax.engine.decode_shapes import next_power_of_two
from areal_jax.errors import InvalidRequest
from areal_jax.models import lora
from areal_jax.models.config import LoRA, Target
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import fetch
from areal_jax.tinker import checkpoints
from areal_jax.tinker.batches import BatchPrograms, Outputs, Work, row_tokens_of
from areal_jax.tinker.config import TinkerConfig
from areal_jax.tinker.messages import (
    Datum,
    ForwardBackward,
    forward_backward_output,
    read_datums,
)
from areal_jax.tinker.objective import SummedLoss, read_loss
from areal_jax.tinker.programs import AdamParams, ModelState, TrainingPrograms

_MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
"""Targets of `train_mlp`; all others are of attention."""

LEAST_RANK = 8
"""Rank of the smallest bucket; others are powers of two."""


@dataclass(eq=False, slots=True)
class TrainedModel:
    """Parameters, optimizer state and gradients of one client's model. Not thread-safe."""

    programs: TrainingPrograms
    state: ModelState
    gradients: Params | None = None
    """Sum since the last optimizer step; None: there is none."""
    step: int = 0
    """Number of optimizer steps."""
    is_resident: bool = True
    """Whether its arrays are on the devices."""

    def check(self, request: ForwardBackward, config: TinkerConfig) -> Prepared:
        """Read a request for outputs and gradients.

        Raises:
            InvalidRequest: the batch is invalid.
        """
        loss = read_loss(request.loss, request.loss_config)
        num_datums, most = len(request.message.data), config.limits.max_datums
        if not 1 <= num_datums <= most:
            raise InvalidRequest(
                f"expected 1 to limits.max_datums={most} datums, found {num_datums}"
            )
        datums = read_datums(request, loss.columns)
        vocab_size = self.programs.policy.config.vocab_size
        for number, datum in enumerate(datums):
            if len(datum.tokens) > config.max_tokens:
                raise InvalidRequest(
                    f"datum {number}: expected at most max_tokens={config.max_tokens} tokens, "
                    f"found {len(datum.tokens)}"
                )
            for tokens in (datum.tokens, datum.targets):
                if tokens.min() < 0 or tokens.max() >= vocab_size:
                    raise InvalidRequest(
                        f"datum {number}: expected token ids from 0 to {vocab_size - 1}, found "
                        f"{tokens.min()} to {tokens.max()}"
                    )
            for name, values in datum.columns.items():
                if not np.isfinite(values).all():
                    raise InvalidRequest(f"datum {number}: expected {name} to be finite numbers")
        return Prepared(self, loss, datums, learns=not request.forward_only)

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Make one optimizer step with the gradients since the last one.

        Raises:
            FloatingPointError: they are not finite; they are dropped, and nothing else changes.
        """
        gradients, self.gradients = self.gradients, None
        if gradients is None:
            gradients = self.programs.zero_gradients(self.state.params)
        try:
            self.state, norm = self.programs.step(self.state, gradients, adam)
        except FloatingPointError as error:
            self.state = error.args[1]
            raise FloatingPointError(
                f"{error.args[0]}; the optimizer step was not made and the gradients were dropped"
            ) from None
        self.step += 1
        return {"grad_norm": norm, "step": float(self.step)}

    def to_host(self) -> None:
        """Move all arrays to the host."""
        if self.is_resident:
            self.state = ModelState(*fetch(tuple(self.state)))
            self.gradients = None if self.gradients is None else fetch(self.gradients)
            self.is_resident = False

    def to_devices(self) -> None:
        """Move all arrays to the devices."""
        if not self.is_resident:
            self.state = self.programs.on_devices(self.state)
            if self.gradients is not None:
                zeros = self.programs.zero_gradients(self.gradients)
                self.gradients = self.programs.add(zeros, self.gradients)
            self.is_resident = True


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A request for outputs and gradients that can be computed."""

    model: TrainedModel
    loss: SummedLoss
    datums: Sequence[Datum]
    learns: bool
    """Whether its gradients are added to the model's."""


@dataclass(eq=False)
class TrainingBackend:
    """The frozen policy on the train mesh, and the programs of its adapters.

    Attributes:
        policy: The policy without an adapter.
        params: Its parameters: frozen, or the initial ones where all are trained.
        mesh: The train mesh.
        dtype: Compute dtype.
        config: Settings of the server.
        base_name: Name of the policy, which adapters carry.
    """

    policy: Policy
    params: Params
    mesh: Mesh
    dtype: DTypeLike
    config: TinkerConfig
    base_name: str

    def __post_init__(self) -> None:
        self._programs: dict[LoRA | None, TrainingPrograms] = {}
        self._batches: dict[LoRA | None, BatchPrograms] = {}

    @property
    def base(self) -> Params:
        """The frozen parameters; empty where all are trained."""
        return self.params if self.config.lora else {}

    def adapter(self, rank: int, *, trains_attention: bool, trains_mlp: bool) -> LoRA:
        """Return the settings of an adapter.

        Raises:
            InvalidRequest: the rank is too large, or nothing is trained.
        """
        most = self.config.limits.max_rank
        if not 1 <= rank <= most:
            raise InvalidRequest(f"lora_config.rank={rank}: expected 1 to limits.max_rank={most}")
        targets: tuple[Target, ...] = tuple(
            target
            for target in lora.find_batched_targets(self.policy)
            if (trains_mlp if target in _MLP else trains_attention)
        )
        if not targets:
            raise InvalidRequest(
                "lora_config: expected train_attn or train_mlp; the output matrix alone cannot be "
                "adapted"
            )
        return LoRA(rank=rank, alpha=self.config.alpha, targets=targets)

    def bucket(self, shape: LoRA) -> LoRA:
        """Return the shape to which adapters of a shape are padded, so that those of several models
        are in one batch. Its own scale is not used.
        """
        rank = next_power_of_two(shape.rank, LEAST_RANK)
        return LoRA(rank=rank, targets=lora.find_batched_targets(self.policy))

    def policy_of(self, shape: LoRA | None) -> Policy:
        """Return the policy with an adapter."""
        return Policy(self.policy.config, shape)

    def programs_of(self, shape: LoRA | None) -> TrainingPrograms:
        """Return the programs of adapters with these settings."""
        if shape not in self._programs:
            self._programs[shape] = TrainingPrograms(
                self.policy_of(shape), self.mesh, self.dtype, self.config
            )
        return self._programs[shape]

    def forward_backward(self, requests: Sequence[Prepared]) -> list[bytes]:
        """Compute the outputs of requests of different models, and add their gradients.

        Requests with the same loss function, bucket of ranks and length of rows are computed
        together; each model gets the bits that it gets alone.

        Returns:
            Outputs by request, encoded.
        """
        groups: dict[Any, list[int]] = {}
        for number, request in enumerate(requests):
            shape = request.model.programs.policy.lora
            bucket = None if shape is None else self.bucket(shape)
            key = bucket, request.loss, request.learns, row_tokens_of(request.datums)
            groups.setdefault(key, []).append(number)
        found: dict[int, Outputs] = {}
        for (bucket, loss, learns, _), numbers in groups.items():
            if bucket not in self._batches:
                self._batches[bucket] = BatchPrograms(
                    self.policy_of(bucket), self.base, self.mesh, self.dtype, self.config
                )
            works = [
                Work(each.model.state.params, each.model.programs.policy.lora, each.datums)
                for each in (requests[number] for number in numbers)
            ]
            outputs = self._batches[bucket].run(loss, works, learns=learns)
            found |= dict(zip(numbers, outputs, strict=True))
        for number, output in found.items():
            model = requests[number].model
            if output.gradients is not None:
                model.gradients = model.programs.add(model.gradients, output.gradients)
        return [
            forward_backward_output(found[i].logprobs, {"loss:sum": found[i].loss})
            for i in range(len(requests))
        ]

    def create(self, shape: LoRA | None, seed: int) -> TrainedModel:
        """Make a fresh model: an adapter whose update is 0, or the initial parameters."""
        programs = self.programs_of(shape)
        state = programs.copied(self.params) if shape is None else programs.init(seed)
        return TrainedModel(programs, state)

    def load(self, shape: LoRA | None, folder: Path, *, with_optimizer: bool) -> TrainedModel:
        """Read a model from a folder.

        Raises:
            ValueError: the folder does not fit.
        """
        programs = self.programs_of(shape)
        state = checkpoints.load(folder, programs, with_optimizer=with_optimizer)
        return TrainedModel(programs, state)

    def save(self, model: TrainedModel, folder: Path, *, with_optimizer: bool) -> int:
        """Write a folder; return its size in bytes."""
        return checkpoints.save(
            folder,
            model.programs.policy,
            model.state,
            self.base_name,
            with_optimizer=with_optimizer,
        )


def adapter_to_json(shape: LoRA | None) -> dict[str, Any] | None:
    """Return the settings of an adapter as JSON values."""
    if shape is None:
        return None
    return {"rank": shape.rank, "alpha": shape.alpha, "targets": list(shape.targets)}


def adapter_from_json(given: dict[str, Any] | None) -> LoRA | None:
    """Return the settings of an adapter; the inverse of `adapter_to_json`."""
    if given is None:
        return None
    return LoRA(rank=given["rank"], alpha=given["alpha"], targets=tuple(given["targets"]))


def read_adam(given: Mapping[str, Any]) -> AdamParams:
    """Read the settings of an optimizer step.

    Raises:
        InvalidRequest: a number is out of bounds.
    """
    defaults = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    if unknown := sorted(set(given) - set(defaults)):
        raise InvalidRequest(
            f"adam_params: expected {', '.join(defaults)}, found {unknown[0][:100]}"
        )
    values = {name: float(given.get(name, default)) for name, default in defaults.items()}
    for name, value in values.items():
        most = 1.0 if name.startswith("beta") else math.inf
        # Without epsilon, what has no gradient would become nan.
        least = 1e-30 if name == "eps" else 0.0
        if not least <= value < most:
            raise InvalidRequest(
                f"adam_params.{name}={value:g}: expected at least {least:g}, and below {most:g}"
            )
    *others, clip = values.values()
    return AdamParams(*others, max_grad_norm=clip or math.inf)
