"""Laws of taking turns at new weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from areal_jax.records import Weights
from areal_jax.weights import rolling
from areal_jax.weights.rolling import Rolling


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


def test_who_waits_for_a_version_waits_for_no_turn() -> None:
    turns = Rolling([Versions(1)] * 2)
    assert turns.of(0).newest(0) is not None
    assert turns.of(1).wait(1, 1.0) == Weights(1, None)


def test_an_engine_that_never_comes_back_loses_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Rolling([Versions(1)] * 2)
    assert turns.of(0).newest(0) is not None and turns.of(1).newest(0) is None
    monkeypatch.setattr(rolling, "_TURN_S", 0.0)
    assert turns.of(1).newest(0) == Weights(1, None)
