from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.rollout.gate import Gate


def counted(gate: Gate, running: int = 0, accepted: int = 0, rejected: int = 0) -> Gate:
    """Count groups in a gate as a controller does."""
    for _ in range(accepted):
        gate.start()
        gate.accept()
    for _ in range(rejected):
        gate.start()
        gate.reject()
    for _ in range(running):
        gate.start()
    return gate


@pytest.mark.parametrize(
    ("max_running", "batch", "eta", "version", "running", "accepted", "rejected", "capacity"),
    [
        # AReaL's own table: min(max_running - running, (eta + version + 1) * batch - accepted -
        # running).
        (100, 4, 2, 0, 0, 0, 0, 12),
        (100, 4, 2, 5, 0, 0, 0, 32),
        (10, 4, 2, 0, 3, 0, 0, 7),
        (20, 4, 2, 0, 0, 5, 0, 7),
        (20, 8, 3, 0, 0, 15, 5, 17),
        (100, 8, 3, 0, 0, 30, 0, 2),
        (1000, 32, 5, 0, 0, 0, 0, 192),
        (1000, 32, 5, 20, 0, 0, 0, 832),
        (1000, 32, 5, 26, 0, 0, 0, 1000),
        # Nothing rejected counts, and nothing goes below zero.
        (20, 8, 3, 0, 0, 0, 100, 20),
        (100, 4, 0, 0, 4, 0, 0, 0),
    ],
)
def test_capacity_table(
    max_running: int,
    batch: int,
    eta: int,
    version: int,
    running: int,
    accepted: int,
    rejected: int,
    capacity: int,
) -> None:
    gate = counted(Gate(eta, batch, max_running, version, accepted=0), running, accepted, rejected)
    assert gate.capacity() == capacity


@pytest.mark.parametrize(
    ("eta", "batch", "version"),
    [(0, 1, 0), (0, 512, 3), (1, 32, 0), (4, 7, 11), (8, 100, 2), (16, 512, 9)],
)
def test_gate_is_equation_3(eta: int, batch: int, version: int) -> None:
    # Group number N may start iff floor((N - 1) / B) <= version + eta; N - 1 groups are before it.
    for n in range(1, 10_001):
        gate = Gate(eta, batch, max_running=1, version=version, accepted=n - 1)
        assert (gate.capacity() > 0) == ((n - 1) // batch <= version + eta)


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_resumed_gate_admits_what_its_version_allows(eta: int) -> None:
    # Six versions of 8 groups are trained on: (eta + 1) * 8 may start, fewer by what the buffer
    # holds.
    assert Gate(eta, 8, 1000, version=6).capacity() == (eta + 1) * 8
    assert Gate(eta, 8, 1000, version=6, accepted=6 * 8 + 5).capacity() == (eta + 1) * 8 - 5


def test_unbounded_staleness_keeps_the_concurrency_limit() -> None:
    gate = counted(Gate(None, 4, 10), accepted=10_000)
    assert gate.capacity() == 10
    assert gate.start() == 0


def test_start_returns_oldest_version_within_the_bound() -> None:
    # Batches of 2, eta 2: groups 12 and 13 train version 6, and so on to 16 and 17, which train
    # version 8 and need version 6.
    gate = Gate(2, 2, 100, version=6)
    assert [gate.start() for _ in range(6)] == [4, 4, 5, 5, 6, 6]
    gate.version = 7
    assert [gate.start() for _ in range(2)] == [7, 7]
    assert Gate(0, 4, 8, version=7).start() == 7
    assert Gate(2, 4, 8, version=1).start() == 0


def test_task_kind_has_its_own_staleness_bound() -> None:
    # Batches of 2 at version 3, 6 of them trained. Mathematics, eta 1: 2 * (1 + 3 + 1) = 10 in all;
    # code, eta 4: 16.
    gate = Gate(1, 2, 100, version=3, of_kind={"code": 4})
    assert (gate.capacity("math"), gate.capacity("code"), gate.capacity()) == (4, 10, 10)
    # Groups 7 to 10 train versions 3, 3, 4, 4, where programs may be 4 versions old and all else 1.
    assert [gate.start(kind) for kind in ("math", "code", "math", "code")] == [2, 0, 3, 0]
    assert (gate.capacity("math"), gate.capacity("code")) == (0, 6)
    with pytest.raises(RuntimeError, match="max_staleness 1, 4 of kind code"):
        gate.start("math")
    unbounded = Gate(0, 2, 7, of_kind={"code": None})
    assert (unbounded.capacity("math"), unbounded.capacity("code"), unbounded.capacity()) == (
        2,
        7,
        7,
    )


@given(
    st.sampled_from([None, 0, 1, 3]),
    st.integers(1, 5),
    st.integers(1, 9),
    st.lists(st.sampled_from(["start", "accept", "reject", "version"]), max_size=200),
)
def test_started_equals_running_plus_accepted_plus_rejected(
    eta: int | None, batch: int, max_running: int, events: list[str]
) -> None:
    gate, started = Gate(eta, batch, max_running), 0
    for event in events:
        if event == "version":
            gate.version += 1
        elif event == "start" and gate.capacity():
            gate.start()
            started += 1
        elif event in ("accept", "reject") and gate.running:
            getattr(gate, event)()
        assert started == gate.running + gate.accepted + gate.rejected
        assert gate.running <= max_running
        # Only a start adds to accepted + running, and only an open gate lets start: so the bound
        # holds after any event.
        assert eta is None or gate.accepted + gate.running <= (eta + gate.version + 1) * batch


def test_closed_gate_admits_no_group() -> None:
    gate = counted(Gate(0, 2, 8), running=2)
    with pytest.raises(RuntimeError, match="2 of at most 8 running"):
        gate.start()


def test_ending_without_a_running_group_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="expected a running group, found none"):
        Gate(0, 2, 8).accept()


def test_versions_must_increase() -> None:
    gate = Gate(0, 2, 8, version=3)
    with pytest.raises(ValueError, match="at least 3, found 2"):
        gate.version = 2


@pytest.mark.parametrize("field", ["version", "rejected", "accepted under unbounded staleness"])
def test_every_freed_capacity_wakes_a_waiter(field: str) -> None:
    async def waits() -> None:
        gate = counted(Gate(None if "accepted" in field else 0, 2, 2), running=2)
        waiter = asyncio.create_task(gate.wait_open())
        await asyncio.sleep(0)
        assert not waiter.done()
        if field == "version":
            counted_out(gate)
            await asyncio.sleep(0)
            assert not waiter.done()
            gate.version = 1
        elif field == "rejected":
            gate.reject()
        else:
            gate.accept()
        await asyncio.wait_for(waiter, 1)

    def counted_out(gate: Gate) -> None:
        gate.accept()
        gate.accept()

    asyncio.run(waits())


def test_capacity_of_one_admits_one_of_all_waiters() -> None:
    async def race() -> int:
        gate = counted(Gate(0, 1, 4), running=1)

        async def enter() -> None:
            await gate.wait_open()
            gate.start()

        waiters = [asyncio.create_task(enter()) for _ in range(3)]
        await asyncio.sleep(0)
        gate.reject()
        done, pending = await asyncio.wait(waiters, timeout=0.05)
        for waiter in pending:
            waiter.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        assert all(waiter.exception() is None for waiter in done)
        return len(done)

    assert asyncio.run(race()) == 1
