"""Weights through Ray's object store: every entry travels once, whole and right or not at all, and
the latest wins."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ray.exceptions import OwnerDiedError

from areal_jax.weights import object_store
from areal_jax.weights.object_store import Contribution, ShardPublisher, ShardReader

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]

P = PartitionSpec
TIMEOUT_S = 60.0

TRAIN_CUTS = {"matrix": P("fsdp", "tensor"), "scale": P("fsdp"), "count": P()}

MESHES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "one device to one": ({"fsdp": 1, "tensor": 1}, {"data": 1, "tensor": 1}),
    "fsdp 4 to tensor 2": ({"fsdp": 4, "tensor": 1}, {"data": 1, "tensor": 2}),
    "fsdp 2 x tensor 2 to data 2 x tensor 2": ({"fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 2}),
    "fsdp 2 to data 4": ({"fsdp": 2, "tensor": 1}, {"data": 4, "tensor": 1}),
}


def mesh_of(axes: dict[str, int], *, last: bool = False) -> Mesh:
    num_devices = int(np.prod(list(axes.values())))
    devices = jax.devices()[-num_devices:] if last else jax.devices()[:num_devices]
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), devices=devices
    )


def params_of(mesh: Mesh, seed: int = 0, rows: int = 24) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    whole = {
        "matrix": rng.normal(size=(rows, 16)).astype(np.float32),
        "scale": rng.normal(size=rows).astype(np.float32),
        "count": np.int32(seed),
    }
    return {
        name: jax.device_put(array, NamedSharding(mesh, TRAIN_CUTS[name]))
        for name, array in whole.items()
    }


def layout(params: dict[str, jax.Array]) -> dict[str, Any]:
    """Two halves of a leaf in another dtype, the others as they are."""
    halves = params["matrix"].astype(jnp.bfloat16)
    return {
        "layers": (halves[:, :8], halves[:, 8:]),
        "scale": params["scale"],
        "count": params["count"],
    }


def reader_on(mesh: Mesh, rows: int = 24, **changes: Any) -> ShardReader:
    half = NamedSharding(mesh, P(None, "tensor"))
    whole = NamedSharding(mesh, P())
    abstract = {
        "layers": (jax.ShapeDtypeStruct((rows, 8), jnp.bfloat16),) * 2,
        "scale": jax.ShapeDtypeStruct((rows,), jnp.float32),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    return ShardReader({"layers": (half, half), "scale": whole, "count": whole}, abstract | changes)


@pytest.fixture
def closing_all() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(closing_all: ExitStack) -> tuple[ShardPublisher, ShardReader, Mesh]:
    """A publisher on four devices, a reader on two others, and the train mesh."""
    train, engine = mesh_of({"fsdp": 4, "tensor": 1}), mesh_of({"data": 1, "tensor": 2}, last=True)
    publisher = closing_all.enter_context(closing(ShardPublisher(layout)))
    return publisher, closing_all.enter_context(closing(reader_on(engine))), train


def contribution_of(publisher: ShardPublisher, version: int, params: Any) -> Contribution:
    publisher.publish(version, params)
    found = publisher.next_contribution(version - 1, TIMEOUT_S)
    assert found is not None and found["version"] == version
    return found


def assert_equal_bits(arrived: Any, expected: Any) -> None:
    assert jax.tree.structure(arrived) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(arrived), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("cut", MESHES)
@pytest.mark.parametrize("chunk_bytes", [64, 2**26])
def test_transfer_is_bit_exact_for_every_pair_of_shardings(
    cut: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(object_store, "CHUNK_BYTES", chunk_bytes)
    train_axes, engine_axes = MESHES[cut]
    train, engine = mesh_of(train_axes), mesh_of(engine_axes, last=True)
    params = params_of(train, seed=3)
    with closing(ShardPublisher(layout)) as publisher, closing(reader_on(engine)) as reader:
        contribution = contribution_of(publisher, 3, params)
        assert (len(contribution["chunks"]) == 1) == (chunk_bytes == 2**26)
        reader.pull(3, [contribution])
        version, arrived = reader.wait(3, TIMEOUT_S)
    assert version == 3
    assert_equal_bits(arrived, layout(params))
    assert arrived["layers"][0].sharding.is_equivalent_to(
        NamedSharding(engine, P(None, "tensor")), 2
    )


def test_every_entry_is_published_once(pair: tuple[ShardPublisher, ShardReader, Mesh]):
    publisher, _, train = pair
    contribution = contribution_of(publisher, 0, params_of(train))
    volume = {"layers.0": 0, "layers.1": 0, "scale": 0, "count": 0}
    for chunk in contribution["chunks"]:
        for piece in chunk["pieces"]:
            volume[piece["leaf"]] += int(np.prod([stop - start for start, stop in piece["box"]]))
    # What lies whole on all four devices travels once; what they cut, shard by shard.
    assert volume == {"layers.0": 24 * 8, "layers.1": 24 * 8, "scale": 24, "count": 1}
    assert sum(len(chunk["pieces"]) for chunk in contribution["chunks"]) == 3 * 4 + 1


def test_engine_pulls_only_chunks_with_its_shards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_store, "CHUNK_BYTES", 1)
    train = mesh_of({"fsdp": 4, "tensor": 1})
    with closing(ShardPublisher(lambda params: {"matrix": params["matrix"]})) as publisher:
        contribution = contribution_of(publisher, 0, params_of(train))
    engine = NamedSharding(mesh_of({"data": 1, "tensor": 2}, last=True), P())
    abstract = {"matrix": jax.ShapeDtypeStruct((24, 16), jnp.float32)}
    with closing(ShardReader({"matrix": engine}, abstract)) as reader:
        reader.pull(0, [contribution])
        reader.wait(0, TIMEOUT_S)
        assert reader.metrics()["transfer_bytes"] == (24 * 16 * 4, 1.0)


def test_the_trainer_may_donate_its_parameters_right_after_publishing(
    pair: tuple[ShardPublisher, ShardReader, Mesh],
):
    publisher, reader, train = pair
    params = params_of(train, seed=1)
    step = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + 1, params), donate_argnums=0)
    seen = []
    for version in range(4):
        expected = jax.tree.map(np.asarray, layout(params))
        publisher.publish(version, params)
        params = step(params)
        contribution = publisher.next_contribution(version - 1, TIMEOUT_S)
        assert contribution is not None
        reader.pull(version, [contribution])
        seen.append((reader.wait(version, TIMEOUT_S).params, expected))
    # What arrived before is intact too.
    for arrived, expected in seen:
        assert_equal_bits(arrived, expected)


def test_copies_reuse_memory():
    train = mesh_of({"fsdp": 2, "tensor": 2})
    copy = object_store._Copy(layout)

    def places(params: Any) -> list[int]:
        return [
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(params)
            for shard in leaf.addressable_shards
        ]

    first = copy.start(params_of(train, 1))
    where = places(jax.block_until_ready(first))
    copy.recycle(first)
    params = params_of(train, 2)
    second = copy.start(params)
    assert places(jax.block_until_ready(second)) == where
    third = copy.start(params)
    assert not set(places(jax.block_until_ready(third))) & {*where, *places(params)}
    for arrived in (second, third):
        assert_equal_bits(arrived, layout(params))
        # As the train mesh cuts it: nothing was gathered.
        assert arrived["layers"][0].sharding.is_equivalent_to(
            NamedSharding(train, P("fsdp", "tensor")), 2
        )


def test_newest_pull_wins_and_older_ones_are_ignored(
    pair: tuple[ShardPublisher, ShardReader, Mesh],
):
    publisher, reader, train = pair
    first = contribution_of(publisher, 1, params_of(train, 1))
    last = contribution_of(publisher, 7, params_of(train, 7))
    reader.pull(7, [last])
    reader.pull(1, [first])
    version, params = reader.wait(1, TIMEOUT_S)
    assert (version, int(params["count"])) == (7, 7)
    assert reader.newest(7) is None
    assert reader.metrics()["published"] == (1.0, 1.0)
    assert publisher.next_contribution(7, 0.01) is None


def test_corrupted_chunk_is_skipped_and_logged(
    pair: tuple[ShardPublisher, ShardReader, Mesh], caplog: pytest.LogCaptureFixture
):
    publisher, reader, train = pair
    broken = contribution_of(publisher, 1, params_of(train, 1))
    arrays = [array.copy() for array in ray.get(broken["chunks"][0]["ref"])]
    arrays[-1][0] ^= 1
    broken["chunks"][0]["ref"] = ray.put(arrays)
    with caplog.at_level(logging.WARNING):
        reader.pull(1, [broken])
        with pytest.raises(
            TimeoutError,
            match=r"version 1 or newer; .* has none.*skipped: version=1, .* host 0 has digest",
        ):
            reader.wait(1, 2.0)
    assert "weight update skipped: version=1, a chunk of host 0 has digest" in caplog.text
    reader.pull(2, [contribution_of(publisher, 2, params_of(train, 2))])
    assert reader.wait(2, TIMEOUT_S).version == 2
    measured = reader.metrics()
    assert (measured["skipped"], measured["delivered"]) == ((1.0, 1.0), (1.0, 1.0))


def test_chunk_of_a_dead_host_is_skipped_and_logged(caplog: pytest.LogCaptureFixture):
    class Host:
        """Another process that owns what it puts."""

        def put(self, arrays: list[np.ndarray]) -> list[ray.ObjectRef]:
            return [ray.put(arrays)]

    train, engine = mesh_of({"fsdp": 2, "tensor": 1}), mesh_of({"data": 1, "tensor": 1}, last=True)
    # 1.1 MiB: what is small travels with the reference to it, and is not lost.
    rows = 2**15
    with closing(ShardPublisher(layout)) as publisher, closing(reader_on(engine, rows)) as reader:
        lost = contribution_of(publisher, 1, params_of(train, 1, rows))
        host: Any = ray.remote(num_cpus=0)(Host).remote()
        (ref,) = ray.get(host.put.remote(ray.get(lost["chunks"][0]["ref"])), timeout=TIMEOUT_S)
        lost["chunks"][0]["ref"] = ref
        ray.kill(host)
        deadline_s = time.monotonic() + TIMEOUT_S
        # What a dead process owned goes a little later.
        with pytest.raises(OwnerDiedError):
            while time.monotonic() < deadline_s:
                ray.get(ref, timeout=TIMEOUT_S)
                time.sleep(0.1)
        with caplog.at_level(logging.WARNING):
            reader.pull(1, [lost])
            with pytest.raises(
                TimeoutError,
                match="weight update skipped: version=1, a chunk of host 0 could not be pulled: OwnerDiedError",
            ):
                reader.wait(1, 5.0)
        assert (
            "weight update skipped: version=1, a chunk of host 0 could not be pulled: OwnerDiedError"
            in caplog.text
        )
        reader.pull(2, [contribution_of(publisher, 2, params_of(train, 2, rows))])
        assert reader.wait(2, TIMEOUT_S).version == 2


def test_missing_or_foreign_shards_are_skipped_and_logged(
    pair: tuple[ShardPublisher, ShardReader, Mesh], closing_all: ExitStack
):
    publisher, reader, train = pair
    good = contribution_of(publisher, 9, params_of(train, 9))

    def reported(reader: ShardReader, version: int, *contributions: Contribution) -> str:
        reader.pull(version, contributions)
        with pytest.raises(TimeoutError) as caught:
            reader.wait(version, 1.0)
        return str(caught.value)

    def changed(version: int, **changes: Any) -> Contribution:
        of_host: Contribution = copy.copy(good)
        of_host.update({"version": version, **changes})  # pyright: ignore[reportCallIssue, reportArgumentType]
        return of_host

    assert "expected contributions of hosts 0 to 1, found those of [0]" in reported(
        reader, 1, changed(1, num_hosts=2)
    )
    assert "host 0 published version 9" in reported(reader, 2, good)
    chunk = good["chunks"][0]
    fewer = {**chunk, "pieces": chunk["pieces"][:-1]}
    assert "bytes, expected" in reported(reader, 3, changed(3, chunks=[fewer]))
    assert "count has 0 of the 1 entries of []" in reported(reader, 4, changed(4, chunks=[]))
    engine = mesh_of({"data": 1, "tensor": 2}, last=True)
    other = closing_all.enter_context(
        closing(reader_on(engine, scale=jax.ShapeDtypeStruct((24,), jnp.bfloat16)))
    )
    assert "expected scale bfloat16[24], found float32[24]" in reported(other, 5, changed(5))
    taller = closing_all.enter_context(closing(reader_on(engine, rows=32)))
    assert "expected layers.0 bfloat16[32, 8], found bfloat16[24, 8]" in reported(
        taller, 6, changed(6)
    )
    assert reader.metrics()["skipped"] == (4.0, 1.0)
    reader.pull(9, [good])
    assert reader.wait(9, TIMEOUT_S).version == 9


def test_store_keeps_only_the_newest_version_and_those_in_use():
    # 8 MiB each, 100 MiB in all: twenty versions fit only because older ones go.
    train, engine = mesh_of({"fsdp": 2, "tensor": 1}), mesh_of({"data": 1, "tensor": 1}, last=True)
    rows = 2**17
    with (
        closing(ShardPublisher(layout)) as publisher,
        closing(reader_on(engine, rows=rows)) as reader,
    ):
        for version in range(20):
            reader.pull(
                version, [contribution_of(publisher, version, params_of(train, version, rows))]
            )
            assert int(reader.wait(version, TIMEOUT_S).params["count"]) == version
        assert publisher.metrics()["failed"] == (0.0, 1.0)


def test_a_version_that_does_not_fit_into_the_store_is_skipped(caplog: pytest.LogCaptureFixture):
    train = mesh_of({"fsdp": 1, "tensor": 1})
    grown = ShardPublisher(
        lambda params: {"grown": jnp.zeros((len(params["scale"]), 2**16), jnp.uint8)}
    )
    with closing(grown) as publisher, caplog.at_level(logging.WARNING):
        # 2048 rows of 64 KiB are 128 MiB; the store has 100.
        publisher.publish(1, params_of(train, 1, rows=2048))
        assert publisher.next_contribution(0, 3.0) is None
        assert contribution_of(publisher, 2, params_of(train, 2))["version"] == 2
        assert publisher.metrics()["failed"] == (1.0, 1.0)
    assert "weight update failed: version=1, the object store of host 0 is full" in caplog.text


def test_complete_merges_pulled_with_resident_weights():
    train, engine = mesh_of({"fsdp": 2, "tensor": 1}), mesh_of({"data": 1, "tensor": 2}, last=True)
    target = {"scale": NamedSharding(engine, P())}
    abstract = {"scale": jax.ShapeDtypeStruct((24,), jnp.float32)}
    base = {"matrix": 5}
    with (
        closing(ShardPublisher(lambda params: {"scale": params["scale"]})) as publisher,
        closing(ShardReader(target, abstract, complete=lambda arrived: base | arrived)) as reader,
    ):
        reader.pull(0, [contribution_of(publisher, 0, params_of(train))])
        assert reader.wait(0, TIMEOUT_S).params.keys() == {"matrix", "scale"}


def test_closed_publisher_raises():
    publisher = ShardPublisher(layout)
    publisher.close()
    with pytest.raises(RuntimeError, match="the shard publisher is closed"):
        publisher.next_contribution(0, 1.0)
