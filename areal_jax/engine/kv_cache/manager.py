"""What lies in the engine's KV memory, and what is still to be computed in it.

Axes: S slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int, Int32

from areal_jax.engine.batch import PrefillChunk
from areal_jax.engine.decode import DecodeEngine, DecodeState, EngineParams
from areal_jax.engine.kv_cache.pages import PageTable


@dataclass(eq=False)
class PrefillJob:
    """A sequence whose keys and values are being computed, and the slots that wait for them."""

    tokens: Int32[np.ndarray, "_"]
    shard: int
    pages: list[int]
    done: int = 0
    """Tokens whose keys and values are there."""
    slots: list[int] = field(default_factory=list)
    is_prompt: bool = False
    """Whether the pages are its own: slots share the full ones and copy the last. Otherwise they
    are its only slot's."""
    is_wanted: bool = True
    """Of a prompt: whether more slots may come."""


class KVCacheManager:
    """Gives slots pages, and computes what is to be in them: a prompt once for all its samples in a
    data shard."""

    def __init__(self, engine: DecodeEngine):
        config = engine.config
        self._engine, self._chunk_tokens = engine, config.prefill_chunk_tokens
        self.table = PageTable(
            config.num_slots,
            engine.num_shards,
            engine.pages_per_shard,
            engine.pages_per_slot,
            config.page_tokens,
        )
        self.fillings: list[PrefillJob] = []
        """Not finished, or just begun."""
        # Slots that go on with what other weights than the newest have computed.
        self._outdated: set[int] = set()

    def start(
        self,
        slot: int,
        tokens: Int32[np.ndarray, "_"],
        num_new: int,
        prompts: dict[int, PrefillJob] | None = None,
        spare_pages: int = 0,
    ) -> bool:
        """Let a slot resume from a sequence with room for `num_new` tokens behind it; False, and
        nothing, where that is lacking.

        Args:
            prompts: by data shard, what is shared with the other samples of a prompt; None shares
                no more than is kept anyway.
            spare_pages: that must be left.
        """
        table, shard = self.table, self.table.shard(slot)
        store, num_full = table.stores[shard], len(tokens) // table.page_tokens
        filling = None if prompts is None else prompts.get(shard)
        found = [] if filling else store.find(tokens)
        num_own = table.num_pages(len(tokens) + num_new) - (
            len(found) if prompts is None else num_full
        )
        num_common = 0 if prompts is None or filling else table.num_pages(len(tokens)) - len(found)
        if store.num_free < num_own + num_common + spare_pages:
            store.release(found)
            return False
        done = len(found) * table.page_tokens
        if prompts is None:
            table.give(slot, found + store.take(num_own))
            filling = PrefillJob(tokens, shard, table.pages(slot), done)
        else:
            if filling is None:
                filling = prompts[shard] = PrefillJob(
                    tokens, shard, found + store.take(num_common), done, is_prompt=True
                )
            shared = filling.pages[:num_full]
            store.share(shared)
            table.give(slot, shared + store.take(num_own))
        if filling not in self.fillings:
            self.fillings.append(filling)
        filling.slots.append(slot)
        return True

    def release(self, slot: int, cached: Int32[np.ndarray, "_"] | None) -> None:
        """Take a slot's pages, which others may find where the newest weights have computed them.

        Args: cached: the tokens in them; None: they are not all computed."""
        for filling in [each for each in self.fillings if slot in each.slots]:
            filling.slots.remove(slot)
            self._drop_unwanted(filling)
        self.table.clear(slot, None if slot in self._outdated else cached)
        self._outdated.discard(slot)

    def give_up(self, prompts: dict[int, PrefillJob]) -> None:
        """Let go of prompts for which no more slots will come."""
        for filling in prompts.values():
            filling.is_wanted = False
            if filling not in self.fillings:
                self.table.stores[filling.shard].release(filling.pages)
            self._drop_unwanted(filling)
        prompts.clear()

    def _drop_unwanted(self, filling: PrefillJob) -> None:
        if (
            filling in self.fillings
            and not filling.slots
            and not (filling.is_prompt and filling.is_wanted)
        ):
            self.fillings.remove(filling)
            if filling.is_prompt:
                self.table.stores[filling.shard].release(filling.pages)

    def advance(
        self, params: EngineParams, state: DecodeState, *, others_wait: bool
    ) -> tuple[DecodeState, list[PrefillJob], int]:
        """Compute what is to be computed before the next dispatch: all short sequences, a chunk of
        each long one, or where `others_wait` of the first. Returns what is complete, for `finish`,
        and how many tokens were computed."""
        fills: list[PrefillChunk] = []
        long_before = False
        for filling in self.fillings:
            left = len(filling.tokens) - filling.done
            is_long = left > self._chunk_tokens
            if left and not (is_long and long_before and others_wait):
                fills.append(self._next(filling.tokens, filling.done, filling.pages, filling.shard))
                filling.done += len(fills[-1].tokens)
                long_before |= is_long
        complete = [each for each in self.fillings if each.done == len(each.tokens)]
        self.fillings = [each for each in self.fillings if each.done < len(each.tokens)]
        return (
            self._engine.prefill(params, state, fills),
            complete,
            sum(len(fill.tokens) for fill in fills),
        )

    def finish(self, state: DecodeState, complete: Sequence[PrefillJob]) -> DecodeState:
        """Give the slots of complete sequences what is theirs: their own copy of a page that is not
        full, and their view."""
        table = self.table
        pairs: list[list[tuple[int, int]]] = [[] for _ in table.stores]
        columns: dict[int, int] = {}
        for filling in complete:
            store, last = table.stores[filling.shard], len(filling.tokens) // table.page_tokens
            store.keep(filling.tokens, filling.pages)
            columns |= dict.fromkeys(filling.slots, len(filling.tokens))
            if filling.is_prompt:
                if last < len(filling.pages):
                    pairs[filling.shard] += [
                        (filling.pages[last], table.pages(slot)[last]) for slot in filling.slots
                    ]
                if not filling.is_wanted:
                    store.release(filling.pages)
            filling.slots.clear()
        return self._engine.insert(self.show(self._engine.copy(state, pairs)), columns)

    def show(self, state: DecodeState) -> DecodeState:
        """Let the device see the slots' tables as they are."""
        if self.table.changed:
            state, self.table.changed = self._engine.point(state, self.table.array), False
        return state

    def reserve(self, ends: Int[np.ndarray, "S"]) -> list[int]:
        """Take pages for so many tokens of each slot; returns the slots for which there are none
        left."""
        return [
            slot
            for slot in np.flatnonzero(ends).tolist()
            if not self.table.reserve(slot, int(ends[slot]))
        ]

    @property
    def holds_any(self) -> bool:
        """Whether any page is in use, or kept."""
        return any(store.holds_any for store in self.table.stores)

    def forget(self, kept: Iterable[int] = ()) -> None:
        """Other weights have come: nothing computed so far may be found, and what is being computed
        is begun again.

        Args: kept: slots that go on with what they have; others find it neither now nor once they
            have ended."""
        self._outdated.update(kept)
        for store in self.table.stores:
            store.forget()
        for filling in self.fillings:
            filling.done = 0

    def rebuild(
        self,
        params: EngineParams,
        state: DecodeState,
        sequences: Mapping[int, Int32[np.ndarray, "_"]],
    ) -> tuple[DecodeState, int]:
        """Compute the pages of these slots anew, of which each holds so many tokens: those that
        several share once, and first.

        Returns the number of tokens that were computed."""
        table, size = self.table, self.table.page_tokens
        seen, common = set[tuple[int, int]](), set[tuple[int, int]]()
        for slot, tokens in sequences.items():
            here = {(table.shard(slot), page) for page in table.pages(slot)[: len(tokens) // size]}
            common |= here & seen
            seen |= here
        num_common = {
            slot: sum(
                (table.shard(slot), page) in common
                for page in table.pages(slot)[: len(tokens) // size]
            )
            for slot, tokens in sequences.items()
        }
        computed = set[tuple[int, int]]()
        first: list[tuple[int, int, int]] = []
        # The longest first: the others' prefixes are then within them.
        for slot, count in sorted(num_common.items(), key=lambda item: -item[1]):
            here = [(table.shard(slot), page) for page in table.pages(slot)[:count]]
            if here and here[-1] not in computed:
                first.append((slot, 0, count * size))
                table.store(slot).keep(sequences[slot], table.pages(slot)[:count])
                computed.update(here)
        rest = [(slot, num_common[slot] * size, len(tokens)) for slot, tokens in sequences.items()]
        num_tokens = 0
        for spans in (first, rest):
            while spans := [span for span in spans if span[1] < span[2]]:
                fills = [
                    self._next(sequences[slot][:end], start, table.pages(slot), table.shard(slot))
                    for slot, start, end in spans
                ]
                state = self._engine.prefill(params, state, fills)
                num_tokens += sum(len(fill.tokens) for fill in fills)
                spans = [
                    (slot, start + len(fill.tokens), end)
                    for (slot, start, end), fill in zip(spans, fills, strict=True)
                ]
        columns = {slot: len(tokens) for slot, tokens in sequences.items()}
        return self._engine.insert(self.show(state), columns), num_tokens

    def _next(
        self, tokens: Int32[np.ndarray, "_"], start: int, pages: Sequence[int], shard: int
    ) -> PrefillChunk:
        """The next chunk of a sequence."""
        end = min(start + self._chunk_tokens, len(tokens))
        return PrefillChunk(tokens[start:end], start, pages[: self.table.num_pages(end)], shard)
