"""Engine loops of a run in one process, and the channel that brings them weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial

from jax.sharding import Mesh

from areal_jax.data.grammars import Grammars
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import EngineParams
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.fleet import Fleet
from areal_jax.metrics.trace import Trace
from areal_jax.models import lora
from areal_jax.models.decoder import Params
from areal_jax.run.periodic_evaluation import WEIGHTS_TIMEOUT_S
from areal_jax.run.plan import Plan
from areal_jax.weights.local import WeightChannel
from areal_jax.weights.rolling import RollingSource, RollingUpdate, rolling_source


class LocalEngines:
    """Engine loops that are numbered from the last device on: those next to the train mesh, with
    the highest numbers, may leave and join. The loops of the plan are not started.
    """

    def __init__(self, plan: Plan, base: Params, trace: Trace):
        """
        Args:
            plan: Plan of the run.
            base: Frozen weights of an adapter, on the train mesh; empty without an adapter.
            trace: Trace of the run.
        """
        self._plan, self._trace = plan, trace
        self._grammars = Grammars.of(plan.tokenizer, plan.policy.config.vocab_size)
        engines = plan.engines[::-1]
        self.weight_channel = WeightChannel(
            plan.engine.layout,
            [engine.param_shardings for engine in engines],
            plan.train_mesh,
            complete=self.completions(engines, plan.train_mesh, base),
            on_event=partial(trace.span, "weight_channel"),
        )
        self._rolling_update = RollingUpdate(lambda: self.fleet.num_engines)
        self.fleet = Fleet([self._make_loop(*numbered) for numbered in enumerate(engines)])

    def close(self) -> None:
        """End all loops, then the weight channel."""
        try:
            self.fleet.close()
        finally:
            self.weight_channel.close()

    def completions(
        self, engines: Sequence[DecodeEngine], train_mesh: Mesh, base: Params
    ) -> list[Callable[[EngineParams], EngineParams]] | None:
        """Return, for each engine, the function that merges an adapter with the frozen weights,
        which are transferred here; None without engines or adapter.
        """
        if not base or not engines:
            return None
        targets, layout = [engine.base_shardings for engine in engines], self._plan.engine.layout
        with closing(WeightChannel(layout, targets, train_mesh)) as weight_channel:
            weight_channel.publish(0, base)
            return [
                partial(
                    lora.attach,
                    self._plan.policy,
                    weight_channel.wait(0, WEIGHTS_TIMEOUT_S, number).params,
                )
                for number in range(len(targets))
            ]

    def add_engine(
        self,
        number: int,
        engine: DecodeEngine,
        complete: Callable[[EngineParams], EngineParams] | None,
    ) -> None:
        """Start one more engine loop, which gets the next version of the weights.

        Args:
            number: Number of the engine.
            engine: Its compiled programs.
            complete: As of `completions`.
        """
        self.weight_channel.add_engine(number, engine.param_shardings, complete)
        loop = self._make_loop(number, engine)
        loop.start()
        self.fleet.add_engine(number, loop)

    async def remove_engine(self, number: int) -> None:
        """Move an engine's requests to the others, and free its devices."""
        await self.fleet.remove_engine(number)
        self._rolling_update.remove_engine(number)
        self.weight_channel.remove_engine(number)

    def _make_loop(self, number: int, engine: DecodeEngine) -> EngineLoop:
        source = rolling_source(self._rolling_update, number, self.weight_channel.source(number))
        return EngineLoop(
            engine,
            source,
            on_event=partial(_trace_engine, self._trace, source, number),
            grammars=self._grammars,
        )


def _trace_engine(
    trace: Trace,
    source: RollingSource,
    number: int,
    name: str,
    start_s: float,
    end_s: float,
    args: Mapping[str, int | float],
) -> None:
    """Record an event of an engine loop; after a swap the next engine may swap."""
    lane = "rollout engine loop" + (f" {number + 1}" if number else "")
    trace.span(lane, name, start_s, end_s, {"engine": number, **args})
    if name == "swap":
        source.complete_swap()
