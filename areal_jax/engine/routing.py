"""Routing of requests to engines: by prefix affinity, else to the engine with the lowest load."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

import numpy as np
from jaxtyping import Int32

BLOCK_TOKENS = 64
"""Granularity of prefix affinity, in tokens."""

MAX_PREFIXES = 1 << 16
"""Number of remembered prefixes; the least recently used ones are evicted."""

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
"""Metrics that add up over engines; the others are means."""

Sums = Mapping[str, tuple[float, float]]
"""Sum and weight of each metric."""


class Router:
    """Load of each engine, and the prompt prefixes that its prefix cache may hold.

    A turn of a conversation is routed to the engine that sampled the turns before it, unless its
    load exceeds the lowest load by more than a quarter of its slots.
    """

    def __init__(self) -> None:
        self._patience: dict[int, int] = {}
        # Requested samples that are not finished, by engine.
        self._load: dict[int, int] = {}
        # The engine to which each prefix was routed last, by digest; least recently used first.
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def add_engine(self, number: int, num_slots: int) -> None:
        """Add an engine."""
        self._patience[number], self._load[number] = max(num_slots // 4, 1), 0

    def remove_engine(self, number: int) -> None:
        """Remove an engine."""
        del self._patience[number], self._load[number]

    def load(self, number: int) -> int:
        """Return the number of unfinished samples of an engine."""
        return self._load[number]

    def route(
        self, prompt_tokens: Int32[np.ndarray, "P"], num_samples: int, able: Collection[int] = ()
    ) -> int:
        """Choose an engine for a request, and add the request to its load.

        Args:
            prompt_tokens: The prompt.
            num_samples: Number of samples.
            able: Engines to choose from; empty: all.

        Returns:
            The engine's number.
        """
        prefixes = digests(prompt_tokens) if len(self._load) > 1 else []
        number = self._choose(prefixes, able or self._load)
        for prefix in prefixes:
            self._seen[prefix] = number
            self._seen.move_to_end(prefix)
        while len(self._seen) > MAX_PREFIXES:
            self._seen.popitem(last=False)
        self._load[number] += num_samples
        return number

    def complete(self, number: int, num_samples: int) -> None:
        """Subtract finished samples from an engine's load, if the engine still exists."""
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
    """Return a digest of each prefix of whole blocks, shortest first."""
    found, digest = list[bytes](), b""
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        digest = blake2b(
            digest + tokens[end - BLOCK_TOKENS : end].tobytes(), digest_size=16
        ).digest()
        found.append(digest)
    return found


def merge_engines(of_engines: Sequence[Sums]) -> dict[str, tuple[float, float]]:
    """Merge the metrics of several engines over the same period: counts add up, means are
    averaged.
    """
    sums, weights = defaultdict[str, float](float), defaultdict[str, float](float)
    for metrics in of_engines:
        for name, (total, weight) in metrics.items():
            sums[name] += total
            weights[name] += weight / len(of_engines) if name in TOTALS else weight
    return {name: (sums[name], weights[name]) for name in weights}


def merge_periods(earlier: Sums, later: Sums) -> dict[str, tuple[float, float]]:
    """Merge the metrics of one engine over two consecutive periods."""
    counts = set(TOTALS) - {"tokens_per_s"}
    found = dict(earlier)
    for name, (total, weight) in later.items():
        known, known_weight = earlier.get(name, (0.0, 0.0))
        found[name] = (known + total, weight if name in counts else known_weight + weight)
    return found
