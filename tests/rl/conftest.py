"""Losses never broadcast one rank against another: [B] meeting [B, 1] is an error here, not a
silent [B, B]."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def ranks_are_never_promoted() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"):
        yield
