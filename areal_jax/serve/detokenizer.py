"""The text of an answer as its tokens arrive: whole characters only, and nothing of a stop
string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Text of some tokens; a character of which bytes are missing ends in \\ufffd."""


class Detokenizer:
    """Text of a growing sequence of tokens. A character whose bytes lie in several tokens comes
    with the last of them."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # Tokens since the last one but one place at which a character ended: what comes before a
        # token may decide about the space in front of it. Of these, the first `_read` have been
        # given out.
        self._tokens = list[int]()
        self._read = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if not tokens:
            return ""
        self._tokens += tokens
        before, text = self._decode(self._tokens[: self._read]), self._decode(self._tokens)
        if text.endswith("\ufffd"):
            return ""
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        return text[len(before) :]

    def flush(self) -> str:
        """What is left: bytes that make no character."""
        text = self._decode(self._tokens)[len(self._decode(self._tokens[: self._read])) :]
        self._tokens.clear()
        self._read = 0
        return text


class StreamDetokenizer:
    """The text of one answer, and where it ends.

    Args:
        stops: texts before which an answer ends; the first place where one begins counts.
        silent: tokens that say nothing: those that end an answer.
        hold: a text that is held back from where it begins, such as a call of a tool."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        silent: Collection[int] = (),
        hold: str = "",
    ) -> None:
        self._detokenizer, self._stops, self._silent, self._hold = (
            Detokenizer(decode),
            tuple(stops),
            silent,
            hold,
        )
        self._pending = ""
        self._is_held = False
        self.num_tokens = 0
        """Tokens of the answer so far, up to the one with which a stop string is complete."""
        self.is_stopped = False
        """Whether a stop string has ended it."""
        self.text = ""
        """All that was said and is not held back."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now; nothing after a stop string."""
        # Token by token where it matters which one completes a stop string.
        for piece in [[token] for token in tokens] if self._stops else [tokens]:
            if self.is_stopped:
                break
            self.num_tokens += len(piece)
            self._hear(
                self._detokenizer.push([token for token in piece if token not in self._silent])
            )
        return self._say()

    def finish(self, tokens: Sequence[int]) -> str:
        """The rest of the text. Args: tokens: of the whole answer, those that were pushed before
        too."""
        if not self.is_stopped:
            said = self.push(tokens[self.num_tokens :])
            if not self.is_stopped:
                self._hear(self._detokenizer.flush())
            return said + self._say(is_last=True)
        return self._say(is_last=True)

    @property
    def held(self) -> str:
        """What is held back at the end, from where `hold` begins."""
        return self._pending if self._is_held else ""

    def _hear(self, text: str) -> None:
        """Add to what is pending, up to a stop string."""
        self._pending += text
        found = [place for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if found:
            self._pending, self.is_stopped = self._pending[: min(found)], True

    def _say(self, *, is_last: bool = False) -> str:
        """Take off what is pending all that is certain."""
        if self._is_held:
            return ""
        end = self._pending.find(self._hold) if self._hold else -1
        if end >= 0:
            self._is_held = True
        elif is_last or self.is_stopped:
            end = len(self._pending)
        else:
            marks = (*self._stops, self._hold)
            end = len(self._pending) - max(_overlap(self._pending, mark) for mark in marks)
        said, self._pending = self._pending[:end], self._pending[end:]
        self.text += said
        return said


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark may have begun."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )
