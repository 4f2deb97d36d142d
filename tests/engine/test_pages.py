"""Pages: no page leaks or has two writers, and memory in use follows the live tokens."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.engine.kv_cache.pages import PagePool, PageTable
from areal_jax.engine.sequence import Sequence
from areal_jax.records import Request, Sampling

PAGE = 16


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def in_slot(slot: int) -> Sequence:
    return Sequence(Request(str(slot), tokens(1), 1, Sampling(1), seed=0), 0, slot=slot)


def test_a_page_is_free_after_its_last_reference():
    pool = PagePool(4, PAGE)
    pages = pool.take(3)
    pool.share(pages[:2])
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 2
    pool.release(pages[:2])
    assert pool.num_free == 4


def test_match_prefix_finds_full_cached_pages_only():
    pool = PagePool(8, PAGE)
    sequence = tokens(3 * PAGE + 5)
    pages = pool.take(4)
    pool.cache_prefix(sequence, pages)
    pool.release(pages)
    assert pool.num_free == 8
    # The fourth page is partial; another continuation shares two pages.
    assert pool.match_prefix(np.concatenate([sequence, tokens(40, 1)])) == pages[:3]
    assert pool.match_prefix(np.concatenate([sequence[: 2 * PAGE], tokens(40, 1)])) == pages[:2]
    assert pool.match_prefix(sequence[: 2 * PAGE - 1]) == pages[:1]
    # The same tokens after another prefix are another page.
    assert pool.match_prefix(sequence[PAGE:]) == []
    assert pool.num_free == 5


def test_eviction_is_lru_and_drops_suffix_pages_first():
    pool = PagePool(4, PAGE)
    old, new = tokens(2 * PAGE, 1), tokens(2 * PAGE, 2)
    for sequence in (old, new):
        pages = pool.take(2)
        pool.cache_prefix(sequence, pages)
        pool.release(pages)
    pool.take(1)
    assert (len(pool.match_prefix(new)), len(pool.match_prefix(old))) == (2, 1)


def test_a_matched_prefix_becomes_the_most_recently_used():
    pool = PagePool(2, PAGE)
    first, second = tokens(PAGE, 1), tokens(PAGE, 2)
    for sequence in (first, second):
        pages = pool.take(1)
        pool.cache_prefix(sequence, pages)
        pool.release(pages)
    pool.release(pool.match_prefix(first))
    pool.take(1)
    assert (len(pool.match_prefix(first)), len(pool.match_prefix(second))) == (1, 0)


def test_invalidation_uncaches_prefixes_and_leaks_no_page():
    pool = PagePool(4, PAGE)
    sequence = tokens(2 * PAGE)
    pages, other = pool.take(2), pool.take(1)
    pool.cache_prefix(sequence, pages)
    pool.release(pages)
    pool.invalidate()
    assert pool.match_prefix(sequence) == []
    assert pool.num_free == 3
    pool.release(other)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
    assert not PagePool(4, PAGE).holds_any and pool.holds_any


@pytest.mark.parametrize("num_shards", [1, 2])
def test_memory_in_use_is_at_most_a_tenth_above_live_tokens(num_shards: int):
    """Groups of 4 share prompts of 100 to 900 tokens; each sample adds 8 tokens per dispatch,
    log-normal many in all."""
    rng = np.random.default_rng(num_shards)
    table = PageTable(32, num_shards, 32 * 256, 256, PAGE)
    free, live, ratios = list(range(32)), dict[int, list[int]](), []
    sequences = [in_slot(slot) for slot in range(32)]
    shared: dict[int, tuple[int, int]] = {}
    for dispatch in range(600):
        while len(free) >= 4:
            group = [slot for slot in free if table.shard(slot) == table.shard(free[0])][:4]
            if len(group) < 4:
                break
            length = int(rng.integers(100, 900))
            pool = table.pool(sequences[group[0]])
            prompt = pool.take(table.num_pages(length))
            for slot in group:
                free.remove(slot)
                full = prompt[: length // PAGE]
                pool.share(full)
                table.extend(sequences[slot], full)
                live[slot] = [length, length + min(int(rng.lognormal(6, 1)), 3000)]
                shared[slot] = (dispatch * 100 + group[0], length // PAGE * PAGE)
            pool.release(prompt)
        for slot, (length, end) in list(live.items()):
            live[slot][0] = min(length + 8, end)
            assert table.reserve(sequences[slot], live[slot][0])
            pages = sequences[slot].pages
            assert table.array[slot, : len(pages)].tolist() == pages
        # Live tokens: each prompt's full pages once, and what every sample has beyond them.
        common = {shared[slot] for slot in live}
        alive = sum(length for _, length in common) + sum(
            length - shared[slot][1] for slot, (length, _) in live.items()
        )
        ratios.append(table.num_used * PAGE / alive)
        for slot, (length, end) in list(live.items()):
            if length == end:
                table.release(sequences[slot])
                del live[slot]
                free.append(slot)
    assert np.mean(ratios) <= 1.1
    for slot in live:
        table.release(sequences[slot])
    assert table.num_used == 0
    owners = [page for pool in table.pools for page in pool.take(pool.num_free)]
    assert len(owners) == table.size


def test_reserve_allocates_all_lacking_pages_or_none():
    table = PageTable(2, 1, 3, 3, PAGE)
    first, second = in_slot(0), in_slot(1)
    needed = np.array([2 * PAGE, 2 * PAGE])
    assert table.lacking(needed) == [0, 1]
    assert table.reserve(first, 2 * PAGE)
    assert table.lacking(needed) == [1]
    assert not table.reserve(second, 2 * PAGE)
    assert table.num_used == 2 and second.pages == []
    table.release(first)
    assert table.lacking(needed) == [0, 1]
    assert table.reserve(second, 2 * PAGE)
