"""Annotations of functions and dataclasses are checked whenever tests call them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import jaxtyping
import numpy as np
import pytest
from annotation_checks import check_annotations
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float


@check_annotations
def product(
    left: Float[np.ndarray, "B T"], right: Float[np.ndarray, "B T"]
) -> Float[np.ndarray, "B T"]:
    return left * right if left.sum() else left[0]


@check_annotations
@dataclass
class Pair:
    left: Float[np.ndarray, "B"]
    right: Float[np.ndarray, "B"]


def test_a_letter_is_one_size_in_arguments_and_result() -> None:
    ones = np.ones((2, 3))
    assert product(ones, ones).shape == (2, 3)
    for wrong in (np.ones((2, 4)), np.ones(3), np.ones((2, 3), int)):
        with pytest.raises(BeartypeCallHintViolation):
            product(ones, wrong)
    with pytest.raises(BeartypeCallHintViolation):
        product(0 * ones, ones)


def test_calls_do_not_share_sizes() -> None:
    for size in (1, 2):
        product(np.ones((size, 2)), product(np.ones((size, 2)), np.ones((size, 2))))


def test_fields_are_checked() -> None:
    Pair(np.ones(2), np.ones(2))
    with pytest.raises(BeartypeCallHintViolation):
        Pair(np.ones(2), np.ones(3))


def test_what_only_type_checkers_can_read_is_not_checked() -> None:
    @check_annotations
    def next_of(numbers: count[int], missing: Unknown) -> int:  # pyright: ignore # noqa: F821
        return next(numbers)

    assert next_of(count(3), None) == 3
    with pytest.raises(BeartypeCallHintViolation):
        next_of(iter("text"), None)


@pytest.mark.skipif(jaxtyping.config.jaxtyping_disable, reason="JAXTYPING_DISABLE is set")
def test_modules_with_shapes_are_checked() -> None:
    from areal_jax.rl.logprobs import values_before

    row: Any = np.ones(3)
    with pytest.raises(BeartypeCallHintViolation):
        values_before(row, row)
