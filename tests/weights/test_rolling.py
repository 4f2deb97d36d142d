"""Laws of taking turns at new weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import pytest

from areal_jax.records import Weights
from areal_jax.weights import rolling
from areal_jax.weights.rolling import InTurn, Rolling, Turns


@dataclass
class Versions:
    """A source of versions without parameters."""

    newest_version: int

    def newest(self, after: int) -> Weights | None:
        return Weights(self.newest_version, None) if self.newest_version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return Weights(self.newest_version, None)


def test_while_one_engine_swaps_the_others_go_on_with_what_they_have() -> None:
    turns = Rolling([Versions(5)] * 3)
    first, second, third = (turns.of(number) for number in range(3))
    assert first.newest(4) == Weights(5, None)
    assert second.newest(4) is None and third.newest(4) is None
    # It has swapped: the next may.
    turns.swapped(0)
    assert second.newest(4) == Weights(5, None) and third.newest(4) is None
    # Who asks again has swapped too, whether or not there is more to take.
    assert second.newest(5) is None
    assert third.newest(4) == Weights(5, None) and third.newest(4) == Weights(5, None)


def test_another_engines_word_ends_no_turn() -> None:
    turns = Rolling([Versions(1)] * 2)
    assert turns.of(0).newest(0) is not None
    turns.swapped(1)
    assert turns.of(1).newest(0) is None


def test_who_waits_for_a_version_sleeps_until_others_have_swapped() -> None:
    turns = Rolling([Versions(1)] * 2)
    assert turns.of(0).newest(0) is not None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(turns.of(1).wait, 1, 60.0)
        assert wait([waiting], 0.2).not_done
        turns.swapped(0)
        assert waiting.result(10.0) == Weights(1, None)
    # It takes none from the others by that, and gives up waiting in time.
    assert turns.of(0).newest(0) == Weights(1, None)
    assert turns.of(1).wait(1, 0.1) == Weights(1, None)


def test_an_engine_that_never_comes_back_loses_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Rolling([Versions(1)] * 2)
    assert turns.of(0).newest(0) is not None and turns.of(1).newest(0) is None
    monkeypatch.setattr(rolling, "_TURN_S", 0.0)
    assert turns.of(1).newest(0) == Weights(1, None)


def test_an_eighth_of_many_engines_swaps_at_a_time() -> None:
    turns = Turns()
    assert [turns.take(number, 16) for number in range(16)] == [True] * 2 + [False] * 14
    turns.over(1)
    # Who has its turn is given no second one; one more may begin.
    assert [turns.take(number, 16) for number in (0, 7, 9)] == [False, True, False]
    # Of up to fifteen, one.
    assert [Turns().take(0, 15), Turns().take(0, 1)] == [True, True]
    few = Turns()
    assert [few.take(number, 15) for number in range(15)] == [True] + [False] * 14


def test_a_turn_that_is_given_from_elsewhere_is_asked_for_once_and_ends_with_the_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    versions, asked = Versions(0), list[int]()
    monkeypatch.setattr(rolling, "_ASK_AGAIN_S", 1000.0)
    engine = InTurn(versions, lambda: asked.append(versions.newest_version))
    # A turn that comes too late, when it has swapped already, is not kept for the next version.
    engine.give()
    # Nothing newer: nothing to ask for.
    assert engine.newest(0) is None and asked == []
    versions.newest_version = 1
    assert engine.newest(0) is None and engine.newest(0) is None and asked == [1]
    # While it waits, a newer one comes: that is the one it takes, for as long as its turn lasts.
    versions.newest_version = 2
    engine.give()
    assert engine.newest(0) == Weights(2, None) and engine.newest(0) == Weights(2, None)
    engine.swapped()
    versions.newest_version = 3
    monkeypatch.setattr(rolling, "_ASK_AGAIN_S", 0.0)
    assert engine.newest(2) is None and asked == [1, 3]
    # Not answered: it asks again.
    assert engine.newest(2) is None and asked == [1, 3, 3]
    # Who can do nothing without the version sleeps until it is its turn.
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(engine.wait, 3, 60.0)
        assert wait([waiting], 0.2).not_done
        engine.give()
        assert waiting.result(10.0) == Weights(3, None) == engine.newest(2)
    engine.swapped()
    assert engine.wait(3, 0.1) == Weights(3, None) and engine.newest(2) is None
