"""Anthropic's Messages API and OpenAI's Responses API, by the clients of their makers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from openai.types.responses import Response
from scripted_engine import KEY, Scripted, served
from tokenizers import Tokenizer

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.serve.config import LimitsConfig

if TYPE_CHECKING:
    # It takes 1.4 s to import: only where a test runs.
    import anthropic

PARAMETERS: Any = {"type": "object", "properties": {"what": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "é"}}\n</tool_call>'
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "find", "description": "finds", "parameters": PARAMETERS},
}
MESSAGES_TOOL: Any = {"name": "find", "description": "finds", "input_schema": PARAMETERS}
RESPONSES_TOOL: Any = {
    "type": "function",
    "name": "find",
    "description": "finds",
    "parameters": PARAMETERS,
    "strict": False,
}
TEMPLATE = """\
{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """The embedded policy's, with a template that renders tools."""
    folder = Path(tmp_path_factory.mktemp("policy"))
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return HFTokenizer.from_folder(folder)


Act = Callable[[openai.AsyncOpenAI, "anthropic.AsyncAnthropic"], Awaitable[None]]


def with_clients(
    engine: Scripted, tokenizer: HFTokenizer, act: Act, limits: LimitsConfig | None = None
) -> None:
    import anthropic

    async def main() -> None:
        async with served(engine, limits, tokenizer) as (_, client):
            root = str(client.base_url).removesuffix("/v1/")
            async with anthropic.AsyncAnthropic(
                base_url=root, api_key=KEY, max_retries=0
            ) as messages:
                await act(client, messages)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_one_conversation_has_the_same_prompts_in_three_protocols(tokenizer: HFTokenizer):
    said = f"I look.\n{CALL}{CALL}"
    engine = Scripted([said, "done"] * 3)

    async def act(client: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        # Chat completions.
        history: Any = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ]
        create = client.chat.completions.create
        [choice] = (await create(model="m", messages=history, tools=[CHAT_TOOL])).choices
        calls = choice.message.tool_calls or []
        history.append(choice.message.model_dump(exclude_none=True))
        history += [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in calls]
        last = await create(model="m", messages=history, tools=[CHAT_TOOL])
        assert last.choices[0].message.content == "done"

        # Responses.
        items: Any = [{"role": "user", "content": "hi"}]
        given: Any = {"model": "m", "instructions": "be brief", "tools": [RESPONSES_TOOL]}
        response = await client.responses.create(**given, input=items)
        assert response.status == "completed" and response.output_text == "I look.\n"
        items += [item.model_dump(exclude_none=True) for item in response.output]
        called = [item for item in response.output if item.type == "function_call"]
        assert [(each.name, json.loads(each.arguments)) for each in called] == [
            ("find", {"what": "é"})
        ] * 2
        assert len({each.call_id for each in called}) == 2
        items += [
            {"type": "function_call_output", "call_id": each.call_id, "output": "7"}
            for each in called
        ]
        assert (await client.responses.create(**given, input=items)).output_text == "done"

        # Messages.
        turns: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        given = {"model": "m", "max_tokens": 50, "system": "be brief", "tools": [MESSAGES_TOOL]}
        message = await messages.messages.create(**given, messages=turns)
        assert message.stop_reason == "tool_use"
        text, *uses = message.content
        assert text.type == "text" and text.text == "I look.\n"
        assert [each.input for each in uses if each.type == "tool_use"] == [{"what": "é"}] * 2
        results = [
            {"type": "tool_result", "tool_use_id": each.id, "content": content}
            for each, content in zip(uses, ["7", [{"type": "text", "text": "7"}]], strict=True)
            if each.type == "tool_use"
        ]
        turns += [
            {"role": "assistant", "content": [each.model_dump() for each in message.content]},
            {"role": "user", "content": results},
        ]
        counted = await messages.messages.count_tokens(
            model="m", system="be brief", messages=turns, tools=[MESSAGES_TOOL]
        )
        last = await messages.messages.create(**given, messages=turns)
        assert last.stop_reason == "end_turn"
        assert last.usage.input_tokens == counted.input_tokens

    with_clients(engine, tokenizer, act)
    prompts = [tokenizer.decode(request.prompt_tokens) for request in engine.requests]
    assert len(prompts) == 6
    assert prompts[0] == prompts[2] == prompts[4] and "be brief" in prompts[0]
    assert prompts[1] == prompts[3] == prompts[5] and prompts[1].count("tool\n7") == 2


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("plain words", "plain words"),
        (f"I look.\n{CALL}", "I look.\n"),
        (f"\n\n{CALL} {CALL}", ""),
        ("\n late words", "\n late words"),
        ("", ""),
    ],
)
def test_streams_and_complete_answers_agree(tokenizer: HFTokenizer, said: str, text: str):
    async def act(client: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        given: Any = {"model": "m", "input": "hi", "tools": [RESPONSES_TOOL]}
        whole = await client.responses.create(**given)
        deltas, kinds = "", list[str]()
        async with client.responses.stream(**given) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    deltas += event.delta
            final = await stream.get_final_response()
        assert whole.output_text == final.output_text == deltas == text
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

        def essence(response: Any) -> list[Any]:
            return [
                item.content[0].text if item.type == "message" else (item.name, item.arguments)
                for item in response.output
            ]

        assert essence(whole) == essence(final)
        assert whole.usage and final.usage
        assert whole.usage.output_tokens == final.usage.output_tokens

        given = {
            "model": "m",
            "max_tokens": 90,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [MESSAGES_TOOL],
        }
        message = await messages.messages.create(**given)
        deltas = ""
        async with messages.messages.stream(**given) as events:
            async for each in events.text_stream:
                deltas += each
            streamed = await events.get_final_message()
        assert deltas == text

        def blocks(of: Any) -> list[Any]:
            return [each.text if each.type == "text" else each.input for each in of.content]

        assert blocks(message) == blocks(streamed)
        assert (message.stop_reason, message.usage.output_tokens) == (
            streamed.stop_reason,
            streamed.usage.output_tokens,
        )
        assert message.stop_reason == ("tool_use" if CALL in said else "end_turn")

    with_clients(Scripted([said] * 4), tokenizer, act)


def test_stop_sequences_are_named(tokenizer: HFTokenizer):
    engine = Scripted(["one two three four"] * 2)

    async def act(_: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        given: Any = {
            "model": "m",
            "max_tokens": 50,
            "messages": [{"role": "user", "content": "count"}],
            "stop_sequences": ["four", " three"],
        }
        message = await messages.messages.create(**given)
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
        [block] = message.content
        assert block.type == "text" and block.text == "one two"
        async with messages.messages.stream(**given) as events:
            streamed = await events.get_final_message()
        assert streamed.stop_sequence == " three"
        [last] = streamed.content
        assert last.type == "text" and last.text == "one two"

    with_clients(engine, tokenizer, act)


def test_tokens_come_back_in_every_protocol(tokenizer: HFTokenizer):
    engine = Scripted(["five tokens"] * 3)
    more: Any = {"return_token_ids": True, "seed": 7}

    async def act(client: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        turns: Any = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(model="m", messages=turns, extra_body=more)
        message = await messages.messages.create(
            model="m", max_tokens=50, messages=turns, extra_body=more
        )
        response = await client.responses.create(
            model="m",
            input=turns,
            extra_body=more,
            include=["message.output_text.logprobs"],
            top_logprobs=0,
        )
        found = [each.model_dump() for each in (message, response)]
        choice = chat.choices[0].model_dump()
        for each in found:
            assert each["prompt_token_ids"] == chat.model_dump()["prompt_token_ids"]
            for name in ("token_ids", "versions", "token_logprobs"):
                assert each[name] == choice[name] and len(each[name]) > 1
        [item] = response.output
        assert item.type == "message" and item.content[0].type == "output_text"
        logprobs = item.content[0].logprobs or []
        assert [each.logprob for each in logprobs] == choice["token_logprobs"]

    with_clients(engine, tokenizer, act)
    assert [request.seed for request in engine.requests] == [7] * 3


def test_fields_that_claude_code_sends_are_accepted(tokenizer: HFTokenizer):
    engine = Scripted(["done"])
    body = {
        "model": "m",
        "max_tokens": 32,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": " helpful."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "fix it"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"what": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no such file"}],
                        "cache_control": {"type": "ephemeral"},
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
            {"role": "system", "content": "remember the rules"},
        ],
        "tools": [MESSAGES_TOOL | {"eager_input_streaming": True}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
    }

    async def act(_: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        url = f"{messages.base_url}/v1/messages?beta=true".replace("//v1", "/v1")
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers={"x-api-key": KEY}) as response,
        ):
            assert response.status == 200, await response.text()
            lines = (await response.text()).split("\n")
        events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        assert events[0] == "message_start" and events[-1] == "message_stop"

    with_clients(engine, tokenizer, act)
    [request] = engine.requests
    prompt = tokenizer.decode(request.prompt_tokens)
    order = ["You are helpful.", "fix it", '"what"', "no such file", "go on", "remember the rules"]
    # The tool's parameters stand in front, as the template has it.
    places = [prompt.rindex(each) for each in order]
    assert places == sorted(places)


USER: Any = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": None}, "you must provide max_tokens"),
        ({"max_tokens": 0}, "expected max_tokens to be greater than"),
        ({"messages": []}, "expected messages to have at least 1 item"),
        ({"messages": [USER] * 9}, "limits.max_messages=8 items, found 9"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages[0].content to be a string"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message to be of role"),
        ({"tool_choice": {"type": "any"}}, "tool_choice requires tools, found none"),
        ({"tool_choice": {"type": "tool"}}, "you must provide tool_choice.name"),
        ({"tools": [{"type": "web_search", "name": "w", "input_schema": {}}]}, "tools[0].type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"mcp_servers": []}, "Unrecognized request argument supplied: mcp_servers"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "expected messages[0].content to be a string or a list of blocks",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image", "source": {
                "type": "base64", "media_type": "image/png", "data": "eA=="}}]}, USER]},
            "one of text, tool_use, thinking, redacted_thinking in a message of role assistant",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {
                "type": "url", "url": "http://x"}}]}]},
            "expected a data URI, or a URL with http or https of a host in images.hosts (none)",
        ),
    ],
)  # fmt: skip
def test_wrong_messages_are_refused_in_anthropics_form(
    tokenizer: HFTokenizer, more: dict[str, Any], words: str
):
    import anthropic

    async def act(_: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        body = {"model": "m", "max_tokens": 9, "messages": [USER]} | more
        with pytest.raises(anthropic.BadRequestError) as refused:
            await messages.post("/v1/messages", body=body, cast_to=anthropic.types.Message)
        error: Any = refused.value.body
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert words in error["error"]["message"]

    with_clients(Scripted(), tokenizer, act, LimitsConfig(max_messages=8))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"input": None}, "you must provide input"),
        ({"input": [USER] * 9}, "limits.max_messages=8 items, found 9"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "expected input[0] to"),
        ({"previous_response_id": "resp_1"}, "the server keeps no responses"),
        ({"background": True}, "background is not supported: expected false"),
        ({"tool_choice": "required"}, "tool_choice requires tools, found none"),
        ({"tool_choice": {"type": "web_search"}}, 'tool_choice to be "auto", "none", "req'),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type to be 'function'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.json_schema.schema"),
        ({"unknown_field": 1}, "Unrecognized request argument supplied: unknown_field"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "be a JSON object in a string",
        ),
    ],
)
def test_wrong_responses_requests_are_refused(
    tokenizer: HFTokenizer, more: dict[str, Any], words: str
):
    async def act(client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic) -> None:
        body = {"model": "m", "input": "hi"} | more
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/responses", body=body, cast_to=Response)
        assert words in refused.value.message

    with_clients(Scripted(), tokenizer, act, LimitsConfig(max_messages=8))


def test_clients_raise_the_error_of_the_status(tokenizer: HFTokenizer):
    import anthropic

    async def act(client: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        given: Any = {"max_tokens": 9, "messages": [USER]}
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await messages.messages.create(model="other", **given)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await messages.with_options(api_key="wrong").messages.create(model="m", **given)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").responses.create(model="m", input="hi")
        assert [each.id async for each in messages.models.list()] == ["m"]

    with_clients(Scripted(), tokenizer, act)


def test_streams_that_fail_end_with_an_error_event(tokenizer: HFTokenizer):
    import anthropic

    async def act(client: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        given: Any = {"model": "m", "max_tokens": 99, "messages": [USER]}
        with pytest.raises(anthropic.APIStatusError, match="the server failed: OSError"):
            async with messages.messages.stream(**given) as events:
                await events.get_final_message()
        with pytest.raises(openai.APIError, match="the server failed: OSError"):
            async with client.responses.stream(model="m", input="hi") as stream:
                await stream.get_final_response()

    with_clients(Scripted(["some words of it"] * 2, error=OSError("disk")), tokenizer, act)


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        # Of Qwen3, DeepSeek and GPT-OSS: a switch, or levels.
        (
            "{{ enable_thinking }}",
            {"": "", "none": "False", "minimal": "False", "low": "True", "high": "True"},
        ),
        ("{{ thinking }}", {"": "", "none": "False", "medium": "True"}),
        ("{{ reasoning_effort }}", {"": "", "none": "low", "low": "low", "xhigh": "high"}),
        ("{{ messages[0].content }}", {"": "hi", "none": "hi", "high": "hi"}),
    ],
)
def test_reasoning_effort_reaches_templates_that_know_it(template: str, efforts: dict[str, str]):
    raw = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    tokenizer = HFTokenizer(raw, template, {}, [2])

    async def act(client: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> None:
        given: Any = {"model": "m", "messages": [USER]}
        for effort, rendered in efforts.items():
            chat = given | ({"reasoning_effort": effort} if effort else {})
            await client.chat.completions.create(**chat)
            reasoning: Any = {"effort": effort or None}
            await client.responses.create(model="m", input="hi", reasoning=reasoning)
            thinking = {"type": "disabled"} if effort == "none" else {"type": "adaptive"}
            output = {} if effort in ("", "none") else {"output_config": {"effort": effort}}
            await messages.messages.create(
                **given, max_tokens=9, extra_body={"thinking": thinking, **output}
            )
            texts = [tokenizer.decode(each.prompt_tokens) for each in engine.requests[-3:]]
            assert texts == [rendered] * 3
        with pytest.raises(openai.BadRequestError, match="reasoning_effort to be"):
            await client.chat.completions.create(**given, extra_body={"reasoning_effort": "huge"})

    engine = Scripted()
    with_clients(engine, tokenizer, act)
