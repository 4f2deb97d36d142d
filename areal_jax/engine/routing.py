"""Routing of requests to engines: by prefix affinity, else to the engine with the lowest load."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush

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
        # Heap of load and engine; outdated entries are dropped when they reach the top.
        self._by_load: list[tuple[int, int]] = []
        # The engine to which each prefix was routed last, by digest; least recently used first.
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def add_engine(self, number: int, num_slots: int) -> None:
        """Add an engine."""
        self._patience[number] = max(num_slots // 4, 1)
        self._set_load(number, 0)

    def remove_engine(self, number: int) -> None:
        """Remove an engine."""
        del self._patience[number], self._load[number]

    def load(self, number: int) -> int:
        """Return the number of unfinished samples of an engine."""
        return self._load[number]

    def route(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        is_able: Callable[[int], bool] = lambda _: True,
    ) -> int:
        """Choose an engine for a request, and add the request to its load.

        Args:
            prompt_tokens: The prompt.
            num_samples: Number of samples.
            is_able: Whether to choose an engine; if none is able, all are.

        Returns:
            The engine's number.
        """
        prefixes = self._digests(prompt_tokens)
        return self._add(self._choose(prefixes, is_able), prefixes, num_samples)

    def assign(self, number: int, prompt_tokens: Int32[np.ndarray, "P"], num_samples: int) -> int:
        """Add a request to the load of a given engine, whose number is returned."""
        return self._add(number, self._digests(prompt_tokens), num_samples)

    def complete(self, number: int, num_samples: int) -> None:
        """Subtract finished samples from an engine's load, if the engine still exists."""
        if number in self._load:
            self._set_load(number, self._load[number] - num_samples)

    def _digests(self, prompt_tokens: Int32[np.ndarray, "P"]) -> list[bytes]:
        return digests(prompt_tokens) if len(self._load) > 1 else []

    def _add(self, number: int, prefixes: Sequence[bytes], num_samples: int) -> int:
        for prefix in prefixes:
            self._seen[prefix] = number
            self._seen.move_to_end(prefix)
        while len(self._seen) > MAX_PREFIXES:
            self._seen.popitem(last=False)
        self._set_load(number, self._load[number] + num_samples)
        return number

    def _set_load(self, number: int, load: int) -> None:
        self._load[number] = load
        heappush(self._by_load, (load, number))
        if len(self._by_load) > 4 * len(self._load) + 64:
            self._by_load = [(load, number) for number, load in self._load.items()]
            heapify(self._by_load)

    def _choose(self, prefixes: Sequence[bytes], is_able: Callable[[int], bool]) -> int:
        least = self._find_least(is_able)
        if least is None:
            is_able = self._load.__contains__
            least = self._find_least(is_able)
            assert least is not None
        for prefix in reversed(prefixes):
            known = self._seen.get(prefix)
            if known is not None and known in self._load and is_able(known):
                lead = self._load[known] - self._load[least]
                return known if lead <= self._patience[known] else least
        return least

    def _find_least(self, is_able: Callable[[int], bool]) -> int | None:
        """Return the able engine with the lowest load, the first of several."""
        passed, found = list[tuple[int, int]](), None
        while self._by_load and found is None:
            load, number = self._by_load[0]
            if self._load.get(number) == load and is_able(number):
                found = number
            else:
                heappop(self._by_load)
                if self._load.get(number) == load:
                    passed.append((load, number))
        for entry in passed:
            heappush(self._by_load, entry)
        return found


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
