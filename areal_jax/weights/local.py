"""The weight channel: parameters travel from the train mesh to the meshes that decode, and the
latest version wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.protocols import WeightSource
from areal_jax.records import Weights
from areal_jax.weights.channel import Event, LatestWins, WeightUpdate

Tree: TypeAlias = Any
"""A tree of arrays, or of their shardings."""


class WeightChannel:
    """Takes versions from the trainer without making it wait, and hands the newest whole one to
    every engine.

    `publish` only enqueues a program of the train mesh that copies the parameters into the engines'
    layout; a thread waits for it and moves the copy to one engine after the other. A version that
    is not yet on its way when a newer one arrives is dropped. The weight channel itself is the
    WeightSource of the first engine, `of(number)` that of any."""

    def __init__(
        self,
        layout: Callable[[Tree], Tree],
        targets: Sequence[Tree],
        source: Mesh,
        *,
        path: Literal["device", "host"] | None = None,
        complete: Sequence[Callable[[Tree], Tree]] | None = None,
        on_event: Event | None = None,
    ):
        """
        Args:
            layout: what the engines want of the trainer's parameters; pure, compiled for the train
            mesh.
            targets: the sharding of every leaf of `layout`'s result, on the mesh of each engine.
                These are cut alike.
            source: the train mesh.
            path: "device" copies from device to device; "host" goes through the memory of the host.
                None takes "host" where the
                devices are CPUs, whose memory it is: then the engine reads the very copy that was
                made for it.
            complete: for each engine, what puts to what arrives what lies on its mesh already, such
                as the weights an adapter
                belongs to.
        """
        self._targets, self._complete, self._on_event = targets, complete, on_event
        self._path = path or ("host" if source.devices.flat[0].platform == "cpu" else "device")
        devices = {device for how in jax.tree.leaves(targets) for device in how.device_set}
        self._moves = devices != set(source.devices.flat)
        staging = targets[0]
        if self._moves:
            # Cut as it will arrive, as far as the train mesh can: a copy that must also be cut
            # otherwise blocks and is slow.
            staging = (
                jax.tree.map(lambda how: _like(how, source), targets[0])
                if self._path == "device"
                else None
            )
        # What jit returns shares no memory with what it was given, so that the trainer may donate
        # its own to its next step.
        self._copy = jax.jit(layout, out_shardings=staging)
        self._line: LatestWins[Tree, Weights] = LatestWins(
            "the weight channel", self._deliver, len(targets)
        )

    def publish(self, version: int, params: Tree) -> None:
        """Send a version to the engine without waiting; afterwards `params` may be donated or
        overwritten.

        Raises ValueError where the version is not newer than the last one, and the copier's error
        where it has died."""
        self._line.publish(version, lambda: self._copy(params))

    def of(self, number: int) -> WeightSource:
        """Where the engine of that number, from 0, finds newer weights."""
        return _Delivery(self, number)

    def newest(self, after: int, number: int = 0) -> Weights | None:
        """The newest complete version above `after`, or None; never waits."""
        return self._line.newest(after, number)

    def wait(self, at_least: int, timeout_s: float, number: int = 0) -> Weights:
        """Wait for a version of at least `at_least`. TimeoutError names the version waited for."""
        return self._line.wait(at_least, timeout_s, number)

    def wait_everywhere(self, at_least: int, timeout_s: float) -> None:
        """Wait until every engine finds a version of at least `at_least`. TimeoutError names the
        version waited for."""
        # The last engine is the last to get it.
        self.wait(at_least, timeout_s, len(self._targets) - 1)

    def paused(self) -> AbstractContextManager[None]:
        """Deliver nothing while inside: the newest version stays what it is. What was published
        last meanwhile follows.

        Raises RuntimeError where it is held already."""
        return self._line.paused()

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Sum and weight of each measure since the last call.

        published, delivered, dropped: counts of versions (weight 1). By version: publish_s the
        trainer's thread, copy_s until the copy was made on the train mesh, transfer_s and
        transfer_bytes to all engines, delay_s from publishing to the last delivery."""
        return self._line.metrics("published", "delivered", "dropped")

    def close(self) -> None:
        """End the copier after the version under way. Whoever waits gets an error."""
        self._line.close()

    def _deliver(self, update: WeightUpdate[Tree]) -> None:
        start = time.perf_counter()
        params, num_bytes = jax.block_until_ready(update.content), 0
        copied = time.perf_counter()
        on_its_way = jax.device_get(params) if self._moves and self._path == "host" else params
        for number, target in enumerate(self._targets):
            if self._moves:
                params = jax.block_until_ready(jax.device_put(on_its_way, target))
                num_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            weights = Weights(
                update.version, self._complete[number](params) if self._complete else params
            )
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


@dataclass(frozen=True)
class _Delivery:
    """One engine's view of the weight channel."""

    weight_channel: WeightChannel
    number: int

    def newest(self, after: int) -> Weights | None:
        return self.weight_channel.newest(after, self.number)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return self.weight_channel.wait(at_least, timeout_s, self.number)


def _like(how: NamedSharding, mesh: Mesh) -> NamedSharding:
    """The same cut on another mesh; whole where that mesh does not cut an axis of that name into as
    many pieces."""

    def cut(names: Any) -> Any:
        together = (names,) if isinstance(names, str) else names or ()
        return (
            names
            if all(mesh.shape.get(name) == how.mesh.shape[name] for name in together)
            else None
        )

    return NamedSharding(mesh, PartitionSpec(*map(cut, how.spec)))
