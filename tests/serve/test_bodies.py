"""Accepted request bodies, and the messages of refused ones."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.serve import anthropic_messages
from areal_jax.serve.bodies import read_chat, read_json, read_texts
from areal_jax.serve.validation import APIError

HELLO = [{"role": "user", "content": "hello"}]


def chat(**body: Any) -> Any:
    return read_chat({"model": "m", "messages": HELLO, **body})


def texts(**body: Any) -> Any:
    return read_texts({"model": "m", "prompt": "hello", **body})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "expected messages to have at least 1 item, found a list of 0"),
        ({"messages": "hello"}, 'expected messages to be a valid list, found "hello"'),
        ({"messages": ["hello"]}, 'expected messages[0] to be an object, found "hello"'),
        (
            {"messages": [{"role": "king", "content": "hello"}]},
            "'user', 'assistant' or 'tool', found \"king\"",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content to be a string or a list of parts of type text or image_url, found null",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content to be a string or a list of parts of type text or image_url, found a list",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            'tool_calls[0].function.arguments to be a JSON object in a string, found "{"',
        ),
        *(
            (
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [{"function": {"name": "f", "arguments": given}}],
                        }
                    ]
                },
                "messages[0].tool_calls[0].function.arguments to be a JSON object in a string",
            )
            for given in ("[1]", "1", "null", {"x": 1}, '{"x": "\\ud800"}', '{"x":' * 100_000)
        ),
        ({"model": None}, "you must provide model"),
        ({"n": 0}, "expected n to be greater than or equal to 1, found 0"),
        ({"n": 1.5}, "expected n to be a valid integer, found 1.5"),
        ({"n": True}, "expected n to be a valid integer, found true"),
        ({"temperature": 3}, "expected temperature to be less than or equal to 2, found 3"),
        ({"temperature": float("nan")}, "expected temperature to be a finite number, found NaN"),
        ({"temperature": 10**400}, "expected temperature to be a valid number, found 1000"),
        ({"top_p": 0}, "expected top_p to be greater than or equal to 0.000001, found 0"),
        (
            {"top_k": 2**31},
            "expected top_k to be less than or equal to 2147483647, found 2147483648",
        ),
        ({"max_tokens": 0}, "expected max_tokens to be greater than or equal to 1, found 0"),
        ({"stop": ["a", ""]}, "none of them empty, found a list of 2"),
        (
            {"stop": ["a"] * 17},
            "stop to be a string or a list of at most 16, none of them empty, found a list of 17",
        ),
        (
            {"stop_token_ids": [1, "a"]},
            'expected stop_token_ids[1] to be a valid integer, found "a"',
        ),
        (
            {"stop_token_ids": [2**31]},
            "expected stop_token_ids[0] to be less than 2147483648, found 2147483648",
        ),
        (
            {"stop_token_ids": [1] * 9},
            "expected stop_token_ids to have at most 8 items, found a list of 9",
        ),
        (
            {"top_logprobs": 2},
            "top_logprobs requires logprobs=true, found top_logprobs=2 and logprobs=false",
        ),
        (
            {"logprobs": True, "top_logprobs": 21},
            "expected top_logprobs to be less than or equal to 20, found 21",
        ),
        ({"logit_bias": {"1": 2}}, 'logit_bias is not supported: expected {}, found {"1": 2}'),
        (
            {"response_format": {"type": "structural_tag"}},
            "expected response_format to be an object of type text, json_object or json_schema",
        ),
        (
            {"tool_choice": "any"},
            'expected tool_choice to be "auto", "none", "required", an object',
        ),
        ({"tool_choice": "required"}, "tool_choice requires tools, found none"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "expected one format of the answer, found response_format and guided_regex",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs to have at least 1 choice"),
        ({"guided_json": "{"}, "guided_json: expected JSON: EOF"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex to be a valid string"),
        (
            {"tools": [{"type": "retrieval"}]},
            "expected tools[0].type to be 'function', found \"retrieval\"",
        ),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "you must provide tools[0].function.name",
        ),
        ({"tools": ["find"]}, 'expected tools[0] to be an object, found "find"'),
        (
            {"stream_options": {"include_usage": 1}},
            "expected stream_options.include_usage to be a valid boolean, found 1",
        ),
        (
            {"messages": [{"role": "tool", "content": "7", "tool_call_id": 1}]},
            "expected messages[0].tool_call_id to be",
        ),
        ({"seed": "7"}, 'expected seed to be a valid integer, found "7"'),
        ({"min_new_tokens": 1}, "Unrecognized request argument supplied: min_new_tokens"),
        ({"banana": 1}, "Unrecognized request argument supplied: banana"),
    ],
)
def test_invalid_body_is_refused_with_a_reason(body: dict[str, Any], words: str):
    with pytest.raises(APIError) as refused:
        chat(**body)
    assert refused.value.status == 400
    assert words in refused.value.message


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [1, -1], [[1], "a", 3], [1.5], 3])
def test_prompt_is_text_or_tokens_or_a_list(prompt: Any):
    with pytest.raises(APIError):
        texts(prompt=prompt)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1, 2], [3]], ((1, 2), (3,)))],
)
def test_prompts_are_read(prompt: Any, read: Any):
    assert texts(prompt=prompt).prompts == read


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 100_000, b'{"a": "\\ud800"}', b'{"\\udfff": 1}'],
)
def test_body_that_is_not_an_object_is_refused(body: bytes):
    with pytest.raises(APIError):
        read_json(body, 1000)


def test_null_fields_are_treated_as_absent():
    assert chat(n=None, stop=None, seed=None, tools=None, temperature=None) == chat()


def test_messages_are_converted_for_templates():
    asked = chat(
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ]
    )
    assert asked.turns == (
        {"role": "system", "content": "be brief"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    )


def test_images_are_read_from_data_uris():
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}},
        {"type": "text", "text": "How many?"},
    ]
    asked = chat(messages=[{"role": "user", "content": parts}])
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    assert asked.turns == ({"role": "user", "content": content},)
    assert asked.generation_params.images == (b"hi",)


def test_results_of_tools_have_images_in_two_protocols():
    uri = "data:image/png;base64,aGk="
    image = {"type": "image_url", "image_url": {"url": uri}}
    result = {
        "role": "tool",
        "tool_call_id": "1",
        "content": [{"type": "text", "text": "a"}, image],
    }
    asked = chat(messages=[result])
    content = [{"type": "text", "text": "a"}, {"type": "image"}]
    assert asked.turns == ({"role": "tool", "content": content, "tool_call_id": "1"},)
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "source": source}]
    used = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [used]}]}
    of_blocks, _ = anthropic_messages.read(body, 10)
    assert of_blocks.turns == asked.turns
    assert of_blocks.generation_params.images == asked.generation_params.images == (b"hi",)


@pytest.mark.parametrize(
    ("role", "url", "words"),
    [
        ("user", "file:///a.png", "expected an image as bytes or a data URI"),
        ("user", "data:image/png;base64,?", "expected a data URI in base64"),
        (
            "system",
            "data:image/png;base64,aGk=",
            "expected images in messages of the user and of tools",
        ),
    ],
)
def test_other_images_are_refused(role: str, url: str, words: str):
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(APIError, match=words):
        chat(messages=[{"role": role, "content": [part]}])


def test_absent_fields_leave_sampling_parameters_unchanged():
    assert chat().generation_params.sampling == {}
    generation_params = chat(
        temperature=1,
        top_k=5,
        min_tokens=2,
        presence_penalty=0.5,
        logprobs=True,
        top_logprobs=3,
        max_tokens=9,
    ).generation_params
    assert generation_params.sampling == {
        "temperature": 1.0,
        "top_k": 5,
        "min_new_tokens": 2,
        "presence_penalty": 0.5,
        "num_top_logprobs": 3,
    }
    assert generation_params.max_new_tokens == 9


def test_max_completion_tokens_takes_precedence():
    assert chat(max_tokens=9, max_completion_tokens=5).generation_params.max_new_tokens == 5
