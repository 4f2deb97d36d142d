from __future__ import annotations

import json

import pytest

from areal_jax.data.tool_calls import InvalidToolCall, ToolCall
from areal_jax.workflows.config import Hermes, Tags
from areal_jax.workflows.tool_use import MAX_CALLS, announcement, parse_calls

NAMES = ("calculator", "python", "search")


def calculated(expression: str) -> ToolCall:
    return ToolCall("calculator", {"expression": expression})


def hermes(said: str) -> list[ToolCall | InvalidToolCall]:
    return parse_calls(Hermes(), said, NAMES)


def call(name: str = "calculator", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_read_in_order_with_any_text_around_them() -> None:
    said = f"Let me see. {call(expression='1+1')} and {call('search', query='two')} done"
    assert hermes(said) == [calculated("1+1"), ToolCall("search", {"query": "two"})]
    assert hermes("no call at all") == []
    tags = "first <search>a <b></search> then <calculator>1<2</calculator> and <search>c</search>"
    assert parse_calls(Tags(), tags, NAMES) == [
        ToolCall("search", {"query": "a <b>"}),
        calculated("1<2"),
        ToolCall("search", {"query": "c"}),
    ]


def test_calls_in_reasoning_are_ignored() -> None:
    assert hermes(f"<think>maybe {call(expression='1')}</think> no") == []
    assert hermes(f"<think>maybe</think> {call(expression='1')}") == [calculated("1")]
    assert hermes(f"<think>never ends {call(expression='1')}") == []
    twice = f"<think>a</think> {call(expression='1')} <think>{call(expression='2')}</think> no"
    assert hermes(twice) == [calculated("1")]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('<tool_call>{"name": "calculator"', "<tool_call> without </tool_call>"),
        ("<tool_call>calculator(1)</tool_call>", "expected JSON"),
        ("<tool_call></tool_call>", "expected JSON"),
        ("<tool_call>[1]</tool_call>", "expected a JSON object"),
        ('<tool_call>{"name": "calculator"}</tool_call>', "expected the arguments"),
        (
            call("browser", url="x"),
            "unknown tool 'browser'; available tools: calculator, python, search",
        ),
        (
            '<tool_call>{"name": ["calculator"], "arguments": {}}</tool_call>',
            "expected a JSON object",
        ),
        (call(code="1"), 'expected the arguments of calculator to be {"expression": a string}'),
        (call(expression="1", more="2"), "expected the arguments"),
        (call(expression=1), "expected the arguments"),
        (
            '<tool_call>{"name": "calculator", "arguments": "1+1"}</tool_call>',
            "expected a JSON object",
        ),
        ("<tool_call>" + "[" * 200_000 + "</tool_call>", "expected JSON"),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": '
            + "9" * 10_000
            + "}}</tool_call>",
            "expected JSON",
        ),
    ],
)
def test_incomplete_call_error_gives_the_reason(said: str, reason: str) -> None:
    (bad,) = hermes(said)
    assert isinstance(bad, InvalidToolCall)
    assert reason in bad.reason
    assert len(bad.reason) < 300


def test_unclosed_tag_is_an_error() -> None:
    assert parse_calls(Tags(), "<search>a</search> <search>b", NAMES)[1] == InvalidToolCall(
        "<search> without </search>"
    )
    # Tools that there are not are words like others.
    assert parse_calls(Tags(), "<python>1</python>", ("search",)) == []


def test_calls_of_a_turn_are_limited() -> None:
    assert hermes(call(expression="1") * MAX_CALLS) == [calculated("1")] * MAX_CALLS
    calls = hermes(call(expression="1") * (MAX_CALLS + 3))
    assert calls[:MAX_CALLS] == [calculated("1")] * MAX_CALLS
    assert calls[MAX_CALLS:] == [
        InvalidToolCall(f"expected at most {MAX_CALLS} calls in a turn, found {MAX_CALLS + 3}")
    ]


def test_unclosed_final_call_with_complete_json_is_executed() -> None:
    unclosed = call(expression="1+1").removesuffix("</tool_call>")
    assert hermes(f"Let me see. {unclosed}") == [calculated("1+1")]


def test_extra_json_keys_are_ignored() -> None:
    said = '{"id": 1, "name": "calculator", "arguments": {"expression": "1"}}'
    assert hermes(f"<tool_call>{said}</tool_call>") == [calculated("1")]


def test_announcement_lists_exactly_the_tools() -> None:
    said = announcement(Hermes(), ("calculator", "search"))
    signatures = [json.loads(line) for line in said.split("\n") if line.startswith('{"type"')]
    assert [signature["function"]["name"] for signature in signatures] == ["calculator", "search"]
    assert signatures[1]["function"]["parameters"]["required"] == ["query"]
    # What it shows is what is read.
    assert "<search>query</search>" in announcement(Tags(), ("search",))
    assert parse_calls(Tags(), "<search>query</search>", ("search",)) == [
        ToolCall("search", {"query": "query"})
    ]
