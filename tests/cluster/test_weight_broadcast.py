"""Versions on their way from several trainer hosts to engines: the same of all hosts, the newest,
whole or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from areal_jax.cluster import weight_broadcast as relay_module
from areal_jax.cluster.weight_broadcast import Relay


class Hosts:
    """What a relay asks of trainer hosts: each gives a published version when the test says so."""

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

    def give_up(self, why: str) -> None:
        raise AssertionError(why)

    def metrics(self) -> dict[str, tuple[float, float]]:
        return {}


class Offers:
    """What a relay tells engines."""

    def __init__(self) -> None:
        self.made: list[tuple[int, Any]] = []

    def offer(self, version: int, contributions: Any) -> None:
        self.made.append((version, contributions))

    def on_skip(self, skipped: Callable[[int], None]) -> None:
        self.skip = skipped

    async def arrived(self, version: int, timeout_s: float) -> None:
        assert self.made and self.made[-1][0] >= version


def relayed(
    act: Callable[[Relay, Hosts, Offers], Awaitable[None]], offer_timeout_s: float = 30.0
) -> Offers:
    async def run() -> Offers:
        hosts, offers = Hosts(), Offers()
        relay = Relay(hosts, offers, offer_timeout_s=offer_timeout_s)
        await act(relay, hosts, offers)
        await relay.close()
        return offers

    return asyncio.run(run())


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_version_is_offered_when_every_host_has_given_it() -> None:
    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        relay.publish(1, None)
        await turns()
        hosts.give(1, 1)
        await turns()
        assert offers.made == []
        hosts.give(1, 0)
        await turns()

    assert relayed(act).made == [(1, [{"host": 0, "version": 1}, {"host": 1, "version": 1}])]


def test_of_what_is_published_meanwhile_the_newest_follows() -> None:
    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        for version in (1, 2, 3):
            relay.publish(version, None)
        hosts.give(1)
        await turns()
        hosts.give(3)
        await turns()
        assert hosts.published == [1, 3]

    assert [version for version, _ in relayed(act).made] == [1, 3]


def test_what_could_not_be_sent_before_the_next_step_began_is_never_sent_under_another_name() -> (
    None
):
    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        relay.publish(1, None)
        relay.publish(2, None)
        hosts.is_stepping = True
        hosts.give(1)
        await turns()
        # From here on the hosts' parameters are on the way to version 3.
        hosts.is_stepping = False
        await turns()
        assert hosts.published == [1]
        relay.publish(3, None)
        hosts.give(3)
        await turns()
        assert hosts.published == [1, 3]

    assert [version for version, _ in relayed(act).made] == [1, 3]


def test_a_version_that_a_host_does_not_give_in_time_is_skipped_for_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        relay.publish(1, None)
        relay.publish(2, None)
        await asyncio.sleep(0.15)
        hosts.give(2)
        await turns()
        assert relay.metrics()["skipped"] == (1.0, 1.0)

    with caplog.at_level(logging.WARNING):
        assert [version for version, _ in relayed(act, offer_timeout_s=0.1).made] == [2]
    assert "version 1 is skipped: not every host gave it within 0.1 s" in caplog.messages


def test_while_it_is_held_nothing_is_offered_and_the_newest_follows() -> None:
    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        with relay.paused():
            for version in (1, 2):
                relay.publish(version, None)
                await turns()
                hosts.give(version)
                await turns()
            assert offers.made == []
            with pytest.raises(RuntimeError, match="held already"), relay.paused():
                pass

    assert [version for version, _ in relayed(act).made] == [2]


def test_a_version_that_nobody_gave_in_time_is_asked_for_again() -> None:
    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        relay.publish(1, None)
        await asyncio.sleep(0.15)
        # Nothing newer is published: the trainer waits for a batch.
        hosts.give(1)
        await turns()

    assert [version for version, _ in relayed(act, offer_timeout_s=0.1).made] == [1]


def test_a_version_that_engines_cannot_take_is_given_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        relay.publish(1, None)
        hosts.give(1)
        await turns()
        hosts.is_stepping = True
        offers.skip(1)
        await turns()
        # The next version is on its way, and this one cannot be had any more.
        assert hosts.published == [1]
        hosts.is_stepping = False
        offers.skip(1)
        await turns()
        assert hosts.published == [1, 1]
        hosts.give(1)
        await turns()

    assert [version for version, _ in relayed(act).made] == [1, 1]


def test_a_version_that_did_not_fit_into_the_store_is_put_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "RETRY_S", 0.01)

    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        hosts.failures = ["the object store is full"]
        relay.publish(1, None)
        hosts.give(1)
        await asyncio.sleep(0.05)
        assert hosts.published == [1, 1]
        hosts.give(1)
        await turns()

    assert [version for version, _ in relayed(act).made] == [1]


def test_when_the_held_version_is_lost_a_newer_one_is_offered() -> None:
    async def act(relay: Relay, hosts: Hosts, offers: Offers) -> None:
        relay.publish(1, None)
        hosts.give(1)
        await turns()
        with relay.paused():
            relay.publish(2, None)
            hosts.give(2)
            await turns()
            assert [version for version, _ in offers.made] == [1]
            # An engine that joined cannot have the version that the evaluation asks for, and nobody
            # has its parameters.
            offers.skip(1)
            assert [version for version, _ in offers.made] == [1, 2]

    relayed(act)
