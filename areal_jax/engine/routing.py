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
        "draft_tokens",
        "accepted_draft_tokens",
        "wait_s",
    ),
    *("tokens_per_s", "compilations"),
)
"""Metrics that add up over engines; the others are means."""

Sums = Mapping[str, tuple[float, float]]
"""Sum and weight of each metric."""


class EngineLoads(dict[int, int]):
    """Load of each engine by its number, from which the lowest is found without a search.

    `loads[number] = load` and `del loads[number]` alone change it.
    """

    def __init__(self) -> None:
        super().__init__()
        # Heap of load and engine; outdated entries are dropped when they reach the top.
        self._entries: list[tuple[int, int]] = []

    def __setitem__(self, number: int, load: int) -> None:
        super().__setitem__(number, load)
        heappush(self._entries, (load, number))
        if len(self._entries) > 4 * len(self) + 64:
            self._entries = [(load, number) for number, load in self.items()]
            heapify(self._entries)

    def find_least(self, is_able: Callable[[int], bool] | None = None) -> int | None:
        """Return the able engine with the lowest load, the first of several; None: none is able."""
        entries, passed = self._entries, list[tuple[int, int]]()
        while entries:
            load, number = entries[0]
            if self.get(number) != load:
                heappop(entries)
            elif is_able is None or is_able(number):
                break
            else:
                passed.append(heappop(entries))
        found = entries[0][1] if entries else None
        for entry in passed:
            heappush(entries, entry)
        return found


class Router:
    """Load of each engine, and the prompt prefixes that its prefix cache may hold.

    A turn of a conversation is routed to the engine that sampled the turns before it, unless its
    load exceeds the lowest load by more than a quarter of its slots.
    """

    def __init__(self) -> None:
        self._patience: dict[int, int] = {}
        # Requested samples that are not finished.
        self._loads = EngineLoads()
        # The engine to which each prefix was routed last, by digest; least recently used first.
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def add_engine(self, number: int, num_slots: int) -> None:
        """Add an engine."""
        self._patience[number] = max(num_slots // 4, 1)
        self._loads[number] = 0

    def remove_engine(self, number: int) -> None:
        """Remove an engine."""
        del self._patience[number], self._loads[number]

    def load(self, number: int) -> int:
        """Return the number of unfinished samples of an engine."""
        return self._loads[number]

    def route(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        is_able: Callable[[int], bool] | None = None,
    ) -> int:
        """Choose an engine for a request, and add the request to its load.

        Args:
            prompt_tokens: The prompt.
            num_samples: Number of samples.
            is_able: Whether to choose an engine; if none is able, or without it, all are.

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
        if number in self._loads:
            self._loads[number] -= num_samples

    def _digests(self, prompt_tokens: Int32[np.ndarray, "P"]) -> list[bytes]:
        return digests(prompt_tokens) if len(self._loads) > 1 else []

    def _add(self, number: int, prefixes: Sequence[bytes], num_samples: int) -> int:
        for prefix in prefixes:
            self._seen[prefix] = number
            self._seen.move_to_end(prefix)
        while len(self._seen) > MAX_PREFIXES:
            self._seen.popitem(last=False)
        self._loads[number] += num_samples
        return number

    def _choose(self, prefixes: Sequence[bytes], is_able: Callable[[int], bool] | None) -> int:
        least = self._loads.find_least(is_able)
        if least is None:
            is_able, least = None, self._loads.find_least()
            assert least is not None
        for prefix in reversed(prefixes):
            known = self._seen.get(prefix)
            if known is None or known not in self._loads:
                continue
            if is_able is None or is_able(known):
                lead = self._loads[known] - self._loads[least]
                return known if lead <= self._patience[known] else least
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
