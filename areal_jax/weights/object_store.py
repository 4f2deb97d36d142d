"""Weights between hosts, through Ray's object store: every trainer host gives its own shards, every
engine takes what it needs.

A trainer host puts the shards that lie on its devices into the store and offers a `Contribution`,
which says what is where. Whoever connects the two carries the contributions of all hosts to the
engines. An engine's reader pulls what its devices hold, from all hosts at once, and shows a version
when all of it is there and right. Nothing is gathered, and nobody waits.

Contributions are plain dicts, so that what travels depends on no class of ours."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import ray
import xxhash
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Shaped, UInt8
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from areal_jax.records import NO_VERSION, Weights
from areal_jax.weights.channel import Event, LatestWins, WeightUpdate

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 2**20
"""Shards travel together up to this size; a larger one travels alone."""

PULL_TIMEOUT_S = 120.0
"""A chunk that has not come by then is not waited for: the version is offered again, or a newer
one."""

_NUM_THREADS = 4
_FEW_FLOPS = 2048

Tree: TypeAlias = Any
Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop along every dimension of a leaf."""


class Piece(TypedDict):
    """A part of a leaf."""

    leaf: str
    """Its path, such as `layers.0.attn.q`."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole leaf."""
    box: Box


class Chunk(TypedDict):
    """One object of the store: a list of arrays of bytes, one per piece."""

    ref: Any
    """ray.ObjectRef."""
    digest: int
    """xxh3 of all its bytes, piece after piece."""
    pieces: list[Piece]


class Contribution(TypedDict):
    """What one trainer host has of a version."""

    version: int
    host: int
    num_hosts: int
    """How many contributions make the version whole."""
    chunks: list[Chunk]


class ShardPublisher:
    """Gives this host's part of every version to the store, without making the trainer wait; the
    latest version wins.

    All processes of the train mesh call `publish` with the same versions."""

    def __init__(self, layout: Callable[[Tree], Tree], *, on_event: Event | None = None):
        """
        Args:
            layout: what the engines want of the trainer's parameters; pure, compiled for their
            mesh, whose cut it keeps.
        """
        self.host, self.num_hosts, self._on_event = (
            jax.process_index(),
            jax.process_count(),
            on_event,
        )
        self._copy = _Copy(layout)
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hashing")
        self._line: LatestWins[Tree, Contribution] = LatestWins(
            "the publisher of shards", self._put
        )

    def publish(self, version: int, params: Tree, *, again: bool = False) -> None:
        """Offer a version without waiting; afterwards `params` may be donated or overwritten.

        A version that is under way or offered already is left alone.

        Args: again: put it into the store anew, for what was put there before is lost or did not
            fit.
        Raises: the error of the thread where it has died."""
        if again:
            self._line.withdraw(version)
        self._line.send(version, lambda: self._copy.start(params))

    @property
    def is_busy(self) -> bool:
        """Whether a version is on its way into the store."""
        return self._line.under_way is not None

    @property
    def last_failure(self) -> str:
        """Why a version could not be put into the store, the last time; empty where all could."""
        return self._line.last_failure

    def next(self, after: int, timeout_s: float) -> Contribution | None:
        """Wait for a contribution to a version above `after`, the newest there is; None where none
        comes in time.

        The store keeps what the newest contribution names, and whatever else somebody still holds a
        reference to."""
        try:
            return self._line.wait(after + 1, timeout_s)
        except TimeoutError:
            return None

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Sum and weight of each measure since the last call.

        published, offered, dropped, failed: counts of versions (weight 1); failed did not fit into
        the store. By version: publish_s the trainer's thread, copy_s until the copy was made on the
        train mesh, put_s and put_bytes into the store, delay_s from publishing to offering."""
        return self._line.metrics("published", "offered", "dropped", "failed")

    def close(self) -> None:
        """End after the version under way. Whoever waits gets an error."""
        self._line.close()
        self._hashing.shutdown()

    def _put(self, update: WeightUpdate[Tree]) -> None:
        start = time.perf_counter()
        params, version = jax.block_until_ready(update.content), update.version
        copied = time.perf_counter()
        shards = list(_own_shards(params))
        num_bytes = sum(data.nbytes for _, data in shards)
        for _, data in shards:
            data.copy_to_host_async()
        try:
            chunks = self._put_chunks(shards)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            logger.warning(
                "version %d is not published by host %d, the object store is full: %s",
                version,
                self.host,
                error,
            )
            self._line.fail(version, f"the object store of host {self.host} is full: {error}")
            self._line.count(failed=1)
            return
        del shards
        self._copy.take_back(params)
        contribution = Contribution(
            version=version, host=self.host, num_hosts=self.num_hosts, chunks=chunks
        )
        self._line.deliver(version, contribution)
        end = time.perf_counter()
        self._line.count(
            offered=1,
            copy_s=copied - start,
            put_s=end - copied,
            put_bytes=num_bytes,
            delay_s=end - update.sent_s,
        )
        if self._on_event is not None:
            self._on_event("put", update.sent_s, end, {"version": version, "bytes": num_bytes})

    def _put_chunks(self, shards: Sequence[tuple[Piece, jax.Array]]) -> list[Chunk]:
        """Lists of arrays go into the store without being joined first; they are hashed
        meanwhile."""
        put: list[tuple[Any, Future[int], list[Piece]]] = []
        for together in _chunks(shards):
            arrays = [_as_bytes(np.asarray(data)) for _, data in together]
            digest = self._hashing.submit(_digest, arrays)
            put.append((ray.put(arrays), digest, [piece for piece, _ in together]))
        return [
            Chunk(ref=ref, digest=digest.result(), pieces=pieces) for ref, digest, pieces in put
        ]


class ShardReader:
    """Puts versions together from what trainer hosts gave to the store, and shows the newest whole
    one to an engine.

    A version that cannot be had, or is not right, is skipped with a warning, and taken when it is
    offered again."""

    def __init__(
        self,
        targets: Tree,
        abstract: Tree,
        *,
        complete: Callable[[Tree], Tree] | None = None,
        on_event: Event | None = None,
        on_skip: Callable[[int, str], None] = lambda _version, _why: None,
    ):
        """
        Args:
            targets: the sharding of every leaf, on the engine's mesh.
            abstract: a like tree of ShapeDtypeStructs.
            complete: what puts to what arrives what lies on the mesh already, such as the weights
                an adapter belongs to.
            on_skip: called with a version that could not be had, and why; in the carrying thread.
        """
        leaves = jax.tree_util.tree_leaves_with_path(abstract)
        self._structure = jax.tree.structure(abstract)
        placed = jax.tree.leaves(targets, is_leaf=lambda node: isinstance(node, NamedSharding))
        self._wanted = {
            _name(path): _Wanted(
                leaf.shape, np.dtype(leaf.dtype), how, frozenset(_boxes(how, leaf.shape))
            )
            for (path, leaf), how in zip(leaves, placed, strict=True)
        }
        self._complete, self._on_event, self._on_skip = complete, on_event, on_skip
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pulling")
        self._line: LatestWins[Sequence[Contribution], Weights] = LatestWins(
            "the reader of shards", self._read
        )

    def offer(self, version: int, contributions: Sequence[Contribution]) -> None:
        """A version can be had, with the contributions of all hosts; never waits. From any thread.

        What is not newer than what arrived or is under way is left alone: an offer may be repeated
        until it was taken."""
        self._line.send(version, lambda: contributions)

    @property
    def arrived(self) -> int:
        """The newest complete version; NO_VERSION before the first."""
        newest = self._line.newest(NO_VERSION)
        return NO_VERSION if newest is None else newest.version

    @property
    def under_way(self) -> int | None:
        """The version that is being pulled or will be next; None where no newer one than the
        complete one was offered."""
        return self._line.under_way

    def newest(self, after: int) -> Weights | None:
        """The newest complete version above `after`, or None; never waits."""
        return self._line.newest(after)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Wait for a version of at least `at_least`. TimeoutError names the version waited for, and
        why the last one was skipped."""
        return self._line.wait(at_least, timeout_s)

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Sum and weight of each measure since the last call.

        published, delivered, dropped, skipped: counts of versions (weight 1); skipped were broken.
        By version: transfer_s and transfer_bytes from the store to the engine, delay_s from the
        offer on."""
        return self._line.metrics("published", "delivered", "dropped", "skipped")

    def close(self) -> None:
        """End after the version under way. Whoever waits gets an error."""
        self._line.close()
        self._pool.shutdown()

    def _read(self, update: WeightUpdate[Sequence[Contribution]]) -> None:
        start, version = time.perf_counter(), update.version
        try:
            params, num_bytes = self._assemble(version, update.content)
        except _Broken as broken:
            skipped = f"version {version} is skipped: {broken}"
            logger.warning("%s; waiting for the next offer of it or of a newer one", skipped)
            self._line.fail(version, skipped)
            self._line.count(skipped=1)
            self._on_skip(version, str(broken))
            return
        self._line.deliver(
            version, Weights(version, self._complete(params) if self._complete else params)
        )
        end = time.perf_counter()
        self._line.count(
            delivered=1,
            transfer_s=end - start,
            transfer_bytes=num_bytes,
            delay_s=end - update.sent_s,
        )
        if self._on_event is not None:
            self._on_event("weights", update.sent_s, end, {"version": version, "bytes": num_bytes})

    def _assemble(self, version: int, contributions: Sequence[Contribution]) -> tuple[Tree, int]:
        """The parameters on the engine's mesh, and how many bytes were pulled for them."""
        _require_all_hosts(version, contributions)
        needed = [
            (contribution["host"], chunk)
            for contribution in contributions
            for chunk in contribution["chunks"]
            if self._holds_something(contribution["host"], chunk)
        ]
        deadline_s = time.monotonic() + PULL_TIMEOUT_S
        pulled = self._pool.map(lambda found: _pull(found[0], found[1], deadline_s), needed)
        parts: dict[str, list[_Part]] = {name: [] for name in self._wanted}
        num_bytes = 0
        for (_, chunk), arrays in zip(needed, pulled, strict=True):
            for piece, array in zip(chunk["pieces"], arrays, strict=True):
                shape = tuple(stop - start for start, stop in piece["box"])
                whole = array.view(self._wanted[piece["leaf"]].dtype).reshape(shape)
                parts[piece["leaf"]].append(_Part(piece["box"], whole))
                num_bytes += array.nbytes
        leaves = list(
            self._pool.map(lambda name: self._wanted[name].made_of(name, parts[name]), self._wanted)
        )
        return jax.block_until_ready(jax.tree.unflatten(self._structure, leaves)), num_bytes

    def _holds_something(self, host: int, chunk: Chunk) -> bool:
        """Whether the engine's devices need any of it. Raises _Broken where it is not of this
        model."""
        return any(
            [self._wanted_of(host, piece).touches(piece["box"]) for piece in chunk["pieces"]]
        )

    def _wanted_of(self, host: int, piece: Piece) -> _Wanted:
        wanted = self._wanted.get(piece["leaf"])
        came = (
            f"host {host} came with another model: {piece['leaf']} "
            f"{piece['dtype']}{list(piece['shape'])}"
        )
        if wanted is None:
            raise _Broken(f"{came}, which the engine's does not have")
        if (str(wanted.dtype), wanted.shape) != (piece["dtype"], tuple(piece["shape"])):
            raise _Broken(f"{came}, the engine's is {wanted.dtype}{list(wanted.shape)}")
        return wanted


class _Copy:
    """A program that copies parameters in the layout of engines, cut as they are. What it returns
    shares no memory with what it was given, so that the trainer may give its own to its next
    step."""

    def __init__(self, layout: Callable[[Tree], Tree]) -> None:
        def copied(params: Tree, zero: Float[Array, ""]) -> tuple[Tree, Float[Array, ""]]:
            # XLA on CPUs runs a program with next to no arithmetic in the thread of whoever asks
            # for it, who would wait.
            return layout(params), jnp.sum(
                jnp.sin(zero + jnp.arange(_FEW_FLOPS, dtype=jnp.float32))
            )

        self._anew = jax.jit(copied)
        # The memory of an earlier copy becomes that of the next one.
        self._over = jax.jit(
            lambda params, _, zero: copied(params, zero), donate_argnums=1, keep_unused=True
        )
        # At most one copy that is not needed any more: put by the thread that carries versions,
        # taken by the trainer's.
        self._spare: deque[Tree] = deque(maxlen=1)
        self._is_compiled = False

    def start(self, params: Tree) -> Tree:
        """The copy, under way."""
        zero = np.float32(0)
        try:
            spare = self._spare.popleft()
        except IndexError:
            spare = self._anew(params, zero)[0]
            if self._is_compiled or not _lies_on_cpus(spare):
                return spare
            # The other program too, so that no later version waits for the compiler.
            self._is_compiled = True
        return self._over(params, spare, zero)[0]

    def take_back(self, copy: Tree) -> None:
        """A copy is not needed any more. On CPUs its memory is kept for the next: to be given
        memory by the system takes longer than to copy. Accelerators give it at once, and have none
        to spare."""
        if _lies_on_cpus(copy):
            self._spare.append(copy)


class _Broken(Exception):
    """Why a version cannot be had."""


class _Part(NamedTuple):
    box: Box
    array: Shaped[np.ndarray, "..."]


class _Wanted(NamedTuple):
    """A leaf of the engine's."""

    shape: tuple[int, ...]
    dtype: np.dtype
    placed: NamedSharding
    boxes: frozenset[Box]
    """What this process's devices hold of it."""

    def touches(self, box: Box) -> bool:
        return any(_common(box, wanted) is not None for wanted in self.boxes)

    def made_of(self, name: str, parts: Sequence[_Part]) -> jax.Array:
        """The leaf on the engine's mesh."""
        arrays = {box: _cut_out(name, box, self.dtype, parts) for box in self.boxes}
        return jax.make_array_from_callback(
            self.shape, self.placed, lambda index: arrays[_box(index, self.shape)]
        )


def _lies_on_cpus(params: Tree) -> bool:
    return all(device.platform == "cpu" for device in jax.tree.leaves(params)[0].devices())


def _own_shards(params: Tree) -> Iterator[tuple[Piece, jax.Array]]:
    """Every part of the parameters once over all hosts: of those that lie on several devices, the
    first one's."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                box = _box(shard.index, leaf.shape)
                yield (
                    Piece(leaf=_name(path), dtype=str(leaf.dtype), shape=leaf.shape, box=box),
                    shard.data,
                )


def _chunks(shards: Iterable[tuple[Piece, jax.Array]]) -> Iterator[list[tuple[Piece, jax.Array]]]:
    """In order, as many together as fit into a chunk."""
    together: list[tuple[Piece, jax.Array]] = []
    num_bytes = 0
    for piece, data in shards:
        if together and num_bytes + data.nbytes > CHUNK_BYTES:
            yield together
            together, num_bytes = [], 0
        together.append((piece, data))
        num_bytes += data.nbytes
    if together:
        yield together


def _pull(host: int, chunk: Chunk, deadline_s: float) -> list[UInt8[np.ndarray, "_"]]:
    """What a chunk holds, where it lies in this host's memory. Raises _Broken where it is lost,
    late or not what was put."""
    left_s = max(0.0, deadline_s - time.monotonic())
    try:
        arrays = ray.get(chunk["ref"], timeout=left_s)
    except RayError as error:
        reported = str(error).strip().splitlines()
        raise _Broken(
            f"a chunk of host {host} could not be had: {type(error).__name__}: "
            f"{reported[0] if reported else ''}"
        ) from error
    sizes = [
        math.prod(stop - start for start, stop in piece["box"]) * np.dtype(piece["dtype"]).itemsize
        for piece in chunk["pieces"]
    ]
    if [array.nbytes for array in arrays] != sizes:
        raise _Broken(
            f"a chunk of host {host} has pieces of {[array.nbytes for array in arrays]} bytes, "
            f"expected {sizes}"
        )
    if (came := _digest(arrays)) != chunk["digest"]:
        raise _Broken(
            f"a chunk of host {host} has digest {came:016x}, expected {chunk['digest']:016x}"
        )
    return arrays


def _cut_out(
    name: str, box: Box, dtype: np.dtype, parts: Sequence[_Part]
) -> Shaped[np.ndarray, "..."]:
    """A box of a leaf; no copy where one part holds all of it."""
    size = math.prod(stop - start for start, stop in box)
    common = [(both, part) for part in parts if (both := _common(box, part.box)) is not None]
    for both, part in common:
        if both == box:
            return part.array if part.box == box else part.array[_within(box, part.box)]
    found = sum(math.prod(stop - start for start, stop in both) for both, _ in common)
    if found != size:
        raise _Broken(
            f"{name} came with {found} of the {size} entries of {_text(box)}; a part of a "
            "host's "
            "is missing"
        )
    whole = np.empty([stop - start for start, stop in box], dtype)
    for both, part in common:
        whole[_within(both, box)] = part.array[_within(both, part.box)]
    return whole


def _require_all_hosts(version: int, contributions: Sequence[Contribution]) -> None:
    """Raise _Broken where a host's contribution is missing or is to another version."""
    hosts = sorted(contribution["host"] for contribution in contributions)
    num_hosts = max((contribution["num_hosts"] for contribution in contributions), default=1)
    if hosts != list(range(num_hosts)):
        raise _Broken(
            f"expected contributions of hosts 0 to {num_hosts - 1}, came those of {hosts or 'none'}"
        )
    if others := {
        one["host"]: one["version"] for one in contributions if one["version"] != version
    }:
        raise _Broken(
            "; ".join(f"host {host} came with version {other}" for host, other in others.items())
        )


def _boxes(how: NamedSharding, shape: tuple[int, ...]) -> Iterator[Box]:
    yield from (_box(index, shape) for index in how.addressable_devices_indices_map(shape).values())


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))


def _common(one: Box, other: Box) -> Box | None:
    """What two boxes share; None where that is nothing."""
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in an array that holds an outer one."""
    return tuple(
        slice(start - begin, stop - begin)
        for (start, stop), (begin, _) in zip(box, outer, strict=True)
    )


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _as_bytes(array: Shaped[np.ndarray, "..."]) -> UInt8[np.ndarray, "_"]:
    """The same memory, where the array lies in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digest(arrays: Iterable[UInt8[np.ndarray, "_"]]) -> int:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.data)
    return digest.intdigest()
