"""Scheduler of continuous batching: which sequences get slots and pages, which are preempted, and
which are finished.

It decides on host data alone, in numpy, and never touches a device.

Axes: S slots, T tokens of a sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import islice

import numpy as np
from jaxtyping import Int32

from areal_jax.engine.batch import DecodeOutput, PrefillChunk, SamplingMode, is_penalized
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.expert_log import ExpertLog
from areal_jax.engine.kv_cache.manager import CacheInsert, KVCacheManager
from areal_jax.engine.kv_cache.pages import PageTable
from areal_jax.engine.sequence import PrefillJob, Sequence, SequenceGroup, SequenceState
from areal_jax.engine.slots import SlotTable
from areal_jax.records import StopReason


class Scheduler:
    """Assigns slots and pages to sequences, first come, first served.

    A sequence is admitted if there are pages for it. If a running sequence needs a page and none is
    free, the sequence admitted last is preempted: it waits, before all others, with the tokens that
    it has sampled, and is prefilled again later.

    The class has more than 200 lines because each decision changes slots, pages and queue together.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_shards: int,
        pages_per_shard: int,
        pages_per_slot: int,
        *,
        has_states: bool = False,
    ):
        table = PageTable(
            config.num_slots, num_shards, pages_per_shard, pages_per_slot, config.page_tokens
        )
        self._config = config
        self.cache = KVCacheManager(
            table,
            config.prefill_chunk_tokens,
            has_states=has_states,
            batch_invariant=config.batch_invariant != "off",
        )
        self.slots = SlotTable(
            config.num_slots,
            config.max_new_tokens,
            config.tokens_per_dispatch,
            has_drafts=config.draft_tokens > 0,
        )
        self.waiting: OrderedDict[str, SequenceGroup] = OrderedDict()
        """Groups with sequences that wait for a slot, by request id, in order of admission."""
        # Waiting groups whose prompts are open to their other sequences, by request id.
        self._open: dict[str, SequenceGroup] = {}
        self.running: dict[int, Sequence] = {}
        """Sequences by slot, prefilling ones included, in order of admission."""
        self._free_slots = [table.slots(shard)[::-1] for shard in range(num_shards)]
        self._num_ended = 0
        """Sequences that ended in the last dispatch."""
        self._num_grammars = 0
        """Running sequences with a grammar."""
        self.experts: ExpertLog | None = None
        """Set by its owner to record experts."""

    @property
    def has_active(self) -> bool:
        """Whether any sequence samples in the next dispatch."""
        return bool(self.slots.active.any())

    def add(self, group: SequenceGroup) -> None:
        """Let a group's waiting sequences wait for slots, after all others."""
        self.waiting[group.id] = group

    def abort(self, group: SequenceGroup) -> None:
        """Remove all sequences of a group."""
        for sequence in group.sequences:
            if sequence.slot is not None:
                self._free_slot(sequence)
        self._dequeue(group)

    def admit(self, version: int) -> None:
        """Assign free slots to waiting sequences, as long as there are pages for them.

        Args:
            version: of the weights; groups that need a newer one are passed over.
        """
        num_free = sum(map(len, self._free_slots))
        able = (each for each in self.waiting.values() if each.request.min_version <= version)
        # Each takes one slot at least: the queue, which may be long, is not copied.
        for group in list(islice(able, num_free)):
            if not self._assign_slots(group):
                break

    def _assign_slots(self, group: SequenceGroup) -> bool:
        """Assign slots to a group's sequences; return False if some of them must wait."""
        cache, config = self.cache, self._config
        pools = cache.table.pools
        while group.waiting:
            free = [shard for shard, slots in enumerate(self._free_slots) if slots]
            if not free:
                return False
            shard = max(free, key=lambda shard: pools[shard].num_free)
            sequence, slot = group.waiting[0], self._free_slots[shard][-1]
            num_sampled = len(sequence.sampled.tokens)
            num_new = min(
                group.request.sampling.max_new_tokens - num_sampled, config.tokens_per_dispatch
            )
            num_others = len(cache.table.slots(shard)) - len(self._free_slots[shard])
            is_shared = not num_sampled and (len(group.waiting) > 1 or shard in group.prompts)
            prompts = group.prompts if is_shared else None
            # A spare page for each running sequence where pages may run out; otherwise the sequence
            # just admitted would soon be preempted.
            spare_pages = num_others if config.kv_tokens else 0
            if not cache.allocate(sequence, slot, num_new, prompts, spare_pages):
                if num_others:
                    return False
                # Only prompts of waiting groups can hold pages, this group's too.
                self.close_prompts()
                if not cache.allocate(sequence, slot, num_new):
                    used = cache.table.num_used
                    raise RuntimeError(f"{used} pages are in use in an engine without a sequence")
            group.waiting.popleft()
            if group.prompts:
                self._open[group.id] = group
            self._free_slots[shard].pop()
            self.running[slot] = sequence
            self._num_grammars += bool(sequence.request.sampling.grammar)
        self._dequeue(group)
        return True

    def schedule_prefill(self) -> tuple[list[PrefillChunk], list[PrefillJob]]:
        """Return the chunks to prefill before the next dispatch, and the jobs they complete."""
        return self.cache.next_chunks(others_run=self.has_active)

    def start(self, complete: list[PrefillJob]) -> CacheInsert:
        """Let the sequences of complete prefill jobs run."""
        for job in complete:
            for sequence in job.sequences:
                self.slots.assign_slot(sequence)
        return self.cache.complete(complete)

    def reserve_pages(self) -> int:
        """Allocate the pages of the next dispatch; return the number of preempted sequences."""
        num_preempted = 0
        while (slot := self._reserve()) is not None:
            if self._open:
                self.close_prompts()
            else:
                self._preempt_last(self.cache.table.shard(slot))
                num_preempted += 1
        return num_preempted

    def reserve_ahead(self) -> bool:
        """Allocate the pages of the dispatch after the next; return False if any is lacking."""
        return self._reserve(1) is None

    def _reserve(self, num_ahead: int = 0) -> int | None:
        """Allocate pages for a dispatch; return a slot that lacks some."""
        table, ends = self.cache.table, self.slots.ends(num_ahead)
        lacking = [
            slot
            for slot in table.lacking(ends)
            if not table.reserve(self.running[slot], int(ends[slot]))
        ]
        return lacking[0] if lacking else None

    def _preempt_last(self, shard: int) -> None:
        """Preempt the sequence of a data shard that was admitted last."""
        table, running = self.cache.table, reversed(self.running.items())
        sequence = next(sequence for slot, sequence in running if table.shard(slot) == shard)
        group = sequence.group
        self._free_slot(sequence)
        group.waiting.appendleft(sequence)
        self.waiting[group.id] = group
        self.waiting.move_to_end(group.id, last=False)

    def can_run_ahead(self) -> bool:
        """Return whether the next dispatch may be enqueued before the output of the last is known.

        It would delay prefills, and waiting sequences if a slot becomes free: so, while some wait,
        only if no sequence ended last and none certainly ends next.
        """
        # Mode SHAPED takes the tokens so far, and grammars too.
        if self.cache.jobs or self.slots.mode() == SamplingMode.SHAPED or self._num_grammars:
            return False
        num_lasting = self.slots.num_lasting()
        is_free_soon = self._num_ended > 0 or num_lasting < len(self.running)
        return num_lasting > 0 and not (self.waiting and is_free_soon)

    def process_outputs(
        self, output: DecodeOutput, version: int
    ) -> list[tuple[Sequence, StopReason]]:
        """Log the output of a dispatch; return the sequences that ended, and why, for `finish`."""
        if self.experts is not None:
            self.experts.log_dispatch(output, self.slots.positions())
        ended = self.slots.process_outputs(output, version).tolist()
        self._num_ended = len(ended)
        for sequence in self.with_grammars():
            self.slots.restart(sequence)
        return [
            (self.running[slot], "stop" if output.stopped[slot] else "length") for slot in ended
        ]

    def with_grammars(self) -> list[Sequence]:
        """Return the sequences that sample in the next dispatch and have a grammar."""
        if not self._num_grammars:
            return []
        live = (self.running[slot] for slot in self.slots.live())
        return [sequence for sequence in live if sequence.request.sampling.grammar]

    def finish(self, sequence: Sequence, reason: StopReason) -> None:
        """Finish a running or waiting sequence."""
        group = sequence.group
        if sequence.slot is not None:
            self._free_slot(sequence)
        else:
            group.waiting.remove(sequence)
            if not group.waiting:
                self._dequeue(group)
        sequence.finish(reason)

    def invalidate(self, *, keep: bool, adapters: Collection[int] | None = None) -> list[Sequence]:
        """Invalidate what earlier weights have computed.

        Args:
            keep: whether running sequences keep their pages.
            adapters: adapters whose weights have changed; None: all weights.

        Returns:
            The running sequences whose pages must be rebuilt.
        """
        live = (self.running[slot] for slot in self.slots.live())
        running = [s for s in live if adapters is None or s.request.adapter in adapters]
        if self.experts is not None:
            for sequence in running:
                self.experts.record(sequence)
        self.close_prompts(adapters)
        self.cache.invalidate(running if keep else (), adapters, running)
        return [] if keep else running

    def close_prompts(self, adapters: Collection[int] | None = None) -> None:
        """Close the shared prefills of all waiting groups, or of those with these adapters."""
        for group in list(self._open.values()):
            if adapters is None or group.request.adapter in adapters:
                self._close_prompts(group)

    def _close_prompts(self, group: SequenceGroup) -> None:
        self.cache.close_prompts(group.prompts)
        self._open.pop(group.id, None)

    def _dequeue(self, group: SequenceGroup) -> None:
        self._close_prompts(group)
        self.waiting.pop(group.id, None)

    def _free_slot(self, sequence: Sequence) -> None:
        """Free the slot and pages of a sequence, which then waits with what it has sampled."""
        slot = sequence.slot
        assert slot is not None
        if self.experts is not None:
            self.experts.record(sequence)
        self.cache.free(sequence)
        sequence.leave_slot()
        self.slots.free_slot(slot)
        del self.running[slot]
        self._num_grammars -= bool(sequence.request.sampling.grammar)
        self._free_slots[self.cache.table.shard(slot)].append(slot)


def penalized_tokens(
    running: Iterable[Sequence], num_slots: int, max_tokens: int
) -> Int32[np.ndarray, "S T"]:
    """Return by slot the tokens of running sequences with penalties; -1 elsewhere."""
    tokens = np.full((num_slots, max_tokens), -1, np.int32)
    for sequence in running:
        if sequence.state is SequenceState.RUNNING and is_penalized(sequence.request.sampling):
            found = sequence.tokens()
            tokens[sequence.slot, : len(found)] = found
    return tokens
