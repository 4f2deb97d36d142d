"""Whose tokens lie in which pages of the device's memory: told on the host, in numpy alone.

A page holds `page_tokens` consecutive tokens of a sequence. Those that begin alike share their full
pages; only the owner of a page that is not full writes to it. Every data shard of the mesh has
pages, slots and numbers of its own.

Axes: S slots, M pages of a slot's table.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int


class PagePool:
    """The pages of one data shard: free, in use by so many, or idle: kept for whoever begins with
    the same tokens."""

    def __init__(self, num_pages: int, page_tokens: int):
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._free = list(range(num_pages))[::-1]
        self._uses = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        # The one that has been idle for longest first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that `take` can give: no one uses them."""
        return len(self._free) + len(self._idle)

    @property
    def holds_any(self) -> bool:
        """Whether any page is in use, or kept."""
        return len(self._free) < self.num_pages

    def take(self, count: int) -> list[int]:
        """Pages with nothing in them, at most `num_free`; what was idle for longest is given up
        first."""
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._uses[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Use these pages as well."""
        for page in pages:
            self._idle.pop(page, None)
            self._uses[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Use these pages no more. Those that none uses become free, or idle where they are
        kept."""
        # The end of a sequence goes before its beginning, which more sequences may have in common.
        for page in reversed(pages):
            self._uses[page] -= 1
            if self._uses[page] == 0:
                if page in self._name_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, tokens: Int[np.ndarray, "_"]) -> list[int]:
        """The full pages that are kept of the beginning of this sequence; they are now used by one
        more."""
        pages: list[int] = []
        for name in self._names(tokens):
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        self.share(pages)
        return pages

    def keep(self, tokens: Int[np.ndarray, "_"], pages: Sequence[int]) -> None:
        """Let the full pages of this sequence be found by others, for as long as there is room."""
        for name, page in zip(self._names(tokens), pages, strict=False):
            if name not in self._page_of and page not in self._name_of:
                self._page_of[name], self._name_of[page] = page, name

    def forget(self) -> None:
        """Let nothing be found any more: other weights would have computed something else."""
        self._free += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._name_of.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._name_of.pop(page)]
        self._free.append(page)

    def _names(self, tokens: Int[np.ndarray, "_"]) -> Iterator[bytes]:
        """A name for the content of every full page: a digest of its tokens and the name of the
        page before."""
        data, size = np.ascontiguousarray(tokens, np.int32).tobytes(), 4 * self.page_tokens
        name = b""
        for end in range(size, len(data) + 1, size):
            name = hashlib.blake2b(name + data[end - size : end], digest_size=16).digest()
            yield name


class PageTable:
    """Which pages hold the sequence of each slot."""

    def __init__(
        self,
        num_slots: int,
        num_shards: int,
        pages_per_shard: int,
        pages_per_slot: int,
        page_tokens: int,
    ):
        self.page_tokens = page_tokens
        self.stores = [PagePool(pages_per_shard, page_tokens) for _ in range(num_shards)]
        self.array = np.zeros((num_slots, pages_per_slot), np.int32)
        """[S, M]: numbers within the slot's shard; 0 beyond the last page of a slot."""
        self.changed = True
        """Whether the device has yet to see `array`: whoever shows it resets this."""
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]

    def shard(self, slot: int) -> int:
        """The data shard in which a slot lies."""
        return slot * len(self.stores) // len(self._pages)

    def slots(self, shard: int) -> list[int]:
        """The slots of a data shard."""
        count = len(self._pages) // len(self.stores)
        return list(range(shard * count, (shard + 1) * count))

    def store(self, slot: int) -> PagePool:
        """The pages among which a slot's are."""
        return self.stores[self.shard(slot)]

    def pages(self, slot: int) -> list[int]:
        """A slot's pages, in order."""
        return self._pages[slot]

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_tokens)

    def give(self, slot: int, pages: Sequence[int]) -> None:
        """Let a slot go on with these pages after those it has; it now answers for their use."""
        held = self._pages[slot]
        self.array[slot, len(held) : len(held) + len(pages)] = pages
        held.extend(pages)
        self.changed = True

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Take what pages a slot needs to hold so many tokens; False, and nothing, where there are
        not enough."""
        missing = self.num_pages(num_tokens) - len(self._pages[slot])
        if missing > 0:
            store = self.store(slot)
            if store.num_free < missing:
                return False
            self.give(slot, store.take(missing))
        return True

    def clear(self, slot: int, cached: Int[np.ndarray, "_"] | None = None) -> None:
        """Take a slot's pages from it. Args: cached: the tokens in them, where they are whole and
        may be found by others."""
        if cached is not None:
            self.store(slot).keep(cached, self._pages[slot])
        self.store(slot).release(self._pages[slot])
        self._pages[slot] = []

    @property
    def num_used(self) -> int:
        """Pages that someone uses."""
        return sum(store.num_pages - store.num_free for store in self.stores)

    @property
    def size(self) -> int:
        """Pages there are."""
        return sum(store.num_pages for store in self.stores)
