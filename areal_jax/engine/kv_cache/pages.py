"""Pages of the KV cache: ownership, prefix caching by hashes (vLLM: `enable_prefix_caching`) and
LRU eviction, in numpy only.

A page holds `page_tokens` consecutive tokens of a sequence. Sequences with a common prefix share
its full pages; only the owner of a partial page writes to it. Every data shard of the mesh has its
own pages, slots and page numbers.

Axes: S slots, M pages of a slot's table.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator

import numpy as np
from jaxtyping import Int

from areal_jax.engine.sequence import Sequence


class PagePool:
    """Pages of one data shard: free, in use (reference-counted), or unused but cached for reuse."""

    def __init__(self, num_pages: int, page_tokens: int):
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._free = list(range(num_pages))[::-1]
        self._ref_counts = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # Cached pages that nobody uses, the least recently used first.
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of pages that `take` can return: nobody uses them."""
        return len(self._free) + len(self._evictable)

    @property
    def holds_any(self) -> bool:
        """Whether any page is in use or cached."""
        return len(self._free) < self.num_pages

    def take(self, count: int) -> list[int]:
        """Allocate empty pages, at most `num_free`; evict the least recently used cached ones."""
        while len(self._free) < count:
            page, _ = self._evictable.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Collection[int]) -> None:
        """Add a reference to these pages."""
        for page in pages:
            self._evictable.pop(page, None)
            self._ref_counts[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop a reference to these pages, which become free, or evictable if cached."""
        # A sequence's suffix is evicted before its prefix, which others are likelier to share.
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if page in self._hash_of:
                    self._evictable[page] = None
                else:
                    self._free.append(page)

    def match_prefix(self, tokens: Int[np.ndarray, "_"], salt: bytes = b"") -> list[int]:
        """Return the cached pages of the longest prefix of a sequence, with a reference added.

        Args:
            tokens: tokens of the sequence.
            salt: what else the content of pages depends on; other salts share no page.
        """
        pages: list[int] = []
        for digest in self._hashes(tokens, salt):
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        self.share(pages)
        return pages

    def cache_prefix(
        self, tokens: Int[np.ndarray, "_"], pages: list[int], salt: bytes = b""
    ) -> None:
        """Cache the full pages of a sequence until they are evicted."""
        for digest, page in zip(self._hashes(tokens, salt), pages, strict=False):
            if digest not in self._page_of and page not in self._hash_of:
                self._page_of[digest], self._hash_of[page] = page, digest

    def invalidate(self) -> None:
        """Forget all cached prefixes: other weights compute other keys and values."""
        self._free += self._evictable
        self._evictable.clear()
        self._page_of.clear()
        self._hash_of.clear()

    def forget(self, pages: Collection[int]) -> None:
        """Let no other sequence reuse these pages, which are in use."""
        for page in pages:
            if (digest := self._hash_of.pop(page, None)) is not None:
                del self._page_of[digest]

    def _hashes(self, tokens: Int[np.ndarray, "_"], salt: bytes) -> Iterator[bytes]:
        """Yield the hash of every full page: of its tokens and the hash of the page before."""
        data, size = np.ascontiguousarray(tokens, np.int32).tobytes(), 4 * self.page_tokens
        digest = salt
        for end in range(size, len(data) + 1, size):
            digest = hashlib.blake2b(digest + data[end - size : end], digest_size=16).digest()
            yield digest


class PageTable:
    """Page pools of all data shards, and the page table that the device reads."""

    def __init__(
        self,
        num_slots: int,
        num_shards: int,
        pages_per_shard: int,
        pages_per_slot: int,
        page_tokens: int,
    ):
        self.page_tokens = page_tokens
        self.pools = [PagePool(pages_per_shard, page_tokens) for _ in range(num_shards)]
        self.array = np.zeros((num_slots, pages_per_slot), np.int32)
        """[S, M]: page numbers within the slot's shard; undefined beyond a slot's last page."""
        self.changed = True
        """Whether `array` differs from the device's: the owner copies it and resets this."""
        self._num_held = np.zeros(num_slots, np.int32)

    def shard(self, slot: int) -> int:
        """Return the data shard of a slot."""
        return slot * len(self.pools) // len(self.array)

    def slots(self, shard: int) -> list[int]:
        """Return the slots of a data shard."""
        count = len(self.array) // len(self.pools)
        return list(range(shard * count, (shard + 1) * count))

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        return -(-num_tokens // self.page_tokens)

    def pool(self, sequence: Sequence) -> PagePool:
        """Return the pool of a sequence's pages."""
        assert sequence.slot is not None
        return self.pools[self.shard(sequence.slot)]

    def extend(self, sequence: Sequence, pages: list[int]) -> None:
        """Append pages, whose reference passes to the sequence."""
        slot, start = sequence.slot, len(sequence.pages)
        assert slot is not None
        sequence.pages.extend(pages)
        self.array[slot, start : len(sequence.pages)] = pages
        self._num_held[slot] = len(sequence.pages)
        self.changed = True

    def lacking(self, num_tokens: Int[np.ndarray, "S"]) -> list[int]:
        """Return the slots that need more pages to hold so many tokens each."""
        return np.flatnonzero(-(-num_tokens // self.page_tokens) > self._num_held).tolist()

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate the pages that a sequence lacks to hold so many tokens.

        Returns:
            False, and no page is allocated, if there are not enough free pages.
        """
        missing = self.num_pages(num_tokens) - len(sequence.pages)
        if missing > 0:
            pool = self.pool(sequence)
            if pool.num_free < missing:
                return False
            self.extend(sequence, pool.take(missing))
        return True

    def release(
        self, sequence: Sequence, cached: Int[np.ndarray, "_"] | None = None, salt: bytes = b""
    ) -> None:
        """Release a sequence's pages.

        Args:
            cached: tokens in the pages, to cache their prefix; None if they are incomplete.
            salt: as of `PagePool.match_prefix`.
        """
        pool, pages = self.pool(sequence), sequence.pages
        if cached is not None:
            pool.cache_prefix(cached, pages, salt)
        pool.release(pages)
        sequence.pages = []
        self._num_held[sequence.slot] = 0

    @property
    def num_used(self) -> int:
        """Number of pages in use."""
        return sum(pool.num_pages - pool.num_free for pool in self.pools)

    @property
    def size(self) -> int:
        """Number of pages of all shards."""
        return sum(pool.num_pages for pool in self.pools)
