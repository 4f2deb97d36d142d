"""Laws of the scheduler and the KV cache manager, held without a device.

`Device` models what the decode programs do with pages: it stores which token each position of a
page holds, and the version of the weights that computed it.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence as SequenceOf

import chz
import numpy as np
import pytest

from areal_jax.engine.batch import DecodeOutput, PrefillChunk, SamplingMode
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.kv_cache.manager import CacheInsert
from areal_jax.engine.scheduler import Scheduler, penalized_tokens
from areal_jax.engine.sequence import Sequence, SequenceGroup, SequenceState
from areal_jax.records import Completion, Request, Sampling

CONFIG = EngineConfig(
    num_slots=4, max_prompt_tokens=24, max_new_tokens=16, steps_per_dispatch=4, page_tokens=4
)
PROMPT = tuple(range(100, 109))


def token_at(request: Request, sample: int, position: int) -> int:
    """What the model samples at a position."""
    return (7 * position + 3 * sample + request.seed) % 50


class Device:
    """A scheduler, and the pages that its decisions fill."""

    def __init__(self, config: EngineConfig = CONFIG, num_shards: int = 1):
        self.config, self.version = config, 0
        pages_per_slot = math.ceil((config.max_tokens - 1) / config.page_tokens)
        per_shard = config.num_slots // num_shards * pages_per_slot + 1
        if config.kv_tokens:
            per_shard = config.kv_tokens // (num_shards * config.page_tokens)
        self.scheduler = Scheduler(config, num_shards, per_shard, pages_per_slot)
        shape = num_shards, per_shard, config.page_tokens
        self.tokens, self.versions = np.full(shape, -1), np.full(shape, -1)
        self.num_prefilled = self.num_preempted = 0

    def admit(self, *groups: SequenceGroup) -> None:
        for group in groups:
            self.scheduler.add(group)
        self.scheduler.admit(self.version)

    def prefill(self) -> None:
        """Prefill one round of chunks, as between two dispatches."""
        chunks, complete = self.scheduler.schedule_prefill()
        self._compute(chunks)
        insert = self.scheduler.start(complete)
        self._copy(insert)
        for sequence in self.running():
            self.check(sequence)

    def dispatch(self) -> list[Sequence]:
        """Sample in every active slot, and finish the sequences that end."""
        scheduler = self.scheduler
        self.num_preempted += scheduler.reserve_pages()
        ended = scheduler.process_outputs(self._decode(), self.version)
        for sequence, reason in ended:
            scheduler.finish(sequence, reason)
        return [sequence for sequence, _ in ended]

    def step(self, *groups: SequenceGroup) -> list[Sequence]:
        """One iteration of the engine loop."""
        self.admit(*groups)
        self.prefill()
        return self.dispatch() if self.scheduler.has_active else []

    def swap(self, *, keep: bool = False) -> None:
        """Take other weights."""
        self.version += 1
        rebuilt = self.scheduler.invalidate(keep=keep)
        for chunks in self.scheduler.cache.rebuild(rebuilt):
            self._compute(chunks)
        for sequence in self.running():
            self.check(sequence)

    def running(self) -> list[Sequence]:
        """Sequences that decode, without those in prefill."""
        return [
            each for each in self.scheduler.running.values() if each.state is SequenceState.RUNNING
        ]

    def check(self, sequence: Sequence) -> None:
        """The pages of a running sequence hold its tokens, computed with the newest weights."""
        cached, size = sequence.cached_tokens(), self.config.page_tokens
        shard = self.scheduler.cache.table.shard(sequence.slot or 0)
        places = np.arange(len(cached))
        pages = np.array(sequence.pages, int)[places // size]
        assert self.tokens[shard, pages, places % size].tolist() == cached.tolist()
        if not sequence.is_outdated:
            assert set(self.versions[shard, pages, places % size]) <= {self.version}

    def is_empty(self) -> bool:
        """Whether every slot and page is free."""
        scheduler, table = self.scheduler, self.scheduler.cache.table
        free = [
            sorted(pool.take(pool.num_free)) == [*range(pool.num_pages)] for pool in table.pools
        ]
        slots = sorted(slot for slots in scheduler._free_slots for slot in slots)
        assert not (
            scheduler.running or scheduler.waiting or scheduler.cache.jobs or scheduler.has_active
        )
        return table.size > 0 and all(free) and slots == [*range(self.config.num_slots)]

    def _compute(self, chunks: SequenceOf[PrefillChunk]) -> None:
        for chunk in chunks:
            assert len(chunk.tokens) <= self.config.prefill_chunk_tokens
            self.num_prefilled += len(chunk.tokens)
            for position, token in enumerate(chunk.tokens.tolist(), chunk.start):
                self._write(chunk.shard, chunk.pages, position, token)

    def _copy(self, insert: CacheInsert) -> None:
        for shard, pairs in enumerate(insert.copies):
            for source, target in pairs:
                self.tokens[shard, target] = self.tokens[shard, source]
                self.versions[shard, target] = self.versions[shard, source]

    def _decode(self) -> DecodeOutput:
        """Each step feeds the last token, whose keys and values it writes, and samples the next
        one."""
        scheduler, steps = self.scheduler, self.config.steps_per_dispatch
        table, records = scheduler.cache.table, scheduler.slots.records()
        tokens = np.full((steps, len(records)), -1, np.int32)
        active, stopped = records["active"] > 0, np.zeros(len(records), bool)
        last = records["token"].copy()
        for slot in np.flatnonzero(active).tolist():
            record, sequence = records[slot], scheduler.running[slot]
            for i in range(min(steps, int(record["remaining"]))):
                position = int(record["position"]) + i
                self._write(
                    table.shard(slot), table.array[slot].tolist(), position, int(last[slot])
                )
                last[slot] = tokens[i, slot] = token_at(
                    sequence.request, int(record["sample"]), position + 1
                )
                stopped[slot] = last[slot] in record["stop_tokens"]
                active[slot] = i + 1 < record["remaining"] and not stopped[slot]
                if not active[slot]:
                    break
        counts = (tokens >= 0).sum(0, dtype=np.int32)
        return DecodeOutput(tokens, -tokens.astype(np.float32), counts, active, stopped, last)

    def _write(self, shard: int, pages: SequenceOf[int], position: int, token: int) -> None:
        place = (
            shard,
            pages[position // self.config.page_tokens],
            position % self.config.page_tokens,
        )
        self.tokens[place], self.versions[place] = token, self.version


def group(
    name: str,
    num_samples: int = 1,
    prompt: SequenceOf[int] = PROMPT,
    *,
    num_new: int = 8,
    seed: int = 0,
    min_version: int = 0,
    resume: tuple[Completion, ...] = (),
    **sampling: float | tuple[int, ...],
) -> SequenceGroup:
    tokens = np.asarray(prompt, np.int32)
    settings = Sampling(num_new, **sampling)  # pyright: ignore[reportArgumentType]
    return SequenceGroup(
        Request(name, tokens, num_samples, settings, seed, min_version, resume), deadline_s=math.inf
    )


def names(sequences: SequenceOf[Sequence]) -> list[str]:
    return [f"{each.request.id}{each.sample}" for each in sequences]


def running(device: Device) -> list[str]:
    return names([*device.scheduler.running.values()])


def expected_tokens(sequence: Sequence) -> list[int]:
    start = len(sequence.request.prompt_tokens)
    count = sequence.request.sampling.max_new_tokens
    return [token_at(sequence.request, sequence.sample, start + i) for i in range(count)]


def test_scheduler_and_kv_cache_do_not_import_jax():
    modules = (
        "areal_jax.engine.scheduler",
        "areal_jax.engine.kv_cache.manager",
        "areal_jax.engine.kv_cache.pages",
    )
    code = (
        f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules or 'jaxlib' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Admission.


def test_admission_is_first_come_first_served():
    device = Device()
    device.admit(group("a", 3), group("b", 2), group("c"))
    assert running(device) == ["a0", "a1", "a2", "b0"]
    device.prefill()
    device.scheduler.finish(device.running()[1], "stop")
    device.admit()
    assert running(device) == ["a0", "a2", "b0", "b1"]
    device.prefill()
    device.scheduler.finish(device.running()[0], "stop")
    device.admit()
    assert running(device) == ["a2", "b0", "b1", "c0"]


def test_group_that_needs_newer_weights_is_skipped():
    device = Device()
    device.admit(group("new", min_version=1), group("old"))
    assert running(device) == ["old0"]
    device.swap()
    device.admit()
    assert running(device) == ["old0", "new0"]


def test_group_that_waits_for_pages_is_not_overtaken():
    # 11 pages. `a` takes 3 for 8 + 4 tokens; `long` needs 7 and one to spare, `b` 1 and one to
    # spare.
    device = Device(chz.replace(CONFIG, kv_tokens=44))
    device.admit(group("a"), group("long", prompt=range(24)), group("b", prompt=(1,)))
    assert running(device) == ["a0", "long0"]
    device = Device(chz.replace(CONFIG, kv_tokens=40))
    device.admit(group("a"), group("long", prompt=range(24)), group("b", prompt=(1,)))
    assert running(device) == ["a0"]


def test_admission_reserves_a_page_per_running_sequence():
    # 12 pages. The prompt takes 6, two sequences 2 more each; a third would leave none for the next
    # dispatch of the others.
    device = Device(chz.replace(CONFIG, kv_tokens=48))
    device.admit(group("a", 4, range(24), num_new=16))
    assert running(device) == ["a0", "a1"]
    assert device.scheduler.cache.table.pools[0].num_free == 2


def test_slots_are_assigned_in_the_shard_with_most_free_pages():
    device = Device(num_shards=2)
    device.admit(group("a"), group("b"), group("c"))
    table = device.scheduler.cache.table
    shards = [table.shard(slot) for slot in device.scheduler.running]
    assert shards == [0, 1, 0]


def test_a_resumed_sequence_is_prefilled_with_its_tokens():
    device = Device()
    whole = [token_at(group("a").request, 0, position) for position in range(9, 17)]
    before = np.array(whole[:3], np.int32)
    sampled = Completion(before, -before.astype(np.float32), np.full(3, -5, np.int32), "suspended")
    resumed = group("a", resume=(sampled,))
    finished = device.step(resumed) + device.step()
    assert names(finished) == ["a0"] and device.num_prefilled == 9 + 3 - 1
    assert resumed.completions()[0].tokens.tolist() == whole
    assert resumed.completions()[0].versions.tolist() == [-5] * 3 + [0] * 5


def test_a_resumed_group_runs_its_unfinished_samples_only():
    tokens = np.arange(8, dtype=np.int32)
    done = Completion(tokens, tokens.astype(np.float32), tokens, "suspended")
    stopped = Completion(done.tokens[:2], done.logp[:2], done.versions[:2], "stop")
    fresh = Completion(done.tokens[:0], done.logp[:0], done.versions[:0], "suspended")
    resumed = group("a", 3, resume=(done, stopped, fresh))
    assert [each.stop_reason for each in resumed.completions()] == ["length", "stop", "suspended"]
    device = Device()
    device.admit(resumed)
    assert running(device) == ["a2"]


# Prefill.


def test_a_group_prefills_its_prompt_once_and_shares_its_pages():
    device = Device()
    shared = group("a", 4)
    device.admit(shared)
    device.prefill()
    assert device.num_prefilled == 8
    pages = [each.pages for each in shared.sequences]
    assert all(each[:2] == pages[0][:2] for each in pages)
    assert len({each[2] for each in pages}) == 4


def test_a_partial_prompt_page_is_copied_to_every_sequence():
    device = Device()
    shared = group("a", 4, range(11))
    device.step(shared)
    assert device.num_prefilled == 10 and len(shared.prompts) == 0
    assert len({each.pages[2] for each in shared.sequences}) == 4


def test_waiting_samples_join_the_prompt_that_is_computed():
    device = Device()
    shared = group("a", 10)
    finished = device.step(shared)
    while not shared.is_finished:
        finished += device.step()
    assert sorted(names(finished)) == [f"a{i}" for i in range(10)]
    assert device.num_prefilled == 8 and device.is_empty()


def test_a_later_request_reuses_the_cached_prefix():
    device = Device()
    first = group("a")
    device.step(first)
    device.step()
    before = device.num_prefilled
    turn = [*PROMPT, *first.completions()[0].tokens.tolist(), 1, 2, 3]
    device.step(group("b", prompt=turn))
    # 16 of the 17 tokens of prompt and completion are cached, in 4 full pages.
    assert device.num_prefilled - before == len(turn) - 1 - 16


def test_long_prompts_are_prefilled_one_chunk_per_dispatch():
    device = Device(chz.replace(CONFIG, prefill_chunk_tokens=8))
    device.step(group("short", prompt=(1, 2), num_new=16))
    device.admit(group("a", prompt=range(24)), group("b", prompt=range(30, 54)))
    states = []
    for _ in range(3):
        before = device.num_prefilled
        device.step()
        states.append((device.num_prefilled - before, names(device.running())))
    assert [count for count, _ in states] == [8, 8, 7 + 8]
    assert states[1][1] == ["short0"] and "a0" in states[2][1]


# Preemption.


TIGHT = chz.replace(CONFIG, num_slots=3, kv_tokens=4 * 14)


def fill(device: Device) -> list[SequenceGroup]:
    """Three sequences, one prompt each, that outgrow 14 pages together."""
    starts = {"a": 0, "b": 20, "c": 40}
    groups = [group(name, prompt=range(i, i + 9), num_new=16, seed=i) for name, i in starts.items()]
    device.admit(*groups)
    assert running(device) == ["a0", "b0", "c0"]
    device.prefill()
    return groups


def test_the_sequence_admitted_last_is_preempted_with_its_tokens():
    device = Device(TIGHT)
    groups = fill(device)
    while not device.num_preempted:
        device.dispatch()
    preempted = groups[2].sequences[0]
    assert running(device) == ["a0", "b0"] and list(groups[2].waiting) == [preempted]
    assert (
        preempted.state is SequenceState.WAITING
        and preempted.slot is None
        and preempted.pages == []
    )
    count = len(preempted.sampled.tokens)
    assert count > 0 and preempted.sampled.tokens.tolist() == expected_tokens(preempted)[:count]


def test_a_preempted_sequence_is_admitted_before_all_others():
    device = Device(TIGHT)
    groups = fill(device)
    device.scheduler.add(group("d", prompt=(1,)))
    while not device.num_preempted:
        device.dispatch()
    assert list(device.scheduler.waiting) == ["c", "d"]
    while not all(each.is_finished for each in groups):
        device.step()
    for [sequence] in (each.sequences for each in groups):
        assert sequence.sampled.tokens.tolist() == expected_tokens(sequence)


def test_prompts_of_waiting_groups_are_dropped_before_preemption():
    device = Device(chz.replace(CONFIG, num_slots=2, kv_tokens=4 * 12))
    shared = group("a", 3, range(10), num_new=16)
    device.admit(shared)
    device.prefill()
    # 2 shared pages, the partial one of the prompt, and in the end 5 of each sequence.
    assert len(shared.prompts) == 1 and len(shared.waiting) == 1
    for _ in range(3):
        assert device.dispatch() == [] and len(shared.prompts) == 1
    # The last page of each sequence would be the 13th.
    assert names(device.dispatch()) == ["a0", "a1"]
    assert shared.prompts == {} and device.num_preempted == 0


# Eviction.


def test_eviction_is_lru():
    device = Device(chz.replace(CONFIG, num_slots=1, kv_tokens=4 * 12))
    prompts = {
        name: [start + i for i in range(13)] for name, start in (("a", 0), ("b", 20), ("c", 40))
    }
    finish(device, group("a", prompt=prompts["a"], num_new=1))
    finish(device, group("b", prompt=prompts["b"], num_new=1))
    # Reusing the prefix of `a` makes that of `b` the least recently used one.
    assert prefilled(device, group("a again", prompt=prompts["a"], num_new=1)) == 0
    # 6 of 12 pages are cached. These 7 take 6 free ones and evict the last page of `b`.
    finish(device, group("c", prompt=range(60, 84), num_new=4))
    assert prefilled(device, group("a once more", prompt=prompts["a"], num_new=1)) == 0
    assert prefilled(device, group("b again", prompt=prompts["b"], num_new=1)) == 4


def finish(device: Device, asked: SequenceGroup) -> None:
    device.step(asked)
    while not asked.is_finished:
        device.step()


def prefilled(device: Device, asked: SequenceGroup) -> int:
    """Tokens that are computed for a request."""
    before = device.num_prefilled
    finish(device, asked)
    return device.num_prefilled - before


def test_a_running_sequence_is_never_evicted():
    device = Device(chz.replace(CONFIG, num_slots=2, kv_tokens=4 * 20))
    lasting = group("lasting", num_new=16)
    device.step(lasting)
    for i in range(3):
        device.step(group(str(i), prompt=range(20 * i, 20 * i + 13), num_new=4))
        for sequence in device.running():
            device.check(sequence)
    assert lasting.sequences[0].sampled.tokens.tolist() == expected_tokens(lasting.sequences[0])


# Finish, abort, weights.


def test_finish_reports_stop_and_length():
    device = Device()
    stop = token_at(group("a").request, 0, 10)
    both = group("a", stop_token_ids=(stop,)), group("b", seed=1)
    finished = device.step(*both) + device.step()
    assert names(finished) == ["a0", "b0"]
    assert [each.completions()[0].stop_reason for each in both] == ["stop", "length"]
    assert both[0].completions()[0].tokens.tolist() == expected_tokens(both[0].sequences[0])[:2]
    assert device.is_empty()


def test_a_waiting_sequence_can_be_finished():
    device = Device()
    device.step(group("crowd", 4), many := group("a", 2))
    device.scheduler.finish(many.sequences[0], "stop")
    assert "a" in device.scheduler.waiting
    device.scheduler.finish(many.sequences[1], "stop")
    assert many.is_finished and "a" not in device.scheduler.waiting


@pytest.mark.parametrize("num_steps", [0, 1])
def test_abort_frees_slots_pages_and_the_shared_prompt(num_steps: int):
    device = Device(chz.replace(CONFIG, prefill_chunk_tokens=4))
    aborted = group("a", 6, range(20))
    device.admit(aborted)
    for _ in range(num_steps):
        device.step()
    device.scheduler.abort(aborted)
    assert device.is_empty()


def test_other_weights_reuse_no_prefix():
    device = Device()
    finish(device, group("a"))
    device.swap()
    assert prefilled(device, group("b")) == 8


def test_kept_pages_are_not_reused_by_others():
    device = Device()
    kept = group("a", num_new=16)
    device.step(kept)
    device.swap(keep=True)
    assert kept.sequences[0].is_outdated
    finish(device, group("b", prompt=range(5), num_new=16))
    assert kept.is_finished and not kept.sequences[0].is_outdated
    assert prefilled(device, group("c")) == 8


def test_a_rebuild_computes_shared_pages_once():
    device = Device()
    device.step(group("a", 4, num_new=16))
    before = device.num_prefilled
    device.swap()
    # 2 pages of the prompt, and of each sequence the 4 tokens after it.
    assert device.num_prefilled - before == 8 + 4 * 4


def test_versions_of_tokens_survive_preemption_and_swaps():
    device = Device(TIGHT)
    groups = fill(device)
    for _ in range(40):
        device.step()
        device.swap()
    assert device.num_preempted > 0
    for each in groups:
        [completion] = each.completions()
        assert completion.tokens.tolist() == expected_tokens(each.sequences[0])
        assert (np.diff(completion.versions) >= 0).all() and len(
            set(completion.versions.tolist())
        ) > 1


# Running ahead.


def test_no_dispatch_runs_ahead_of_a_slot_that_becomes_free():
    device = Device()
    device.step(group("a", 4, num_new=12), group("b"))
    # 8 of 12 tokens are left: no sequence ends in the dispatch in flight.
    assert device.scheduler.can_run_ahead()
    device.step()
    assert not device.scheduler.can_run_ahead()


def test_prefills_and_penalties_prevent_running_ahead():
    device = Device(chz.replace(CONFIG, prefill_chunk_tokens=4))
    device.step(group("a", num_new=16))
    device.step()
    device.step()
    assert device.scheduler.can_run_ahead()
    device.step(group("long", prompt=range(24)))
    assert device.scheduler.cache.jobs and not device.scheduler.can_run_ahead()
    device = Device()
    device.step(group("a", num_new=16, presence_penalty=0.5))
    assert (
        device.scheduler.slots.mode() == SamplingMode.SHAPED
        and not device.scheduler.can_run_ahead()
    )


def test_penalized_tokens_are_those_of_sequences_with_penalties():
    device = Device()
    device.step(group("plain"), penalized := group("p", num_new=16, presence_penalty=0.5))
    found = penalized_tokens(device.scheduler.running.values(), 4, 40)
    sequence = penalized.sequences[0]
    assert (found[0] == -1).all()
    assert (
        found[1, :13].tolist() == [*PROMPT, *expected_tokens(sequence)[:4]]
        and (found[1, 13:] == -1).all()
    )


# All together.


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("is_tight", [False, True])
def test_random_workloads_sample_all_tokens_and_leak_nothing(
    num_shards: int, keep: bool, is_tight: bool
):
    rng = np.random.default_rng(4 * is_tight + 2 * num_shards + keep)
    kv_tokens = num_shards * 4 * 13 if is_tight else 0
    device = Device(chz.replace(CONFIG, kv_tokens=kv_tokens, prefill_chunk_tokens=8), num_shards)
    groups, aborted = list[SequenceGroup](), list[SequenceGroup]()
    for i in range(120):
        # Few different prompts, so that prefixes are shared.
        start, length, count, num_new = (
            int(rng.integers(*span)) for span in ((0, 3), (1, 25), (1, 7), (1, 17))
        )
        groups.append(group(str(i), count, range(start, start + length), num_new=num_new, seed=i))
        device.step(groups[-1])
        if rng.random() < 0.2:
            device.swap(keep=keep)
        if rng.random() < 0.1 and not groups[-1].is_finished:
            device.scheduler.abort(groups[-1])
            aborted.append(groups.pop())
    while device.scheduler.waiting or device.scheduler.running:
        device.step()
    for each in groups:
        for sequence in each.sequences:
            completion = sequence.completion()
            assert completion.stop_reason == "length"
            assert completion.tokens.tolist() == expected_tokens(sequence)
            np.testing.assert_array_equal(completion.logp, -completion.tokens.astype(np.float32))
    assert aborted and device.is_empty()
    assert (device.num_preempted > 0) == is_tight
