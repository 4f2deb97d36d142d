"""Compiled programs of the state of trained models: initialization, Adam's step, prompts.

Models with adapters of one shape share them. Axes: N tokens of a prompt, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped

from areal_jax.models import lora
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import TRAIN_RULES, put, put_batch, put_copy
from areal_jax.tinker.batches import make_forward, shortest_row
from areal_jax.tinker.config import TinkerConfig
from areal_jax.trainer.forward import Forward, ModelInputs
from areal_jax.trainer.optimizer import make_traced_optimizer
from areal_jax.trainer.state import state_shardings, trained


class AdamParams(NamedTuple):
    """Settings of one optimizer step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    """inf: gradients are not clipped."""


class ModelState(NamedTuple):
    """What training changes."""

    params: Params
    opt_state: optax.OptState


class PromptLogprobs(NamedTuple):
    """What a policy predicts of a prompt. The first token has the log-prob 0."""

    logp: Float32[np.ndarray, "N"]
    ids: Shaped[np.ndarray, "N K"]
    """-1 at the first token."""
    top_logp: Float32[np.ndarray, "N K"]


class TrainingPrograms:
    """The programs of one policy: the frozen one with an adapter, or one that is trained whole."""

    def __init__(
        self, policy: Policy, mesh: Mesh, compute_dtype: DTypeLike, config: TinkerConfig
    ) -> None:
        self.policy, self._mesh = policy, mesh
        self._dtype, self._config = compute_dtype, config
        self._trained = trained(policy)
        plain = make_traced_optimizer(jnp.zeros(5), self._trained.axes)
        self.shardings = state_shardings(policy, mesh, plain)
        self._init_opt_state = jax.jit(plain.init, out_shardings=self.shardings.opt_state)
        everywhere = NamedSharding(mesh, PartitionSpec())
        out = (*self.shardings, everywhere, everywhere)
        self._step = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=out)
        self._forwards: dict[int, Forward] = {}

    def init(self, seed: int) -> ModelState:
        """Return a fresh adapter, whose update is 0."""
        init = jax.jit(partial(lora.init, self.policy), out_shardings=self.shardings.params)
        return self.with_fresh_optimizer(init(jax.random.key(seed)))

    def copied(self, params: Params) -> ModelState:
        """Return a copy of parameters, which the first step consumes, with an empty optimizer."""
        return self.with_fresh_optimizer(put_copy(params, self.shardings.params))

    def with_fresh_optimizer(self, params: Params) -> ModelState:
        """Return parameters with an empty optimizer state."""
        return ModelState(params, self._init_opt_state(params))

    def on_devices(self, state: ModelState) -> ModelState:
        """Move a state from the host to the train mesh."""
        return ModelState(*put(tuple(state), tuple(self.shardings)))

    def add(self, gradients: Params | None, more: Params) -> Params:
        """Add gradients, in the order of requests."""
        return more if gradients is None else self._add(gradients, more)

    def step(
        self, state: ModelState, gradients: Params, adam: AdamParams
    ) -> tuple[ModelState, float]:
        """Make one step of AdamW; the state is consumed.

        Returns:
            The new state, and the norm of the gradients.

        Raises:
            FloatingPointError: the gradients are not finite; the state in `error.args[1]` is as
                before.
        """
        rate, *others = adam
        numbers = np.array(others, np.float32)
        params, opt_state, norm, is_finite = self._step(
            *state, gradients, np.float32(rate), numbers
        )
        new = ModelState(params, opt_state)
        if not is_finite:
            raise FloatingPointError(f"the norm of the gradients is {float(norm)}", new)
        return new, float(norm)

    def zero_gradients(self, params: Params) -> Params:
        """Return gradients of no batch."""
        return put(
            jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), params),
            self.shardings.params,
        )

    def prompt_logprobs(
        self, params: Params, base: Params, tokens: Shaped[np.ndarray, "N"], num_top: int
    ) -> PromptLogprobs:
        """Compute the log-prob of every token of a prompt, and the most likely tokens."""
        count, row_tokens = len(tokens), shortest_row(len(tokens))
        if row_tokens not in self._forwards:
            self._forwards[row_tokens] = make_forward(
                self.policy, self._mesh, self._dtype, self._config, row_tokens
            )
        forward = self._forwards[row_tokens]
        columns = np.zeros((3, forward.rows, row_tokens), np.int32)
        columns[:, 0, :count] = tokens, np.ones(count), np.arange(count)
        inputs = ModelInputs(*put_batch(self._mesh, list(columns), TRAIN_RULES))
        found = forward.top_predictions(params, base, inputs, max(1, num_top))
        return PromptLogprobs(*(np.asarray(each)[0, :count] for each in found))

    @cached_property
    def _add(self) -> Callable[[Params, Params], Params]:
        return jax.jit(
            lambda a, b: jax.tree.map(jnp.add, a, b),
            donate_argnums=0,
            out_shardings=self.shardings.params,
        )

    def _apply(
        self,
        params: Params,
        opt_state: optax.OptState,
        gradients: Params,
        rate: Float[Array, ""],
        numbers: Float[Array, "5"],
    ) -> Any:
        """Update once, or return the state unchanged if the gradients are not finite."""
        optimizer = make_traced_optimizer(numbers, self._trained.axes)
        norm = optax.tree.norm(gradients)
        direction, new_opt_state = optimizer.update(gradients, opt_state, params)
        new_params = jax.tree.map(lambda leaf, toward: leaf - rate * toward, params, direction)
        is_finite = jnp.isfinite(norm)
        params, opt_state = jax.tree.map(
            partial(jnp.where, is_finite), (new_params, new_opt_state), (params, opt_state)
        )
        return params, opt_state, norm, is_finite
