"""Bounds of numeric settings, as validators of chz fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bound:
    """Values that a number may have. Other values of the field, such as None, are not bounded."""

    expected: str
    """The values in words, for messages."""
    allows: Callable[[float], bool]

    def __call__(self, record: Any, name: str) -> None:
        """Check one field of a record, as chz's validators do.

        Raises:
            ValueError: the value is out of bounds.
        """
        if self.is_violated_by(value := getattr(record, name)):
            # chz passes the name of the attribute that holds the raw value.
            raise ValueError(f"{name.removeprefix('X_')}={value}: expected {self.expected}")

    def is_violated_by(self, value: object) -> bool:
        """Whether a value is a number out of bounds."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return not self.allows(value)


POSITIVE = Bound("a number above 0", lambda value: value > 0)
NOT_NEGATIVE = Bound("0 or more", lambda value: value >= 0)
FRACTION = Bound("a number from 0 to 1", lambda value: 0 <= value <= 1)
BELOW_HALF = Bound("a number from 0 to less than 0.5", lambda value: 0 <= value < 0.5)
ABOVE_ONE = Bound("a number above 1", lambda value: value > 1)
ANY_NUMBER = Bound("any number", lambda value: True)


def at_most(highest: int) -> Bound:
    """A number from 0 to `highest`."""
    return Bound(f"0 to {highest}", lambda value: 0 <= value <= highest)
