"""Search in passages of text with BM25."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_QUERY_WORDS = 100


class Index:
    """Passages, indexed by their words. A query returns the same passages in the same order on
    every machine.
    """

    def __init__(self, passages: Sequence[str]) -> None:
        if not passages:
            raise ValueError("expected passages to search in, found none")
        self._passages = passages
        self._ranking = _bm25()
        self._ranking.index([words(passage) for passage in passages], show_progress=False)

    def search(self, query: str, num_results: int) -> list[str]:
        """Return the best passages, best first; none if no word matches."""
        known = [
            word for word in words(query)[:MAX_QUERY_WORDS] if word in self._ranking.vocab_dict
        ]
        if not known:
            return []
        scores = self._ranking.get_scores(known)
        best: list[int] = np.argsort(-scores, kind="stable")[:num_results].tolist()
        return [self._passages[place] for place in best if scores[place] > 0]


def words(text: str) -> list[str]:
    """Return the words and numbers of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


def _bm25() -> Any:
    if "jax" not in sys.modules:
        # The library would start jax, and thereby claim an accelerator, for a sort that numpy does
        # as well.
        # as well.
        sys.modules["jax"] = None  # type: ignore[assignment]
        try:
            import bm25s
        finally:
            del sys.modules["jax"]
    else:
        import bm25s
    return bm25s.BM25()
