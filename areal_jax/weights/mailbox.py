"""The mailbox: parameters travel from the train mesh to the meshes that decode, and the newest version wins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.records import Weights, WeightSource

Tree: TypeAlias = Any
"""A tree of arrays, or of their shardings."""

Event: TypeAlias = Callable[[str, float, float, Mapping[str, int | float]], None]
"""on_event(name, start_s, end_s, args), times of time.perf_counter; called in the copier's thread."""

_NAP_S = 1.0
_CLOSE_TIMEOUT_S = 60.0


class _Parcel(NamedTuple):
    """A version under way: its parameters in the engine's layout, still on the train mesh, perhaps still being made."""

    version: int
    params: Tree
    published_s: float


class Mailbox:
    """Takes versions from the trainer without making it wait, and hands the newest whole one to every engine.

    `publish` only enqueues a program of the train mesh that copies the parameters into the engines' layout; a thread waits for
    it and moves the copy to one engine after the other. A version that is not yet on its way when a newer one arrives is
    dropped. The mailbox itself is the WeightSource of the first engine, `of(number)` that of any."""

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
            layout: what the engines want of the trainer's parameters; pure, compiled for the train mesh.
            targets: the sharding of every leaf of `layout`'s result, on the mesh of each engine. These are cut alike.
            source: the train mesh.
            path: "device" copies from device to device; "host" goes through the memory of the host. None takes "host" where the
                devices are CPUs, whose memory it is: then the engine reads the very copy that was made for it.
            complete: for each engine, what puts to what arrives what lies on its mesh already, such as the weights an adapter
                belongs to.
        """
        self._targets, self._complete, self._on_event = targets, complete, on_event
        self._path = path or ("host" if source.devices.flat[0].platform == "cpu" else "device")
        devices = {device for how in jax.tree.leaves(targets) for device in how.device_set}
        self._moves = devices != set(source.devices.flat)
        staging = targets[0]
        if self._moves:
            # Cut as it will arrive, as far as the train mesh can: a copy that must also be cut otherwise blocks and is slow.
            staging = jax.tree.map(lambda how: _like(how, source), targets[0]) if self._path == "device" else None
        # What jit returns shares no memory with what it was given, so that the trainer may donate its own to its next step.
        self._copy = jax.jit(layout, out_shardings=staging)
        # One place for the version that waits for the copier (put by `publish`, taken by the copier) and for each engine one
        # with the newest whole version (put by the copier, read by the engine). The condition guards them and all counts.
        self._changed = threading.Condition()
        self._waiting: _Parcel | None = None
        self._newest: list[Weights | None] = [None] * len(targets)
        self._is_held = False
        self._last_version: int | None = None
        self._error: Exception | None = None
        self._closed = False
        self._sums: dict[str, list[float]] = {}
        # Owned by this object. Ends when `close` says so, or with the first error, which `publish`, `newest` and `wait` raise.
        self._copier = threading.Thread(target=self._run, name="mailbox-copier", daemon=True)
        self._copier.start()

    def publish(self, version: int, params: Tree) -> None:
        """Send a version to the engine without waiting; afterwards `params` may be donated or overwritten.

        Raises ValueError where the version is not newer than the last one, and the copier's error where it has died."""
        start = time.perf_counter()
        with self._changed:
            self._check()
            if self._last_version is not None and version <= self._last_version:
                raise ValueError(f"version {version} was published after version {self._last_version}; versions only grow")
            self._last_version = version
        parcel = _Parcel(version, self._copy(params), start)
        with self._changed:
            self._count("dropped", int(self._waiting is not None))
            self._waiting = parcel
            self._count("published", 1)
            self._count("publish_s", time.perf_counter() - start)
            self._changed.notify_all()

    def of(self, number: int) -> WeightSource:
        """Where the engine of that number, from 0, finds newer weights."""
        return _Delivery(self, number)

    def newest(self, after: int, number: int = 0) -> Weights | None:
        """The newest complete version above `after`, or None; never waits."""
        with self._changed:
            self._check()
            newest = self._newest[number]
            return newest if newest is not None and newest.version > after else None

    def wait(self, at_least: int, timeout_s: float, number: int = 0) -> Weights:
        """Wait for a version of at least `at_least`. TimeoutError names the version waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._has(at_least, number), timeout_s)
            self._check()
            newest = self._newest[number]
            if newest is None or newest.version < at_least:
                has = "none" if newest is None else f"version {newest.version}"
                raise TimeoutError(
                    f"waited {timeout_s} s for weights of version {at_least} or newer; the mailbox has {has}, "
                    f"the last one published is {self._last_version}"
                )
            return newest

    def wait_everywhere(self, at_least: int, timeout_s: float) -> None:
        """Wait until every engine finds a version of at least `at_least`. TimeoutError names the version waited for."""
        # The last engine is the last to get it.
        self.wait(at_least, timeout_s, len(self._targets) - 1)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Deliver nothing while inside: the newest version stays what it is. What was published last meanwhile follows.

        Raises RuntimeError where it is held already."""
        with self._changed:
            if self._is_held:
                raise RuntimeError("the mailbox is held already: one evaluation at a time")
            self._is_held = True
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Sum and weight of each measure since the last call.

        published, delivered, dropped: counts of versions (weight 1). By version: publish_s the trainer's thread, copy_s until
        the copy was made on the train mesh, transfer_s and transfer_bytes to all engines, delay_s from publishing to the last
        delivery."""
        with self._changed:
            sums, self._sums = self._sums, {}
        counts = {name: (sums.get(name, [0.0])[0], 1.0) for name in ("published", "delivered", "dropped")}
        return {name: (total, weight) for name, (total, weight) in sums.items()} | counts

    def close(self) -> None:
        """End the copier after the version under way. Whoever waits gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._copier.join(_CLOSE_TIMEOUT_S)
        if self._copier.is_alive():
            raise TimeoutError(f"the mailbox's copier did not end within {_CLOSE_TIMEOUT_S} s of close()")

    def _run(self) -> None:
        # The thread's outermost door: whatever ends it must reach the trainer and the engine.
        try:
            while (parcel := self._take()) is not None:
                self._deliver(parcel)
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self) -> _Parcel | None:
        """The version to move next; None at the end."""
        with self._changed:
            while not self._closed:
                if self._waiting is not None and not self._is_held:
                    parcel, self._waiting = self._waiting, None
                    return parcel
                self._changed.wait(_NAP_S)
        return None

    def _deliver(self, parcel: _Parcel) -> None:
        start = time.perf_counter()
        jax.block_until_ready(parcel.params)
        copied = time.perf_counter()
        params, num_bytes = parcel.params, 0
        on_its_way = jax.device_get(params) if self._moves and self._path == "host" else params
        for number, target in enumerate(self._targets):
            if self._moves:
                params = jax.block_until_ready(jax.device_put(on_its_way, target))
                num_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            weights = Weights(parcel.version, self._complete[number](params) if self._complete else params)
            with self._changed:
                self._newest[number] = weights
                self._changed.notify_all()
        end = time.perf_counter()
        with self._changed:
            self._count("delivered", 1)
            self._count("copy_s", copied - start)
            self._count("transfer_s", end - copied)
            self._count("transfer_bytes", num_bytes)
            self._count("delay_s", end - parcel.published_s)
        if self._on_event is not None:
            self._on_event("weights", parcel.published_s, end, {"version": parcel.version, "bytes": num_bytes})

    def _over(self) -> bool:
        return self._closed or self._error is not None

    def _has(self, version: int, number: int) -> bool:
        newest = self._newest[number]
        return newest is not None and newest.version >= version

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the mailbox ended with {type(self._error).__name__}: {self._error}") from self._error
        if self._closed:
            raise RuntimeError("the mailbox is closed")

    def _count(self, name: str, amount: int | float) -> None:
        sums = self._sums.setdefault(name, [0.0, 0.0])
        sums[0] += amount
        sums[1] += 1


@dataclass(frozen=True)
class _Delivery:
    """One engine's view of the mailbox."""

    mailbox: Mailbox
    number: int

    def newest(self, after: int) -> Weights | None:
        return self.mailbox.newest(after, self.number)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return self.mailbox.wait(at_least, timeout_s, self.number)


def _like(how: NamedSharding, mesh: Mesh) -> NamedSharding:
    """The same cut on another mesh; whole where that mesh does not cut an axis of that name into as many pieces."""

    def cut(names: Any) -> Any:
        together = (names,) if isinstance(names, str) else names or ()
        return names if all(mesh.shape.get(name) == how.mesh.shape[name] for name in together) else None

    return NamedSharding(mesh, PartitionSpec(*map(cut, how.spec)))
