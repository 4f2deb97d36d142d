"""Policies that training reads and does not train. Axes: B rows, T tokens of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Float

from areal_jax.models.decoder import Params
from areal_jax.parallel.sharding import Moved, abstract, is_abstract, move, shardings_of
from areal_jax.trainer.forward import DeviceBatch, Forward, ModelInputs, TopPredictions
from areal_jax.trainer.state import in_host_memory


class ReadOnlyPolicy:
    """A policy on the train mesh whose predictions training reads."""

    def __init__(self, forward: Forward, weights: Callable[[], tuple[Params, Params]]):
        """
        Args:
            forward: The policy's forward pass.
            weights: Returns its parameters and, if they are an adapter, those that it adapts.
        """
        self.forward, self._weights = forward, weights

    def logprobs(self, batches: Sequence[DeviceBatch | ModelInputs]) -> list[Float[Array, "B T"]]:
        """Return the log-probs of all tokens of micro-batches, asynchronously."""
        weights = self._weights()
        return [self.forward.logprobs(*weights, batch) for batch in batches]

    def top_predictions(
        self, batches: Sequence[DeviceBatch | ModelInputs], num_top: int
    ) -> list[TopPredictions]:
        """Return log-probs and most likely tokens of micro-batches, asynchronously."""
        weights = self._weights()
        return [self.forward.top_predictions(*weights, batch, num_top) for batch in batches]

    @property
    def num_compilations(self) -> int:
        """Number of programs compiled so far."""
        return self.forward.num_compilations

    def compile(self, num_top: int = 0) -> jax.stages.Compiled:
        """Return the program behind `logprobs`, or behind `top_predictions` of `num_top` tokens;
        compile it first if this is its first use.
        """
        return self.forward.compiled(*self._abstract(), num_top)

    def _abstract(self) -> tuple[Params, Params]:
        return self._weights()


class FrozenPolicy(ReadOnlyPolicy):
    """A policy on the train mesh that is never trained, such as a reference or a teacher."""

    def __init__(
        self, forward: Forward, params: Params, base: Params | None = None, *, offload: bool = False
    ):
        """
        Args:
            forward: The policy's forward pass.
            params: Parameters on the train mesh, sharded by TRAIN_RULES, in the compute dtype. They
                are not copied, so that shared arrays exist once. Shapes alone if the program is
                only to be compiled.
            base: If `params` is an adapter, the parameters that it adapts.
            offload: Keep `params` in host memory, and transfer them to the devices for each call.
        """
        self._base = {} if base is None else base
        self._placed = shardings_of(params)
        self._stored = in_host_memory(self._placed) if offload else self._placed
        self._params: Params = params
        if offload and not is_abstract(params):
            self._params = jax.device_put(params, self._stored)
        # Does nothing if they are on the devices. One transfer for all micro-batches.
        super().__init__(forward, lambda: (jax.device_put(self._params, self._placed), self._base))

    def take_over(self, other: FrozenPolicy, moved: Moved) -> None:
        """Move the weights of the same policy on another mesh here; only shapes remain there.

        Args:
            other: The policy there.
            moved: Arrays that have been moved, which models share.
        """
        placed = shardings_of(self._base)
        self._params = move(other._params, self._stored, moved)
        self._base = move(other._base, placed, moved)
        other._params, other._base = other._abstract()

    def _abstract(self) -> tuple[Params, Params]:
        placed = shardings_of(self._base)
        return abstract(self._params, self._placed), abstract(self._base, placed)
