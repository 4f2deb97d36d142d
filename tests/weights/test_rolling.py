"""Laws of the rolling weight update."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import pytest

from areal_jax.records import Weights
from areal_jax.weights import rolling
from areal_jax.weights.rolling import RollingSource, RollingUpdate, rolling_sources


@dataclass
class Versions:
    """A source of versions without parameters."""

    newest_version: int

    def newest(self, after: int) -> Weights | None:
        return Weights(self.newest_version, None) if self.newest_version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return Weights(self.newest_version, None)


def test_other_engines_keep_decoding_while_one_swaps() -> None:
    first, second, third = rolling_sources([Versions(5)] * 3)
    assert first.newest(4) == Weights(5, None) == first.newest(4)
    assert third.newest(4) is None and second.newest(4) is None
    # It has swapped: the next may, which is who has asked first.
    first.complete_swap()
    assert second.newest(4) is None and third.newest(4) == Weights(5, None)
    third.complete_swap()
    assert second.newest(4) == Weights(5, None)
    # Who has the newest already asks for nothing, and holds nobody up.
    assert third.newest(5) is None and first.newest(5) is None
    second.complete_swap()
    assert [each.newest(4) is not None for each in (first, second, third)] == [True, False, False]


def test_wait_blocks_until_other_engines_have_swapped() -> None:
    first, second = rolling_sources([Versions(1)] * 2)
    assert first.newest(0) is not None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(second.wait, 1, 60.0)
        assert wait([waiting], 0.2).not_done
        first.complete_swap()
        assert waiting.result(10.0) == Weights(1, None) == second.newest(0)
    # It gives up waiting in time.
    assert first.wait(1, 0.1) == Weights(1, None) and first.newest(0) is None


def test_turn_of_a_hanging_engine_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "_REQUEST_AGAIN_S", 0.0)
    first, second = rolling_sources([Versions(1)] * 2)
    assert first.newest(0) is not None and second.newest(0) is None
    monkeypatch.setattr(rolling, "_TURN_S", 0.0)
    assert second.newest(0) == Weights(1, None)


def test_an_eighth_of_many_engines_swaps_in_order_of_request() -> None:
    num_engines, begun = 16, list[int]()

    def may_begin(number: int) -> Callable[[float], None]:
        return lambda _ticket: begun.append(number)

    rolling_update = RollingUpdate(lambda: num_engines)
    for number in range(16):
        rolling_update.request_turn(number, 1.0, may_begin(number))
    assert begun == [0, 1]
    # Who asks again keeps its place; who has its turn is notified again, and gets no second
    # one.
    rolling_update.request_turn(5, 2.0, may_begin(5))
    rolling_update.request_turn(0, 2.0, may_begin(0))
    assert begun == [0, 1, 0] and rolling_update.swapping == {0, 1}
    del begun[-1]
    rolling_update.end_turn(1, 1.0)
    assert begun == [0, 1, 2]
    # One that is lost before its turn is passed over; one that is lost when it has no wish ends
    # nobody's turn.
    rolling_update.end_turn(3, 2.0)
    rolling_update.end_turn(1, 2.0)
    assert begun == [0, 1, 2]
    rolling_update.end_turn(0, 2.0)
    assert begun == [0, 1, 2, 4]
    # Of up to fifteen, one: two swap, so that two must have ended before another begins.
    num_engines = 15
    rolling_update.end_turn(2, 2.0)
    assert begun == [0, 1, 2, 4]
    rolling_update.end_turn(4, 2.0)
    assert begun == [0, 1, 2, 4, 5]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_remote_turn_is_requested_once_and_ends_with_the_swap() -> None:
    versions, messages, clock = Versions(0), list[str](), Clock()
    engine = RollingSource(
        versions,
        request_turn=lambda ticket, _: messages.append(
            f"wants {versions.newest_version} at {ticket:g}"
        ),
        end_turn=lambda ticket: messages.append(f"over {ticket:g}"),
        clock=clock,
    )
    # A turn that comes when it has swapped already is given back, and not kept for the next
    # version.
    engine.grant_turn(99.0)
    assert messages == ["over 99"]
    # Nothing newer: nothing to ask for.
    assert engine.newest(0) is None and messages == ["over 99"]
    versions.newest_version = 1
    assert (
        engine.newest(0) is None and engine.newest(0) is None and messages[1:] == ["wants 1 at 100"]
    )
    # While it waits, a newer one comes: that is the one it takes, for as long as its turn lasts.
    versions.newest_version = 2
    engine.grant_turn(100.0)
    assert engine.newest(0) == Weights(2, None) and engine.newest(0) == Weights(2, None)
    engine.complete_swap()
    assert messages[2:] == ["over 100"]
    # Not answered: it asks again.
    versions.newest_version, clock.now_s = 3, 101.0
    assert engine.newest(2) is None and messages[3:] == ["wants 3 at 101"]
    clock.now_s = 102.0
    assert engine.newest(2) is None and messages[4:] == ["wants 3 at 102"]
    # Who can do nothing without the version sleeps until it is its turn.
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(engine.wait, 3, 60.0)
        assert wait([waiting], 0.2).not_done
        engine.grant_turn(102.0)
        assert waiting.result(10.0) == Weights(3, None) == engine.newest(2)
    engine.complete_swap()
    assert engine.wait(3, 0.1) == Weights(3, None) and engine.newest(2) is None


def test_a_late_or_repeated_turn_starts_no_swap() -> None:
    over, clock = list[float](), Clock()
    engine = RollingSource(
        Versions(1), request_turn=lambda _ticket, _give: None, end_turn=over.append, clock=clock
    )
    assert engine.newest(0) is None
    # Too late: by the end of a swap the turn might be another engine's.
    clock.now_s += rolling._BEGIN_S
    engine.grant_turn(100.0)
    assert engine.newest(0) is None and over == [100.0]
    # It has asked again meanwhile; it is notified of that turn twice, the second time after it has
    # swapped and wants the next.
    requested_s = clock.now_s
    engine.grant_turn(requested_s)
    assert engine.newest(0) == Weights(1, None)
    engine.complete_swap()
    clock.now_s += 1.0
    assert engine.newest(0) is None
    engine.grant_turn(requested_s)
    assert engine.newest(0) is None and over == [100.0, requested_s, requested_s]
    # A turn that it has had for too long without beginning to swap, it gives back and asks anew.
    engine.grant_turn(clock.now_s)
    assert engine.newest(0) == Weights(1, None)
    clock.now_s += rolling._BEGIN_S
    assert engine.newest(0) is None and over[-1] == clock.now_s - rolling._BEGIN_S


def test_the_end_of_one_turn_never_ends_another() -> None:
    clock, begun = Clock(), list[tuple[int, float]]()
    rolling_update = RollingUpdate(lambda: 2, clock)

    def ask(number: int, ticket: float) -> None:
        rolling_update.request_turn(number, ticket, lambda granted: begun.append((number, granted)))

    ask(0, 1.0)
    ask(1, 1.0)
    rolling_update.end_turn(0, 0.5)
    assert begun == [(0, 1.0)]
    # A lost answer is given again, a lost end is noticed when the time is over, without anyone
    # asking.
    ask(0, 2.0)
    assert begun == [(0, 1.0), (0, 1.0)]
    clock.now_s += rolling._TURN_S
    rolling_update.grant_turns()
    assert begun[2:] == [(1, 1.0)] and rolling_update.swapping == {1}
    rolling_update.remove_engine(1)
    assert rolling_update.swapping == frozenset()
