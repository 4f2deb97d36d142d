"""The weight channel: latest wins, nobody waits for it, a version is whole or absent."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import Meshes, make_meshes
from areal_jax.weights.local import WeightChannel

Params = dict[str, jax.Array]

PLACEMENTS = {
    "one device": (PlacementConfig(), 1),
    "4 + 4 devices": (PlacementConfig(train_devices=4, rollout_devices=4), 8),
    "2 + 6 devices": (PlacementConfig(train_devices=2, rollout_devices=6), 8),
    "both cut in two": (
        PlacementConfig(train_devices=4, train_tensor=2, rollout_devices=4, rollout_tensor=2),
        8,
    ),
    "only one cut in two": (
        PlacementConfig(train_devices=4, rollout_devices=4, rollout_tensor=2),
        8,
    ),
}


def meshes_of(name: str) -> Meshes:
    placement, num_devices = PLACEMENTS[name]
    return make_meshes(placement, jax.devices()[:num_devices])


def params_of(meshes: Meshes, version: int) -> Params:
    """Parameters that show their version in every entry, cut over the train mesh as it cuts
    them."""
    whole = {
        "matrix": np.full((24, 16), version, np.float32),
        "scale": np.full(24, version, np.float32),
    }
    cut = {"matrix": PartitionSpec("fsdp", "tensor"), "scale": PartitionSpec("fsdp")}
    return {
        name: jax.device_put(array, NamedSharding(meshes.train, cut[name]))
        for name, array in whole.items()
    }


def layout(params: Params) -> dict[str, Any]:
    """One leaf in another dtype and cut in two, one as it is."""
    halves = params["matrix"].astype(jnp.bfloat16)
    return {"matrix": (halves[:12], halves[12:]), "scale": params["scale"]}


def weight_channel_between(
    meshes: Meshes, path: Literal["device", "host"] | None = None, on_event: Any = None
) -> WeightChannel:
    matrix = NamedSharding(meshes.rollout, PartitionSpec(None, "tensor"))
    target = {"matrix": (matrix, matrix), "scale": NamedSharding(meshes.rollout, PartitionSpec())}
    return WeightChannel(layout, [target], meshes.train, path=path, on_event=on_event)


def versions_in(params: dict[str, Any]) -> set[float]:
    return {
        float(value)
        for leaf in jax.tree.leaves(params)
        for value in np.unique(np.asarray(leaf, np.float32))
    }


@pytest.mark.parametrize("path", ["device", "host", None])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_version_arrives_in_the_engines_layout_on_its_mesh(
    placement: str, path: Literal["device", "host"] | None
):
    meshes = meshes_of(placement)
    weight_channel = weight_channel_between(meshes, path)
    weight_channel.publish(3, params_of(meshes, 3))
    version, params = weight_channel.wait(3, timeout_s=60.0)
    weight_channel.close()
    assert version == 3
    assert versions_in(params) == {3.0}
    assert [leaf.shape for leaf in params["matrix"]] == [(12, 16)] * 2
    assert params["matrix"][0].dtype == jnp.bfloat16
    assert params["scale"].dtype == jnp.float32
    assert all(
        set(leaf.sharding.device_set) == set(meshes.rollout.devices.flat)
        for leaf in jax.tree.leaves(params)
    )
    assert params["matrix"][0].sharding.is_equivalent_to(
        NamedSharding(meshes.rollout, PartitionSpec(None, "tensor")), 2
    )


@pytest.mark.parametrize("path", ["device", "host"])
@pytest.mark.parametrize("placement", ["one device", "4 + 4 devices"])
def test_the_trainer_may_donate_its_parameters_right_after_publishing(
    placement: str, path: Literal["device", "host"]
):
    meshes = meshes_of(placement)
    weight_channel = weight_channel_between(meshes, path)
    params = params_of(meshes, 1)
    where = jax.tree.map(lambda leaf: leaf.sharding, params)
    step = jax.jit(
        lambda params: jax.tree.map(lambda leaf: leaf + 1, params),
        donate_argnums=0,
        out_shardings=where,
    )
    seen = []
    for version in range(1, 6):
        weight_channel.publish(version, params)
        params = step(params)
        seen.append(weight_channel.wait(version, timeout_s=60.0).params)
    weight_channel.close()
    # What was delivered before is intact too.
    assert [versions_in(each) for each in seen] == [{1.0}, {2.0}, {3.0}, {4.0}, {5.0}]


def test_newest_version_wins_and_dropped_ones_are_counted():
    meshes = meshes_of("4 + 4 devices")
    delivered, go_on = threading.Event(), threading.Event()

    def hold_the_copier(name: str, start_s: float, end_s: float, args: dict[str, float]) -> None:
        assert name == "weights" and start_s < end_s
        delivered.set()
        assert go_on.wait(60)

    weight_channel = weight_channel_between(meshes, on_event=hold_the_copier)
    weight_channel.publish(0, params_of(meshes, 0))
    assert delivered.wait(60)
    for version in (1, 2, 3, 7):
        weight_channel.publish(version, params_of(meshes, version))
    newest = weight_channel.newest(after=-1)
    assert newest is not None and newest.version == 0
    assert weight_channel.newest(after=0) is None
    go_on.set()
    version, params = weight_channel.wait(1, timeout_s=60.0)
    assert (version, versions_in(params)) == (7, {7.0})
    assert weight_channel.newest(after=7) is None
    measured = weight_channel.metrics()
    weight_channel.close()
    assert (measured["published"], measured["delivered"]) == ((5.0, 1.0), (2.0, 1.0))
    assert measured["dropped"] == (3.0, 1.0)


def test_paused_channel_delivers_the_last_version_afterwards():
    meshes = meshes_of("one device")
    with closing(weight_channel_between(meshes)) as weight_channel:
        weight_channel.publish(1, params_of(meshes, 1))
        held = weight_channel.wait(1, 10.0)
        with weight_channel.paused():
            for version in (2, 3, 4):
                weight_channel.publish(version, params_of(meshes, version))
            with pytest.raises(TimeoutError, match="has version 1, the last one published is 4"):
                weight_channel.wait(2, 0.2)
            assert weight_channel.newest(0) is held
            assert weight_channel.newest(1) is None
            with (
                pytest.raises(RuntimeError, match="one evaluation at a time"),
                weight_channel.paused(),
            ):
                pass
        assert weight_channel.wait(2, 10.0).version == 4
        assert weight_channel.metrics()["dropped"] == (2.0, 1.0)


def test_versions_are_published_atomically():
    meshes = meshes_of("4 + 4 devices")
    weight_channel = weight_channel_between(meshes, "device")
    prepared = [params_of(meshes, version) for version in range(40)]
    seen: list[tuple[int, set[float]]] = []

    def look() -> None:
        last = -1
        deadline_s = time.perf_counter() + 60
        while last < 39 and time.perf_counter() < deadline_s:
            if (weights := weight_channel.newest(last)) is not None:
                last = weights.version
                seen.append((last, versions_in(weights.params)))

    reader = threading.Thread(target=look)
    reader.start()
    for version, params in enumerate(prepared):
        weight_channel.publish(version, params)
    reader.join(90)
    weight_channel.close()
    assert seen[-1][0] == 39
    assert all(values == {float(version)} for version, values in seen)
    assert [version for version, _ in seen] == sorted({version for version, _ in seen})


@pytest.mark.slow
def test_publishing_does_not_wait_for_the_parameters_to_be_computed():
    meshes = meshes_of("4 + 4 devices")
    weight_channel = weight_channel_between(meshes)
    weight_channel.publish(0, params_of(meshes, 0))
    weight_channel.wait(0, timeout_s=60.0)
    params = params_of(meshes, 1)

    def slow(params: Params) -> Params:
        heavy = jax.lax.fori_loop(
            0, 60, lambda _, x: jnp.tanh(x @ x.T), jnp.ones((600, 600)) * params["scale"][0]
        )
        return jax.tree.map(lambda leaf: leaf + 0 * heavy[0, 0], params)

    step = jax.jit(slow, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params))
    jax.block_until_ready(step(params))
    computed = step(params)
    weight_channel.publish(1, computed)
    assert not any(leaf.is_ready() for leaf in jax.tree.leaves(computed))
    assert weight_channel.newest(after=0) is None
    assert weight_channel.wait(1, timeout_s=60.0).version == 1
    weight_channel.close()


def test_wait_times_out_with_the_missing_version():
    meshes = meshes_of("one device")
    weight_channel = weight_channel_between(meshes)
    with pytest.raises(TimeoutError, match=r"version 4 or newer; the weight channel has none"):
        weight_channel.wait(4, timeout_s=0.01)
    weight_channel.publish(2, params_of(meshes, 2))
    weight_channel.wait(2, timeout_s=60.0)
    with pytest.raises(
        TimeoutError, match=r"waited 0.01 s .* version 4 or newer; the weight channel has version 2"
    ):
        weight_channel.wait(4, timeout_s=0.01)
    weight_channel.close()


@pytest.mark.parametrize("path", ["device", "host"])
def test_engines_join_and_leave_and_the_train_mesh_changes(path: Literal["device", "host"]):
    meshes = meshes_of("2 + 6 devices")
    weight_channel = weight_channel_between(meshes, path)
    weight_channel.publish(1, params_of(meshes, 1))
    weight_channel.wait_all_engines(1, timeout_s=60.0)
    # The first four devices train now, and an engine has the last four.
    others = meshes_of("4 + 4 devices")
    params = params_of(others, 2)
    before = weight_channel.change_source(weight_channel.compile_copy(others.train, params))
    everywhere = NamedSharding(others.rollout, PartitionSpec())
    weight_channel.add_engine(1, {"matrix": (everywhere, everywhere), "scale": everywhere})
    assert weight_channel.newest(-1, 1) is None
    weight_channel.publish(2, params)
    weight_channel.wait_all_engines(2, timeout_s=60.0)
    version, arrived = weight_channel.wait(2, 1.0, 1)
    assert version == 2 and versions_in(arrived) == {2.0}
    assert arrived["scale"].sharding.device_set == set(others.rollout.devices.flat)
    # Back, without the engine.
    weight_channel.change_source(before)
    weight_channel.remove_engine(1)
    weight_channel.publish(3, params_of(meshes, 3))
    weight_channel.wait_all_engines(3, timeout_s=60.0)
    assert versions_in(weight_channel.wait(3, 1.0).params) == {3.0}
    weight_channel.close()


def test_versions_must_increase():
    meshes = meshes_of("one device")
    weight_channel = weight_channel_between(meshes)
    weight_channel.publish(2, params_of(meshes, 2))
    with pytest.raises(ValueError, match="expected a version above 2, found version 2"):
        weight_channel.publish(2, params_of(meshes, 2))
    weight_channel.close()


def test_delivery_error_reaches_trainer_and_engine():
    meshes = meshes_of("4 + 4 devices")
    # 7 columns do not divide over 4 devices.
    target = {"odd": NamedSharding(meshes.rollout, PartitionSpec(None, "data"))}
    weight_channel = WeightChannel(
        lambda params: {"odd": jnp.ones((24, 7))}, [target], meshes.train, path="host"
    )
    weight_channel.publish(0, params_of(meshes, 0))
    with pytest.raises(
        RuntimeError, match=r"the weight channel ended with .*axis 1 is partitioned 4 times"
    ) as caught:
        weight_channel.wait(0, timeout_s=60.0)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RuntimeError, match="the weight channel ended"):
        weight_channel.newest(after=-1)
    with pytest.raises(RuntimeError, match="the weight channel ended"):
        weight_channel.publish(1, params_of(meshes, 1))
    weight_channel.close()


def test_closed_channel_raises_in_waiting_callers():
    meshes = meshes_of("one device")
    weight_channel = weight_channel_between(meshes)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            weight_channel.wait(0, timeout_s=60.0)
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    weight_channel.close()
    waiting.join(60)
    assert [str(error) for error in errors] == ["the weight channel is closed"]
    with pytest.raises(RuntimeError, match="closed"):
        weight_channel.publish(0, params_of(meshes, 0))


def test_every_stage_of_a_transfer_is_measured():
    meshes = meshes_of("4 + 4 devices")
    weight_channel = weight_channel_between(meshes)
    for version in range(2):
        weight_channel.publish(version, params_of(meshes, version))
        weight_channel.wait(version, timeout_s=60.0)
    measured = weight_channel.metrics()
    # 24 x 16 entries of two bytes, and 24 of four.
    assert measured["transfer_bytes"] == (2 * (24 * 16 * 2 + 24 * 4), 2.0)
    for name in ("publish_s", "copy_s", "transfer_s", "delay_s"):
        total, weight = measured[name]
        assert weight == 2 and total > 0
    assert measured["delay_s"][0] >= measured["copy_s"][0] + measured["transfer_s"][0]
    assert weight_channel.metrics() == {
        "published": (0.0, 1.0),
        "delivered": (0.0, 1.0),
        "dropped": (0.0, 1.0),
    }
    weight_channel.close()
