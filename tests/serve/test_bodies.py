"""What clients may ask for, and what they are told where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.serve.bodies import APIError, read_chat, read_json, read_texts

HELLO = [{"role": "user", "content": "hello"}]


def chat(**body: Any) -> Any:
    return read_chat({"model": "m", "messages": HELLO, **body})


def texts(**body: Any) -> Any:
    return read_texts({"model": "m", "prompt": "hello", **body})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "expected messages to be a list, came a text"),
        ({"messages": ["hello"]}, "expected an object, came a text"),
        ({"messages": [{"role": "king", "content": "hello"}]}, "came 'king'"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "expected content to be a text, came null",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "texts only"),
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
            "JSON",
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
                "expected the arguments of a function to be a JSON object in a text",
            )
            for given in ("[1]", "1", "null", {"x": 1}, '{"x": "\\ud800"}', '{"x":' * 100_000)
        ),
        ({"model": None}, "you must provide model"),
        ({"n": 0}, "expected n to be 1 or more, came 0"),
        ({"n": 1.5}, "expected n to be an integer, came a number"),
        ({"n": True}, "expected n to be an integer, came true or false"),
        ({"temperature": 3}, "expected temperature to be from 0 to 2, came 3"),
        ({"temperature": float("nan")}, "came nan"),
        ({"temperature": 10**400}, "came inf"),
        ({"top_p": 0}, "expected top_p to be from 1e-06 to 1, came 0"),
        ({"top_k": 2**31}, "expected top_k to be from 0 to 2147483647, came 2147483648"),
        ({"max_tokens": 0}, "expected max_tokens to be 1 or more"),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"stop": ["a"] * 17}, "at most 16 texts"),
        ({"stop_token_ids": [1, "a"]}, "token ids"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        ({"logit_bias": {"1": 2}}, "logit_bias is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "expected auto or none"),
        ({"tools": [{"type": "function", "function": {}}]}, "a function that has a name"),
        ({"banana": 1}, "Unrecognized request argument supplied: banana"),
    ],
)
def test_what_cannot_be_is_refused_in_words(body: dict[str, Any], words: str):
    with pytest.raises(APIError) as refused:
        chat(**body)
    assert refused.value.status == 400
    assert words in refused.value.message


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [1, -1], [[1], "a", 3], [1.5], 3])
def test_a_prompt_is_text_or_tokens_or_several_of_either(prompt: Any):
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
def test_a_body_that_is_no_object_is_refused(body: bytes):
    with pytest.raises(APIError):
        read_json(body, 1000)


def test_null_is_as_if_it_was_not_given():
    assert chat(n=None, stop=None, seed=None, tools=None, temperature=None) == chat()


def test_messages_become_what_templates_read():
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


def test_only_what_is_given_changes_how_tokens_are_drawn():
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


def test_the_newer_name_of_the_budget_goes_before_the_older_one():
    assert chat(max_tokens=9, max_completion_tokens=5).generation_params.max_new_tokens == 5
