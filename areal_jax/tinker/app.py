"""HTTP interface of the training server: routes, key, limits and errors by category."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from aiohttp import web

from areal_jax.errors import InvalidRequest
from areal_jax.serve.bodies import read_json
from areal_jax.serve.validation import APIError
from areal_jax.tinker import bodies
from areal_jax.tinker.config import TinkerLimits
from areal_jax.tinker.messages import parse_forward_backward, sample_to_json
from areal_jax.tinker.service import Service
from areal_jax.tinker.tenants import QueueFull, Tenant, Unknown

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
RETRY_AFTER_S = 1

_TENANT: ContextVar[Tenant] = ContextVar("tenant")
"""Tenant of the request that a task answers."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=bodies.Body)


class App:
    """Tinker's API over a service.

    It has more than 200 lines because it is the list of all routes.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._tenants = service, service.tenants
        self.limits: TinkerLimits = service.config.limits
        self.http = web.Application(
            middlewares=[self._convert_errors], client_max_size=self.limits.max_body_bytes
        )
        router = self.http.router
        for path, handler in (
            ("session_heartbeat", self._immediate(bodies.SessionHeartbeat, service.heartbeat)),
            ("get_info", self._immediate(bodies.ModelBody, service.get_info)),
            ("unload_model", self._immediate(bodies.ModelBody, service.unload_model)),
            (
                "create_sampling_session",
                self._immediate(bodies.CreateSamplingSession, service.create_sampling_session),
            ),
            ("weights_info", self._immediate(bodies.WeightsInfo, service.catalog.weights_info)),
            ("cancel_future", self._immediate(bodies.RetrieveFuture, service.cancel)),
            ("create_model", self._submitted(bodies.CreateModel, service.create_model)),
            ("load_weights", self._submitted(bodies.LoadWeights, service.load_weights)),
            ("asample", self._submitted(bodies.Sample, service.sample)),
        ):
            router.add_post(f"/api/v1/{path}", handler)
        for path, kind in (
            ("optim_step", bodies.OptimStep),
            ("save_weights", bodies.SaveWeights),
            ("save_weights_for_sampler", bodies.SaveWeightsForSampler),
        ):
            router.add_post(f"/api/v1/{path}", self._operation(path, kind))
        router.add_post("/api/v1/create_session", self._create_session)
        router.add_post("/api/v1/forward_backward", self._forward_backward)
        router.add_post("/api/v1/retrieve_future", self._retrieve_future)
        router.add_post("/api/v1/client/config", self._client_config)
        router.add_post("/api/v1/telemetry", self._telemetry)
        router.add_get("/api/v1/healthz", self._health)
        router.add_get("/api/v1/get_server_capabilities", self._capabilities)
        router.add_get("/api/v1/samplers/{sampler}", self._sampler)
        router.add_get("/api/v1/sessions", self._sessions)
        router.add_get("/api/v1/sessions/{session}", self._session)
        router.add_post("/api/v1/sessions/{session}/finish", self._finish_session)
        router.add_get("/api/v1/training_runs", self._training_runs)
        router.add_get("/api/v1/training_runs/{model}", self._training_run)
        router.add_get("/api/v1/training_runs/{model}/checkpoints", self._checkpoints)
        router.add_delete(
            "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}", self._delete_checkpoint
        )
        router.add_put(
            "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}/ttl", self._set_checkpoint_ttl
        )
        router.add_get("/api/v1/checkpoints", self._all_checkpoints)

    def close(self) -> None:
        """There is nothing to end: the service ends by itself."""

    # Middleware.

    @web.middleware
    async def _convert_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and convert every error to a status and a category."""
        try:
            if request.path != "/api/v1/healthz":
                tenant = self._tenants.of_key(request.headers.get("X-API-Key", ""))
                _TENANT.set(tenant)
                for name in request.match_info.values():
                    self._tenants.require_owner(tenant, name)
            return await handler(request)
        except ConnectionError:
            raise  # the client has left
        except Exception as error:  # any error becomes a response
            status, message = self._refusal(error)
            if status >= 500:
                logger.exception("%s %s failed", request.method, request.path)
            category = "server" if status >= 500 else "user"
            headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
            fields: dict[str, Any] = {"error": message, "detail": message, "category": category}
            if isinstance(error, QueueFull):
                fields |= error.state
            return web.json_response(fields, status=status, headers=headers)

    def _refusal(self, error: Exception) -> tuple[int, str]:
        match error:
            case APIError():
                return error.status, error.message
            case Unknown():
                return 404, str(error)
            case InvalidRequest():
                return 400, str(error)
            case web.HTTPRequestEntityTooLarge():
                limit = self.limits.max_body_bytes
                return 413, f"expected at most limits.max_body_bytes={limit} bytes"
            case web.RequestPayloadError():
                return 400, f"the body of the request cannot be read: {error}"
            case web.HTTPException():
                return error.status, f"{error.reason}: see docs/tinker.md for the endpoints"
        return 500, f"the server failed: {type(error).__name__}"

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                return await request.read()
        except TimeoutError:
            limit = f"limits.body_timeout_s={self.limits.body_timeout_s:g}"
            raise APIError(408, f"the request did not arrive within {limit} s") from None

    async def _body(self, request: web.Request, kind: type[B]) -> tuple[B, bytes]:
        raw = await self._read(request)
        if len(raw) > self.limits.max_json_bytes:
            limit = self.limits.max_json_bytes
            raise APIError(413, f"expected at most limits.max_json_bytes={limit} bytes")
        body = bodies.read_body(kind, read_json(raw, len(raw)))
        for field in bodies.OWNED & kind.model_fields.keys():
            if (name := getattr(body, field)) is not None:
                self._tenants.require_owner(_TENANT.get(), name)
        return body, raw

    # Routes.

    def _immediate(self, kind: type[B], handle: Callable[[B], dict[str, Any]]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            body, _ = await self._body(request, kind)
            return web.json_response(handle(body))

        return answer

    def _submitted(self, kind: type[B], submit: Callable[[B, bytes], dict[str, Any]]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            return web.json_response(submit(*await self._body(request, kind)))

        return answer

    def _operation(self, name: str, kind: type[Any]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            body, raw = await self._body(request, kind)
            return web.json_response(self._service.submit(body.model_id, body.seq_id, name, raw))

        return answer

    async def _create_session(self, request: web.Request) -> web.Response:
        body, _ = await self._body(request, bodies.CreateSession)
        return web.json_response(self._service.create_session(body, _TENANT.get()))

    async def _forward_backward(self, request: web.Request) -> web.Response:
        if request.content_type != PROTOBUF:
            raise APIError(415, f"expected {PROTOBUF}, found {request.content_type}; tinker>=0.25")
        raw = await self._read(request)
        parsed = parse_forward_backward(raw)
        self._tenants.require_owner(_TENANT.get(), parsed.model_id)
        return web.json_response(self._service.forward_backward(parsed, raw))

    async def _retrieve_future(self, request: web.Request) -> web.Response:
        body, _ = await self._body(request, bodies.RetrieveFuture)
        row = await self._service.retrieve(body)
        match row.status:
            case "pending":
                fields = {
                    "type": "try_again",
                    "request_id": row.id,
                    "queue_state": "active",
                }
                return web.json_response(fields, status=408)
            case "protobuf" if PROTOBUF in request.headers.get("Accept", ""):
                return web.Response(body=row.result, content_type=PROTOBUF)
            case "protobuf" if row.kind == "sample":
                return web.json_response(sample_to_json(row.result))
            case "protobuf":
                raise APIError(406, f"expected Accept: {PROTOBUF}; tinker>=0.25 sends it")
        return web.Response(body=row.result, content_type="application/json")

    async def _client_config(self, request: web.Request) -> web.Response:
        await self._read(request)
        limits = self.limits
        return web.json_response(
            {
                "pjwt_auth_enabled": False,
                "proto_compress_fwdbwd": False,
                "parallel_fwdbwd_chunks": True,
                "fwdbwd_max_chunk_len": limits.max_datums,
                "sample_max_concurrent_requests": min(1000, limits.max_queued_samples),
            }
        )

    async def _telemetry(self, request: web.Request) -> web.Response:
        await self._read(request)
        return web.json_response({"status": "accepted"})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.catalog.capabilities())

    async def _sampler(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.get_sampler(request.match_info["sampler"]))

    async def _sessions(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.sessions(*_of(request)))

    async def _session(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.session(request.match_info["session"]))

    async def _finish_session(self, request: web.Request) -> web.Response:
        await self._read(request)
        return web.json_response(self._service.finish_session(request.match_info["session"]))

    async def _training_runs(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.catalog.training_runs(*_of(request)))

    async def _training_run(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.catalog.training_run(request.match_info["model"]))

    async def _checkpoints(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.catalog.checkpoints(request.match_info["model"]))

    async def _all_checkpoints(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.catalog.all_checkpoints(*_of(request)))

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        found = request.match_info
        self._service.catalog.delete_checkpoint(found["model"], f"{found['kind']}/{found['name']}")
        return web.Response(status=204)

    async def _set_checkpoint_ttl(self, request: web.Request) -> web.Response:
        body, _ = await self._body(request, bodies.CheckpointTtl)
        found = request.match_info
        self._service.catalog.set_checkpoint_ttl(
            found["model"], f"{found['kind']}/{found['name']}", body.ttl_seconds
        )
        return web.json_response({})


def _of(request: web.Request) -> tuple[Tenant, int, int]:
    """Return whose list is asked for, its limit and its offset.

    Raises:
        InvalidRequest: they are no such numbers.
    """
    try:
        limit, offset = (
            int(request.query.get(k, d)) for k, d in (("limit", "20"), ("offset", "0"))
        )
    except ValueError:
        raise InvalidRequest("expected limit and offset to be integers") from None
    if not (0 <= limit <= 1000 and offset >= 0):
        raise InvalidRequest(
            f"expected limit from 0 to 1000 and offset from 0, found {limit}, {offset}"
        )
    return _TENANT.get(), limit, offset
