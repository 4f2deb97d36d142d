"""Engine loops of a run in one process, and the channel that brings them weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, closing
from functools import partial

from areal_jax.data.grammars import Grammars
from areal_jax.engine.decode_state import EngineParams
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.fleet import Fleet
from areal_jax.metrics.trace import Trace
from areal_jax.models import lora
from areal_jax.models.decoder import Params
from areal_jax.run.periodic_evaluation import WEIGHTS_TIMEOUT_S
from areal_jax.run.plan import Plan
from areal_jax.weights.local import WeightChannel
from areal_jax.weights.rolling import RollingSource, rolling_sources


def start_engine_loops(
    stack: AsyncExitStack, plan: Plan, base: Params | None, trace: Trace
) -> tuple[WeightChannel, Fleet]:
    """Make the weight channel and the engine loops of a plan; the loops are not started.

    Args:
        base: frozen weights of an adapter.
    """
    attach = None
    if base is not None:
        attach = [partial(lora.attach, plan.policy, each) for each in _bases(plan, base)]
    weight_channel = WeightChannel(
        plan.engine.layout,
        [engine.param_shardings for engine in plan.engines],
        plan.train_mesh,
        complete=attach,
        on_event=partial(trace.span, "weight_channel"),
    )
    stack.callback(weight_channel.close)
    sources = rolling_sources(
        [weight_channel.source(number) for number in range(len(plan.engines))]
    )
    grammars = Grammars.of(plan.tokenizer, plan.policy.config.vocab_size)
    fleet = Fleet(
        [
            EngineLoop(
                engine,
                source,
                on_event=partial(_trace_engine, trace, source, number),
                grammars=grammars,
            )
            for number, (engine, source) in enumerate(zip(plan.engines, sources, strict=True))
        ]
    )
    stack.callback(fleet.close)
    return weight_channel, fleet


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


def _bases(plan: Plan, base: Params) -> list[EngineParams]:
    """The frozen weights on every engine's mesh; they are transferred once, as versions are."""
    targets = [engine.base_shardings for engine in plan.engines]
    with closing(WeightChannel(plan.engine.layout, targets, plan.train_mesh)) as weight_channel:
        weight_channel.publish(0, base)
        return [
            weight_channel.wait(0, WEIGHTS_TIMEOUT_S, number).params
            for number in range(len(targets))
        ]
