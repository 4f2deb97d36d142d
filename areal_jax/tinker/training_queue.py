"""Operations on models, in the order of their numbers, and models in turns.

One thread computes. A model is restored from its snapshot and the journal when it is used first.

The file has more than 400 lines because queue and operations share the state of a model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from areal_jax.errors import InvalidRequest
from areal_jax.models.config import LoRA
from areal_jax.parallel.sharding import fetch
from areal_jax.tinker.futures import Futures, error_result, json_result
from areal_jax.tinker.journal import CheckpointRow, Journal, ModelRow, RequestRow
from areal_jax.tinker.messages import parse_forward_backward
from areal_jax.tinker.pooled_engine import SamplerWeights
from areal_jax.tinker.tenants import SCHEME, Unknown
from areal_jax.tinker.training import (
    Prepared,
    TrainedModel,
    TrainingBackend,
    adapter_from_json,
    read_adam,
)

logger = logging.getLogger(__name__)

FORWARD_BACKWARD = "forward_backward"
LATEST, INFLIGHT = "latest", "inflight"
"""Sampler weights that change: those of the last optimizer step, and of the last save of kind
`inflight`."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_KINDS = {"weights": "training", "sampler_weights": "sampler"}
_UNNAMED = ".unnamed-"

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class QueuedModel:
    """A model with its operations."""

    row: ModelRow
    next_seq: int = 0
    """Number of the next operation."""
    waiting: dict[int, RequestRow] = field(default_factory=dict)
    replayed: list[RequestRow] = field(default_factory=list)
    """Operations since the snapshot, of before the server was started."""
    model: TrainedModel | None = None
    """None until its first operation."""
    snapshot_s: float = -math.inf
    """Time of the last snapshot; the first optimizer step makes one."""
    used_s: float = 0.0
    """Time of the last operation."""

    @property
    def shape(self) -> LoRA | None:
        """Settings of the adapter."""
        return adapter_from_json(self.row.fields["lora"])


@dataclass(slots=True)
class OperationResult:
    """Result of an operation, and what the event loop then stores and publishes."""

    status: str
    result: bytes
    checkpoint: CheckpointRow | None = None
    sampler: tuple[str, str] | None = None
    """Id and path of a new sampler."""
    published: tuple[str, SamplerWeights] | None = None
    snapshot: Path | None = None


class TrainingQueue:
    """Executes the operations of all models, one after the other.

    It has more than 200 lines because it is the list of all operations.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        journal: Journal,
        futures: Futures,
        folder: Path,
        on_done: Callable[[OperationResult, QueuedModel], Any],
        follows: Callable[[str], bool],
        tenant_of: Callable[[str], str],
    ) -> None:
        """Read all models from the journal.

        Args:
            backend: computes.
            journal: the journal.
            futures: gets the results.
            folder: run folder.
            on_done: awaited after an operation, with its result.
            follows: whether an engine follows a path.
            tenant_of: returns the name of the tenant of a model.
        """
        self._backend, self._journal, self._futures = backend, journal, futures
        self._folder, self._on_done, self._follows = folder, on_done, follows
        self._limits = backend.config.limits
        self._tenant_of = tenant_of
        # Tenants in the order of their last turn: the last one has the highest number.
        self._num_turns, self._last_turns = 0, Counter[str]()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "training")
        self.checkpoints = {row.path: row for row in journal.checkpoints()}
        # In the order of their last operation: of a tenant, the first one is the next.
        self.models: dict[str, QueuedModel] = {}
        for row in journal.models():
            if row.is_open:
                self._reopen(row)

    def _reopen(self, row: ModelRow) -> None:
        rows = self._journal.requests(row.id, row.snapshot_seq)
        done = [each for each in rows if each.status != "pending"]
        entry = QueuedModel(row, next_seq=row.snapshot_seq + 1 + len(done))
        entry.waiting = {each.seq: each for each in rows if each.status == "pending"}
        entry.replayed = [each for each in done if each.status != "error"]
        for each in entry.waiting.values():
            is_batch = each.kind == FORWARD_BACKWARD
            num_tokens = parse_forward_backward(each.body).num_tokens if is_batch else 0
            self._futures.watch(each.id, num_tokens)
        self.models[row.id] = entry

    # The event loop.

    async def run(self) -> None:
        """Execute operations until cancelled."""
        while True:
            turn = self._next_turn()
            if not turn:
                self._wake.clear()
                await self._wake.wait()
                continue
            # Others have a turn before the next operation of these.
            for entry, row in turn:
                self.models[entry.row.id] = self.models.pop(entry.row.id)
                self._num_turns += 1
                self._last_turns[self._tenant_of(entry.row.id)] = self._num_turns
                del entry.waiting[row.seq]
            found = await self.call(lambda turn=turn: self._execute(turn))
            for (entry, row), done in zip(turn, found, strict=True):
                entry.next_seq += 1
                await self._finish(entry, row, done)

    def _next_turn(self) -> list[tuple[QueuedModel, RequestRow]]:
        """Return the next operation, and what is computed with it: forward_backward of other
        models.

        Tenants have turns: next is the tenant whose last turn was first, and of its models the one
        that has waited longest.
        """
        ranked, of_tenant = list[tuple[int, int, QueuedModel]](), Counter[str]()
        for entry in self.models.values():
            if entry.next_seq in entry.waiting:
                tenant = self._tenant_of(entry.row.id)
                ranked.append((of_tenant[tenant], self._last_turns[tenant], entry))
                of_tenant[tenant] += 1
        ranked.sort(key=lambda each: each[:2])
        ready = [(entry, entry.waiting[entry.next_seq]) for *_, entry in ranked]
        if not ready or ready[0][1].kind != FORWARD_BACKWARD:
            return ready[:1]
        most = min(self._limits.max_batched_models, self._limits.max_resident_models)
        return [each for each in ready if each[1].kind == FORWARD_BACKWARD][:most]

    async def call(self, work: Callable[[], T]) -> T:
        """Compute something in the thread, between operations."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def add_model(self, row: ModelRow) -> None:
        """Add a model whose first operation follows."""
        self._journal.add_model(row)
        self.models[row.id] = QueuedModel(row)

    def add(self, row: RequestRow) -> None:
        """Add an operation."""
        self.models[row.owner].waiting[row.seq] = row
        self._wake.set()

    def find(self, model: str) -> QueuedModel:
        """Find a model.

        Raises:
            Unknown: there is none.
        """
        if model not in self.models:
            raise Unknown(f"model_id={model[:200]!r}: there is no such model, or it was unloaded")
        return self.models[model]

    def drop(self, model: str) -> None:
        """Unload a model; its checkpoints stay."""
        entry = self.models.pop(model)
        self._journal.close_model(model)
        for row in entry.waiting.values():
            self._futures.finish(row.id, *error_result("the model was unloaded", "user"))
        if entry.row.snapshot:
            shutil.rmtree(self._folder / entry.row.snapshot, ignore_errors=True)

    def folder_of(self, path: str) -> Path:
        """Return the folder of a tinker:// path.

        Raises:
            Unknown: it is no path of a checkpoint.
        """
        model, *rest = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(rest) != 2 or rest[0] not in _KINDS:
            raise Unknown(
                f"{path[:200]!r}: expected tinker://MODEL/weights/NAME or "
                "tinker://MODEL/sampler_weights/NAME"
            )
        if path not in self.checkpoints:
            raise Unknown(f"{path[:200]!r}: there is no such checkpoint, or it has expired")
        return self._folder / "checkpoints" / model.replace(":", "-") / rest[0] / rest[1]

    def shape_of(self, path: str) -> LoRA | None:
        """Return the adapter's settings of a checkpoint."""
        return adapter_from_json(self.checkpoints[path].fields["lora"])

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint."""
        folder = self.folder_of(path)
        self._journal.delete_checkpoint(path)
        del self.checkpoints[path]
        shutil.rmtree(folder, ignore_errors=True)

    def set_checkpoint_ttl(self, path: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire so many seconds from now; None: never."""
        self.folder_of(path)
        row = self.checkpoints[path]
        row.fields["expires"] = _expiry(ttl_s)
        self._journal.add_checkpoint(row)

    def expire_checkpoints(self) -> None:
        """Delete the checkpoints whose time is over."""
        now = time.time()
        for path, row in list(self.checkpoints.items()):
            if (expires := row.fields.get("expires")) is not None and expires <= now:
                logger.info("checkpoint expired: %s", path)
                self.delete_checkpoint(path)

    async def _finish(self, entry: QueuedModel, row: RequestRow, done: OperationResult) -> None:
        """Store what an operation did; its result comes before the snapshot that contains it."""
        if done.checkpoint is not None:
            self._journal.add_checkpoint(done.checkpoint)
            self.checkpoints[done.checkpoint.path] = done.checkpoint
            self._expire_unnamed(entry.row.id)
        await self._on_done(done, entry)
        self._futures.finish(row.id, done.status, done.result)
        if done.snapshot is not None and entry.row.id not in self.models:
            shutil.rmtree(done.snapshot)  # the model was unloaded meanwhile
        elif done.snapshot is not None and entry.model is not None:
            old = entry.row.snapshot
            entry.row.snapshot = str(done.snapshot.relative_to(self._folder))
            entry.row.snapshot_seq = row.seq
            self._journal.set_snapshot(
                entry.row.id,
                row.seq,
                entry.row.snapshot,
                entry.model.step,
                self._limits.result_ttl_s,
            )
            if old and old != entry.row.snapshot:
                shutil.rmtree(self._folder / old, ignore_errors=True)

    def _expire_unnamed(self, model: str) -> None:
        prefix = f"{SCHEME}{model}/sampler_weights/{_UNNAMED}"
        unnamed = [path for path in self.checkpoints if path.startswith(prefix)]
        for path in unnamed[: -self._limits.num_unnamed_samplers]:
            self.delete_checkpoint(path)

    # The thread.

    def _execute(self, turn: Sequence[tuple[QueuedModel, RequestRow]]) -> list[OperationResult]:
        """Execute operations of different models, of which several are all forward_backward."""
        turn = list(turn)
        entries = [entry for entry, _ in turn]
        results: list[OperationResult | None] = [
            self._guarded(row, lambda entry=entry: self._make_resident(entry, entries))
            for entry, row in turn
        ]
        if len(turn) == 1:
            (entry, row), failed = turn[0], results[0]
            return [failed or self._result(row, lambda: self._apply(entry, row))]
        prepared = dict[int, Prepared]()

        def prepare(number: int) -> None:
            entry, row = turn[number]
            request = parse_forward_backward(row.body)
            prepared[number] = self._model(entry).check(request, self._backend.config)

        for number, (_, row) in enumerate(turn):
            results[number] = results[number] or self._guarded(
                row, lambda number=number: prepare(number)
            )
        try:
            outputs = self._backend.forward_backward(list(prepared.values()))
        except Exception:  # of any class: alone, only those fail whose fault it is
            logger.exception("%d requests failed together; computing each alone", len(prepared))
            return [
                results[number] or self._result(row, lambda e=entry, r=row: self._apply(e, r))
                for number, (entry, row) in enumerate(turn)
            ]
        for number, output in zip(prepared, outputs, strict=True):
            results[number] = OperationResult("protobuf", output)
        return [each for each in results if each is not None]

    def _guarded(self, row: RequestRow, work: Callable[[], None]) -> OperationResult | None:
        """Do a part of an operation; return the result of the operation if it failed."""
        done = OperationResult("", b"")

        def run() -> OperationResult:
            work()
            return done

        result = self._result(row, run)
        return None if result is done else result

    def _result(self, row: RequestRow, work: Callable[[], OperationResult]) -> OperationResult:
        """Return the result of an operation, or its error."""
        try:
            return work()
        except InvalidRequest as error:
            return OperationResult(*error_result(str(error), "user"))
        except FloatingPointError as error:
            return OperationResult(*error_result(str(error), "user", "dropped"))
        except Exception as error:  # of any class: the client gets it, and others go on
            logger.exception("%s of %s failed", row.kind, row.owner)
            return OperationResult(
                *error_result(f"the server failed: {type(error).__name__}", "server")
            )

    def _make_resident(self, entry: QueuedModel, used: Collection[QueuedModel] = ()) -> None:
        """Restore a model, and move those that were used least recently to the host.

        Args:
            entry: the model.
            used: models that stay on the devices.
        """
        if entry.model is None and (entry.row.snapshot or entry.replayed):
            self._restore(entry)
        if entry.model is not None:
            entry.model.to_devices()
        # The event loop adds models meanwhile.
        entry.used_s = time.monotonic()
        kept = {id(each) for each in (entry, *used)}
        others = [e for e in list(self.models.values()) if id(e) not in kept]
        resident = [e.model for e in others if e.model is not None and e.model.is_resident]
        most = self._limits.max_resident_models - len(kept)
        for model in resident[: max(0, len(resident) - most)]:
            model.to_host()

    def move_idle(self) -> None:
        """Move the models that were not used for long to the host; called in the thread."""
        limit = time.monotonic() - self._limits.idle_timeout_s
        for entry in list(self.models.values()):
            if entry.model is not None and entry.model.is_resident and entry.used_s < limit:
                logger.info("model moved to the host: model=%s", entry.row.id)
                entry.model.to_host()

    def _restore(self, entry: QueuedModel) -> None:
        row = entry.row
        logger.info(
            "resuming from snapshot: model=%s seq=%d operations=%d",
            row.id,
            row.snapshot_seq,
            len(entry.replayed),
        )
        if row.snapshot:
            folder = self._folder / row.snapshot
            entry.model = self._backend.load(entry.shape, folder, with_optimizer=True)
            entry.model.step = row.step
        for each in entry.replayed:
            if each.kind in ("save_weights", "save_weights_for_sampler"):
                continue
            with suppress(FloatingPointError):  # as the first time
                self._apply(entry, each, is_replay=True)
        entry.replayed = []

    def _apply(
        self, entry: QueuedModel, row: RequestRow, *, is_replay: bool = False
    ) -> OperationResult:
        """Execute an operation on a model that is on the devices."""
        if row.kind == FORWARD_BACKWARD:
            request = parse_forward_backward(row.body)
            if is_replay and request.forward_only:
                return OperationResult("", b"")
            prepared = self._model(entry).check(request, self._backend.config)
            (output,) = self._backend.forward_backward([prepared])
            return OperationResult("protobuf", output)
        body = json.loads(row.body)
        match row.kind:
            case "create_model":
                entry.model = self._backend.create(entry.shape, entry.row.fields["seed"])
                return OperationResult(*json_result(model_id=row.owner, type="create_model"))
            case "optim_step":
                metrics = self._model(entry).optim_step(read_adam(body.get("adam_params") or {}))
                done = OperationResult(*json_result(metrics=metrics, type="optim_step"))
                if not is_replay:
                    self._snapshot(entry, row, done)
                    path = f"{SCHEME}{row.owner}/sampler_weights/{LATEST}"
                    if self._follows(path):
                        done.published = path, self._weights(entry)
                return done
            case "load_weights":
                done = self._load(entry, row, body)
                if not is_replay:
                    self._snapshot(entry, row, done, is_due=True)
                return done
            case "save_weights":
                return self._save(entry, row, "weights", self._name(body, f"step-{row.seq}"), body)
            case _:
                return self._save_for_sampler(entry, row, body)

    def _model(self, entry: QueuedModel) -> TrainedModel:
        if entry.model is None:
            raise InvalidRequest(f"model_id={entry.row.id}: the model could not be created")
        return entry.model

    def _load(self, entry: QueuedModel, row: RequestRow, body: dict[str, Any]) -> OperationResult:
        path = body["path"]
        folder, shape = self.folder_of(path), self.shape_of(path)
        if shape != entry.shape:
            raise InvalidRequest(f"{path}: expected an adapter of {entry.shape}, found {shape}")
        try:
            model = self._backend.load(shape, folder, with_optimizer=body["optimizer"])
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        model.step = self.checkpoints[path].fields["step"] if body["optimizer"] else 0
        entry.model = model
        return OperationResult(*json_result(path=path, model_id=row.owner, type="load_weights"))

    def _save_for_sampler(
        self, entry: QueuedModel, row: RequestRow, body: dict[str, Any]
    ) -> OperationResult:
        number = body.get("sampling_session_seq_id")
        if number is None:
            return self._save(
                entry, row, "sampler_weights", self._name(body, f"step-{row.seq}"), body
            )
        is_inflight = body.get("kind") == INFLIGHT
        name = INFLIGHT if is_inflight else f"{_UNNAMED}{row.seq}"
        done = self._save(entry, row, "sampler_weights", name, body)
        assert done.checkpoint is not None
        sampler = f"{entry.row.session}:sample:{number}"
        done.sampler = sampler, done.checkpoint.path
        done.status, done.result = json_result(
            sampling_session_id=sampler, type="save_weights_for_sampler"
        )
        if is_inflight and self._follows(done.checkpoint.path):
            done.published = done.checkpoint.path, self._weights(entry)
        return done

    def _save(
        self, entry: QueuedModel, row: RequestRow, kind: str, name: str, body: dict[str, Any]
    ) -> OperationResult:
        model, path = self._model(entry), f"{SCHEME}{row.owner}/{kind}/{name}"
        found = self.checkpoints.get(path)
        # An operation is repeated if the server was killed before its result was stored.
        is_own = found is not None and found.fields["request"] == row.id
        if found is not None and not (is_own or name == INFLIGHT or body.get("overwrite")):
            raise InvalidRequest(
                f"{path}: there is such a checkpoint; set overwrite, or another name"
            )
        folder = self._folder / "checkpoints" / row.owner.replace(":", "-") / kind / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        size = self._backend.save(model, folder, with_optimizer=kind == "weights")
        checkpoint = CheckpointRow(path, row.owner, _KINDS[kind], time.time(), size)
        checkpoint.fields = {
            "lora": entry.row.fields["lora"],
            "step": model.step,
            "request": row.id,
            "user_metadata": body.get("user_metadata"),
            "expires": _expiry(body.get("ttl_seconds")),
        }
        operation = "save_weights" if kind == "weights" else "save_weights_for_sampler"
        return OperationResult(*json_result(path=path, type=operation), checkpoint=checkpoint)

    def _name(self, body: dict[str, Any], default: str) -> str:
        name = body.get("path") or default
        if not _NAME.fullmatch(name) or name in (LATEST, INFLIGHT):
            raise InvalidRequest(
                f"path={name[:200]!r}: expected a name of letters, digits, '_', '-' and '.', other "
                f"than {LATEST} and {INFLIGHT}"
            )
        return name

    def _weights(self, entry: QueuedModel) -> SamplerWeights:
        """Return a copy of a model's weights, on the host."""
        model = self._model(entry)
        return SamplerWeights(entry.shape, fetch(model.state.params), model.step)

    def latest_weights(self, model: str) -> SamplerWeights:
        """Return a copy of a model's current weights; called in the thread.

        Raises:
            Unknown: there is no such model.
        """
        entry = self.find(model)
        self._make_resident(entry)
        return self._weights(entry)

    def _snapshot(
        self, entry: QueuedModel, row: RequestRow, done: OperationResult, *, is_due: bool = False
    ) -> None:
        """Write a snapshot if the last one is old; there are no gradients now."""
        now = time.monotonic()
        if is_due or now - entry.snapshot_s >= self._limits.snapshot_period_s:
            entry.snapshot_s = now
            done.snapshot = (
                self._folder / "snapshots" / row.owner.replace(":", "-") / f"seq-{row.seq}"
            )
            done.snapshot.parent.mkdir(parents=True, exist_ok=True)
            self._backend.save(self._model(entry), done.snapshot, with_optimizer=True)


def _expiry(ttl_s: int | None) -> float | None:
    """Return the time of day, in seconds, after so many seconds; None: never."""
    return None if ttl_s is None else time.time() + ttl_s
