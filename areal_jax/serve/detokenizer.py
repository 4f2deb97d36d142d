"""Incremental detokenization: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Text of some tokens; a character of which bytes are missing ends in \\ufffd."""


class Detokenizer:
    """Text of a growing sequence of tokens.

    A character whose bytes are in several tokens is returned with the last of them.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # Tokens since the last one but one place at which a character ended: what comes before a
        # token may decide about the space in front of it. The text of the first `_read` of them
        # was returned.
        self._tokens = list[int]()
        self._read = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
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
        """Return the remaining bytes, which make no character, as replacement characters."""
        text = self._decode(self._tokens)[len(self._decode(self._tokens[: self._read])) :]
        self._tokens.clear()
        self._read = 0
        return text


class StreamDetokenizer:
    """The text of one answer, and where it ends."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        skipped: Collection[int] = (),
        hold: Sequence[str] = (),
    ) -> None:
        """
        Args:
            decode: text of some tokens.
            stops: stop strings; the answer ends before the first one.
            skipped: tokens without text, such as those that end an answer.
            hold: texts that are not emitted, nor what follows the first one, such as the start of a
                tool call.
        """
        self._detokenizer, self._stops = Detokenizer(decode), tuple(stops)
        self._skipped, self._hold = skipped, tuple(hold)
        self._pending = ""
        self._is_held = False
        self.num_tokens = 0
        """Tokens of the answer so far, up to the one with which a stop string is complete."""
        self.stop_string: str | None = None
        """The stop string that ended it."""
        self.text = ""
        """Text emitted so far."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that later tokens cannot change; nothing after a stop string."""
        # Token by token where it matters which one completes a stop string.
        for piece in [[token] for token in tokens] if self._stops else [tokens]:
            if self.is_stopped:
                break
            self.num_tokens += len(piece)
            self._append(
                self._detokenizer.push([token for token in piece if token not in self._skipped])
            )
        return self._emit()

    def finish(self, tokens: Sequence[int]) -> str:
        """Return the rest of the text.

        Args:
            tokens: all tokens of the answer, also those that were pushed before.
        """
        text = self.push(tokens[self.num_tokens :])
        if not self.is_stopped:
            self._append(self._detokenizer.flush())
        return text + self._emit(is_last=True)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self.stop_string is not None

    @property
    def held(self) -> str:
        """Text that was not emitted, from `hold` to the end; empty without `hold`."""
        return self._pending if self._is_held else ""

    def _append(self, text: str) -> None:
        """Append to the pending text, up to a stop string."""
        self._pending += text
        found = [(place, stop) for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if found:
            place, self.stop_string = min(found)
            self._pending = self._pending[:place]

    def _emit(self, *, is_last: bool = False) -> str:
        """Remove and return the pending text that later tokens cannot change."""
        if self._is_held:
            return ""
        found = [place for mark in self._hold if (place := self._pending.find(mark)) >= 0]
        if found:
            end, self._is_held = min(found), True
        elif is_last or self.is_stopped:
            end = len(self._pending)
        else:
            marks = (*self._stops, *self._hold)
            overlaps = (_overlap(self._pending, mark) for mark in marks)
            end = len(self._pending) - max(overlaps, default=0)
        emitted, self._pending = self._pending[:end], self._pending[end:]
        self.text += emitted
        return emitted


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the start of a mark."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )
