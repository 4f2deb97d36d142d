"""Sessions with their models and samplers: what the endpoints of Tinker's API do.

The file has more than 400 lines because of its one class.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.errors import InvalidRequest
from areal_jax.models import lora
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params
from areal_jax.parallel.sharding import put
from areal_jax.records import derive_seed
from areal_jax.serve.validation import APIError
from areal_jax.threads import log_failure
from areal_jax.tinker import bodies, checkpoints
from areal_jax.tinker.catalog import Catalog, ServedPolicy
from areal_jax.tinker.config import TinkerConfig
from areal_jax.tinker.engine_pool import EnginePool
from areal_jax.tinker.futures import Futures
from areal_jax.tinker.journal import Journal, ModelRow, RequestRow
from areal_jax.tinker.messages import ForwardBackward
from areal_jax.tinker.pooled_engine import SamplerWeights
from areal_jax.tinker.programs import PromptLogprobs
from areal_jax.tinker.sampling import SamplingRequests
from areal_jax.tinker.tenants import SCHEME, QueueFull, Tenant, Tenants, Unknown
from areal_jax.tinker.training import TrainingBackend, adapter_to_json
from areal_jax.tinker.training_queue import (
    INFLIGHT,
    LATEST,
    OperationResult,
    QueuedModel,
    TrainingQueue,
)

logger = logging.getLogger(__name__)

DEFAULT_RANK = 32
"""The client's own; also of the engine that samples from the base."""

_EXPIRY_PERIOD_S = 5.0


class Service:
    """State of the server. Used by the event loop only.

    It has more than 200 lines because sessions, models and samplers refer to each other.
    """

    def __init__(
        self,
        config: TinkerConfig,
        policy: ServedPolicy,
        backend: TrainingBackend,
        journal: Journal,
        pool: EnginePool,
        tenants: Tenants,
    ) -> None:
        self.tenants = tenants
        self.config, self.policy, self._backend, self._journal = config, policy, backend, journal
        self.folder = Path(config.run_folder).expanduser()
        self.futures = Futures(journal, tenants)
        self._pool = pool
        self._queue = TrainingQueue(
            backend,
            journal,
            self.futures,
            self.folder,
            self._apply_done,
            pool.has,
            tenants.name_of,
        )
        self._samples = SamplingRequests(
            pool, self.futures, policy.tokenizer, config, self._score_prompt, tenants.name_of
        )
        journal.delete_closed(config.limits.result_ttl_s)
        # Open sessions with the time of their last heartbeat. Those of before a restart get time.
        self._heard_s = {
            name: time.monotonic() for name, _, is_open in journal.sessions() if is_open
        }
        self._ended = {name for name, _, is_open in journal.sessions() if not is_open}
        # Session and path of every sampler.
        self._samplers = {sampler: (session, path) for sampler, session, path in journal.samplers()}
        # Weights of the last fixed path whose prompts were scored, on the train mesh.
        self._scored: tuple[str, LoRA | None, Params] | None = None
        self.catalog = Catalog(config, policy, journal, self._queue, tenants)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute in the block, and resume what a killed server left."""
        for sampler, (_, path) in self._samplers.items():
            for row in self._journal.requests(sampler):
                if row.status == "pending":
                    body = bodies.read_body(bodies.Sample, json.loads(row.body))
                    self.futures.watch(row.id, self._num_tokens(body))
                    self._samples.start(row, body, path)
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(self._queue.run(), name="training queue"),
            loop.create_task(self._expire(), name="expiry of checkpoints and sessions"),
        ]
        for task in tasks:
            task.add_done_callback(log_failure)
        try:
            yield
        finally:
            await self._samples.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._queue.close)
            await self._pool.close()

    # Sessions.

    def create_session(self, body: bodies.CreateSession, tenant: Tenant) -> dict[str, Any]:
        session = secrets.token_hex(8)
        fields = {"user_metadata": body.user_metadata, "sdk_version": body.sdk_version[:100]}
        self.tenants.check(tenant.name, "max_sessions", len(self._sessions_of(tenant.name)))
        self._journal.add_session(session, fields | {"tenant": tenant.name})
        self.tenants.add_session(session, tenant)
        self._heard_s[session] = time.monotonic()
        return {"type": "create_session", "session_id": session}

    def heartbeat(self, body: bodies.SessionHeartbeat) -> dict[str, Any]:
        self._require_session(body.session_id)
        self._heard_s[body.session_id] = time.monotonic()
        return {"type": "session_heartbeat"}

    def sessions(self, tenant: Tenant, limit: int, offset: int) -> dict[str, Any]:
        return {"sessions": self._sessions_of(tenant.name)[offset : offset + limit]}

    def _sessions_of(self, tenant: str) -> list[str]:
        """List the open sessions of a tenant."""
        return [name for name in self._heard_s if self.tenants.name_of(name) == tenant]

    def session(self, session: str) -> dict[str, Any]:
        """Describe a session, also one that has ended."""
        fields = next((f for name, f, _ in self._journal.sessions() if name == session), None)
        if fields is None:
            raise Unknown(f"{session[:200]!r}: there is no such session")
        return {
            "training_run_ids": [r.id for r in self._journal.models() if r.session == session],
            "sampler_ids": [name for name, (of, _) in self._samplers.items() if of == session],
            "user_metadata": fields["user_metadata"],
        }

    def finish_session(self, session: str) -> dict[str, Any]:
        """End a session at its client's request; a repeated request changes nothing."""
        if session not in self._ended:
            self._require_session(session)
            self._end_session(session)
        return {}

    def _require_session(self, session: str) -> None:
        if session in self._ended:
            raise APIError(410, f"the session {session} has ended")
        if session not in self._heard_s:
            raise Unknown(f"session_id={session[:200]!r}: there is no such session")

    def _end_session(self, session: str) -> None:
        logger.info("session ended: %s", session)
        self._samples.end_session(session)
        for model in [e.row.id for e in self._queue.models.values() if e.row.session == session]:
            self._queue.drop(model)
        for sampler in [name for name, (of, _) in self._samplers.items() if of == session]:
            del self._samplers[sampler]
        self._journal.end_session(session)
        del self._heard_s[session]
        self._ended.add(session)

    async def _expire(self) -> None:
        """End sessions without heartbeat, delete old results of samplers, and free the memory of
        what is not used.
        """
        while True:
            await asyncio.sleep(_EXPIRY_PERIOD_S)
            limit = time.monotonic() - self.config.limits.session_timeout_s
            for session in [name for name, heard_s in self._heard_s.items() if heard_s < limit]:
                self._end_session(session)
            self._queue.expire_checkpoints()
            for sampler in self._samplers:
                self._journal.expire_requests(sampler, self.config.limits.result_ttl_s)
            await self._queue.call(self._queue.move_idle)
            await self._pool.close_idle(self.config.limits.idle_timeout_s)

    # Models.

    def create_model(self, body: bodies.CreateModel, raw: bytes) -> dict[str, Any]:
        self._require_session(body.session_id)
        self._require_base(body.base_model)
        if body.optimizer_config.type != "adamw":
            raise InvalidRequest(f"optimizer_config: expected adamw, found {body.optimizer_config}")
        given, shape = body.lora_config or bodies.LoraConfig(), None
        if self.config.lora:
            shape = self._backend.adapter(
                given.rank, trains_attention=given.train_attn, trains_mlp=given.train_mlp
            )
        model = f"{body.session_id}:train:{body.model_seq_id}"
        seed = (
            derive_seed(self.config.seed, model) if given.seed is None else given.seed % (1 << 31)
        )
        fields = {
            "lora": adapter_to_json(shape),
            "seed": seed,
            "user_metadata": body.user_metadata,
        }
        return self._create(model, body.session_id, fields, "create_model", raw)

    def load_weights(self, body: bodies.LoadWeights, raw: bytes) -> dict[str, Any]:
        """Load a checkpoint into a model, or create a model from it."""
        if body.model_id is not None:
            if body.seq_id is None:
                raise InvalidRequest("seq_id: expected the number of the operation, found none")
            return self.submit(body.model_id, body.seq_id, "load_weights", raw)
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidRequest("expected model_id and seq_id, or session_id and model_seq_id")
        self._require_session(body.session_id)
        self._queue.folder_of(body.path)
        shape = self._queue.shape_of(body.path)
        fields = {
            "lora": adapter_to_json(shape),
            "seed": 0,
            "user_metadata": body.user_metadata,
        }
        model = f"{body.session_id}:train:{body.model_seq_id}"
        return self._create(model, body.session_id, fields, "load_weights", raw)

    def _create(
        self, model: str, session: str, fields: dict[str, Any], kind: str, raw: bytes
    ) -> dict[str, Any]:
        """Add a model; what creates it is its operation 0."""
        if model not in self._queue.models:
            if self._journal.request(f"{model}:0") is not None:
                raise Unknown(f"model_id={model}: the model was unloaded")
            limits, models = self.config.limits, self._queue.models.values()
            if not self.config.lora and models:
                raise APIError(429, "lora=false: expected 1 model; unload it and try again")
            of_session = sum(entry.row.session == session for entry in models)
            for name, count in (("max_models", len(models)), ("max_models_of_session", of_session)):
                if count >= getattr(limits, name):
                    raise QueueFull(f"limits.{name}", getattr(limits, name), count)
            of, tenant = self.tenants.name_of, self.tenants.name_of(session)
            of_tenant = sum(of(entry.row.id) == tenant for entry in models)
            self.tenants.check(tenant, "max_models", of_tenant)
            self._queue.add_model(ModelRow(model, session, fields))
        return self.submit(model, 0, kind, raw)

    def submit(
        self, model: str, seq: int, kind: str, raw: bytes, num_tokens: int = 0
    ) -> dict[str, Any]:
        """Add an operation of a model; a repeated one has its future already."""
        entry = self._queue.find(model)
        self._heard_s[entry.row.session] = time.monotonic()
        self.catalog.last_request_s[model] = time.time()
        most = self.config.limits.max_queued_operations
        if len(entry.waiting) >= most and seq > entry.next_seq:
            raise QueueFull("limits.max_queued_operations", most, len(entry.waiting))
        row, is_new = self.futures.submit(
            model,
            seq,
            kind,
            raw,
            num_tokens=num_tokens,
            least=entry.next_seq,
            is_awaited=bool(entry.waiting) and seq == entry.next_seq,
        )
        if is_new:
            self._queue.add(row)
        return {"request_id": row.id, "model_id": model}

    def forward_backward(self, request: ForwardBackward, raw: bytes) -> dict[str, Any]:
        if request.seq_id < 1:
            raise InvalidRequest(f"seq_id={request.seq_id}: expected a number of at least 1")
        return self.submit(
            request.model_id, request.seq_id, "forward_backward", raw, request.num_tokens
        )

    def get_info(self, body: bodies.ModelBody) -> dict[str, Any]:
        entry = self._queue.find(body.model_id)
        shape = entry.shape
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_name": self.policy.name,
            "is_lora": shape is not None,
            "lora_rank": shape and shape.rank,
            "model_data": {
                "arch": self._backend.policy.config.architecture,
                "model_name": self.policy.name,
                "tokenizer_id": self.policy.tokenizer_id,
            },
        }

    def unload_model(self, body: bodies.ModelBody) -> dict[str, Any]:
        self._queue.find(body.model_id)
        self._queue.drop(body.model_id)
        return {"type": "unload_model", "model_id": body.model_id}

    def _require_base(self, name: str) -> None:
        if name not in self.policy.names:
            raise InvalidRequest(
                f"base_model={name[:200]!r}: there is no such model; expected {self.policy.name!r}"
            )

    async def _apply_done(self, done: OperationResult, entry: QueuedModel) -> None:
        """Make known what an operation of a model has made."""
        if done.sampler is not None:
            sampler, path = done.sampler
            self._add_sampler(sampler, entry.row.session, path)
        if done.published is not None:
            await self._pool.publish(*done.published)
        elif done.checkpoint is not None:
            self._pool.invalidate(done.checkpoint.path)
            self._scored = None

    # Samplers.

    def create_sampling_session(self, body: bodies.CreateSamplingSession) -> dict[str, Any]:
        self._require_session(body.session_id)
        path = body.model_path or ""
        if not path:
            self._require_base(body.base_model or "")
        elif self._followed(path) is None:
            self._queue.folder_of(path)
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if (found := self._samplers.get(sampler)) is not None and found[1] != path:
            raise InvalidRequest(f"{sampler}: expected the path {found[1]!r}, found {path[:200]!r}")
        self._add_sampler(sampler, body.session_id, path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def _add_sampler(self, sampler: str, session: str, path: str) -> None:
        self._journal.add_sampler(sampler, session, path)
        self._samplers[sampler] = session, path

    def _followed(self, path: str) -> str | None:
        """Return the model whose last optimizer step a path follows; None if it follows none."""
        model, *rest = path.removeprefix(SCHEME).split("/")
        if rest != ["sampler_weights", LATEST]:
            return None
        self._queue.find(model)
        return model

    def get_sampler(self, sampler: str) -> dict[str, Any]:
        _, path = self._sampler(sampler)
        return {"sampler_id": sampler, "base_model": self.policy.name, "model_path": path or None}

    def _sampler(self, sampler: str) -> tuple[str, str]:
        if sampler not in self._samplers:
            raise Unknown(f"{sampler[:200]!r}: there is no such sampling session")
        return self._samplers[sampler]

    def sample(self, body: bodies.Sample, raw: bytes) -> dict[str, Any]:
        session, path = self._sampler(body.sampling_session_id)
        self._heard_s[session] = time.monotonic()
        limits, queued = self.config.limits, self._samples.num_unfinished[session]
        if queued >= limits.max_queued_samples:
            raise QueueFull("limits.max_queued_samples", limits.max_queued_samples, queued)
        row, is_new = self.futures.submit(
            body.sampling_session_id,
            body.seq_id,
            "sample",
            raw,
            num_tokens=self._num_tokens(body),
        )
        if is_new:
            self._samples.start(row, body, path)
        ids = [f"{row.id}:{number}" for number in range(body.num_samples)]
        return {"request_id": row.id, "sample_sequence_ids": ids}

    def _num_tokens(self, body: bodies.Sample) -> int:
        return body.num_tokens(self.config.engine.max_new_tokens)

    def cancel(self, body: bodies.RetrieveFuture) -> dict[str, Any]:
        self._samples.cancel(body.request_id)
        return {"type": "cancel_future"}

    async def retrieve(self, body: bodies.RetrieveFuture) -> RequestRow:
        """Return a request, when it has its result or the time to hold is over."""
        row = await self.futures.wait(body.request_id, self.config.limits.hold_s)
        if row is None:
            raise Unknown(f"request_id={body.request_id[:200]!r}: there is no such request")
        return row

    async def load_sampler(self, path: str) -> SamplerWeights:
        """Load the weights of a path, for the engines."""
        if not path:
            known = [shape for shape in self._pool.shapes if shape is not None]
            if not self.config.lora:
                return SamplerWeights(None, self._backend.params, 0)
            shape = (
                known[0]
                if known
                else self._backend.adapter(
                    min(DEFAULT_RANK, self.config.limits.max_rank),
                    trains_attention=True,
                    trains_mlp=True,
                )
            )
            zeros = jax.tree.map(
                lambda leaf: np.zeros(leaf.shape, np.float32),
                lora.abstract(self._backend.policy_of(shape)),
            )
            return SamplerWeights(shape, zeros, 0)
        if (model := self._followed(path)) is not None:
            return await self._queue.call(lambda: self._queue.latest_weights(model))
        folder, shape = self._queue.folder_of(path), self._queue.shape_of(path)
        policy = self._backend.policy_of(shape)
        placed = self._backend.programs_of(shape).shardings.params
        params = await asyncio.to_thread(checkpoints.load_params, folder, policy, placed)
        step = self._queue.checkpoints[path].fields["step"]
        return SamplerWeights(shape, jax.device_get(params), step)

    async def _score_prompt(self, path: str, prompt: np.ndarray, num_top: int) -> PromptLogprobs:
        """Score a prompt, between operations of models."""
        scored = self._scored
        if scored is None or scored[0] != path:
            weights = await self.load_sampler(path)
            placed = self._backend.programs_of(weights.lora).shardings.params
            scored = path, weights.lora, put(weights.params, placed)
            is_fixed = not path.endswith((f"/{LATEST}", f"/{INFLIGHT}"))
            self._scored = scored if is_fixed else None
        _, shape, params = scored
        programs, base = self._backend.programs_of(shape), self._backend.base
        return await self._queue.call(
            lambda: programs.prompt_logprobs(params, base, prompt, num_top)
        )
