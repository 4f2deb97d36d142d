"""Broadcast of versions from trainer hosts to engines: equal on all hosts, newest, and complete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from areal_jax.cluster import weight_broadcast as broadcast_module
from areal_jax.cluster.weight_broadcast import WeightBroadcast


class Hosts:
    """Trainer hosts of the broadcast, which contribute a published version on request."""

    num_hosts = 2

    def __init__(self) -> None:
        self.published: list[int] = []
        self.given: list[dict[int, asyncio.Event]] = [{}, {}]
        self.is_stepping = False
        self.failures: list[str] = []

    @property
    def version(self) -> int:
        return self.published[-1] if self.published else 0

    def publish(self, version: int, *, again: bool = False) -> None:
        if self.published[-1:] == [version] and not again:
            return
        self.published.append(version)
        for given in self.given:
            given[version] = asyncio.Event()

    async def contribution(self, host: int, after: int) -> Any:
        version = self.published[-1]
        assert version > after
        await self.given[host][version].wait()
        if host == 0 and self.failures:
            return self.failures.pop()
        return {"host": host, "version": version}

    def give(self, version: int, *hosts: int) -> None:
        for host in hosts or (0, 1):
            self.given[host][version].set()

    def mark_dead(self, why: str) -> None:
        raise AssertionError(why)

    def metrics(self) -> dict[str, tuple[float, float]]:
        return {}


class Offers:
    """Engines of the broadcast, with the announced versions."""

    def __init__(self) -> None:
        self.made: list[tuple[int, Any]] = []
        self.num_withdrawn = 0

    def update_weights(self, version: int, contributions: Any) -> None:
        self.made.append((version, contributions))

    def on_update_failure(self, callback: Callable[[int], None]) -> None:
        self.skip = callback

    def withdraw_weights(self) -> None:
        self.num_withdrawn += 1

    async def wait_for_version(self, version: int, timeout_s: float) -> None:
        assert self.made and self.made[-1][0] >= version


def broadcasting(
    act: Callable[[WeightBroadcast, Hosts, Offers], Awaitable[None]],
    collect_timeout_s: float = 30.0,
) -> Offers:
    async def run() -> Offers:
        hosts, offers = Hosts(), Offers()
        broadcast = WeightBroadcast(hosts, offers, collect_timeout_s=collect_timeout_s)
        await act(broadcast, hosts, offers)
        await broadcast.close()
        return offers

    return asyncio.run(run())


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_version_is_announced_when_every_host_has_published_it() -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        broadcast.publish(1, None)
        await turns()
        hosts.give(1, 1)
        await turns()
        assert offers.made == []
        hosts.give(1, 0)
        await turns()

    assert broadcasting(act).made == [(1, [{"host": 0, "version": 1}, {"host": 1, "version": 1}])]


def test_withdrawn_version_is_announced_when_it_is_published_again() -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        broadcast.publish(1, None)
        hosts.give(1)
        await turns()
        broadcast.publish(2, None)
        # The hosts end with version 2 in flight; an engine fails to pull version 1.
        await broadcast.withdraw()
        offers.skip(1)
        hosts.give(2)
        await turns()
        assert [version for version, _ in offers.made] == [1] and offers.num_withdrawn == 1
        hosts.published.clear()
        broadcast.publish(2, None)
        hosts.give(2)
        await turns()

    assert [version for version, _ in broadcasting(act).made] == [1, 2]


def test_newest_version_published_meanwhile_follows() -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        for version in (1, 2, 3):
            broadcast.publish(version, None)
        hosts.give(1)
        await turns()
        hosts.give(3)
        await turns()
        assert hosts.published == [1, 3]

    assert [version for version, _ in broadcasting(act).made] == [1, 3]


def test_version_of_a_finished_step_is_not_sent_under_another_number() -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        broadcast.publish(1, None)
        broadcast.publish(2, None)
        hosts.is_stepping = True
        hosts.give(1)
        await turns()
        # From here on the hosts' parameters are on the way to version 3.
        hosts.is_stepping = False
        await turns()
        assert hosts.published == [1]
        broadcast.publish(3, None)
        hosts.give(3)
        await turns()
        assert hosts.published == [1, 3]

    assert [version for version, _ in broadcasting(act).made] == [1, 3]


def test_version_that_times_out_is_skipped_for_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        broadcast.publish(1, None)
        broadcast.publish(2, None)
        await asyncio.sleep(0.15)
        hosts.give(2)
        await turns()
        assert broadcast.metrics()["skipped"] == (1.0, 1.0)

    with caplog.at_level(logging.WARNING):
        assert [version for version, _ in broadcasting(act, collect_timeout_s=0.1).made] == [2]
    assert (
        "weight update skipped: version=1, not every host published it within 0.1 s"
    ) in caplog.messages


def test_paused_broadcast_announces_the_newest_afterwards() -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        with broadcast.paused():
            for version in (1, 2):
                broadcast.publish(version, None)
                await turns()
                hosts.give(version)
                await turns()
            assert offers.made == []
            with pytest.raises(RuntimeError, match="paused already"), broadcast.paused():
                pass

    assert [version for version, _ in broadcasting(act).made] == [2]


def test_version_that_timed_out_is_collected_again() -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        broadcast.publish(1, None)
        await asyncio.sleep(0.15)
        # Nothing newer is published: the trainer waits for a batch.
        hosts.give(1)
        await turns()

    assert [version for version, _ in broadcasting(act, collect_timeout_s=0.1).made] == [1]


def test_version_that_engines_cannot_pull_is_published_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        broadcast.publish(1, None)
        hosts.give(1)
        await turns()
        hosts.is_stepping = True
        offers.skip(1)
        await turns()
        # The next version is in transit, and this one is no longer available.
        assert hosts.published == [1]
        hosts.is_stepping = False
        offers.skip(1)
        await turns()
        assert hosts.published == [1, 1]
        hosts.give(1)
        await turns()

    assert [version for version, _ in broadcasting(act).made] == [1, 1]


def test_version_that_did_not_fit_into_the_store_is_put_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast_module, "RETRY_S", 0.01)

    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        hosts.failures = ["the object store is full"]
        broadcast.publish(1, None)
        hosts.give(1)
        await asyncio.sleep(0.05)
        assert hosts.published == [1, 1]
        hosts.give(1)
        await turns()

    assert [version for version, _ in broadcasting(act).made] == [1]


def test_newer_version_replaces_a_lost_one_while_paused() -> None:
    async def act(broadcast: WeightBroadcast, hosts: Hosts, offers: Offers) -> None:
        broadcast.publish(1, None)
        hosts.give(1)
        await turns()
        with broadcast.paused():
            broadcast.publish(2, None)
            hosts.give(2)
            await turns()
            assert [version for version, _ in offers.made] == [1]
            # An engine that joined cannot get the version of the evaluation: no host has its
            # parameters any more.
            offers.skip(1)
            assert [version for version, _ in offers.made] == [1, 2]

    broadcasting(act)
