"""The engine core: executes the scheduler's decisions on the devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from areal_jax.data.grammars import Grammars
from areal_jax.engine.batch import PrefillChunk, SamplingMode, TokenMasks
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import DecodeState, EngineParams
from areal_jax.engine.engine_metrics import EngineMetrics
from areal_jax.engine.expert_log import ExpertLog
from areal_jax.engine.prompt_images import PromptImages
from areal_jax.engine.scheduler import Scheduler, penalized_tokens
from areal_jax.engine.sequence import Sequence
from areal_jax.engine.token_masks import TokenMasker
from areal_jax.errors import InvalidRequest
from areal_jax.records import NO_VERSION, Weights


class _InFlight(NamedTuple):
    """A dispatch whose output is not read."""

    packed: jax.Array
    start_s: float


class EngineCore:
    """Scheduler, weights and decode state of one engine. Used by the engine thread only.

    The host waits for the device in `update_weights`, and in `dispatch` for the output, which is
    one transfer per dispatch. It has more than 200 lines because all of its methods change the
    decode state.
    """

    _state: DecodeState
    _draft: EngineParams
    """Parameters of the draft policy, which the programs read beside those of the policy."""

    def __init__(
        self, engine: DecodeEngine, metrics: EngineMetrics, grammars: Grammars | None = None
    ):
        self._engine, self._metrics = engine, metrics
        self.scheduler = Scheduler(
            engine.config,
            engine.num_shards,
            engine.pages_per_shard,
            engine.pages_per_slot,
            has_states=engine.policy.config.linear is not None,
        )
        if engine.config.router_replay:
            self.scheduler.experts = ExpertLog(
                self.scheduler.cache.table,
                engine.shapes.experts(),
                engine.shapes.experts_dtype,
                keeps_first=engine.config.replayed_experts == "first",
            )
        self.images: PromptImages | None = None
        if engine.image_reader is not None:
            self.images = PromptImages(engine.image_reader, engine.encode)
        self._log_experts = self.scheduler.experts and self.scheduler.experts.log_prefill
        self._masker: TokenMasker | None = None
        if grammars is not None:
            sizes = engine.config.num_slots, engine.config.tokens_per_dispatch
            self._masker = TokenMasker(grammars, *sizes)
        self._masks: TokenMasks | None = None
        self.weights = Weights(NO_VERSION, None)
        self.num_tokens = 0
        """Tokens decoded so far."""
        # Time since which the device waits for the host; None while it is busy or has no work.
        self._device_idle_since: float | None = None

    def start(self) -> None:
        """Load the draft policy, if there is one, and allocate the decode state."""
        self._draft = self._engine.load_draft()
        self._state = self._engine.init_state()

    def release(self) -> None:
        """Free weights and decode state; nothing is decoded afterwards."""
        self.weights = Weights(self.weights.version, None)
        for name in ("_state", "_draft"):
            vars(self).pop(name, None)

    def update_weights(self, newest: Weights) -> None:
        """Swap to newer weights; invalidate cached prefixes, rebuild or keep running sequences."""
        start_s = time.perf_counter()
        newest = Weights(newest.version, {**newest.params, **self._draft})
        old, self.weights = self.weights, newest
        num_recomputed = 0
        # Equal weights leave every page as it is, so that such a swap changes no output bit.
        engine, scheduler = self._engine, self.scheduler
        if self.images is not None:
            self._keep_images(self.images, old.params, newest.params)
        if scheduler.cache.holds_any:
            changed = engine.changed_adapters(old.params, newest.params)
            if changed is None or changed:
                keep = engine.config.on_update == "keep"
                sequences = scheduler.invalidate(keep=keep, adapters=changed)
                num_recomputed = self._rebuild(sequences) if sequences else 0
        end_s = time.perf_counter()
        self.stop_gap_timer()
        self._metrics.count("swaps", 1)
        self._metrics.count("swap_stall_s", end_s - start_s)
        self._metrics.count("recompute_tokens", num_recomputed)
        self._metrics.event(
            "swap", start_s, end_s, version=newest.version, recompute_tokens=num_recomputed
        )

    def _keep_images(self, images: PromptImages, old: Any, new: Any) -> None:
        """Discard the embeddings of images, unless the vision tower is the same."""
        if old is not None and not self._engine.same_tower(old, new):
            images.invalidate()

    def _rebuild(self, sequences: list[Sequence]) -> int:
        """Recompute the pages of running sequences; return the number of tokens computed."""
        engine, num_tokens = self._engine, 0
        for chunks in self.scheduler.cache.rebuild(sequences):
            self._compute(chunks)
            num_tokens += sum(len(chunk.tokens) for chunk in chunks)
        columns = {each.slot: each.num_tokens - 1 for each in sequences if each.slot is not None}
        self._sync_page_table()
        self._state = engine.insert(self._state, columns)
        jax.block_until_ready(self._state.pages)
        return num_tokens

    def prefill(self) -> None:
        """Prefill the next chunks, and let the sequences run whose prefill is complete."""
        engine, scheduler = self._engine, self.scheduler
        if not scheduler.cache.jobs:
            return
        start_s = time.perf_counter()
        chunks, complete = scheduler.schedule_prefill()
        self._compute(chunks)
        insert = scheduler.start(complete)
        if scheduler.experts is not None:
            scheduler.experts.copy(insert.copies)
        self._state = engine.copy(
            engine.fit(self._state, scheduler.slots.num_columns()), insert.copies
        )
        self._state = engine.copy_states(self._state, insert.states)
        self._sync_page_table()
        self._state = engine.insert(self._state, insert.num_tokens)
        if engine.config.draft_tokens:
            started = {slot: scheduler.running[slot] for slot in insert.num_tokens}
            self._state = engine.record(
                self._state,
                {slot: (each.tokens(), each.prompt_checksum) for slot, each in started.items()},
            )
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        self._metrics.count("prefill_tokens", num_tokens)
        self._metrics.event("prefill", start_s, time.perf_counter(), tokens=num_tokens)

    def _compute(self, chunks: list[PrefillChunk]) -> None:
        """Compute keys and values of chunks, and the embeddings of their images."""
        params = self.weights.params
        if self.images is not None:
            chunks = self.images.with_images(params, chunks)
        self._state = self._engine.prefill(params, self._state, chunks, self._log_experts)

    def update_masks(self) -> Mapping[str, InvalidRequest]:
        """Compute which tokens sequences with grammars may sample in the next dispatch.

        Returns:
            Errors by request.
        """
        self._masks, failed = None, {}
        if self._masker is not None and (sequences := self.scheduler.with_grammars()):
            self._masks, failed = self._masker.masks(sequences)
        return failed

    def dispatch(self, may_run_ahead: Callable[[], bool]) -> Iterator[list[Sequence]]:
        """Decode until something else is to be done.

        Args:
            may_run_ahead: whether the next dispatch may be enqueued before the last one's output is
                read, so that the device never waits for the host.

        Yields:
            The sequences that finished, for each dispatch.
        """
        if num_preempted := self.scheduler.reserve_pages():
            self._metrics.count("preemptions", num_preempted)
        in_flight = self._enqueue(0)
        while may_run_ahead():
            following = self._enqueue(1)
            yield self._process_outputs(in_flight, device_continues=True)
            in_flight = following
        yield self._process_outputs(in_flight, device_continues=False)

    def stop_gap_timer(self) -> None:
        """Stop measuring the host gap: the device waits for something else than bookkeeping."""
        self._device_idle_since = None

    def _enqueue(self, num_ahead: int) -> _InFlight:
        """Enqueue a dispatch on the device, before the output of `num_ahead` others is read."""
        engine, slots = self._engine, self.scheduler.slots
        start_s = time.perf_counter()
        self._state = engine.fit(self._state, slots.num_columns(num_ahead))
        self._sync_page_table()
        if slots.changed:
            self._state, slots.changed = engine.assign_slot(self._state, slots.records()), False
        mode, tokens = slots.mode(), None
        if mode == SamplingMode.SHAPED:
            running = self.scheduler.running.values()
            tokens = penalized_tokens(running, engine.config.num_slots, engine.max_tokens)
        params = self.weights.params
        self._state, packed = engine.generate(
            params, self._state, mode=mode, sequences=tokens, masks=self._masks
        )
        if self._device_idle_since is not None:
            gap_s = time.perf_counter() - self._device_idle_since
            self._metrics.count("host_gap_us", 1e6 * gap_s)
        return _InFlight(packed, start_s)

    def _process_outputs(self, in_flight: _InFlight, *, device_continues: bool) -> list[Sequence]:
        """Wait for the output of a dispatch, count it, and finish the sequences that ended."""
        scheduler, metrics, version = self.scheduler, self._metrics, self.weights.version
        output = self._engine.fetch(in_flight.packed)
        end_s = time.perf_counter()
        if device_continues:
            metrics.count("host_gap_us", 0.0)
        self._device_idle_since = None if device_continues else end_s
        ended = scheduler.process_outputs(output, version)
        # Counted before requests are resolved, so that their tokens are in the metrics by then.
        table = scheduler.cache.table
        num_tokens = metrics.count_output(output, self._engine.config.steps_per_dispatch)
        self.num_tokens += num_tokens
        metrics.count("kv_used", table.num_used, table.size)
        metrics.event("dispatch", in_flight.start_s, end_s, version=version, tokens=num_tokens)
        for sequence, reason in ended:
            scheduler.finish(sequence, reason)
        return [sequence for sequence, _ in ended]

    def _sync_page_table(self) -> None:
        """Copy the page table to the device if it has changed."""
        table = self.scheduler.cache.table
        if table.changed:
            self._state, table.changed = self._engine.point(self._state, table.array), False
