"""The real server with the embedded policy, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion

from areal_jax.engine.config import EngineConfig
from areal_jax.records import Completion, Message, Request
from areal_jax.run.serving import engine_backend
from areal_jax.serve.app import App, listening
from areal_jax.serve.config import LimitsConfig, ServeConfig
from areal_jax.serve.engine_backend import EngineBackend

T = TypeVar("T")

CONFIG = ServeConfig(
    engine=EngineConfig(
        num_slots=8,
        max_prompt_tokens=64,
        max_new_tokens=320,
        steps_per_dispatch=4,
        prefill_chunk_tokens=64,
    ),
    limits=LimitsConfig(max_body_bytes=20_000, max_requests=80, max_samples=16),
    devices=1,
)
KEY = "the right one"
MODEL = "embedded"
ASKED: Any = [{"role": "user", "content": "What is 12 + 30?"}]
TOKENS = {"return_token_ids": True}


@dataclass
class Server:
    loop: asyncio.AbstractEventLoop
    source: EngineBackend
    url: str

    def run(self, awaitable: Coroutine[Any, Any, T]) -> T:
        """Run something in the server's thread."""
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started, ready = threading.Event(), list[Server]()

    async def serve() -> None:
        stop = asyncio.Event()
        async with (
            engine_backend(CONFIG, KEY) as source,
            listening(App(source, CONFIG.limits, source.measure), "127.0.0.1", 0, 1.0) as port,
        ):
            ready.append(Server(asyncio.get_running_loop(), source, f"http://127.0.0.1:{port}"))
            stops.append(stop)
            started.set()
            await stop.wait()

    stops = list[asyncio.Event]()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(250)
    yield ready[0]
    ready[0].loop.call_soon_threadsafe(stops[0].set)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **how: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=how.pop("messages", ASKED), **how)


def texts(answer: ChatCompletion) -> list[str | None]:
    return [choice.message.content for choice in answer.choices]


@pytest.mark.slow
def test_server_tokens_match_the_engine_loop(server: Server, client: openai.OpenAI):
    answer = chat(client, n=2, seed=7, temperature=0.9, max_completion_tokens=20, extra_body=TOKENS)
    tokenizer, sampling = server.source.tokenizer, server.source.sampling
    prompt = tokenizer.render([Message("user", ASKED[0]["content"])])
    assert answer.prompt_token_ids == prompt.tolist()

    async def generate() -> list[Completion]:
        own = replace(sampling, temperature=0.9, max_new_tokens=20)
        return await server.source.engine.submit(Request("own", prompt, 2, own, seed=7))

    for choice, completion in zip(answer.choices, server.run(generate()), strict=True):
        assert choice.model_extra["token_ids"] == completion.tokens.tolist()
        assert choice.model_extra["versions"] == [0] * len(completion.tokens)
        np.testing.assert_allclose(choice.model_extra["token_logprobs"], completion.logp, atol=1e-5)
        assert choice.message.content == tokenizer.decode(completion.tokens)
        assert choice.finish_reason == completion.stop_reason
    assert answer.usage is not None
    sampled = sum(len(choice.model_extra["token_ids"]) for choice in answer.choices)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), sampled)


@pytest.mark.slow
def test_echo_returns_the_log_probs_of_the_prompt(client: openai.OpenAI):
    given: Any = {"model": MODEL, "prompt": "7 + 5 = ", "seed": 3, "extra_body": TOKENS}
    sampled = client.completions.create(**given, n=2, max_tokens=12).model_dump()
    prompts = [sampled["prompt_token_ids"] + each["token_ids"] for each in sampled["choices"]]
    # As evaluators ask for the likelihood of a continuation.
    asked: Any = {"model": MODEL, "temperature": 0.0, "logprobs": 1, "echo": True}
    with_one = client.completions.create(**asked, prompt=prompts, max_tokens=1)
    alone = client.completions.create(**asked, prompt=prompts, max_tokens=0)
    start = len(sampled["prompt_token_ids"])
    for choice, longer, tokens, drawn in zip(
        alone.choices, with_one.choices, prompts, sampled["choices"], strict=True
    ):
        assert choice.logprobs and longer.logprobs and longer.logprobs.top_logprobs
        logp = choice.logprobs.token_logprobs or []
        assert len(logp) == len(tokens) and logp[0] is None
        np.testing.assert_allclose(logp[start:], drawn["token_logprobs"], atol=1e-4)
        # One more token, the most likely one.
        more = longer.logprobs.token_logprobs or []
        assert more[:-1] == logp and len(more) == len(tokens) + 1
        assert longer.logprobs.tokens and longer.text.startswith(choice.text)
        top: Any = longer.logprobs.top_logprobs
        assert top[0] is None
        assert all(each <= max(of.values()) for each, of in zip(logp[1:], top[1:-1], strict=True))
        assert more[-1] == pytest.approx(max(top[-1].values()), abs=1e-5)
        # Tokens that end a turn have no text.
        assert choice.text == "".join(choice.logprobs.tokens or []).replace("<|im_end|>", "")
    echoed = client.completions.create(model=MODEL, prompt="7 + 5 = ", echo=True, max_tokens=3)
    assert echoed.choices[0].text.startswith("7 + 5 = ") and echoed.choices[0].logprobs is None


def test_streamed_and_complete_answers_are_equal(client: openai.OpenAI):
    whole = chat(client, n=3, seed=5, logprobs=True, extra_body=TOKENS)
    said, sampled, finish, logp = ([""] * 3, [[], [], []], [None] * 3, [[], [], []])
    usage, num_chunks = None, 0
    stream = chat(
        client,
        n=3,
        seed=5,
        logprobs=True,
        extra_body=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        num_chunks, usage = num_chunks + 1, chunk.usage or usage
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            sampled[choice.index] += choice.model_extra.get("token_ids", [])
            logp[choice.index] += choice.logprobs.content if choice.logprobs else []
            finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert num_chunks > 6
    assert said == texts(whole)
    assert sampled == [choice.model_extra["token_ids"] for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    for choice, reported in zip(whole.choices, logp, strict=True):
        assert [each.token for each in reported] == [
            each.token for each in choice.logprobs.content or []
        ]
    assert usage == whole.usage


def test_completions_take_text_or_tokens_one_or_several(server: Server, client: openai.OpenAI):
    tokens = server.source.tokenizer.encode("12+30=").tolist()
    several = client.completions.create(
        model=MODEL, prompt=["12+30=", "7*8="], n=2, seed=1, max_tokens=8
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    as_tokens = client.completions.create(
        model=MODEL, prompt=tokens, n=2, seed=1, max_tokens=8, extra_body=TOKENS
    )
    assert [choice.text for choice in as_tokens.choices] == [
        choice.text for choice in several.choices[:2]
    ]
    assert (as_tokens.model_extra or {})["prompt_token_ids"] == tokens
    streamed = ["", ""]
    for chunk in client.completions.create(
        model=MODEL, prompt=tokens, n=2, seed=1, max_tokens=8, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in as_tokens.choices]


@pytest.mark.slow
def test_logprobs_come_with_the_most_likely_tokens(client: openai.OpenAI):
    answer = chat(
        client, temperature=0, logprobs=True, top_logprobs=3, max_tokens=6, extra_body=TOKENS
    )
    [choice] = answer.choices
    reported = choice.logprobs.content
    assert len(reported) == len(choice.model_extra["token_ids"]) == 6
    for each in reported:
        # The most likely token was sampled, and those beside it are less likely.
        assert each.top_logprobs[0].token == each.token
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob, abs=1e-5)
        logp = [other.logprob for other in each.top_logprobs]
        assert logp == sorted(logp, reverse=True)
        assert sum(np.exp(logp)) <= 1 + 1e-5
        assert bytes(each.bytes).decode() == each.token
    completion = client.completions.create(model=MODEL, prompt="12+30=", logprobs=2, max_tokens=4)
    reported = completion.choices[0].logprobs
    assert (
        reported is not None and len(reported.tokens or []) == len(reported.top_logprobs or []) == 4
    )
    assert all(len(others) == 2 for others in reported.top_logprobs or [])


@pytest.mark.slow
def test_stop_string_may_begin_inside_a_token(client: openai.OpenAI):
    # Long answers: what is sampled before the server receives the first tokens is far from all of
    # it.
    long = TOKENS | {"min_tokens": 256}
    free = chat(client, seed=3, extra_body=long)
    text, tokens = free.choices[0].message.content, free.choices[0].model_extra["token_ids"]
    assert len(text) > 12
    for begin in range(1, 9):
        stop = text[begin : begin + 4]
        answer = chat(client, seed=3, stop=[stop, "never said"], extra_body=long)
        assert answer.choices[0].message.content == text.partition(stop)[0]
        assert answer.choices[0].finish_reason == "stop"
        sampled = answer.choices[0].model_extra["token_ids"]
        assert sampled == tokens[: len(sampled)] and len(sampled) < len(tokens)
        streamed = chat(client, seed=3, stop=[stop], stream=True, extra_body=long)
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
            == text.partition(stop)[0]
        )


def test_penalties_and_min_new_tokens_are_applied(client: openai.OpenAI):
    plain = chat(client, seed=2, temperature=0, max_tokens=24, extra_body=TOKENS)
    other = chat(
        client,
        seed=2,
        temperature=0,
        max_tokens=24,
        presence_penalty=2,
        frequency_penalty=2,
        extra_body=TOKENS | {"min_tokens": 24},
    )
    few, many = (set(answer.choices[0].model_extra["token_ids"]) for answer in (plain, other))
    assert len(other.choices[0].model_extra["token_ids"]) == 24
    assert len(many) > len(few)


@pytest.mark.slow
def test_64_concurrent_clients_get_the_answers_of_single_ones(
    server: Server, client: openai.OpenAI
):
    alone = {seed: texts(chat(client, seed=seed, max_tokens=16)) for seed in range(4)}

    async def all_at_once() -> list[list[str | None]]:
        # One object of the package is as many connections as it has requests under way.
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0
        ) as own:
            create = own.chat.completions.create
            asked = [
                create(model=MODEL, messages=ASKED, seed=seed % 4, max_tokens=16)
                for seed in range(64)
            ]
            return [texts(answer) for answer in await asyncio.gather(*asked)]

    assert asyncio.run(all_at_once()) == [alone[seed % 4] for seed in range(64)]


@pytest.mark.parametrize("streams", [True, False])
def test_disconnected_client_frees_its_slots(server: Server, client: openai.OpenAI, streams: bool):
    # As raw sockets: what leaves here is the connection itself.
    async def leave() -> None:
        body = json.dumps(
            {
                "model": MODEL,
                "messages": ASKED,
                "n": 16,
                "stream": streams,
                "min_tokens": 320,
                "max_tokens": 320,
            }
        ).encode()
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {KEY}",
            f"Content-Length: {len(body)}",
        ]
        writer.write("".join(f"{line}\r\n" for line in [*head, ""]).encode() + body)
        await writer.drain()
        if streams:
            assert b"200" in await asyncio.wait_for(reader.readline(), 60)
        else:
            await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()

    before = metric(server, client, 'requests_total{endpoint="/v1/chat/completions",status="499"}')
    asyncio.run(leave())
    deadline_s = time.monotonic() + 60
    while (
        metric(server, client, 'requests_total{endpoint="/v1/chat/completions",status="499"}')
        == before
    ):
        assert time.monotonic() < deadline_s
    while server.run(_unfinished(server)):
        assert time.monotonic() < deadline_s
    # The metrics' own request is not one.
    assert metric(server, client, "requests_running") == 0
    assert texts(chat(client, seed=0, max_tokens=4, n=8))


async def _unfinished(server: Server) -> dict[str, Any]:
    return await server.source.engine.snapshot()


def metric(server: Server, client: openai.OpenAI, name: str) -> float:
    request = urllib.request.Request(
        f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(
        (float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"areal_jax_{name} ")),
        0.0,
    )


def test_request_counters_grow_by_the_answers(server: Server, client: openai.OpenAI):
    names = ("completion_tokens_total", "prompt_tokens_total", "engine_requests_total")
    before = [metric(server, client, name) for name in names]
    usage = chat(client, seed=1, max_tokens=5).usage
    after = [metric(server, client, name) for name in names]
    assert np.subtract(after, before).tolist() == [usage.completion_tokens, usage.prompt_tokens, 1]


def test_health_requests_are_not_counted(server: Server, client: openai.OpenAI):
    def counted() -> list[float]:
        return [
            metric(server, client, name) for name in ("requests_running", "request_seconds_count")
        ]

    assert counted() == counted()
    before = counted()[1]
    client.models.list()
    with pytest.raises(openai.BadRequestError):
        chat(client, n=0)
    assert counted() == [0, before + 1]


@pytest.mark.parametrize(
    ("header", "body", "status"),
    [
        (b"Authorization: Bearer \xff", b"{}", 401),
        (b"Content-Encoding: gzip", b"{}", 400),
        (b"", b'{"model": "embedded", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b"", b'{"model": "embedded", "messages": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
        (
            b"",
            (
                b'{"model": "embedded", "messages": [{"role": "user", "content": "1"}], "top_k": '
                b"2147483648}"
            ),
            400,
        ),
        (
            b"",
            (
                b'{"model": "embedded", "messages": [{"role": "user", "content": "1"}], '
                b'"temperature": 1e-40}'
            ),
            400,
        ),
    ],
)
def test_hostile_bodies_are_refused_without_harm(
    server: Server, client: openai.OpenAI, header: bytes, body: bytes, status: int
):
    async def answered() -> bytes:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        key = (
            b"" if header.startswith(b"Authorization") else f"Authorization: Bearer {KEY}".encode()
        )
        lines = [
            b"POST /v1/chat/completions HTTP/1.1",
            b"Host: x",
            header,
            key,
            b"Content-Length: %d" % len(body),
        ]
        writer.write(b"".join(line + b"\r\n" for line in lines if line) + b"\r\n" + body)
        found = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        await writer.wait_closed()
        return found

    assert str(status).encode() in asyncio.run(answered())
    assert texts(chat(client, seed=0, max_tokens=2))


def test_wrong_bearer_token_is_refused(server: Server):
    for key in ("wrong", KEY + "x", "ключ"):
        shown = f"Bearer {key}".encode().decode("latin-1")  # as bytes travel in headers
        request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": shown})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == 401
        refused.value.close()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as untrusted:
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            chat(untrusted)
        with pytest.raises(openai.AuthenticationError):
            untrusted.models.list()


def test_health_needs_no_token(server: Server):
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
        assert json.load(answer) == {"status": "ok"}


def test_models_are_named(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "areal_jax"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist; there is 'embedded'"):
        client.chat.completions.create(model="gpt-9", messages=ASKED)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"messages": [{"role": "user", "content": "1+" * 200}]}, "engine.max_prompt_tokens=64"),
        ({"max_tokens": 321}, "engine.max_new_tokens=320"),
        ({"n": 17}, "limits.max_samples=16"),
        ({"temperature": 3.0}, "less than or equal to 2, found 3"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
            "no tools",
        ),
        ({"extra_body": {"banana": 1}}, "Unrecognized request argument supplied: banana"),
        ({"messages": []}, "expected messages to have at least 1 item"),
    ],
)
def test_unanswerable_requests_name_the_setting(
    client: openai.OpenAI, how: dict[str, Any], words: str
):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **how)
    assert words in refused.value.message
    with pytest.raises(openai.BadRequestError):
        chat(client, **how, stream=True)


def test_prompt_with_unknown_token_ids_is_refused(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="expected 0 to 767"):
        client.completions.create(model=MODEL, prompt=[1, 768])


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 400), (b"\xff\x00", 400), (b'"' + b"x" * 30_000 + b'"', 413)],
)
def test_a_malformed_body_is_answered_with_an_error_in_openais_form(
    server: Server, body: bytes, status: int
):
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        data=body,
        headers={"Authorization": f"Bearer {KEY}"},
        method="POST",
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    with refused.value as answer:
        error = json.load(answer)["error"]
    assert refused.value.code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_unknown_paths_return_404(server: Server):
    for path in ("/v1/embeddings", "/sessions/x/v1/models", "/"):
        request = urllib.request.Request(
            server.url + path, headers={"Authorization": f"Bearer {KEY}"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        with refused.value as answer:
            assert "message" in json.load(answer)["error"]
        assert refused.value.code == 404
