"""Weight transfer between hosts through Ray's object store.

A trainer host puts the shards on its devices into the store and returns a `Contribution` that lists
them. The weight broadcast sends the contributions of all hosts to the engines. An engine's reader
pulls the shards of its devices from all hosts in parallel and shows a version when it is complete
and its digests match. No host gathers the parameters, and neither trainer nor engine blocks.

Contributions are plain dicts, so that messages depend on no class of this package. The file has
more than 400 lines because publisher and reader share one description of shards.
"""

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
from areal_jax.weights.channel import LatestWins, OnEvent, WeightUpdate

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 2**20
"""Maximum size of an object of several shards; a larger shard is an object by itself."""

PULL_TIMEOUT_S = 120.0
"""Time after which a pull fails, in seconds; the version or a newer one is announced again."""

_NUM_THREADS = 4
_FEW_FLOPS = 2048

Tree: TypeAlias = Any
Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop in every dimension of a leaf."""


class Piece(TypedDict):
    """A shard of a leaf."""

    leaf: str
    """Path of the leaf, such as `layers.0.attn.q`."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole leaf."""
    box: Box


class Chunk(TypedDict):
    """One object of the store: a list of byte arrays, one per piece."""

    ref: Any
    """ray.ObjectRef."""
    digest: int
    """xxh3 of the bytes of all pieces in order."""
    pieces: list[Piece]


class Contribution(TypedDict):
    """Location of one trainer host's shards of a version."""

    version: int
    host: int
    num_hosts: int
    """Number of contributions of a complete version."""
    chunks: list[Chunk]


class ShardPublisher:
    """Puts this host's shards of every version into the store in a thread; the latest version wins.

    All processes of the train mesh call `publish` with the same versions.
    """

    def __init__(self, layout: Callable[[Tree], Tree], *, on_event: OnEvent | None = None):
        """
        Args:
            layout: Pure function from the trainer's parameters to the engines' parameters; it
                keeps their sharding.
            on_event: Callback after every version.
        """
        self.host, self.num_hosts, self._on_event = (
            jax.process_index(),
            jax.process_count(),
            on_event,
        )
        self._copy = _Copy(layout)
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hashing")
        self._line: LatestWins[Tree, Contribution] = LatestWins("the shard publisher", self._put)

    def publish(self, version: int, params: Tree, *, again: bool = False) -> None:
        """Publish a version without waiting; afterwards `params` may be donated or overwritten.

        A version that is in flight or published already is left alone.

        Args:
            version: Version of the parameters.
            params: Parameters of the trainer.
            again: Put the version into the store once more, because its objects are lost or did
                not fit.

        Raises:
            RuntimeError: The thread died; the cause is its error.
        """
        if again:
            self._line.withdraw(version)
        self._line.send(version, lambda: self._copy.start(params))

    @property
    def is_busy(self) -> bool:
        """Whether a version is in flight to the store."""
        return self._line.in_flight is not None

    @property
    def last_failure(self) -> str:
        """Why the last version did not fit into the store; empty if it did."""
        return self._line.last_failure

    def next_contribution(self, after: int, timeout_s: float) -> Contribution | None:
        """Wait for the newest contribution above version `after`; None after `timeout_s`.

        The store keeps the objects of the newest contribution and those with other references.
        """
        try:
            return self._line.wait(after + 1, timeout_s)
        except TimeoutError:
            return None

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return and reset the sum and weight of each metric.

        Counts of versions (weight 1): published, offered (in the store), dropped (overtaken),
        failed (store full). Per version: publish_s in the trainer's thread, copy_s until the copy
        on the train mesh is complete, put_s and put_bytes into the store, delay_s from publishing
        to the end of the put.
        """
        return self._line.metrics("published", "offered", "dropped", "failed")

    def close(self) -> None:
        """End after the version in flight; waiting callers get an error."""
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
                "weight update failed: version=%d, the object store of host %d is full: %s",
                version,
                self.host,
                error,
            )
            self._line.fail(version, f"the object store of host {self.host} is full: {error}")
            self._line.count(failed=1)
            return
        del shards
        self._copy.recycle(params)
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
        """Put chunks as lists of arrays, without concatenation; hash them in parallel."""
        put: list[tuple[Any, Future[int], list[Piece]]] = []
        for together in _chunks(shards):
            arrays = [_as_bytes(np.asarray(data)) for _, data in together]
            digest = self._hashing.submit(_digest, arrays)
            put.append((ray.put(arrays), digest, [piece for piece, _ in together]))
        return [
            Chunk(ref=ref, digest=digest.result(), pieces=pieces) for ref, digest, pieces in put
        ]


class ShardReader:
    """Weight source of an engine: pulls versions from the store and shows the newest complete one.

    An incomplete or corrupted version is skipped with a warning; it may be pulled again.
    """

    def __init__(
        self,
        targets: Tree,
        abstract: Tree,
        *,
        complete: Callable[[Tree], Tree] | None = None,
        on_event: OnEvent | None = None,
        on_failure: Callable[[int, str], None] = lambda _version, _why: None,
    ):
        """
        Args:
            targets: Sharding of every leaf on the engine's mesh.
            abstract: Tree of ShapeDtypeStructs of the same structure.
            complete: Merges pulled leaves with weights that are on the mesh already, such as the
                base model of an adapter.
            on_event: Callback after every version.
            on_failure: Callback in the thread with a skipped version and the reason.
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
        self._complete, self._on_event, self._on_failure = complete, on_event, on_failure
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pulling")
        self._line: LatestWins[Sequence[Contribution], Weights] = LatestWins(
            "the shard reader", self._read
        )

    def pull(self, version: int, contributions: Sequence[Contribution]) -> None:
        """Pull a version in the background; never waits; thread-safe.

        A version that is not newer than the newest complete or pending one is ignored, so that a
        call may be repeated.

        Args:
            version: Version to pull.
            contributions: Shard locations of all hosts.
        """
        self._line.send(version, lambda: contributions)

    @property
    def newest_version(self) -> int:
        """Newest complete version; NO_VERSION before the first."""
        newest = self._line.newest(NO_VERSION)
        return NO_VERSION if newest is None else newest.version

    @property
    def pending_version(self) -> int | None:
        """Version that is being pulled or is next; None without one newer than the complete one."""
        return self._line.in_flight

    def newest(self, after: int) -> Weights | None:
        """Return the newest complete version above `after`, or None; never waits."""
        return self._line.newest(after)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Wait for a version of at least `at_least`.

        Raises:
            TimeoutError: None arrived within `timeout_s`; the message has the last failure.
        """
        return self._line.wait(at_least, timeout_s)

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return and reset the sum and weight of each metric.

        Counts of versions (weight 1): published, delivered, dropped (overtaken), skipped (invalid).
        Per version: transfer_s and transfer_bytes from the store to the engine, delay_s from the
        call of `pull` on.
        """
        return self._line.metrics("published", "delivered", "dropped", "skipped")

    def close(self) -> None:
        """End after the version in flight; waiting callers get an error."""
        self._line.close()
        self._pool.shutdown()

    def _read(self, update: WeightUpdate[Sequence[Contribution]]) -> None:
        start, version = time.perf_counter(), update.version
        try:
            params, num_bytes = self._assemble(version, update.content)
        except _InvalidUpdate as error:
            skipped = f"weight update skipped: version={version}, {error}"
            logger.warning("%s; waiting for this version again or a newer one", skipped)
            self._line.fail(version, skipped)
            self._line.count(skipped=1)
            self._on_failure(version, str(error))
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
        """Return the parameters on the engine's mesh and the number of pulled bytes."""
        _require_all_hosts(version, contributions)
        needed = [
            (contribution["host"], chunk)
            for contribution in contributions
            for chunk in contribution["chunks"]
            if self._needs(contribution["host"], chunk)
        ]
        deadline_s = time.monotonic() + PULL_TIMEOUT_S
        pulled = self._pool.map(lambda found: _pull(found[0], found[1], deadline_s), needed)
        parts: dict[str, list[_PulledPiece]] = {name: [] for name in self._wanted}
        num_bytes = 0
        for (_, chunk), arrays in zip(needed, pulled, strict=True):
            for piece, array in zip(chunk["pieces"], arrays, strict=True):
                shape = tuple(stop - start for start, stop in piece["box"])
                whole = array.view(self._wanted[piece["leaf"]].dtype).reshape(shape)
                parts[piece["leaf"]].append(_PulledPiece(piece["box"], whole))
                num_bytes += array.nbytes
        leaves = list(
            self._pool.map(
                lambda name: self._wanted[name].assemble(name, parts[name]), self._wanted
            )
        )
        return jax.block_until_ready(jax.tree.unflatten(self._structure, leaves)), num_bytes

    def _needs(self, host: int, chunk: Chunk) -> bool:
        """Return whether the engine's devices need any piece of a chunk; check all pieces."""
        return any(
            [self._wanted_of(host, piece).touches(piece["box"]) for piece in chunk["pieces"]]
        )

    def _wanted_of(self, host: int, piece: Piece) -> _Wanted:
        wanted = self._wanted.get(piece["leaf"])
        found = f"{piece['dtype']}{list(piece['shape'])}"
        if wanted is None:
            raise _InvalidUpdate(
                f"host {host} has another model: found {piece['leaf']} {found}, which the engine's "
                "model lacks"
            )
        if (str(wanted.dtype), wanted.shape) != (piece["dtype"], tuple(piece["shape"])):
            raise _InvalidUpdate(
                f"host {host} has another model: expected {piece['leaf']} "
                f"{wanted.dtype}{list(wanted.shape)}, found {found}"
            )
        return wanted


class _Copy:
    """Program that copies parameters into the engines' layout with the same sharding.

    The copy shares no memory with its input, so that the trainer may donate the input to its next
    step.
    """

    def __init__(self, layout: Callable[[Tree], Tree]) -> None:
        def copied(params: Tree, zero: Float[Array, ""]) -> tuple[Tree, Float[Array, ""]]:
            # XLA on CPUs runs a program with almost no arithmetic in the calling thread, which
            # would block.
            return layout(params), jnp.sum(
                jnp.sin(zero + jnp.arange(_FEW_FLOPS, dtype=jnp.float32))
            )

        self._copy_to_new = jax.jit(copied)
        # The memory of an earlier copy becomes that of the next one.
        self._copy_to_spare = jax.jit(
            lambda params, _, zero: copied(params, zero), donate_argnums=1, keep_unused=True
        )
        # At most one unused copy: the delivery thread puts it, the trainer's thread takes it.
        self._spare: deque[Tree] = deque(maxlen=1)
        self._is_compiled = False

    def start(self, params: Tree) -> Tree:
        """Start to copy."""
        zero = np.float32(0)
        try:
            spare = self._spare.popleft()
        except IndexError:
            spare = self._copy_to_new(params, zero)[0]
            if self._is_compiled or not _is_on_cpus(spare):
                return spare
            # Compile the other program now, so that no later version waits for it.
            self._is_compiled = True
        return self._copy_to_spare(params, spare, zero)[0]

    def recycle(self, copy: Tree) -> None:
        """Keep the memory of an unused copy for the next one, on CPUs only.

        There, allocation takes longer than the copy. Accelerators allocate at once and have no
        memory to spare.
        """
        if _is_on_cpus(copy):
            self._spare.append(copy)


class _InvalidUpdate(Exception):
    """Reason why a version is unusable."""


class _PulledPiece(NamedTuple):
    box: Box
    array: Shaped[np.ndarray, "..."]


class _Wanted(NamedTuple):
    """A leaf of the engine's parameters."""

    shape: tuple[int, ...]
    dtype: np.dtype
    placed: NamedSharding
    boxes: frozenset[Box]
    """Boxes of the leaf on this process's devices."""

    def touches(self, box: Box) -> bool:
        return any(_common(box, wanted) is not None for wanted in self.boxes)

    def assemble(self, name: str, parts: Sequence[_PulledPiece]) -> jax.Array:
        """Return the leaf on the engine's mesh."""
        arrays = {box: _cut_out(name, box, self.dtype, parts) for box in self.boxes}
        return jax.make_array_from_callback(
            self.shape, self.placed, lambda index: arrays[_box(index, self.shape)]
        )


def _is_on_cpus(params: Tree) -> bool:
    return all(device.platform == "cpu" for device in jax.tree.leaves(params)[0].devices())


def _own_shards(params: Tree) -> Iterator[tuple[Piece, jax.Array]]:
    """Yield this host's shards so that all hosts together yield each entry once.

    Of replicated shards, only the first replica counts.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                box = _box(shard.index, leaf.shape)
                yield (
                    Piece(leaf=_name(path), dtype=str(leaf.dtype), shape=leaf.shape, box=box),
                    shard.data,
                )


def _chunks(shards: Iterable[tuple[Piece, jax.Array]]) -> Iterator[list[tuple[Piece, jax.Array]]]:
    """Group shards in order into chunks of at most CHUNK_BYTES."""
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
    """Return the arrays of a chunk in this host's shared memory.

    Raises:
        _InvalidUpdate: The chunk is lost, late or corrupted.
    """
    left_s = max(0.0, deadline_s - time.monotonic())
    try:
        arrays = ray.get(chunk["ref"], timeout=left_s)
    except RayError as error:
        lines = str(error).strip().splitlines()
        raise _InvalidUpdate(
            f"a chunk of host {host} could not be pulled: {type(error).__name__}: "
            f"{lines[0] if lines else ''}"
        ) from error
    sizes = [
        math.prod(stop - start for start, stop in piece["box"]) * np.dtype(piece["dtype"]).itemsize
        for piece in chunk["pieces"]
    ]
    if [array.nbytes for array in arrays] != sizes:
        raise _InvalidUpdate(
            f"a chunk of host {host} has pieces of {[array.nbytes for array in arrays]} bytes, "
            f"expected {sizes}"
        )
    if (found := _digest(arrays)) != chunk["digest"]:
        raise _InvalidUpdate(
            f"a chunk of host {host} has digest {found:016x}, expected {chunk['digest']:016x}"
        )
    return arrays


def _cut_out(
    name: str, box: Box, dtype: np.dtype, parts: Sequence[_PulledPiece]
) -> Shaped[np.ndarray, "..."]:
    """Return a box of a leaf; without a copy if one piece contains it."""
    size = math.prod(stop - start for start, stop in box)
    common = [(both, part) for part in parts if (both := _common(box, part.box)) is not None]
    for both, part in common:
        if both == box:
            return part.array if part.box == box else part.array[_within(box, part.box)]
    found = sum(math.prod(stop - start for start, stop in both) for both, _ in common)
    if found != size:
        raise _InvalidUpdate(
            f"{name} has {found} of the {size} entries of {_text(box)}; a shard of a host is "
            f"missing"
        )
    whole = np.empty([stop - start for start, stop in box], dtype)
    for both, part in common:
        whole[_within(both, box)] = part.array[_within(both, part.box)]
    return whole


def _require_all_hosts(version: int, contributions: Sequence[Contribution]) -> None:
    """Raise _InvalidUpdate where a host's contribution is missing or of another version."""
    hosts = sorted(contribution["host"] for contribution in contributions)
    num_hosts = max((contribution["num_hosts"] for contribution in contributions), default=1)
    if hosts != list(range(num_hosts)):
        raise _InvalidUpdate(
            f"expected contributions of hosts 0 to {num_hosts - 1}, found those of "
            f"{hosts or 'none'}"
        )
    if others := {
        one["host"]: one["version"] for one in contributions if one["version"] != version
    }:
        raise _InvalidUpdate(
            "; ".join(f"host {host} published version {other}" for host, other in others.items())
        )


def _boxes(how: NamedSharding, shape: tuple[int, ...]) -> Iterator[Box]:
    yield from (_box(index, shape) for index in how.addressable_devices_indices_map(shape).values())


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))


def _common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of a box in an array of an outer box."""
    return tuple(
        slice(start - begin, stop - begin)
        for (start, stop), (begin, _) in zip(box, outer, strict=True)
    )


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _as_bytes(array: Shaped[np.ndarray, "..."]) -> UInt8[np.ndarray, "_"]:
    """View a contiguous array as bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digest(arrays: Iterable[UInt8[np.ndarray, "_"]]) -> int:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.data)
    return digest.intdigest()
