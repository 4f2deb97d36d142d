"""HTTP interface: routes, tokens, limits, and responses that stop when the client disconnects.

It does not depend on an engine: a `Backend` generates, which an `Auth` returns for authorized
clients. The file has more than 400 lines because a response and its stream share one state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from aiohttp import http_exceptions, web
from jaxtyping import Int32
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from areal_jax.data.config import RemoteImagesConfig
from areal_jax.data.grammars import Grammars
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.data.tool_calls import ParsedOutput, ToolCall
from areal_jax.data.tool_dialects import resembles_call
from areal_jax.errors import EngineStopped, InvalidRequest, first_error
from areal_jax.records import Completion, Message, OnProgress, Progress, empty_completion
from areal_jax.rewards.reward_model import sigmoid
from areal_jax.serve import anthropic_messages, openai_responses
from areal_jax.serve.bodies import (
    Chat,
    DetokenizeBody,
    GenerationParams,
    Texts,
    TokenizeBody,
    read_chat,
    read_json,
    read_scored,
    read_texts,
    read_tokens,
)
from areal_jax.serve.config import LimitsConfig
from areal_jax.serve.detokenizer import StreamDetokenizer
from areal_jax.serve.remote_images import fetch_images
from areal_jax.serve.responses import CompletionForm, Form, MakeForm, Part, count_tokens, now
from areal_jax.serve.server_metrics import ServerMetrics
from areal_jax.serve.validation import (
    APIError,
    validated,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1

EPOCH = "1970-01-01T00:00:00Z"
"""When the policy was created: not known."""

_LARGE = 1 << 16
"""Size of a request in bytes, and of a response in tokens, from which it counts as large."""

_LOG_PERIOD_S = 10.0

T = TypeVar("T")

Prompt = Int32[np.ndarray, "_"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ReadChat: TypeAlias = Callable[[dict[str, Any], int], tuple[Chat, MakeForm]]
"""Reads a body of at most a number of messages; returns the conversation and the form of its
answer."""

MESSAGES = "/v1/messages"
"""Path of Anthropic's protocol, which has errors of its own form."""


@runtime_checkable
class Backend(Protocol):
    """Generates for one client."""

    @property
    def model(self) -> str:
        """Name of the policy for the client."""
        ...

    @property
    def tokenizer(self) -> HFTokenizer: ...
    @property
    def grammars(self) -> Grammars | None:
        """Those of the engine; None: answers have no format."""
        ...

    @property
    def unmasked_logprobs(self) -> bool:
        """Whether log-probs of answers in a format are those among all tokens."""
        ...

    def serves(self, model: str) -> bool:
        """Return whether a name is that of the policy."""
        ...

    def busy(self) -> AbstractContextManager[None]:
        """Entered while a request of the client is in progress."""
        ...

    def prompt_of(self, chat: Chat) -> Prompt:
        """Render a conversation; called in a thread.

        Raises:
            ValueError: The chat template refuses it.
        """
        ...

    def prompt_of_text(self, text: str) -> Prompt:
        """Encode a text to be continued.

        Raises:
            InvalidRequest: It is too long.
        """
        ...

    async def generate(
        self, prompt: Prompt, generation_params: GenerationParams, on_progress: OnProgress | None
    ) -> list[Completion]:
        """Return the requested completions.

        Raises:
            InvalidRequest: No retry can satisfy the request.
        """
        ...

    async def score(self, prompt: Prompt, num_top: int) -> Completion:
        """Return the tokens of a prompt with their log-probs and the `num_top` most likely ones.

        Raises:
            InvalidRequest: It is too long.
        """
        ...

    def reported(self, prompt: Prompt, chat: Chat | None, parts: Sequence[Part]) -> None:
        """Receive the complete responses that the client got."""
        ...


@runtime_checkable
class Classifier(Protocol):
    """A backend that scores conversations."""

    async def classify(self, messages: Sequence[Message], answer: str) -> tuple[float, int]:
        """Return the score of an answer, and the number of tokens of the conversation.

        Raises:
            APIError: The model is no reward model.
            InvalidRequest: The conversation is too long.
        """
        ...


@runtime_checkable
class Auth(Protocol):
    def enter(self, session: str, key: str) -> Backend:
        """Return the backend for a bearer token and a session (empty: none).

        Raises:
            APIError: There is none.
        """
        ...


class App:
    """OpenAI's and Anthropic's APIs over the backends that an `Auth` returns.

    It has more than 200 lines because it is the list of all routes.
    """

    def __init__(
        self,
        auth: Auth,
        limits: LimitsConfig,
        measure: Callable[[], Mapping[str, float]] = dict,
        images: RemoteImagesConfig | None = None,
    ) -> None:
        """Create the routes.

        Args:
            measure: Returns the engine's totals since it started.
            images: Which images are fetched; None: none.
        """
        self._auth, self._limits, self._num_requests, self._num_running = auth, limits, 0, 0
        self._remote_images = images or RemoteImagesConfig()
        # Of answers to requests with tools.
        self._num_calls, self._num_unparsed = 0, 0
        self._metrics = ServerMetrics(lambda: self._num_running, measure)
        # Threads of slow work, separate ones for large requests; `close` ends them.
        self._small, self._large = (
            ThreadPoolExecutor(2, "small requests"),
            ThreadPoolExecutor(1, "large requests"),
        )
        self.stopped = asyncio.Event()
        """Set when the engine has stopped."""
        self.http = web.Application(
            middlewares=[self._counted, self._convert_errors],
            client_max_size=limits.max_body_bytes,
        )
        for prefix in ("", "/sessions/{session}"):
            self.http.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            self.http.router.add_post(f"{prefix}/v1/completions", self._texts)
            self.http.router.add_post(f"{prefix}/v1/responses", self._responses)
            self.http.router.add_post(f"{prefix}{MESSAGES}", self._messages)
            self.http.router.add_post(f"{prefix}{MESSAGES}/count_tokens", self._count_tokens)
            self.http.router.add_post(f"{prefix}/inference/v1/generate", self._tokens)
            self.http.router.add_get(f"{prefix}/v1/models", self._models)
            self.http.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._models)
        for prefix in ("", "/v1"):
            self.http.router.add_post(f"{prefix}/classify", self._classify)
        self.http.router.add_post("/tokenize", self._tokenize)
        self.http.router.add_post("/detokenize", self._detokenize)
        self.http.router.add_get("/tokenizer_info", self._tokenizer_info)
        self.http.router.add_get("/health", self._health)
        self.http.router.add_get("/metrics", self._scrape)

    @property
    def limits(self) -> LimitsConfig:
        """Return what clients may ask for."""
        return self._limits

    def close(self) -> None:
        """End the threads; pending work is abandoned."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, size: int, work: Callable[[], T]) -> T:
        """Run work off the event loop.

        Args:
            size: Size of the request, or of its response.
        """
        threads = self._large if size > _LARGE else self._small
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    # Middleware.

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count and time requests for completions; other requests are not counted."""
        if request.method != "POST":
            return await handler(request)
        # A client that disconnected gets no response, and counts as 499, as in web servers.
        clock, status = asyncio.get_running_loop().time, 499
        began_s = clock()
        self._num_running += 1
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._num_running -= 1
            self._metrics.requests.labels(endpoint=_endpoint(request), status=str(status)).inc()
            self._metrics.request_seconds.observe(clock() - began_s)

    @web.middleware
    async def _convert_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert every error of a request to an error response of OpenAI's API."""
        try:
            if self._num_running > self._limits.max_requests and request.method == "POST":
                busy = (
                    f"limits.max_requests={self._limits.max_requests} requests are being "
                    "answered; try again"
                )
                raise APIError(429, busy, code="rate_limit_exceeded")
            return await handler(request)
        except ConnectionError:
            raise  # the client has left
        except Exception as error:  # any error becomes a response; counted by its status
            refused = self._refusal(first_error(error))
            if refused.status == 500:
                logger.exception("%s %s failed", request.method, _endpoint(request))
            is_anthropic = MESSAGES in _endpoint(request)
            return _error(refused, anthropic_messages.error_body if is_anthropic else APIError.body)

    def _refusal(self, error: Exception) -> APIError:
        """Return the error message for the client."""
        match error:
            case APIError():
                return error
            case InvalidRequest():
                return APIError(
                    400,
                    str(error),
                    code="context_length_exceeded" if "max_prompt_tokens" in str(error) else None,
                )
            case EngineStopped():
                self.stopped.set()
                return APIError(503, str(error), code="engine_stopped")
            case TimeoutError():
                return APIError(504, str(error), code="timeout")
            case web.HTTPRequestEntityTooLarge():
                return APIError(
                    413,
                    f"expected at most limits.max_body_bytes={self._limits.max_body_bytes} bytes",
                )
            case web.RequestPayloadError():
                return APIError(400, f"the body of the request cannot be read: {error}")
            case web.HTTPException():
                return APIError(
                    error.status,
                    f"{error.reason}: see /v1/models, /v1/chat/completions, /v1/completions, "
                    f"/v1/responses, {MESSAGES} and /inference/v1/generate",
                )
            case _:
                return APIError(500, f"the server failed: {type(error).__name__}")

    def _source(self, request: web.Request) -> Backend:
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        return self._auth.enter(request.match_info.get("session", ""), key)

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await request.read()
        except TimeoutError:
            limit = f"limits.body_timeout_s={self._limits.body_timeout_s:g}"
            raise APIError(408, f"the request did not arrive within {limit} s") from None

    # Routes.

    async def _health(self, request: web.Request) -> web.Response:
        stopped = self.stopped.is_set()
        return web.json_response(
            {"status": "engine stopped" if stopped else "ok"}, status=503 if stopped else 200
        )

    async def _scrape(self, request: web.Request) -> web.Response:
        self._source(request)
        return web.Response(
            body=generate_latest(self._metrics.registry),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    async def _models(self, request: web.Request) -> web.Response:
        source, wanted = self._source(request), request.match_info.get("model")
        # The fields of OpenAI's API and of Anthropic's.
        model = {"id": source.model, "object": "model", "created": 0, "owned_by": "areal_jax"}
        model |= {"type": "model", "display_name": source.model, "created_at": EPOCH}
        if wanted is None:
            listed = {"object": "list", "data": [model], "has_more": False}
            return web.json_response(listed | {"first_id": source.model, "last_id": source.model})
        _require_model(source, wanted)
        return web.json_response(model)

    async def _classify(self, request: web.Request) -> web.Response:
        """Score a conversation: the request and the response are those of vLLM's /classify."""
        source, body = self._source(request), await self._body(request)
        if not isinstance(source, Classifier):
            raise APIError(404, "/classify is not supported by this server")
        read = partial(read_json, body, self._limits.max_body_values)
        scored = await self._in_thread(
            len(body), lambda: read_scored(read(), self._limits.max_messages)
        )
        if scored.model is not None:
            _require_model(source, scored.model)
        async with self._until(asyncio.get_running_loop().time() + self._limits.request_timeout_s):
            score, num_tokens = await source.classify(scored.messages, scored.answer)
        self._num_requests += 1
        self._metrics.prompt_tokens.inc(num_tokens)
        if scored.use_activation:
            score = sigmoid(score)
        found = {"index": 0, "label": "LABEL_0", "probs": [score], "num_classes": 1}
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
        answer = {"id": f"classify-{self._num_requests}", "object": "list", "created": now()}
        return web.json_response(answer | {"model": source.model, "data": [found], "usage": usage})

    async def _tokenize(self, request: web.Request) -> web.Response:
        source = self._source(request)
        body = await self._body(request)

        def work() -> dict[str, Any]:
            given = validated(TokenizeBody, read_json(body, self._limits.max_body_values))
            encode = source.tokenizer.encode
            if given.add_special_tokens:
                encode = source.tokenizer.encode_prompt
            tokens = encode(given.prompt).tolist()
            return {"tokens": tokens, "count": len(tokens)}

        return web.json_response(await self._in_thread(len(body), work))

    async def _detokenize(self, request: web.Request) -> web.Response:
        source = self._source(request)
        body = await self._body(request)

        def work() -> dict[str, str]:
            given = validated(DetokenizeBody, read_json(body, self._limits.max_body_values))
            tokens, size = np.array(given.tokens, np.int32), source.tokenizer.vocab_size
            if len(tokens) and tokens.max() >= size:
                expected = f"expected tokens below {size}, found {tokens.max()}"
                raise APIError(400, expected, param="tokens")
            return {"prompt": source.tokenizer.decode(tokens)}

        return web.json_response(await self._in_thread(len(body), work))

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        tokenizer = self._source(request).tokenizer
        found = {"tokenizer_class": None, "chat_template": tokenizer.template}
        return web.json_response({**found, **tokenizer.special_tokens})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        def read(given: dict[str, Any], max_messages: int) -> tuple[Chat, MakeForm]:
            return read_chat(given, max_messages), partial(CompletionForm, "chat")

        return await self._converse(request, read)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._converse(request, anthropic_messages.read)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._converse(request, openai_responses.read)

    async def _converse(self, request: web.Request, read: ReadChat) -> web.StreamResponse:
        """Answer a conversation.

        Args:
            read: reads the body in the request's protocol.
        """
        source = self._source(request)
        chat, make_form, prompt = await self._read_conversation(request, source, read)
        asked = Asked([prompt], chat.generation_params, make_form, chat)
        return await self._answer(request, source, asked)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        _, _, prompt = await self._read_conversation(
            request, self._source(request), anthropic_messages.read_to_count
        )
        return web.json_response({"input_tokens": len(prompt)})

    async def _read_conversation(
        self, request: web.Request, source: Backend, read: ReadChat
    ) -> tuple[Chat, MakeForm, Prompt]:
        """Read and render a conversation, and fetch its images."""
        body = await self._body(request)

        def read_body() -> tuple[Chat, MakeForm, Prompt | None]:
            chat, make_form = read(
                read_json(body, self._limits.max_body_values), self._limits.max_messages
            )
            _require_model(source, chat.generation_params.model)
            return (chat, make_form, None) if chat.remote_images else rendered(chat, make_form)

        def rendered(chat: Chat, make_form: MakeForm) -> tuple[Chat, MakeForm, Prompt]:
            prompt = _render(source, chat)
            params = _with_grammar(source, chat.generation_params, prompt)
            return replace(chat, generation_params=params), make_form, prompt

        chat, make_form, prompt = await self._in_thread(len(body), read_body)
        if prompt is None:
            chat = await fetch_images(chat, self._remote_images)
            return await self._in_thread(len(body), partial(rendered, chat, make_form))
        return chat, make_form, prompt

    async def _texts(self, request: web.Request) -> web.StreamResponse:
        return await self._continue(request, read_texts, partial(CompletionForm, "text"))

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        return await self._continue(request, read_tokens, partial(CompletionForm, "tokens"))

    async def _continue(
        self,
        request: web.Request,
        read_body: Callable[[Mapping[str, Any]], Texts],
        make_form: MakeForm,
    ) -> web.StreamResponse:
        source = self._source(request)
        body = await self._body(request)

        def read() -> tuple[Texts, list[Prompt]]:
            asked = read_body(read_json(body, self._limits.max_body_values))
            _require_model(source, asked.generation_params.model)
            self._require_few(asked.generation_params.num_samples * len(asked.prompts))
            encode = source.prompt_of_text
            prompts = [
                encode(each) if isinstance(each, str) else np.array(each, np.int32)
                for each in asked.prompts
            ]
            params = _with_grammar(source, asked.generation_params, prompts[0])
            return replace(asked, generation_params=params), prompts

        asked, prompts = await self._in_thread(len(body), read)
        echoed = asked.prompts if asked.echo else None
        wanted = Asked(prompts, asked.generation_params, make_form, echoed=echoed)
        return await self._answer(request, source, wanted)

    # Responses.

    async def _answer(
        self, request: web.Request, source: Backend, asked: Asked
    ) -> web.StreamResponse:
        self._require_few(asked.generation_params.num_samples * len(asked.prompts))
        self._num_requests += 1
        form = asked.make_form(
            str(self._num_requests),
            asked.generation_params,
            asked.prompts,
            cache(source.tokenizer.decode_token),
            now(),
        )
        answering = Choices(source, asked, self._in_thread)
        deadline_s = asyncio.get_running_loop().time() + self._limits.request_timeout_s
        with source.busy():
            if asked.generation_params.stream:
                response = await self._stream(request, answering, form, deadline_s)
            else:
                async with self._until(deadline_s):
                    parts = await answering.whole()
                    text = await self._in_thread(_size(parts), lambda: form.whole(parts))
                    response = web.Response(text=text, content_type="application/json")
        num_prompt_tokens, num_sampled_tokens = count_tokens(asked.prompts, answering.reported)
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.completion_tokens.inc(num_sampled_tokens)
        if asked.chat is not None and asked.chat.tools:
            self._check_dialect(source, answering.reported)
        return response

    def _check_dialect(self, source: Backend, parts: Sequence[Part]) -> None:
        """Report answers that look like tool calls where none was ever parsed."""
        self._num_calls += sum(len(part.calls) for part in parts)
        for part in parts:
            if part.calls or not (dialect := resembles_call(part.text)):
                continue
            self._metrics.unparsed_calls.labels(dialect=dialect).inc()
            self._num_unparsed += 1
            # After 8, 16, 32, ... answers.
            number = self._num_unparsed
            if not self._num_calls and number >= 8 and number.bit_count() == 1:
                logger.warning(
                    "0 tool calls parsed in %d answers that look like calls, the last one of "
                    "dialect %s: the chat template of %s asks for dialect %s; use a template that "
                    "announces tools in the policy's own format",
                    number,
                    dialect,
                    source.model,
                    source.tokenizer.tool_dialect.name,
                )

    def _require_few(self, total: int) -> None:
        if total > self._limits.max_samples:
            raise APIError(
                400,
                (
                    f"{total} answers asked for, expected at most "
                    f"limits.max_samples={self._limits.max_samples}"
                ),
                param="n",
            )

    async def _stream(
        self, request: web.Request, answering: Choices, form: Form, deadline_s: float
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        async with aclosing(answering.parts()) as parts:
            # Nothing is sent before the first token, so that an invalid request is refused
            # with its status.
            async with self._until(deadline_s):
                first = await anext(parts)
            await response.prepare(request)
            try:
                async with self._until(deadline_s):
                    for event in (*form.opening(), *form.chunk(first)):
                        await _send(response, event)
                    async for part in parts:
                        for event in form.chunk(part):
                            await _send(response, event)
                    for event in form.closing(answering.reported):
                        await _send(response, event)
            except ConnectionError:
                raise  # the client has left
            except Exception as error:  # any error; counted in failed_streams
                # The status is sent already: report the failure in the stream, and end it.
                refused = self._refusal(first_error(error))
                self._metrics.failed_streams.labels(endpoint=_endpoint(request)).inc()
                logger.warning("stream failed: %s", error, exc_info=refused.status == 500)
                await _send(response, form.failure(refused))
        await response.write(form.done)
        await response.write_eof()
        return response

    @asynccontextmanager
    async def _until(self, deadline_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline_s):
                yield
        except TimeoutError as error:
            limit = f"limits.request_timeout_s={self._limits.request_timeout_s:g}"
            raise APIError(
                504, str(error) or f"not answered within {limit} s", code="timeout"
            ) from error


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read."""

    prompts: Sequence[Prompt]
    generation_params: GenerationParams
    make_form: MakeForm
    chat: Chat | None = None
    echoed: Sequence[str | tuple[int, ...]] | None = None
    """Texts or tokens of the prompts, if the answers begin with them."""


class Choices:
    """The choices of one request while they are generated."""

    def __init__(
        self,
        source: Backend,
        asked: Asked,
        in_thread: Callable[[int, Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        """
        Args:
            in_thread: Runs work of a size off the event loop.
        """
        self._source, self._asked, self._in_thread = source, asked, in_thread
        self._prompts, self._generation_params = asked.prompts, asked.generation_params
        tokenizer, generation_params, chat = source.tokenizer, asked.generation_params, asked.chat
        skipped = frozenset((*tokenizer.stop_token_ids, *generation_params.stop_tokens))
        self._tools = () if chat is None else chat.tools
        dialect = tokenizer.tool_dialect
        hold = dialect.starts if self._tools else ()
        decode = tokenizer.decode_calls if self._tools else tokenizer.decode
        self._detokenizers = [
            StreamDetokenizer(
                lambda tokens: decode(np.array(tokens, np.int32)),
                generation_params.stops,
                skipped,
                hold,
            )
            for _ in range(generation_params.num_samples * len(asked.prompts))
        ]
        # New text of each choice, put by `_progress_callback` and taken by `parts`; None ends it,
        # put when all samples are complete.
        self._news = asyncio.Queue[Part | None]()
        self.reported: Sequence[Part] = ()
        """The complete answers."""

    async def whole(self) -> Sequence[Part]:
        """Return all choices, each in one part."""
        await self._end(await self._sampled(follows=bool(self._generation_params.stops)))
        if self._asked.echoed is not None:
            self.reported = await self._with_prompts(self._asked.echoed)
        return self.reported

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Yield the choices in parts, as they are sampled."""
        sampling = asyncio.create_task(self._sampled(follows=True))
        sampling.add_done_callback(lambda _: self._news.put_nowait(None))
        try:
            while (part := await self._news.get()) is not None:
                yield part
            for part in await self._end(await sampling):
                yield part
        finally:
            sampling.cancel()

    async def _sampled(self, *, follows: bool) -> list[Completion]:
        n = self._generation_params.num_samples
        if self._generation_params.max_new_tokens == 0:
            return [replace(empty_completion(), stop_reason="length")] * (n * len(self._prompts))
        async with asyncio.TaskGroup() as group:
            generating = [
                group.create_task(
                    self._source.generate(
                        prompt,
                        self._generation_params,
                        self._progress_callback(n * place) if follows else None,
                    )
                )
                for place, prompt in enumerate(self._prompts)
            ]
        return [completion for each in generating for completion in each.result()]

    async def _with_prompts(self, echoed: Sequence[str | tuple[int, ...]]) -> list[Part]:
        """Return the complete answers with their prompts in front."""
        params, tokenizer = self._generation_params, self._source.tokenizer
        parts = list[Part]()
        for place, (prompt, given) in enumerate(zip(self._prompts, echoed, strict=True)):
            text, scored = given, None
            if not isinstance(text, str):
                tokens = prompt
                text = await self._in_thread(len(tokens), partial(tokenizer.decode, tokens))
            if params.include_logp:
                num_top = params.sampling.get("num_top_logprobs", 0)
                scored = await self._source.score(prompt, num_top)
            n = params.num_samples
            parts += [
                replace(part, text=text + part.text, prompt=scored)
                for part in self.reported[n * place : n * (place + 1)]
            ]
        return parts

    def _progress_callback(self, first: int) -> OnProgress:
        """Receive tokens of the choices from `first` on, and end those that contain a stop
        string.
        """

        def follow(progress: Sequence[Progress]) -> list[int]:
            for sample, sampled in progress:
                detokenizer, index = self._detokenizers[first + sample], first + sample
                before = detokenizer.num_tokens
                text = detokenizer.push(sampled.tokens.tolist())
                if detokenizer.num_tokens > before:
                    self._news.put_nowait(
                        Part(index, text, sampled.slice(0, detokenizer.num_tokens - before))
                    )
            return [
                sample for sample, _ in progress if self._detokenizers[first + sample].is_stopped
            ]

        return follow

    async def _end(self, completions: Sequence[Completion]) -> list[Part]:
        """Report the complete answers to the backend; return the unsent rest of each choice."""
        num_tokens = sum(len(completion.tokens) for completion in completions)
        whole, rest = await self._in_thread(num_tokens, lambda: self._decoded(completions))
        n = self._generation_params.num_samples
        for place, prompt in enumerate(self._prompts):
            self._source.reported(prompt, self._asked.chat, whole[n * place : n * (place + 1)])
        self.reported = whole
        return rest

    def _decoded(self, completions: Sequence[Completion]) -> tuple[list[Part], list[Part]]:
        """Return the complete answers, and the unsent rest of each."""
        whole, rest = list[Part](), list[Part]()
        for index, (detokenizer, completion) in enumerate(
            zip(self._detokenizers, completions, strict=True)
        ):
            before = detokenizer.num_tokens
            text = detokenizer.finish(completion.tokens.tolist())
            # Calls are held back. The parser keeps the content before the first one, which is sent.
            parsed = ParsedOutput(detokenizer.text, ())
            if detokenizer.held:
                dialect = self._source.tokenizer.tool_dialect
                parsed = dialect.parse(detokenizer.text + detokenizer.held, self._tools)
            unsent = parsed.content.removeprefix(detokenizer.text)
            content = detokenizer.text + unsent
            calls = tuple(call for call in parsed.calls if isinstance(call, ToolCall))
            kept = completion.slice(0, detokenizer.num_tokens)
            finish = "stop" if detokenizer.is_stopped else completion.stop_reason
            stop_string = detokenizer.stop_string
            whole.append(Part(index, content, kept, finish, calls, stop_string))
            rest.append(
                Part(
                    index,
                    text + unsent,
                    kept.slice(before, detokenizer.num_tokens),
                    finish,
                    calls,
                    stop_string,
                )
            )
        return whole, rest


def message_of(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the assistant's turn."""
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        turn["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return turn


def _size(parts: Sequence[Part]) -> int:
    """Count the tokens with log-probs: those of the choices, and the top tokens of each."""
    reported = (each for part in parts for each in (part.sampled, part.prompt) if each is not None)
    return sum(
        each.tokens.size + (0 if each.top_logprobs is None else each.top_logprobs.tokens.size)
        for each in reported
    )


class _RefusedConnection(asyncio.Protocol):
    """Refuses a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        transport.close()


class _RateLimitedLog(logging.Filter):
    """Logs one line per interval for input that is not HTTP, without a traceback: it is a fault of
    the client.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_held, self._next_s = 0, 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(
            error, http_exceptions.HttpProcessingError | ConnectionError | web.RequestPayloadError
        ):
            return True
        self._num_held += 1
        if time.monotonic() < self._next_s:
            return False
        words = repr(str(error))[:200]
        record.msg, record.args = (
            "%d requests that are not HTTP, the last: %s",
            (self._num_held, words),
        )
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        self._num_held, self._next_s = 0, time.monotonic() + _LOG_PERIOD_S
        return True


def _http_logger() -> logging.Logger:
    found = logging.Logger(f"{__name__}.http")
    found.parent = logger
    found.addFilter(_RateLimitedLog())
    return found


@runtime_checkable
class ConnectionLimits(Protocol):
    """Limits of connections."""

    @property
    def max_connections(self) -> int: ...
    @property
    def body_timeout_s(self) -> float: ...


@runtime_checkable
class HTTPApp(Protocol):
    """An application that can listen."""

    @property
    def http(self) -> web.Application: ...
    @property
    def limits(self) -> ConnectionLimits: ...
    def close(self) -> None:
        """End its threads."""
        ...


@asynccontextmanager
async def listening(
    app: HTTPApp, host: str, port: int, shutdown_timeout_s: float
) -> AsyncIterator[int]:
    """Listen at an address while the body runs; yields the port. At the end, running requests have
    some time to finish.
    """
    # A handler is cancelled when its client disconnects, and with it what it awaits, which frees
    # slots.
    runner = web.AppRunner(
        app.http,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown_timeout_s,
        keepalive_timeout=app.limits.body_timeout_s,
        logger=_http_logger(),
    )
    await runner.setup()
    server = runner.server
    assert server is not None

    def connection() -> asyncio.BaseProtocol:
        return (
            _RefusedConnection()
            if len(server.connections) >= app.limits.max_connections
            else server()
        )

    listener = None
    try:
        listener = await asyncio.get_running_loop().create_server(
            connection, host, port, backlog=128
        )
        yield listener.sockets[0].getsockname()[1]
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()
        app.close()


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    # Other requests run between two events, even if the client reads as fast as they are
    # written.
    await asyncio.sleep(0)
    name = f"event: {event['type']}\n" if "type" in event else ""
    data = json.dumps(event, ensure_ascii=False, allow_nan=False)
    await response.write(f"{name}data: {data}\n\n".encode())


def _error(refused: APIError, body: Callable[[APIError], dict[str, Any]]) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if refused.status == 429 else {}
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(body(refused), status=refused.status, headers=headers)


def _render(source: Backend, chat: Chat) -> Prompt:
    """Render a conversation; called in a thread."""
    try:
        if chat.tools and not source.tokenizer.can_render_tools:
            raise APIError(400, f"the chat template of {source.model} has no tools", param="tools")
        return source.prompt_of(chat)
    except InvalidRequest:
        raise
    except ValueError as error:
        raise APIError(400, str(error), param="messages") from error


def _with_grammar(source: Backend, params: GenerationParams, prompt: Prompt) -> GenerationParams:
    """Add the grammar of the answers, compiled; called in a thread.

    Raises:
        APIError: The format is not supported; the message says why.
    """
    tokenizer, param = source.tokenizer, params.format.param
    end = "".join(map(tokenizer.decode_token, prompt[-4:].tolist()))
    if not (grammar := params.format.grammar(tokenizer, end)):
        return params
    if source.grammars is None:
        raise APIError(400, f"{param} is not supported by this server", param=param)
    try:
        source.grammars.matcher(grammar)
    except InvalidRequest as error:
        raise APIError(400, f"{param}: {error}", param=param) from error
    constraint = {"grammar": grammar, "unmasked_logprobs": source.unmasked_logprobs}
    return replace(params, sampling={**params.sampling, **constraint})


def _require_model(source: Backend, wanted: str) -> None:
    if not source.serves(wanted):
        message = f"The model {wanted[:200]!r} does not exist; there is {source.model!r}"
        raise APIError(404, message, code="model_not_found", param="model")


def _endpoint(request: web.Request) -> str:
    """Return the route without the parts that differ between clients."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical.replace("{", "").replace("}", "")
