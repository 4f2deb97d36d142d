"""The KV cache manager: pages of sequences, shared prefixes and prefill jobs, in numpy only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from areal_jax.engine.batch import PrefillChunk
from areal_jax.engine.kv_cache.pages import PagePool, PageTable
from areal_jax.engine.sequence import PrefillJob, Sequence, SequenceState


class CacheInsert(NamedTuple):
    """Device work that lets prefilled sequences decode."""

    copies: list[list[tuple[int, int]]]
    """By data shard: pages to copy, as (from, to)."""
    num_tokens: dict[int, int]
    """By slot: cached tokens."""
    states: list[list[tuple[int, int]]]
    """By data shard: slots, numbered within it, whose recurrent states to copy, as (from, to)."""


class KVCacheManager:
    """Allocates pages for sequences and plans which keys and values are computed next.

    A prompt is prefilled once per data shard for all sequences of its group.

    With linear attention, whose recurrent state is known after the last token alone, no cached
    prefix is reused, and a prompt is shared by the sequences that join before its prefill is
    complete. The state is in the slot of the first of them, from which the others copy it.

    The class has more than 200 lines because allocating, sharing and rebuilding change the same
    pages.
    """

    def __init__(
        self,
        table: PageTable,
        chunk_tokens: int,
        *,
        has_states: bool = False,
        batch_invariant: bool = False,
    ):
        """
        Args:
            table: pages.
            chunk_tokens: most tokens of a prefill chunk.
            has_states: whether sequences have recurrent states.
            batch_invariant: reuse only what a prefill of the same prompt would compute in the same
                chunks.
        """
        self.table, self._chunk_tokens, self._has_states = table, chunk_tokens, has_states
        self.jobs: list[PrefillJob] = []
        """Prefill jobs that are incomplete, or were added since the last `next_chunks`."""
        # Cached prefixes are reused at multiples of so many tokens.
        size = table.page_tokens
        self._reused_tokens = math.lcm(chunk_tokens, size) if batch_invariant else size
        self._caches_samples = not has_states and not batch_invariant
        # Changes of each adapter's weights, in an engine with several.
        self._changes = Counter[int]()

    @property
    def holds_any(self) -> bool:
        """Whether any page is in use or cached."""
        return any(pool.holds_any for pool in self.table.pools)

    def allocate(
        self,
        sequence: Sequence,
        slot: int,
        num_new: int,
        prompts: dict[int, PrefillJob] | None = None,
        spare_pages: int = 0,
    ) -> bool:
        """Allocate pages in a slot for a sequence and `num_new` more tokens, and start its prefill.

        Args:
            sequence: a waiting sequence.
            slot: a free slot.
            num_new: tokens to reserve pages for, beyond those to prefill.
            prompts: by data shard, the prefill shared by sequences that start from the bare prompt;
                None shares cached prefixes only.
            spare_pages: number of pages that must stay free.

        Returns:
            False, and nothing is changed, if there are not enough free pages.
        """
        table, shard, tokens = self.table, self.table.shard(slot), sequence.cached_tokens()
        pool, num_full = table.pools[shard], len(tokens) // table.page_tokens
        job = None if prompts is None else prompts.get(shard)
        if prompts is not None and job is not None and self._has_states and job not in self.jobs:
            # The state at its end has changed since.
            self.close_prompts({shard: prompts.pop(shard)})
            job = None
        adapter = sequence.request.adapter
        cached = []
        if job is None and not self._has_states:
            usable = len(tokens) // self._reused_tokens * self._reused_tokens
            cached = pool.match_prefix(tokens[:usable], self._salt(adapter))
            unused = len(cached) % (self._reused_tokens // table.page_tokens)
            pool.release(cached[len(cached) - unused :])
            cached = cached[: len(cached) - unused]
        num_shared = len(cached) if prompts is None else num_full
        num_own = table.num_pages(len(tokens) + num_new) - num_shared
        is_new_prompt = prompts is not None and job is None
        num_prompt = table.num_pages(len(tokens)) - len(cached) if is_new_prompt else 0
        if pool.num_free < num_own + num_prompt + spare_pages:
            pool.release(cached)
            return False
        sequence.slot, sequence.state = slot, SequenceState.PREFILLING
        num_computed = len(cached) * table.page_tokens
        if prompts is None:
            table.extend(sequence, cached + pool.take(num_own))
            job = PrefillJob(tokens, shard, sequence.pages, num_computed, adapter=adapter)
        else:
            if job is None:
                pages = cached + pool.take(num_prompt)
                job = prompts[shard] = PrefillJob(
                    tokens, shard, pages, num_computed, is_prompt=True, adapter=adapter
                )
            shared = job.pages[:num_full]
            pool.share(shared)
            table.extend(sequence, shared + pool.take(num_own))
        if job not in self.jobs:
            self.jobs.append(job)
        job.sequences.append(sequence)
        sequence.prefill = job
        return True

    def free(self, sequence: Sequence) -> None:
        """Release a sequence's pages; those that the current weights have computed stay cached."""
        if (job := sequence.prefill) is not None:
            if self._has_states and job.sequences[0] is sequence:
                # Its slot has the state.
                job.num_computed = 0
            job.sequences.remove(sequence)
            sequence.prefill = None
            self._drop_if_unused(job)
        is_reusable = (
            sequence.state is SequenceState.RUNNING
            and not sequence.is_outdated
            and self._caches_samples
        )
        cached = sequence.cached_tokens() if is_reusable else None
        self.table.release(sequence, cached, self._salt(sequence.request.adapter))

    def close_prompts(self, prompts: dict[int, PrefillJob]) -> None:
        """Close the shared prefills of a group: no more sequences will join."""
        for job in prompts.values():
            job.is_open = False
            if job not in self.jobs:
                self.table.pools[job.shard].release(job.pages)
            self._drop_if_unused(job)
        prompts.clear()

    def _drop_if_unused(self, job: PrefillJob) -> None:
        if job in self.jobs and not job.sequences and not (job.is_prompt and job.is_open):
            self.jobs.remove(job)
            if job.is_prompt:
                self.table.pools[job.shard].release(job.pages)

    def next_chunks(self, *, others_run: bool) -> tuple[list[PrefillChunk], list[PrefillJob]]:
        """Select what to prefill before the next dispatch: all short jobs, a chunk of long ones.

        Args:
            others_run: whether running sequences wait for it: then a chunk of one long job only.

        Returns:
            The chunks, and the jobs that they complete, for `complete`.
        """
        chunks: list[PrefillChunk] = []
        has_long = False
        for job in self.jobs:
            left = len(job.tokens) - job.num_computed
            is_long = left > self._chunk_tokens
            if self._has_states and not job.sequences:
                continue
            if left and not (is_long and has_long and others_run):
                slot = job.sequences[0].slot if job.sequences else None
                chunk = self._chunk(job.tokens, job.num_computed, job.pages, job.shard)
                chunks.append(chunk._replace(slot=slot, adapter=job.adapter))
                job.num_computed += len(chunks[-1].tokens)
                has_long |= is_long
        complete = [job for job in self.jobs if job.num_computed == len(job.tokens)]
        self.jobs = [job for job in self.jobs if job.num_computed < len(job.tokens)]
        return chunks, complete

    def complete(self, jobs: list[PrefillJob]) -> CacheInsert:
        """Cache the prefixes of complete jobs, and pass the pages to their sequences."""
        table = self.table
        insert = CacheInsert([[] for _ in table.pools], {}, [[] for _ in table.pools])
        for job in jobs:
            pool, last = table.pools[job.shard], len(job.tokens) // table.page_tokens
            if not self._has_states:
                pool.cache_prefix(job.tokens, job.pages, self._salt(job.adapter))
            first = table.slots(job.shard)[0]
            slots = [each.slot - first for each in job.sequences if each.slot is not None]
            insert.states[job.shard] += [(slots[0], slot) for slot in slots[1:]]
            for sequence in job.sequences:
                assert sequence.slot is not None
                insert.num_tokens[sequence.slot] = len(job.tokens)
                if job.is_prompt and last < len(job.pages):
                    insert.copies[job.shard].append((job.pages[last], sequence.pages[last]))
                sequence.prefill = None
            if job.is_prompt and not job.is_open:
                pool.release(job.pages)
            job.sequences.clear()
        return insert

    def invalidate(
        self,
        kept: SequenceOf[Sequence] = (),
        adapters: Collection[int] | None = None,
        running: SequenceOf[Sequence] = (),
    ) -> None:
        """Invalidate what earlier weights have computed, and restart prefills.

        Args:
            kept: running sequences that keep their pages, which no other sequence reuses.
            adapters: adapters whose weights have changed; None: all weights.
            running: running sequences of these adapters.
        """
        for sequence in kept:
            sequence.is_outdated = True
        if adapters is None:
            for pool in self.table.pools:
                pool.invalidate()
        else:
            self._changes.update(adapters)
            for sequence in running:
                self.table.pool(sequence).forget(sequence.pages)
        for job in self.jobs:
            if adapters is None or job.adapter in adapters:
                job.num_computed = 0

    def _salt(self, adapter: int) -> bytes:
        """Return what tells the pages of an adapter from those of others and of earlier weights."""
        changes = self._changes[adapter]
        return b"%d.%d" % (adapter, changes) if adapter or changes else b""

    def rebuild(self, sequences: SequenceOf[Sequence]) -> Iterator[list[PrefillChunk]]:
        """Plan the recomputation of the pages of running sequences; shared pages once, and first.

        Recurrent states are recomputed with them, for each sequence from its first token on.

        Yields:
            Chunks that may be computed together, after all those before.
        """
        size, tokens = self.table.page_tokens, [each.cached_tokens() for each in sequences]
        pools = [self.table.pool(sequence) for sequence in sequences]
        full = [
            [(pool, page) for page in sequence.pages[: len(cached) // size]]
            for sequence, cached, pool in zip(sequences, tokens, pools, strict=True)
        ]
        uses = Counter(page for pages in full for page in pages)
        num_common = [sum(uses[page] > 1 for page in pages) for pages in full]
        computed = set[tuple[PagePool, int]]()
        first: list[tuple[int, int, int]] = []
        # The longest first: it contains the prefixes of the others.
        if self._has_states:
            num_common = [0] * len(sequences)
        for i in sorted(range(len(sequences)), key=lambda i: -num_common[i]):
            common = full[i][: num_common[i]]
            if common and common[-1] not in computed:
                first.append((i, 0, len(common) * size))
                salt = self._salt(sequences[i].request.adapter)
                pools[i].cache_prefix(tokens[i], sequences[i].pages[: len(common)], salt)
                computed.update(common)
        rest = [(i, num_common[i] * size, len(tokens[i])) for i in range(len(sequences))]
        for spans in (first, rest):
            while spans := [span for span in spans if span[1] < span[2]]:
                chunks = [
                    self._chunk_of(sequences[i], tokens[i][:end], start) for i, start, end in spans
                ]
                yield chunks
                spans = [
                    (i, start + len(chunk.tokens), end)
                    for (i, start, end), chunk in zip(spans, chunks, strict=True)
                ]

    def _chunk_of(
        self, sequence: Sequence, tokens: Int32[np.ndarray, "_"], start: int
    ) -> PrefillChunk:
        assert sequence.slot is not None
        shard = self.table.shard(sequence.slot)
        chunk = self._chunk(tokens, start, sequence.pages, shard)
        return chunk._replace(slot=sequence.slot, adapter=sequence.request.adapter)

    def _chunk(
        self, tokens: Int32[np.ndarray, "_"], start: int, pages: list[int], shard: int
    ) -> PrefillChunk:
        """Return the next chunk of these tokens."""
        end = min(start + self._chunk_tokens, len(tokens))
        needed = pages[: self.table.num_pages(end)]
        return PrefillChunk(tokens[start:end], start, needed, shard, tokens[:start])
