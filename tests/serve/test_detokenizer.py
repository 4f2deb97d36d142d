"""Text as its tokens arrive. A token here is a byte of UTF-8, so that most characters lie in
several tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.serve.detokenizer import Detokenizer, StreamDetokenizer


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def chunks(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """The tokens in pieces of these sizes, over and over."""
    pieces, place, number = list[Sequence[int]](), 0, 0
    while place < len(tokens):
        size = sizes[number % len(sizes)]
        pieces.append(tokens[place : place + size])
        place, number = place + size, number + 1
    return pieces


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(st.text(), SIZES)
def test_emitted_pieces_concatenate_to_the_text(text: str, sizes: list[int]):
    detokenizer = Detokenizer(decode)
    said = [detokenizer.push(chunk) for chunk in chunks(text.encode(), sizes)]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in said)
    assert "".join(said) + detokenizer.flush() == text


@given(st.binary(), SIZES)
def test_incomplete_bytes_are_emitted_as_replacements(tokens: bytes, sizes: list[int]):
    detokenizer = Detokenizer(decode)
    said = "".join(detokenizer.push(chunk) for chunk in chunks(tokens, sizes)) + detokenizer.flush()
    assert said == decode(tokens)


def test_character_is_emitted_with_its_last_token():
    detokenizer = Detokenizer(decode)
    # The euro sign is three bytes.
    assert [detokenizer.push([byte]) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]


@given(st.text("ab€"), st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3), SIZES)
def test_answer_ends_before_the_first_stop_string(text: str, stops: list[str], sizes: list[int]):
    tokens = list(text.encode())
    detokenizer = StreamDetokenizer(decode, stops)
    said = ""
    for chunk in chunks(tokens, sizes):
        said += detokenizer.push(chunk)
        assert all(stop not in said for stop in stops)
    said += detokenizer.finish(tokens)
    # The stop string that is complete first ends it; where two are at once, the one that begins
    # first.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if ends:
        first = min(ends)[0]
        begin = min(begin for end, begin in ends if end == first)
        assert detokenizer.is_stopped
        assert said == text[:begin]
        # The token that completes it belongs to the answer, and none after it.
        assert detokenizer.num_tokens == len(text[:first].encode())
    else:
        assert not detokenizer.is_stopped
        assert said == text
        assert detokenizer.num_tokens == len(tokens)
    assert detokenizer.text == said


def test_possible_stop_string_prefix_is_held_back():
    detokenizer = StreamDetokenizer(decode, ["END"])
    assert detokenizer.push(b"an E") == "an "
    assert detokenizer.push(b"N") == ""
    assert detokenizer.push(b"T") == "ENT"
    assert detokenizer.push(b" EN") == " "
    assert detokenizer.finish(b"an ENT EN") == "EN"


def test_skipped_tokens_are_counted_without_text():
    detokenizer = StreamDetokenizer(decode, skipped={ord("!")})
    assert detokenizer.push(b"hi!") == "hi"
    assert detokenizer.num_tokens == 3


@pytest.mark.parametrize("size", [1, 2, 50])
def test_text_after_the_hold_mark_is_not_emitted(size: int):
    detokenizer, text = StreamDetokenizer(decode, hold=["<call>"]), b"so <cal <call>f(1)</call>"
    said = "".join(detokenizer.push(chunk) for chunk in chunks(text, [size])) + detokenizer.finish(
        text
    )
    assert said == "so <cal "
    assert detokenizer.held == "<call>f(1)</call>"
