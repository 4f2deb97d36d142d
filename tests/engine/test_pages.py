"""Pages: nothing is lost, nothing is used twice, and memory follows what is alive."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.engine.kv_cache.pages import PagePool, PageTable

PAGE = 16


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def test_a_page_is_free_again_when_its_last_user_has_gone():
    store = PagePool(4, PAGE)
    pages = store.take(3)
    store.share(pages[:2])
    assert store.num_free == 1
    store.release(pages)
    assert store.num_free == 2
    store.release(pages[:2])
    assert store.num_free == 4


def test_full_pages_of_a_kept_beginning_are_found_and_no_more():
    store = PagePool(8, PAGE)
    sequence = tokens(3 * PAGE + 5)
    pages = store.take(4)
    store.cache_prefix(sequence, pages)
    store.release(pages)
    assert store.num_free == 8
    # The fourth page is not full; of another continuation two pages are the same.
    assert store.match_prefix(np.concatenate([sequence, tokens(40, 1)])) == pages[:3]
    assert store.match_prefix(np.concatenate([sequence[: 2 * PAGE], tokens(40, 1)])) == pages[:2]
    assert store.match_prefix(sequence[: 2 * PAGE - 1]) == pages[:1]
    # The same tokens behind another beginning are something else.
    assert store.match_prefix(sequence[PAGE:]) == []
    assert store.num_free == 5


def test_what_was_idle_for_longest_makes_room_first_and_ends_before_beginnings():
    store = PagePool(4, PAGE)
    old, new = tokens(2 * PAGE, 1), tokens(2 * PAGE, 2)
    for sequence in (old, new):
        pages = store.take(2)
        store.cache_prefix(sequence, pages)
        store.release(pages)
    store.take(1)
    assert (len(store.match_prefix(new)), len(store.match_prefix(old))) == (2, 1)


def test_new_weights_let_nothing_be_found_and_lose_no_page():
    store = PagePool(4, PAGE)
    sequence = tokens(2 * PAGE)
    pages, other = store.take(2), store.take(1)
    store.cache_prefix(sequence, pages)
    store.release(pages)
    store.invalidate()
    assert store.match_prefix(sequence) == []
    assert store.num_free == 3
    store.release(other)
    assert sorted(store.take(4)) == [0, 1, 2, 3]
    assert not PagePool(4, PAGE).holds_any and store.holds_any


@pytest.mark.parametrize("num_shards", [1, 2])
def test_memory_in_use_is_at_most_a_tenth_more_than_live_tokens_need(num_shards: int):
    """Groups of 4 share prompts of 100 to 900 tokens; each sample draws 8 tokens a dispatch,
    log-normal many in all."""
    rng = np.random.default_rng(num_shards)
    table = PageTable(32, num_shards, 32 * 256, 256, PAGE)
    free, live, ratios = list(range(32)), dict[int, list[int]](), []
    shared: dict[int, tuple[int, int]] = {}
    for dispatch in range(600):
        while len(free) >= 4:
            group = [slot for slot in free if table.shard(slot) == table.shard(free[0])][:4]
            if len(group) < 4:
                break
            length = int(rng.integers(100, 900))
            prompt = table.store(group[0]).take(table.num_pages(length))
            for slot in group:
                free.remove(slot)
                full = prompt[: length // PAGE]
                table.store(slot).share(full)
                table.give(slot, full)
                live[slot] = [length, length + min(int(rng.lognormal(6, 1)), 3000)]
                shared[slot] = (dispatch * 100 + group[0], length // PAGE * PAGE)
            table.store(group[0]).release(prompt)
        for slot, (length, end) in list(live.items()):
            live[slot][0] = min(length + 8, end)
            assert table.reserve(slot, live[slot][0])
            pages = table.array[slot, : len(table.pages(slot))]
            assert pages.tolist() == table.pages(slot)
        # Live tokens: each prompt's full pages once, and what every sample has beside them.
        common = {shared[slot] for slot in live}
        alive = sum(length for _, length in common) + sum(
            length - shared[slot][1] for slot, (length, _) in live.items()
        )
        ratios.append(table.num_used * PAGE / alive)
        for slot, (length, end) in list(live.items()):
            if length == end:
                table.clear(slot)
                del live[slot]
                free.append(slot)
    assert np.mean(ratios) <= 1.1
    for slot in live:
        table.clear(slot)
    assert table.num_used == 0
    owners = [page for store in table.stores for page in store.take(store.num_free)]
    assert len(owners) == table.size


def test_a_slot_for_which_there_are_too_few_pages_gets_none():
    table = PageTable(2, 1, 3, 3, PAGE)
    assert table.reserve(0, 2 * PAGE)
    assert not table.reserve(1, 2 * PAGE)
    assert table.num_used == 2 and table.pages(1) == []
    table.clear(0)
    assert table.reserve(1, 2 * PAGE)
