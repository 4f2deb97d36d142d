"""Laws of taking turns at new weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import pytest

from areal_jax.records import Weights
from areal_jax.weights import rolling
from areal_jax.weights.rolling import InTurn, Turns, in_turns


@dataclass
class Versions:
    """A source of versions without parameters."""

    newest_version: int

    def newest(self, after: int) -> Weights | None:
        return Weights(self.newest_version, None) if self.newest_version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return Weights(self.newest_version, None)


def test_while_one_engine_swaps_the_others_go_on_with_what_they_have() -> None:
    first, second, third = in_turns([Versions(5)] * 3)
    assert first.newest(4) == Weights(5, None) == first.newest(4)
    assert third.newest(4) is None and second.newest(4) is None
    # It has swapped: the next may, which is who has asked first.
    first.swapped()
    assert second.newest(4) is None and third.newest(4) == Weights(5, None)
    third.swapped()
    assert second.newest(4) == Weights(5, None)
    # Who has the newest already asks for nothing, and holds nobody up.
    assert third.newest(5) is None and first.newest(5) is None
    second.swapped()
    assert [each.newest(4) is not None for each in (first, second, third)] == [True, False, False]


def test_who_waits_for_a_version_sleeps_until_others_have_swapped() -> None:
    first, second = in_turns([Versions(1)] * 2)
    assert first.newest(0) is not None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(second.wait, 1, 60.0)
        assert wait([waiting], 0.2).not_done
        first.swapped()
        assert waiting.result(10.0) == Weights(1, None) == second.newest(0)
    # It gives up waiting in time.
    assert first.wait(1, 0.1) == Weights(1, None) and first.newest(0) is None


def test_an_engine_that_never_comes_back_loses_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "_ASK_AGAIN_S", 0.0)
    first, second = in_turns([Versions(1)] * 2)
    assert first.newest(0) is not None and second.newest(0) is None
    monkeypatch.setattr(rolling, "_TURN_S", 0.0)
    assert second.newest(0) == Weights(1, None)


def test_an_eighth_of_many_engines_swaps_at_a_time_in_the_order_of_asking() -> None:
    num_engines, begun = 16, list[int]()

    def may_begin(number: int) -> Callable[[], None]:
        return lambda: begun.append(number)

    turns = Turns(lambda: num_engines)
    for number in range(16):
        turns.ask(number, may_begin(number))
    assert begun == [0, 1]
    # Who asks again, or has its turn, is given no second one.
    turns.ask(5, may_begin(5))
    turns.ask(0, may_begin(0))
    turns.over(1)
    assert begun == [0, 1, 2]
    # One that is lost before its turn is passed over; one that is lost when it has no wish ends nobody's turn.
    turns.over(3)
    turns.over(1)
    assert begun == [0, 1, 2]
    turns.over(0)
    assert begun == [0, 1, 2, 4]
    # Of up to fifteen, one: two swap, so that two must have ended before another begins.
    num_engines = 15
    turns.over(2)
    assert begun == [0, 1, 2, 4]
    turns.over(4)
    assert begun == [0, 1, 2, 4, 5]


def test_a_turn_that_is_given_from_elsewhere_is_asked_for_once_and_ends_with_the_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    versions, said = Versions(0), list[str]()
    monkeypatch.setattr(rolling, "_ASK_AGAIN_S", 1000.0)
    engine = InTurn(versions, ask=lambda _: said.append(f"wants {versions.newest_version}"), over=lambda: said.append("over"))
    # A turn that comes when it has swapped already is given back, and not kept for the next version.
    engine.give()
    assert said == ["over"]
    # Nothing newer: nothing to ask for.
    assert engine.newest(0) is None and said == ["over"]
    versions.newest_version = 1
    assert engine.newest(0) is None and engine.newest(0) is None and said == ["over", "wants 1"]
    # While it waits, a newer one comes: that is the one it takes, for as long as its turn lasts.
    versions.newest_version = 2
    engine.give()
    assert engine.newest(0) == Weights(2, None) and engine.newest(0) == Weights(2, None)
    engine.swapped()
    versions.newest_version = 3
    monkeypatch.setattr(rolling, "_ASK_AGAIN_S", 0.0)
    assert engine.newest(2) is None and said == ["over", "wants 1", "over", "wants 3"]
    # Not answered: it asks again.
    assert engine.newest(2) is None and said[-2:] == ["wants 3", "wants 3"]
    # Who can do nothing without the version sleeps until it is its turn.
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(engine.wait, 3, 60.0)
        assert wait([waiting], 0.2).not_done
        engine.give()
        assert waiting.result(10.0) == Weights(3, None) == engine.newest(2)
    engine.swapped()
    assert engine.wait(3, 0.1) == Weights(3, None) and engine.newest(2) is None
