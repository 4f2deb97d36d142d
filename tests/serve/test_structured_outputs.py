"""Formats of answers and choices of tools: the real engine in three protocols, streamed and not."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
from scripted_engine import TOKENIZER, Scripted, served
from test_protocols import TEMPLATE

from areal_jax.data.grammars import Grammars
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.data.tool_dialects import DIALECTS
from areal_jax.data.tool_grammars import calls_grammar
from areal_jax.engine.config import EngineConfig
from areal_jax.run.serving import engine_backend
from areal_jax.serve.app import App, listening
from areal_jax.serve.bodies import APIError, read_chat
from areal_jax.serve.config import ServeConfig

KEY = "key"
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "e": {"enum": ["u", "v"]},
    },
    "required": ["n", "e"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
FUNCTIONS: Any = [
    {"name": "find", "parameters": SCHEMA},
    {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
]
TOOLS: Any = [{"type": "function", "function": each} for each in FUNCTIONS]
FIND: Any = {"type": "function", "function": {"name": "find"}}
ASKED: Any = [{"role": "user", "content": "hi"}]
GIVEN: Any = {"model": "m", "messages": ASKED, "max_tokens": 128, "seed": 5}


def is_valid(text: str | None) -> bool:
    found = json.loads(text or "")
    return set(found) == {"n", "e"} and 0 <= found["n"] <= 99 and found["e"] in ("u", "v")


# Grammars by themselves.

TEMPLATES = {
    "hermes": "",
    "qwen3_coder": "<function=",
    "harmony": "<|channel|>",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "deepseek, fenced": "<｜tool▁calls▁begin｜>```json",
    "mistral": "[TOOL_CALLS]",
    "mistral, ARGS": "[TOOL_CALLS][ARGS]",
    "llama": '"parameters": dictionary',
    "hermes, reasoning": "<think>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_match_their_schemas_in_every_dialect(name: str):
    dialect = next(each for each in DIALECTS if each.name == name.split(",")[0])
    raw = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    raw.add_special_tokens(list(dialect.special))
    tokenizer = HFTokenizer(raw, TEMPLATES[name], {}, TOKENIZER.stop_token_ids)
    size, rng = tokenizer.vocab_size, np.random.default_rng(0)
    grammars = Grammars.of(tokenizer, size)
    lengths = set[int]()
    for parallel in (False, True, True, True):
        grammar = calls_grammar(tokenizer, FUNCTIONS, "</think>\n", parallel=parallel)
        matcher, tokens = grammars.matcher(grammar), list[int]()
        # Whatever is sampled, is a call.
        while not tokens or tokens[-1] not in tokenizer.stop_token_ids:
            matcher.consume(np.array(tokens[-1:], np.int32))
            bits = np.zeros(-(-size // 32), np.int32)
            matcher.allowed(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            tokens.append(int(rng.choice(allowed)))
        parsed = tokenizer.tool_dialect.parse(
            tokenizer.decode_calls(np.array(tokens, np.int32)), TOOLS
        )
        assert parsed.content == "" and parsed.calls
        for call in parsed.calls:
            assert call.name == "stop" or is_valid(json.dumps(call.arguments))  # pyright: ignore
        lengths.add(len(parsed.calls))
        assert parallel or lengths == {1}
    assert max(lengths) > 1 or name == "harmony"


def test_reasoning_may_precede_calls_where_the_template_knows_it():
    tokenizer = HFTokenizer(TOKENIZER._tokenizer, "<think>", {}, TOKENIZER.stop_token_ids)
    grammars = Grammars.of(tokenizer, tokenizer.vocab_size)
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    for end, said in (
        ("assistant\n", f"<think>so</think>\n\n{call}"),
        ("assistant\n", call),
        ("<think>\n", f"so\n</think>\n\n{call}"),
        ("</think>\n\n", call),
    ):
        grammar = calls_grammar(tokenizer, FUNCTIONS, end, parallel=False)
        grammars.matcher(grammar).consume(tokenizer.encode(said))
    for end, said in (("</think>\n\n", "<think>"), ("assistant\n", "so")):
        grammar = calls_grammar(tokenizer, FUNCTIONS, end, parallel=False)
        with pytest.raises(ValueError, match="satisfy"):
            grammars.matcher(grammar).consume(tokenizer.encode(said))


@pytest.mark.parametrize(
    ("choice", "names", "rendered"),
    [
        ("auto", None, 2),
        ("none", None, 0),
        ("required", ["find", "stop"], 2),
        (FIND, ["find"], 2),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [FIND]},
            },
            ["find"],
            1,
        ),
    ],
)
def test_tool_choice_decides_which_tools_may_and_must_be_called(
    choice: Any, names: list[str] | None, rendered: int
):
    chat = read_chat({"model": "m", "messages": ASKED, "tools": TOOLS, "tool_choice": choice})
    calls = chat.generation_params.format.calls
    assert len(chat.tools) == rendered
    required = calls is not None and calls.is_required
    assert required == (names is not None)
    if calls and names:
        assert [tool["function"]["name"] for tool in calls.tools] == names


def test_a_choice_of_an_unknown_tool_is_refused():
    other = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(APIError, match="expected tool_choice to name one of 'find', 'stop', found"):
        read_chat({"model": "m", "messages": ASKED, "tools": TOOLS, "tool_choice": other})


def test_formats_are_refused_where_the_engine_has_no_grammars():
    async def main() -> None:
        async with served(Scripted()) as (_, client):
            with pytest.raises(openai.BadRequestError, match="response_format is not supported by"):
                await client.chat.completions.create(
                    model="m", messages=ASKED, response_format=FORMAT
                )

    asyncio.run(asyncio.wait_for(main(), 60))


# The real engine.


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the embedded policy, with a template that renders tools."""
    folder = Path(tmp_path_factory.mktemp("policy"))
    for file in EMBEDDED.iterdir():
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    # With one length of the view, each sampling mode is compiled once with masks and once without.
    engine = EngineConfig(
        num_slots=4,
        max_prompt_tokens=352,
        max_new_tokens=128,
        steps_per_dispatch=4,
        prefill_chunk_tokens=64,
        batch_invariant="full",
    )
    config = ServeConfig(model=str(folder), served_name="m", engine=engine, devices=1)
    started, found = threading.Event(), list[Any]()

    async def serve() -> None:
        stop = asyncio.Event()
        async with (
            engine_backend(config, KEY) as source,
            listening(App(source, config.limits), "127.0.0.1", 0, 1.0) as port,
        ):
            found.extend((f"http://127.0.0.1:{port}", stop, asyncio.get_running_loop()))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(250)
    url, stop, loop = found
    yield url
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.mark.slow
def test_chat_answers_match_their_formats(client: openai.OpenAI):
    create = client.chat.completions.create
    answer = create(**GIVEN, n=2, response_format=FORMAT, logprobs=True, top_logprobs=2)
    assert all(is_valid(choice.message.content) for choice in answer.choices)
    logprobs: Any = answer.choices[0].logprobs
    # The first token is "{", alone or with the text after it: whatever else is impossible.
    assert logprobs.constrained and all(
        top.token.startswith("{") for top in logprobs.content[0].top_logprobs
    )
    stream = create(**GIVEN, response_format=FORMAT, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert is_valid("".join(pieces)) and len(pieces) > 3
    found: Any = create(**GIVEN, response_format={"type": "json_object"}).choices[0]
    assert found.message.content.startswith("{")
    for extra, pattern in (
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}}, "(a*)c(b*)"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-3]+ "y"'}}, "x[0-3]+y"),
        ({"guided_json": json.dumps(SCHEMA)}, r"(?s)\{.*\}"),
    ):
        # A number may go on until the budget ends.
        text = create(**GIVEN, extra_body=extra).choices[0]
        assert re.fullmatch(pattern, text.message.content or "") or text.finish_reason == "length"
    completed: Any = client.completions.create(
        model="m", prompt="7 + ", max_tokens=9, logprobs=1, extra_body={"guided_regex": "[0-9]{2}"}
    )
    assert re.fullmatch("[0-9]{2}", completed.choices[0].text)
    assert completed.choices[0].logprobs.constrained


@pytest.mark.slow
def test_required_tools_are_called_in_three_protocols(client: openai.OpenAI, url: str):
    import anthropic

    create = client.chat.completions.create
    for choice in ("required", FIND):
        [one] = create(**GIVEN, tools=TOOLS[:1], tool_choice=choice).choices  # pyright: ignore
        [call] = (one.message.tool_calls or [])[:1]
        assert one.finish_reason in ("tool_calls", "length") and call.type == "function"
        assert call.function.name == "find" and is_valid(call.function.arguments)
    given = {**GIVEN, "parallel_tool_calls": False}
    stream = create(**given, tools=TOOLS, tool_choice="required", stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    [streamed] = [call for delta in deltas for call in delta.tool_calls or ()]
    assert streamed.function and streamed.function.name in ("find", "stop")
    # Text in the format, or calls.
    both = create(**given, tools=TOOLS, response_format=FORMAT).choices[0].message
    assert both.tool_calls or is_valid(both.content)

    flat: Any = [{"type": "function", **each} for each in FUNCTIONS]
    named: Any = {"type": "function", "name": "find"}
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    response = client.responses.create(model="m", input="hi", tools=flat, tool_choice=named)
    [item] = response.output
    assert item.type == "function_call" and is_valid(item.arguments)
    assert is_valid(client.responses.create(model="m", input="hi", text=text).output_text)
    with client.responses.stream(model="m", input="hi", text=text) as events:
        assert is_valid(events.get_final_response().output_text)

    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as messages:
        asked: Any = {"model": "m", "max_tokens": 128, "messages": ASKED}
        tools: Any = [{"name": "find", "input_schema": SCHEMA}]
        for wanted in (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "find"},
        ):
            message = messages.messages.create(**asked, tools=tools, tool_choice=wanted)  # pyright: ignore
            [block] = message.content
            assert message.stop_reason == "tool_use" and block.type == "tool_use"
            assert is_valid(json.dumps(block.input))
        output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        [block] = messages.messages.create(**asked, extra_body={"output_config": output}).content
        assert block.type == "text" and is_valid(block.text)
        with messages.messages.stream(**asked, tools=tools, tool_choice={"type": "any"}) as events:
            assert events.get_final_message().content[-1].type == "tool_use"


@pytest.mark.slow
def test_unsupported_schemas_are_refused_with_the_reason(client: openai.OpenAI):
    unique: Any = {"type": "array", "uniqueItems": True}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": unique}}
    with pytest.raises(openai.BadRequestError, match=r"response_format: .*uniqueItems"):
        client.chat.completions.create(**GIVEN, response_format=wanted)
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": unique}}
    with pytest.raises(openai.BadRequestError, match=r"tools: .*uniqueItems"):
        client.chat.completions.create(**GIVEN, tools=[tool], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match=r"guided_regex: [^$]*unclosed"):
        client.completions.create(model="m", prompt="a", extra_body={"guided_regex": "("})
    with pytest.raises(openai.BadRequestError, match="min_new_tokens=3, expected 0"):
        client.chat.completions.create(
            **GIVEN, response_format=FORMAT, extra_body={"min_tokens": 3}
        )
