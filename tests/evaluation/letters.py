"""A tokenizer whose tokens are letters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.records import Message


class Letters:
    """One token per letter; renders the last message of a conversation only."""

    stop_token_ids = (0,)
    vocab_size = 128

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        return self.encode(messages[-1].content)

    def render_answer(self, prompt: Sequence[Message], answer: str) -> np.ndarray:
        return self.encode(answer)

    def render_next(self, messages: Sequence[Message]) -> np.ndarray:
        return self.render(messages)

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) for letter in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(chr(token) for token in tokens)
