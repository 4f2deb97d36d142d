"""Weight channel of one process: from the train mesh to the rollout meshes, latest version wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.protocols import WeightSource
from areal_jax.records import Weights
from areal_jax.weights.channel import LatestWins, OnEvent, WeightUpdate

Tree: TypeAlias = Any
"""Tree of arrays or of their shardings."""


class WeightChannel:
    """Weight channel that never blocks the trainer; every engine gets the newest complete version.

    `publish` only enqueues a program on the train mesh that copies the parameters into the engines'
    layout. A thread waits for the copy and transfers it to one engine after the other. A waiting
    version is dropped when a newer one arrives. The channel itself is the WeightSource of the first
    engine, `source(number)` that of any engine.
    """

    def __init__(
        self,
        layout: Callable[[Tree], Tree],
        targets: Sequence[Tree],
        source: Mesh,
        *,
        path: Literal["device", "host"] | None = None,
        complete: Sequence[Callable[[Tree], Tree]] | None = None,
        on_event: OnEvent | None = None,
    ):
        """
        Args:
            layout: Pure function from the trainer's parameters to the engines' parameters, compiled
                for the train mesh.
            targets: For each engine, the sharding of every leaf of `layout`'s result on its mesh;
                all engines use the same partitioning.
            source: Train mesh.
            path: "device" copies from device to device; "host" copies through host memory. None is
                "host" for CPU devices, where the engine reads the copy without another transfer.
            complete: For each engine, a function that merges the parameters with weights that are
                on its mesh already, such as the base model of an adapter.
            on_event: Callback after every version.
        """
        # Replaced, never changed: the thread may be iterating over them.
        self._targets = dict(enumerate(targets))
        self._complete = dict(enumerate(complete or ()))
        self._on_event = on_event
        self._path = path or ("host" if source.devices.flat[0].platform == "cpu" else "device")
        devices = {device for how in jax.tree.leaves(targets) for device in how.device_set}
        self._moves = devices != set(source.devices.flat)
        self._copy_from = partial(
            weight_copy, layout, targets[0], moves=self._moves, on_device=self._path == "device"
        )
        self._copy: Callable[[Tree], Tree] = self._copy_from(source)
        self._line: LatestWins[Tree, Weights] = LatestWins(
            "the weight channel", self._deliver, len(targets)
        )

    def publish(self, version: int, params: Tree) -> None:
        """Start a weight update (`update_weights` of every engine) without waiting.

        Afterwards `params` may be donated or overwritten.

        Raises:
            ValueError: The version is not newer than the last one.
            RuntimeError: The delivery thread died; the cause is its error.
        """
        self._line.publish(version, lambda: self._copy(params))

    def add_engine(
        self, number: int, target: Tree, complete: Callable[[Tree], Tree] | None = None
    ) -> None:
        """Deliver to one more engine, from the next version on; arguments as of the channel."""
        self._line.add_destination(number)
        if complete is not None:
            self._complete = {**self._complete, number: complete}
        self._targets = {**self._targets, number: target}

    def remove_engine(self, number: int) -> None:
        """Deliver nothing more to an engine, and drop its weights."""
        self._targets = {key: how for key, how in self._targets.items() if key != number}
        self._complete = {key: merge for key, merge in self._complete.items() if key != number}
        self._line.remove_destination(number)

    def compile_copy(self, source: Mesh, params: Tree) -> Callable[[Tree], Tree]:
        """Compile the copy from another train mesh, for `change_source`.

        Args:
            source: The mesh.
            params: Shapes and shardings of the trainer's parameters there.
        """
        return self._copy_from(source).lower(params).compile()

    def change_source(self, copy: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
        """Copy the next versions by `copy`, from another train mesh; return the copy so far."""
        before, self._copy = self._copy, copy
        return before

    def source(self, number: int) -> WeightSource:
        """Return the weight source of an engine, counted from 0."""
        return _Delivery(self, number)

    def newest(self, after: int, number: int = 0) -> Weights | None:
        """Return the newest complete version above `after`, or None; never waits."""
        return self._line.newest(after, number)

    def wait(self, at_least: int, timeout_s: float, number: int = 0) -> Weights:
        """Wait for a version of at least `at_least`.

        Raises:
            TimeoutError: None arrived within `timeout_s`.
        """
        return self._line.wait(at_least, timeout_s, number)

    def wait_all_engines(self, at_least: int, timeout_s: float) -> None:
        """Wait until every engine has a version of at least `at_least`.

        Raises:
            TimeoutError: They do not within `timeout_s`.
        """
        # Engines are served in order.
        self.wait(at_least, timeout_s, next(reversed(self._targets)))

    def paused(self) -> AbstractContextManager[None]:
        """Deliver nothing while inside; the last version published meanwhile follows.

        Raises:
            RuntimeError: The channel is paused already.
        """
        return self._line.paused()

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return and reset the sum and weight of each metric.

        Counts of versions (weight 1): published, delivered, dropped (overtaken). Per version:
        publish_s in the trainer's thread, copy_s until the copy on the train mesh is complete,
        transfer_s and transfer_bytes to all engines, delay_s from publishing to the last delivery.
        """
        return self._line.metrics("published", "delivered", "dropped")

    def close(self) -> None:
        """End after the version in flight; waiting callers get an error."""
        self._line.close()

    def _deliver(self, update: WeightUpdate[Tree]) -> None:
        start = time.perf_counter()
        params, num_bytes = jax.block_until_ready(update.content), 0
        copied = time.perf_counter()
        in_transit = jax.device_get(params) if self._moves and self._path == "host" else params
        for number, target in self._targets.items():
            if self._moves:
                params = jax.block_until_ready(jax.device_put(in_transit, target))
                num_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            complete = self._complete.get(number)
            weights = Weights(update.version, params if complete is None else complete(params))
            self._line.deliver(update.version, weights, number)
        end = time.perf_counter()
        self._line.count(
            delivered=1,
            copy_s=copied - start,
            transfer_s=end - copied,
            transfer_bytes=num_bytes,
            delay_s=end - update.sent_s,
        )
        if self._on_event is not None:
            self._on_event(
                "weights", update.sent_s, end, {"version": update.version, "bytes": num_bytes}
            )


def weight_copy(
    layout: Callable[[Tree], Tree], target: Tree, source: Mesh, *, moves: bool, on_device: bool
) -> jax.stages.Wrapped:
    """Return the program that copies parameters into the engines' layout, on the train mesh.

    The result of jit shares no memory with its input, so that the trainer may donate the input to
    its next step.

    Args:
        layout: As of `WeightChannel`.
        target: Sharding of every leaf on an engine's mesh.
        source: Train mesh.
        moves: The engine's devices are others than those of the train mesh.
        on_device: The copy then moves from device to device.
    """
    if not moves:
        return jax.jit(layout, out_shardings=target)
    if not on_device:
        return jax.jit(layout)
    # Sharded as the target, as far as the train mesh allows: a transfer that also reshards blocks
    # and is slow.
    return jax.jit(layout, out_shardings=jax.tree.map(lambda how: _reshard(how, source), target))


@dataclass(frozen=True)
class _Delivery:
    """Weight source of one engine."""

    weight_channel: WeightChannel
    number: int

    def newest(self, after: int) -> Weights | None:
        return self.weight_channel.newest(after, self.number)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return self.weight_channel.wait(at_least, timeout_s, self.number)


def _reshard(sharding: NamedSharding, mesh: Mesh) -> NamedSharding:
    """Return the same partitioning on another mesh; axes of different sizes are not partitioned."""

    def keep(names: Any) -> Any:
        axes = (names,) if isinstance(names, str) else names or ()
        return (
            names
            if all(mesh.shape.get(name) == sharding.mesh.shape[name] for name in axes)
            else None
        )

    return NamedSharding(mesh, PartitionSpec(*map(keep, sharding.spec)))
