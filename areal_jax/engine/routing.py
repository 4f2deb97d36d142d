"""Which of several engines a request goes to: where its beginning is known, or where least is to be
done."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

import numpy as np
from jaxtyping import Int32

BLOCK_TOKENS = 64
"""Beginnings of prompts are known by whole blocks of so many tokens."""

MAX_PREFIXES = 1 << 16
"""Beginnings that are remembered; then the ones longest unused are forgotten."""

TOTALS = (
    *(
        "tokens",
        "dispatches",
        "swaps",
        "requests",
        "prefill_tokens",
        "recompute_tokens",
        "preemptions",
        "wait_s",
    ),
    *("tokens_per_s", "compilations"),
)
"""Measures of which those of several engines add up to one of all; the others are means."""

Sums = Mapping[str, tuple[float, float]]
"""Sum and weight of each measure."""


class Router:
    """What engines, by number, have to do, and which prefixes of prompts each of them may still
    hold.

    A turn of a conversation goes to the engine that drew the turns before it, whose cache may hold
    them, unless that has a quarter of its slots more to do than another."""

    def __init__(self) -> None:
        self._patience: dict[int, int] = {}
        # Samples that each engine has been asked for and has not answered.
        self._load: dict[int, int] = {}
        # By the digest of a beginning, the engine that was last given it; least recently used
        # first.
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def join(self, number: int, num_slots: int) -> None:
        """There is an engine of that number."""
        self._patience[number], self._load[number] = max(num_slots // 4, 1), 0

    def leave(self, number: int) -> None:
        """There is no such engine any more."""
        del self._patience[number], self._load[number]

    def load(self, number: int) -> int:
        """Samples that an engine was asked for and has not answered."""
        return self._load[number]

    def give(
        self, prompt_tokens: Int32[np.ndarray, "P"], num_samples: int, able: Collection[int] = ()
    ) -> int:
        """The engine that is to answer, which from now on has so much more to do. Args: able:
        engines to choose from; empty: all."""
        prefixes = digests(prompt_tokens) if len(self._load) > 1 else []
        number = self._choose(prefixes, able or self._load)
        for prefix in prefixes:
            self._seen[prefix] = number
            self._seen.move_to_end(prefix)
        while len(self._seen) > MAX_PREFIXES:
            self._seen.popitem(last=False)
        self._load[number] += num_samples
        return number

    def done(self, number: int, num_samples: int) -> None:
        """An engine, if it is still there, has so much less to do."""
        if number in self._load:
            self._load[number] -= num_samples

    def _choose(self, prefixes: Sequence[bytes], able: Collection[int]) -> int:
        least = min(able, key=self._load.__getitem__)
        known = next(
            (self._seen[each] for each in reversed(prefixes) if self._seen.get(each) in able), None
        )
        if known is not None and self._load[known] - self._load[least] <= self._patience[known]:
            return known
        return least


def digests(tokens: Int32[np.ndarray, "P"]) -> list[bytes]:
    """One of each beginning of whole blocks, shortest first."""
    found, digest = list[bytes](), b""
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        digest = blake2b(
            digest + tokens[end - BLOCK_TOKENS : end].tobytes(), digest_size=16
        ).digest()
        found.append(digest)
    return found


def together(of_engines: Sequence[Sums]) -> dict[str, tuple[float, float]]:
    """The measures of several engines as those of one: what is counted in one time adds up, what is
    a mean stays one."""
    sums, weights = defaultdict[str, float](float), defaultdict[str, float](float)
    for measures in of_engines:
        for name, (total, weight) in measures.items():
            sums[name] += total
            weights[name] += weight / len(of_engines) if name in TOTALS else weight
    return {name: (sums[name], weights[name]) for name in weights}


def in_turn(earlier: Sums, later: Sums) -> dict[str, tuple[float, float]]:
    """The measures of one engine over two times, one after the other."""
    counts = set(TOTALS) - {"tokens_per_s"}
    found = dict(earlier)
    for name, (total, weight) in later.items():
        known, known_weight = earlier.get(name, (0.0, 0.0))
        found[name] = (known + total, weight if name in counts else known_weight + weight)
    return found
