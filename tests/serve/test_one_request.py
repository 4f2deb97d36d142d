"""One request, whatever it is, does not stop the server: what takes long is bounded first, and done
off the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from scripted_engine import KEY, TOKENIZER, Scripted, served

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import InvalidRequest
from areal_jax.records import Sampling
from areal_jax.serve.app import App, listening
from areal_jax.serve.bodies import read_json
from areal_jax.serve.config import LimitsConfig
from areal_jax.serve.engine_backend import EngineBackend
from areal_jax.serve.responses import written
from areal_jax.serve.validation import APIError

TEXT = "The quick brown fox, 12 + 30 = 42. "
MEGABYTES = TEXT * 100_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"


class Watched(HFTokenizer):
    """Remembers the threads in which texts were encoded and decoded."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.threads = set[int]()

    def _encode(self, text: str, *, add_special_tokens: bool) -> Any:
        self.threads.add(threading.get_ident())
        return super()._encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Any) -> str:
        self.threads.add(threading.get_ident())
        return super().decode(tokens)


def test_texts_are_encoded_and_decoded_off_the_event_loop():
    tokenizer = Watched.from_folder(EMBEDDED)
    assert isinstance(tokenizer, Watched)

    async def main() -> None:
        async with served(Scripted(["said"] * 2), tokenizer=tokenizer) as (_, client):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
            await client.completions.create(model="m", prompt="hi")

    asyncio.run(asyncio.wait_for(main(), 60))
    assert tokenizer.threads and threading.get_ident() not in tokenizer.threads


@pytest.mark.slow
def test_event_loop_is_responsive_during_encoding():
    async def main() -> list[int]:
        async with served(Scripted()) as (_, client):
            asking = asyncio.ensure_future(client.completions.create(model="m", prompt=MEGABYTES))
            num_turns = [0]
            while not asking.done():
                await asyncio.sleep(0.005)
                num_turns[0] += 1
            assert (await asking).usage is not None
            return num_turns

    # Encoded in the loop, or under the interpreter's lock, it lets the loop turn a few times before
    # and after.
    assert asyncio.run(asyncio.wait_for(main(), 100))[0] > 50


def test_a_prompt_of_too_many_bytes_is_refused_before_it_is_encoded():
    tokenizer = Watched.from_folder(EMBEDDED)
    assert isinstance(tokenizer, Watched)
    with pytest.raises(
        InvalidRequest,
        match=r"has 3500000 bytes, expected at most .*engine\.max_prompt_tokens=64 tokens",
    ):
        tokenizer.encode_prompt(MEGABYTES, 64)
    with pytest.raises(InvalidRequest, match=r"engine\.max_prompt_tokens=64"):
        tokenizer.render([{"role": "user", "content": MEGABYTES}], (), 64)
    assert tokenizer.threads == set()


@pytest.mark.parametrize("path", ["chat", "texts"])
def test_context_length_error_has_openai_format(path: str):
    engine = Scripted()

    async def main() -> None:
        app = App(EngineBackend(engine, "m", TOKENIZER, Sampling(8), 0, KEY, 64), LimitsConfig())
        async with (
            listening(app, "127.0.0.1", 0, 0.1) as port,
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0
            ) as client,
        ):
            with pytest.raises(openai.BadRequestError, match="the prompt has") as refused:
                if path == "chat":
                    await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": MEGABYTES}]
                    )
                else:
                    await client.completions.create(model="m", prompt=MEGABYTES)
            assert refused.value.code == "context_length_exceeded"

    asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.requests == []


@pytest.mark.parametrize(
    "text", [TEXT, "", "  \n\n\t  ", "a" * 500, "é漢字🙂" * 9, "".join(map(chr, range(1, 3000)))]
)
def test_no_text_has_more_bytes_than_its_tokens_may_have(text: str):
    num_tokens = len(TOKENIZER.encode(text))
    assert (
        TOKENIZER.encode_prompt(text, num_tokens).tolist() == TOKENIZER.encode_prompt(text).tolist()
    )


def test_long_texts_become_the_tokens_of_the_library():
    inner = TOKENIZER._tokenizer
    for text in (MEGABYTES[:20_000], "".join(map(chr, range(1, 0xD7FF)))):
        assert TOKENIZER.encode(text).tolist() == inner.encode(text, add_special_tokens=False).ids
        assert (
            TOKENIZER.encode_prompt(text).tolist()
            == inner.encode(text, add_special_tokens=True).ids
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"messages": [{"role": "user", "content": ""}] * 10},
            "expected messages to have at most limits.max_messages=9 items, found 10",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}] * 129},
            "expected tools to have at most 128 items, found a list of 129",
        ),
        ({"stop": ["a"] * 17}, "a list of at most 16, none of them empty, found a list of 17"),
        (
            {"metadata": {str(i): [] for i in range(60)}},
            "commas and brackets, expected at most limits.max_body_values=100",
        ),
        ({"n": 10**6}, "answers asked for, expected at most limits.max_samples=128"),
        ({"x" * 5000: 1}, r"xxx\.\.\."),
        ({"logit_bias": {"1": 1}}, "logit_bias is not supported"),
    ],
)
def test_oversized_requests_name_the_limit(given: dict[str, Any], words: str):
    engine = Scripted()

    async def main() -> None:
        limits = LimitsConfig(max_messages=9, max_body_values=1000 if "tools" in given else 100)
        async with served(engine, limits) as (_, client):
            body: dict[str, Any] = {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
            } | given
            with pytest.raises(openai.APIStatusError, match=words) as refused:
                await client.post("/chat/completions", body=body, cast_to=object)
            assert refused.value.status_code in (400, 413)
            assert len(refused.value.message) < 3000

    asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.requests == []


def test_bodies_of_many_values_are_refused_before_they_are_parsed():
    with pytest.raises(APIError, match="1300002 commas and brackets"):
        read_json(b'{"a": [' + b"[]," * 650_000 + b"no JSON", 1000)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": None, "ü": "é\n"},
        {"a": list(range(50)), "b": [[i, {"c": [i] * 20}] for i in range(40)]},
        {"a": {"b": {"c": [{"d": "e"}] * 33}}, "f": []},
    ],
)
def test_large_answers_are_written_as_json(value: dict[str, Any]):
    assert json.loads(written(value)) == value


@pytest.mark.slow
def test_event_loop_is_responsive_during_large_responses():
    async def main() -> int:
        async with served(Scripted([TEXT * 60])) as (_, client):
            create = client.chat.completions.create
            asking = asyncio.ensure_future(
                create(
                    model="m", messages=[{"role": "user", "content": "hi"}], n=128, logprobs=True
                )
            )
            num_turns = 0
            while not asking.done():
                await asyncio.sleep(0.005)
                num_turns += 1
            assert len((await asking).choices) == 128
            return num_turns

    assert asyncio.run(asyncio.wait_for(main(), 100)) > 20


MALFORMED = [
    b"\x00\x01\x02 no HTTP \xff\xfe\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nnot hex\r\n",
    HEAD + b"Content-Length: -5\r\n\r\n",
    HEAD + b"Content-Length: 6\r\n\r\n\xff\xfe\xff\xfe\xff\xfe",
]


async def exchanged(port: int, data: bytes) -> bytes:
    """The first line with which a server answers, empty where it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def port_of(client: openai.AsyncOpenAI) -> int:
    assert client.base_url.port is not None
    return client.base_url.port


def lines(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_malformed_http_is_refused_with_one_line_in_the_log(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with served(Scripted()) as (_, client):
            port = await port_of(client)
            for data in MALFORMED * 5:
                line = await exchanged(port, data)
                assert (
                    line == b"" or line.startswith(b"HTTP/1.1 4") or line.startswith(b"HTTP/1.0 4")
                ), (data[:50], line)
            assert b" 200 " in await exchanged(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")

    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(lines(caplog)) == 1 and "not HTTP" in lines(caplog)[0]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("begun", [b"", b"GET /hea", HEAD])
def test_a_connection_without_a_request_is_closed(begun: bytes):
    async def main() -> None:
        async with served(Scripted(), LimitsConfig(body_timeout_s=0.3)) as (_, client):
            assert await exchanged(await port_of(client), begun) == b""

    asyncio.run(asyncio.wait_for(main(), 60))


def test_connection_above_the_limit_is_refused():
    async def main() -> None:
        async with served(Scripted(), LimitsConfig(max_connections=3)) as (_, client):
            port = await port_of(client)
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for _, writer in held:
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert all([b" 200 " in await reader.readline() for reader, _ in held])
            health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            assert b" 503 " in await exchanged(port, health)
            for _, writer in held:
                writer.close()
                await writer.wait_closed()
            while b" 200 " not in await exchanged(port, health):
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))
