"""The HTTP server over a scripted engine: tools, limits, deadlines, failures."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import tokenizers
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import KEY, TOKENIZER, Scripted, served
from tokenizers import processors

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import EngineStopped
from areal_jax.serve.config import LimitsConfig

ASKED: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "find", "description": "finds", "parameters": {"type": "object"}},
    }
]

TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """The embedded policy's, with a template that knows tools."""
    folder = Path(tmp_path_factory.mktemp("policy"))
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return HFTokenizer.from_folder(folder)


def test_templates_that_render_tools_are_detected(tokenizer: HFTokenizer):
    assert tokenizer.can_render_tools
    assert not TOKENIZER.can_render_tools


def test_tools_reach_the_policy_and_calls_reach_the_client(tokenizer: HFTokenizer):
    said = 'I look.\n<tool_call>\n{"name": "find", "arguments": {"what": "é"}}\n</tool_call>'
    engine = Scripted([said] * 2 + ["done"])

    async def main() -> None:
        async with served(engine, tokenizer=tokenizer) as (_, client):
            create = client.chat.completions.create
            answer = await create(model="m", messages=ASKED, tools=TOOLS)
            [choice] = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "I look.\n"
            [call] = choice.message.tool_calls or []
            assert call.type == "function" and call.function.name == "find"
            assert json.loads(call.function.arguments) == {"what": "é"}

            text, called, finish = "", [], None
            async for chunk in await create(model="m", messages=ASKED, tools=TOOLS, stream=True):
                [part] = chunk.choices
                text += part.delta.content or ""
                called += part.delta.tool_calls or []
                finish = part.finish_reason or finish
            assert (text, finish) == ("I look.\n", "tool_calls")
            assert [each.function.arguments for each in called if each.function] == [
                call.function.arguments
            ]

            # The conversation goes on as clients write it.
            history: Any = [
                *ASKED,
                choice.message.model_dump(exclude_none=True),
                {"role": "tool", "content": "7", "tool_call_id": call.id},
            ]
            last = await create(model="m", messages=history, tools=TOOLS)
            assert last.choices[0].message.content == "done"

    asyncio.run(main())
    prompts = [tokenizer.decode(request.prompt_tokens) for request in engine.requests]
    assert "find" in prompts[0]
    assert (
        'I look.\n<tool_call>{"name": "find", "arguments": {"what": "é"}}</tool_call>' in prompts[2]
    )
    assert prompts[2].endswith("tool\n7\nassistant\n")


XML = "I look.\n<tool_call>\n<function=find>\n<parameter=what>\né\n</parameter>\n</function>\n"


def test_calls_are_parsed_in_the_dialect_of_the_template(tmp_path: Path):
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{# <function=NAME> #}" + TEMPLATE)
    coder = HFTokenizer.from_folder(tmp_path)
    assert coder.tool_dialect.name == "qwen3_coder"

    async def main() -> None:
        async with served(Scripted([f"{XML}</tool_call>"] * 2), tokenizer=coder) as (_, client):
            create = client.chat.completions.create
            [choice] = (await create(model="m", messages=ASKED, tools=TOOLS)).choices
            [call] = choice.message.tool_calls or []
            assert call.type == "function" and choice.message.content == "I look.\n"
            assert json.loads(call.function.arguments) == {"what": "é"}
            text, arguments = "", list[str | None]()
            async for chunk in await create(model="m", messages=ASKED, tools=TOOLS, stream=True):
                [part] = chunk.choices
                text += part.delta.content or ""
                arguments += [
                    each.function.arguments for each in part.delta.tool_calls or () if each.function
                ]
            assert (text, arguments) == ("I look.\n", [call.function.arguments])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_calls_of_another_dialect_are_counted_and_reported(
    tokenizer: HFTokenizer, caplog: pytest.LogCaptureFixture
):
    async def main() -> str:
        async with served(Scripted([XML] * 20), tokenizer=tokenizer) as (_, client):
            for _ in range(20):
                await client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS)
            root = str(client.base_url).removesuffix("/v1/")
            async with (
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
                session.get(f"{root}/metrics") as response,
            ):
                return await response.text()

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert 'areal_jax_unparsed_tool_calls_total{dialect="qwen3_coder"} 20.0' in found
    warned = [each for each in caplog.messages if "0 tool calls parsed in" in each]
    assert len(warned) == 2  # after 8 and 16 answers
    assert "asks for dialect hermes" in warned[0]


CALL = '<tool_call>{"name": "find", "arguments": {"what": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("said", "content", "num_calls"),
    [
        (f"I look. {CALL.removesuffix('</tool_call>')}", "I look. ", 1),  # unclosed, complete JSON
        ('I look. <tool_call>{"name": "find"', 'I look. <tool_call>{"name": "find"', 0),
        (CALL.replace("{", '{"id": 7, ', 1), None, 1),
        (f"<think>maybe {CALL}</think>no", f"<think>maybe {CALL}</think>no", 0),
        (f"maybe {CALL}</think>yes{CALL}", f"maybe {CALL}</think>yes", 1),
        (f"{CALL} <tool_call>{{}}</tool_call> {CALL}", "<tool_call>{}</tool_call> ", 2),
    ],
)
def test_tool_calls_of_streamed_and_whole_answers_are_the_same(
    tokenizer: HFTokenizer, said: str, content: str | None, num_calls: int
):
    async def main() -> None:
        async with served(Scripted([said] * 2), tokenizer=tokenizer) as (_, client):
            create = client.chat.completions.create
            [choice] = (await create(model="m", messages=ASKED, tools=TOOLS)).choices
            calls = choice.message.tool_calls or []
            assert choice.message.content == content
            assert choice.finish_reason == ("tool_calls" if num_calls else "stop")
            arguments = [each.function.arguments for each in calls if each.type == "function"]
            assert arguments == ['{"what": "x"}'] * num_calls

            text, streamed = "", list[str]()
            async for chunk in await create(model="m", messages=ASKED, tools=TOOLS, stream=True):
                [part] = chunk.choices
                text += part.delta.content or ""
                deltas = part.delta.tool_calls or []
                streamed += [each.function.arguments or "" for each in deltas if each.function]
            assert (text, streamed) == (content or "", arguments)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for tool in tools or [] %}{% for name, of in tool.function.parameters | items "
            "%}{{ name }}{% endfor %}{{ tool }}{% endfor %}",
            "failed on the conversation: TypeError: Can only get item pairs",
        ),
        (
            "{% if tools %}{{ raise_exception('tools? no') }}{% endif %}",
            "refuses the conversation: tools[?] no",
        ),
    ],
)
def test_template_errors_are_reported_in_their_text(tmp_path: Path, template: str, words: str):
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    given: Any = [{"type": "function", "function": {"name": "find", "parameters": ["what"]}}]

    async def main() -> None:
        async with served(Scripted(["done"]), tokenizer=HFTokenizer.from_folder(tmp_path)) as (
            _,
            client,
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                await client.chat.completions.create(model="m", messages=ASKED, tools=given)

    asyncio.run(main())


def test_continuation_prompt_starts_with_the_bos_token(tmp_path: Path):
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    begin = TOKENIZER.stop_token_ids[0]
    name = inner.id_to_token(begin)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, begin)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    engine, words = Scripted(), TOKENIZER.encode("1+1=").tolist()

    async def main() -> None:
        async with served(engine, tokenizer=HFTokenizer.from_folder(tmp_path)) as (_, client):
            for prompt in ("1+1=", words):
                await client.completions.create(model="m", prompt=prompt)

    asyncio.run(main())
    # Tokens are taken as they are.
    assert [request.prompt_tokens.tolist() for request in engine.requests] == [
        [begin, *words],
        words,
    ]


def test_streamed_text_offsets_count_from_the_start_of_the_answer():
    async def main() -> tuple[list[int], list[int]]:
        async with served(Scripted(["what was to be shown"] * 3)) as (_, client):
            [choice] = (await client.completions.create(model="m", prompt="a", logprobs=0)).choices
            parts: dict[int, list[int]] = {0: [], 1: []}
            async for chunk in await client.completions.create(
                model="m", prompt="a", n=2, logprobs=0, stream=True
            ):
                for part in chunk.choices:
                    parts[part.index] += (part.logprobs and part.logprobs.text_offset) or []
            assert parts[0] == parts[1]
            return (choice.logprobs and choice.logprobs.text_offset) or [], parts[0]

    whole, streamed = asyncio.run(main())
    assert whole[0] == 0 and len(set(whole)) == len(whole) > 6
    assert streamed == whole


def test_without_tools_a_call_is_text(tokenizer: HFTokenizer):
    said = '<tool_call>{"name": "find"}</tool_call>'

    async def main() -> list[Any]:
        async with served(Scripted([said] * 2), tokenizer=tokenizer) as (_, client):
            plain = await client.chat.completions.create(model="m", messages=ASKED)
            none = await client.chat.completions.create(
                model="m", messages=ASKED, tools=TOOLS, tool_choice="none"
            )
            return [plain.choices[0].message, none.choices[0].message]

    for message in asyncio.run(main()):
        assert (message.content, message.tool_calls) == (said, None)


def test_one_request_too_many_gets_retry_after():
    engine = Scripted(hangs=True)

    async def main() -> None:
        async with served(engine, LimitsConfig(max_requests=2)) as (_, client):
            create = client.chat.completions.create
            held = [asyncio.create_task(create(model="m", messages=ASKED)) for _ in range(2)]
            while len(engine.requests) < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError) as refused:
                await create(model="m", messages=ASKED)
            assert refused.value.response.headers["Retry-After"] == "1"
            assert [model.id async for model in client.models.list()] == ["m"]
            for each in held:
                each.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            while engine.num_cancelled < 2:
                await asyncio.sleep(0.01)
            engine.hangs = False
            await create(model="m", messages=ASKED)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("stream", [False, True])
def test_slow_answer_times_out(stream: bool):
    engine = Scripted(["hello there"], hangs=True)

    async def main() -> None:
        async with served(engine, LimitsConfig(request_timeout_s=0.3)) as (_, client):
            create = client.chat.completions.create
            if stream:
                with pytest.raises(openai.APIError, match="request_timeout_s"):
                    async for _ in await create(model="m", messages=ASKED, stream=True):
                        pass
            else:
                with pytest.raises(openai.InternalServerError, match="request_timeout_s") as broken:
                    await create(model="m", messages=ASKED)
                assert broken.value.status_code == 504
            while not engine.num_cancelled:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_stopped_engine_is_reported_by_responses_and_health():
    async def main() -> None:
        async with served(Scripted(error=EngineStopped("the engine has died"))) as (app, client):
            with pytest.raises(openai.InternalServerError, match="the engine has died") as failed:
                await client.chat.completions.create(model="m", messages=ASKED)
            assert failed.value.status_code == 503
            assert app.stopped.is_set()
            health = await client.with_options(
                base_url=str(client.base_url).removesuffix("v1/")
            ).get("/health", cast_to=object)
            assert health

    with pytest.raises(openai.InternalServerError) as unhealthy:
        asyncio.run(asyncio.wait_for(main(), 60))
    assert unhealthy.value.status_code == 503


def test_internal_error_reveals_only_its_kind(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with served(Scripted(error=KeyError("a secret"))) as (_, client):
            with pytest.raises(
                openai.InternalServerError, match="the server failed: KeyError"
            ) as failed:
                await client.chat.completions.create(model="m", messages=ASKED)
            assert "secret" not in failed.value.message

    asyncio.run(asyncio.wait_for(main(), 60))
    assert "a secret" in caplog.text


def test_incomplete_request_times_out():
    async def main() -> bytes:
        async with served(Scripted(), LimitsConfig(body_timeout_s=0.2)) as (_, client):
            port = client.base_url.port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                b"key\r\nContent-Length: 50\r\n\r\n{"
            )
            answer = await reader.readline()
            writer.close()
            await writer.wait_closed()
            return answer

    assert b"408" in asyncio.run(asyncio.wait_for(main(), 60))


def test_seeded_requests_repeat_and_unseeded_ones_differ():
    engine = Scripted()

    async def main() -> None:
        async with served(engine) as (_, client):
            for seed in (None, None, 7, 7):
                await client.chat.completions.create(model="m", messages=ASKED, seed=seed)

    asyncio.run(asyncio.wait_for(main(), 60))
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == 3
    assert seeds[2:] == [7, 7]


async def scrape(client: openai.AsyncOpenAI) -> dict[str, Metric]:
    """Return the metrics of a server by name."""
    url, headers = client.base_url.join("/metrics"), {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession() as session, session.get(str(url), headers=headers) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE_LATEST
        return {
            family.name: family for family in text_string_to_metric_families(await answer.text())
        }


def test_stream_that_fails_after_its_status_is_counted():
    async def main() -> None:
        async with served(Scripted(["hello there"], error=KeyError("secret"))) as (_, client):
            with pytest.raises(openai.APIError, match="the server failed: KeyError"):
                async for _ in await client.chat.completions.create(
                    model="m", messages=ASKED, stream=True
                ):
                    pass
            found = await scrape(client)
        [failed] = [
            each
            for each in found["areal_jax_failed_streams"].samples
            if each.name.endswith("total")
        ]
        assert (failed.labels, failed.value) == ({"endpoint": "/v1/chat/completions"}, 1)
        [finished] = [
            each for each in found["areal_jax_requests"].samples if each.name.endswith("total")
        ]
        assert finished.labels["status"] == "200"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_metrics_of_two_apps_are_separate_and_prometheus_parses_them():
    async def main() -> None:
        async with served(Scripted(["hello"])) as (_, client), served(Scripted()) as (_, other):
            await client.chat.completions.create(model="m", messages=ASKED)
            first, second = await scrape(client), await scrape(other)
            [answered] = [
                each for each in first["areal_jax_requests"].samples if each.name.endswith("_total")
            ]
            assert (answered.labels, answered.value) == (
                {"endpoint": "/v1/chat/completions", "status": "200"},
                1,
            )
            latency = first["areal_jax_request_seconds"]
            assert latency.type == "histogram"
            assert [each.value for each in latency.samples if each.name.endswith("_count")] == [1]
            assert second["areal_jax_requests"].samples == []

    asyncio.run(asyncio.wait_for(main(), 60))


def test_tokens_in_give_the_tokens_of_completions() -> None:
    engine = Scripted(["a sum"] * 2)

    async def main() -> None:
        async with served(engine) as (_, client), aiohttp.ClientSession() as http:
            prompt = TOKENIZER.encode("1+1").tolist()
            text = await client.completions.create(
                model="m", prompt=prompt, max_tokens=8, extra_body={"return_token_ids": True}
            )
            root = str(client.base_url).removesuffix("/v1/")
            headers = {"x-api-key": KEY}

            async def post(**body: Any) -> tuple[int, Any]:
                body = {"model": "m", "token_ids": prompt} | body
                url = f"{root}/inference/v1/generate"
                async with http.post(url, json=body, headers=headers) as response:
                    return response.status, await response.json()

            sampling = {"max_tokens": 8, "logprobs": 1, "skip_special_tokens": False, "top_k": -1}
            status, found = await post(sampling_params=sampling, request_id="mine")
            assert status == 200
            (choice,), (expected,) = found["choices"], text.model_dump()["choices"]
            assert choice["token_ids"] == expected["token_ids"]
            assert choice["finish_reason"] == "stop"
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            assert logprobs == expected["token_logprobs"]
            assert found["prompt_token_ids"] == prompt

            for wrong, name in (
                ({"token_ids": []}, "token_ids"),
                ({"token_ids": "1+1"}, "token_ids"),
                ({"token_ids": [-1]}, "token_ids[0]"),
                ({"sampling_params": [1]}, "sampling_params"),
                ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
                ({"sampling_params": {"prompt": "text"}}, "prompt"),
                ({"sampling_params": {"use_beam_search": True}}, "use_beam_search"),
                ({"stream": True}, "stream"),
                ({"model": None}, "model"),
            ):
                status, found = await post(**wrong)
                assert (status, found["error"]["param"]) == (400, name), wrong

    asyncio.run(main())


def test_tokenizer_endpoints_answer_as_the_tokenizer() -> None:
    async def main() -> None:
        headers = {"x-api-key": KEY}
        async with (
            served(Scripted()) as (_, client),
            aiohttp.ClientSession(headers=headers) as http,
        ):
            root = str(client.base_url).removesuffix("/v1/")

            async def post(path: str, **body: Any) -> tuple[int, Any]:
                async with http.post(f"{root}/{path}", json=body) as response:
                    return response.status, await response.json()

            for text in ("1 + 1 = 2", "", "<|im_end|> é"):
                tokens = TOKENIZER.encode_prompt(text).tolist()
                found = await post("tokenize", prompt=text, model="m")
                assert found == (200, {"tokens": tokens, "count": len(tokens)})
                decoded = TOKENIZER.decode(np.array(tokens, np.int32))
                assert await post("detokenize", tokens=tokens) == (200, {"prompt": decoded})
            assert (await post("tokenize"))[0] == 400
            status, found = await post("detokenize", tokens=[10**6])
            assert status == 400 and "expected tokens below" in found["error"]["message"]
            async with http.get(f"{root}/tokenizer_info") as response:
                info = await response.json()
            assert info["chat_template"] and info["eos_token"] == "<|im_end|>"
            async with http.get(f"{root}/tokenizer_info", headers={"x-api-key": "no"}) as response:
                assert response.status == 401

    asyncio.run(main())
