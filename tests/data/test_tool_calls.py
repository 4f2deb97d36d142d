"""Tool calls in model output."""

from __future__ import annotations

import json

import pytest

from areal_jax.data.tool_calls import InvalidToolCall, ToolCall, parse_hermes, parse_tags

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
F = ToolCall("f", {"x": 1})


def test_calls_are_removed_from_the_content() -> None:
    output = (
        'I look it up.\n<tool_call>\n{"name": "find", "arguments": {"what": "é", "n": 2}}\n'
        '</tool_call>\n<tool_call>{"name": "stop"}</tool_call> Done.'
    )
    content, calls = parse_hermes(output)
    assert content == "I look it up.\nDone."
    assert calls == (ToolCall("find", {"what": "é", "n": 2}), ToolCall("stop", {}))


@pytest.mark.parametrize("space", ["", "\n", " \n"])
def test_unclosed_final_call_with_complete_json_is_accepted(space: str) -> None:
    unclosed = f"see {CALL.removesuffix('</tool_call>')}{space}"
    assert parse_hermes(unclosed) == ("see ", (F,))
    assert parse_hermes(CALL + unclosed) == ("see ", (F, F))


@pytest.mark.parametrize("rest", ['{"name": "f"', '{"name": "f"} and more', "", CALL])
def test_unclosed_call_without_complete_json_is_invalid(rest: str) -> None:
    output = f"<tool_call>{rest}"
    content, (call,) = parse_hermes(output)
    assert content == output
    assert isinstance(call, InvalidToolCall)


def test_extra_json_keys_are_ignored() -> None:
    output = '<tool_call>{"id": 7, "name": "f", "arguments": {"x": 1}, "type": "g"}</tool_call>'
    assert parse_hermes(output) == ("", (F,))


@pytest.mark.parametrize(
    ("output", "calls"),
    [
        (f"<think>maybe {CALL}</think> no", ()),
        (f"<think>maybe {CALL}", ()),
        (f"maybe {CALL}</think> no", ()),  # the chat template opened the block
        (f"maybe {CALL}</think> yes {CALL}", (F,)),
        (f"<think>a</think>{CALL}<think>{CALL}</think>{CALL}", (F, F)),
        (f"<think>a</think>{CALL}<think>{CALL}", (F,)),
    ],
)
def test_reasoning_is_not_searched_for_calls(output: str, calls: tuple[ToolCall, ...]) -> None:
    content, found = parse_hermes(output)
    assert found == calls
    assert content.count(CALL) == output.count(CALL) - len(calls)


def test_a_think_tag_inside_an_argument_opens_no_reasoning() -> None:
    output = f'<tool_call>{{"name": "f", "arguments": {{"x": "<think>"}}}}</tool_call>{CALL}'
    assert parse_hermes(output).calls == (ToolCall("f", {"x": "<think>"}), F)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("f(1)", "expected JSON"),
        ("", "expected JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "expected JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "expected JSON"),
        ('{"name": "\\ud800", "arguments": {}}', "expected JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "expected JSON"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 10_000 + "}}", "expected JSON"),
        ("[" * 200_000, "expected JSON"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "expected JSON"),
        ("[1]", "expected a JSON object"),
        ('{"name": 3, "arguments": {}}', "expected a JSON object"),
        ('{"arguments": {}}', "expected a JSON object"),
        ('{"name": "f", "arguments": "x"}', "expected a JSON object"),
        ('{"name": "f", "arguments": null}', "expected a JSON object"),
    ],
)
def test_invalid_calls_have_a_reason_and_stay_in_the_content(body: str, reason: str) -> None:
    invalid = f"<tool_call>{body}</tool_call>"
    content, (call, valid) = parse_hermes(f"{invalid} {CALL}")
    assert content == f"{invalid} "
    assert valid == F
    assert isinstance(call, InvalidToolCall) and reason in call.reason
    assert len(call.reason) < 300


def test_tags_are_parsed_in_the_order_of_the_output() -> None:
    output = "first <search>a <b></search> then <sum>1<2</sum> <other>x</other> <search>c</search>"
    assert parse_tags(output, {"search": "query", "sum": "terms"}) == (
        ToolCall("search", {"query": "a <b>"}),
        ToolCall("sum", {"terms": "1<2"}),
        ToolCall("search", {"query": "c"}),
    )
    assert parse_tags(output, {}) == ()


def test_tags_need_their_end_and_are_not_searched_in_reasoning() -> None:
    parameters = {"search": "query"}
    assert parse_tags("<search>a</search> <search>b", parameters) == (
        ToolCall("search", {"query": "a"}),
        InvalidToolCall("<search> without </search>"),
    )
    assert parse_tags("<think><search>a</search></think>", parameters) == ()


@pytest.mark.timeout(30)
@pytest.mark.slow
def test_parsing_time_is_linear_in_the_output() -> None:
    # Quadratic parsing of a megabyte would exceed the time limit of a test.
    assert len(parse_tags("<search>" * 130_000, {"search": "query"})) == 1
    repetitions = ("<tool_call>", "<think>", "</think>", "<tool_call></think>", CALL)
    found = [len(parse_hermes(repeated * 90_000).calls) for repeated in repetitions]
    assert found == [1, 0, 0, 1, 90_000]


def test_output_without_calls_is_content() -> None:
    assert parse_hermes(" no call ") == (" no call ", ())
    assert json.loads(parse_hermes(json.dumps({"name": "f"})).content) == {"name": "f"}
