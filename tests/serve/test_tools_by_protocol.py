"""Calls of tools in what a policy says."""

from __future__ import annotations

import pytest

from areal_jax.serve.tool_calls import ToolCall, parse_tool_calls


def test_calls_are_taken_out_of_the_text():
    said = (
        'I look it up.\n<tool_call>\n{"name": "find", "arguments": {"what": "é", "n": '
        "2}}\n</tool_call>\n"
        '<tool_call>{"name": "stop"}</tool_call>'
    )
    assert parse_tool_calls(said) == (
        "I look it up.",
        (ToolCall("find", '{"what": "é", "n": 2}'), ToolCall("stop", "{}")),
    )


def test_a_call_may_lack_its_end():
    assert parse_tool_calls('<tool_call>{"name": "f", "arguments": {"x": {"y": 1}}}')[1] == (
        ToolCall("f", '{"x": {"y": 1}}'),
    )


def test_half_a_character_or_no_number_makes_no_call():
    for call in (
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '{"name": "f", "arguments": {"x": NaN}}',
    ):
        said = f"<tool_call>{call}</tool_call>"
        assert parse_tool_calls(said) == (said, ())


@pytest.mark.parametrize(
    "said",
    [
        "no call ",
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "f"',
        "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000 + "</tool_call>",
    ],
)
def test_what_is_no_call_in_full_stays_in_the_text(said: str):
    assert parse_tool_calls(said) == (said, ())
