"""Responses as JSON objects of OpenAI's protocol, complete or streamed.

With return_token_ids, in addition to the fields of OpenAI: `prompt_token_ids` (a list of lists for
several prompts), and `token_ids`, `versions` and `token_logprobs` of each choice, one entry for
each token, stop tokens too.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32

from areal_jax.data.tool_calls import ToolCall
from areal_jax.records import Completion, StopReason
from areal_jax.serve.bodies import GenerationParams

TokenText = Callable[[int], str]

_SLICE = 16
"""Elements of a list that are written at once: a single call would hold the interpreter's lock for
all of it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Text and tokens of one choice: all of it, or the new part."""

    index: int
    text: str
    sampled: Completion
    """The tokens of this part."""
    finish: StopReason | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """The answers to one request."""

    kind: Literal["chat", "text", "tokens"]
    number: str
    """Names the request."""
    generation_params: GenerationParams
    prompts: Sequence[Int32[np.ndarray, "_"]]
    token_text: TokenText
    created: int
    _reported: Counter[int] = field(default_factory=Counter)
    """Characters of the tokens of each choice whose log-probs were sent."""

    def whole(self, parts: Sequence[Part]) -> str:
        """The answer in one, as JSON; written choice by choice, as the objects of all take ten
        times the memory.
        """
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        choices = ", ".join([_written(self._choice(part, "message")) for part in parts])
        before, after = self._frame(kind) | self._prompts(), {"usage": self.usage(parts)}
        return f'{_written(before)[:-1]}, "choices": [{choices}], {_written(after)[1:]}'

    def in_tokens(self, parts: Sequence[Part]) -> str:
        """The answer without text, as vLLM's /inference/v1/generate writes it, as JSON."""
        choices = [
            {
                "index": part.index,
                "token_ids": part.sampled.tokens.tolist(),
                "finish_reason": part.finish,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logp, "top_logprobs": []}
                        for token, logp, _ in _with_top_logprobs(part.sampled)
                    ]
                },
                "versions": part.sampled.versions.tolist(),
            }
            for part in parts
        ]
        frame = {"request_id": self.number, "choices": choices, "usage": self.usage(parts)}
        return _written(frame | self._prompts())

    def opening(self) -> list[dict[str, Any]]:
        """Return the first chunks of a stream, with the role."""
        if self.kind == "text":
            return (
                [self._chunk([]) | self._prompts()] if self.generation_params.include_tokens else []
            )
        choices = [
            _delta(index, {"role": "assistant", "content": ""})
            for index in range(self.generation_params.num_samples)
        ]
        return [self._chunk(choices) | self._prompts()]

    def chunk(self, part: Part) -> dict[str, Any]:
        """A part of a stream."""
        return self._chunk([self._choice(part, "delta")])

    def closing(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """What a stream ends with, where it is asked for: the count of tokens."""
        return (
            [self._chunk([]) | {"usage": self.usage(parts)}]
            if self.generation_params.include_usage
            else []
        )

    def usage(self, parts: Sequence[Part]) -> dict[str, int]:
        """Tokens of prompts and answers."""
        prompt, sampled = (
            sum(map(len, self.prompts)),
            sum(len(part.sampled.tokens) for part in parts),
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _frame(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.generation_params.model,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._frame(
            "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        ) | {"choices": choices}

    def _prompts(self) -> dict[str, Any]:
        if not self.generation_params.include_tokens:
            return {}
        prompts = [prompt.tolist() for prompt in self.prompts]
        return {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}

    def _choice(self, part: Part, name: str) -> dict[str, Any]:
        choice = {"index": part.index, "finish_reason": part.finish, "logprobs": None}
        if self.kind == "text":
            choice["text"] = part.text
        else:
            choice[name] = self._message(part, is_delta=name == "delta")
            if part.calls and part.finish == "stop":
                choice["finish_reason"] = "tool_calls"
        sampled = part.sampled
        if self.generation_params.include_logp:
            choice["logprobs"] = (
                self._chat_logp(sampled) if self.kind == "chat" else self._text_logp(part)
            )
        if self.generation_params.include_tokens:
            choice["token_ids"], choice["versions"] = (
                sampled.tokens.tolist(),
                sampled.versions.tolist(),
            )
            choice["token_logprobs"] = sampled.logp.tolist()
        return choice

    def _message(self, part: Part, *, is_delta: bool) -> dict[str, Any]:
        message: dict[str, Any] = {} if is_delta else {"role": "assistant", "refusal": None}
        if not is_delta or part.text:
            message["content"] = None if part.calls and not part.text.strip() else part.text
        if part.calls:
            message["tool_calls"] = [
                {
                    **({"index": place} if is_delta else {}),
                    "id": f"call_{self.number}_{part.index}_{place}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for place, call in enumerate(part.calls)
            ]
        return message

    def _chat_logp(self, sampled: Completion) -> dict[str, Any]:
        return {
            "content": [
                self._token(token, logp)
                | {"top_logprobs": [self._token(*other) for other in others]}
                for token, logp, others in _with_top_logprobs(sampled)
            ],
            "refusal": None,
        }

    def _token(self, token: int, logp: float) -> dict[str, Any]:
        text = self.token_text(token)
        # Part of a character has a place in no text; which bytes it stands for, only the tokenizer
        # knows.
        return {
            "token": text,
            "logprob": logp,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    def _text_logp(self, part: Part) -> dict[str, Any]:
        reported = [
            (self.token_text(token), logp, others)
            for token, logp, others in _with_top_logprobs(part.sampled)
        ]
        ends = np.cumsum(
            [self._reported[part.index], *(len(text) for text, _, _ in reported)]
        ).tolist()
        self._reported[part.index] = ends[-1]
        return {
            "tokens": [text for text, _, _ in reported],
            "token_logprobs": [logp for _, logp, _ in reported],
            "top_logprobs": [
                {self.token_text(token): logp for token, logp in others}
                for _, _, others in reported
            ],
            "text_offset": ends[:-1],
        }


def _with_top_logprobs(sampled: Completion) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Token, log-prob, and the most likely tokens with theirs, as far as they could be sampled."""
    if sampled.top_logprobs is None:
        others = [[]] * len(sampled.tokens)
    else:
        rows = zip(
            sampled.top_logprobs.tokens.tolist(), sampled.top_logprobs.logp.tolist(), strict=True
        )
        others = [[each for each in zip(*row, strict=True) if each[1] > -np.inf] for row in rows]
    return list(zip(sampled.tokens.tolist(), sampled.logp.tolist(), others, strict=True))


def _written(value: Any) -> str:
    """JSON of objects, and of long lists in them, by many short calls."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(name)}: {_written(each)}" for name, each in value.items())
            + "}"
        )
    if isinstance(value, list) and len(value) > _SLICE:
        slices = (value[start : start + _SLICE] for start in range(0, len(value), _SLICE))
        return "[" + ", ".join(json.dumps(each)[1:-1] for each in slices) + "]"
    return json.dumps(value)


def _delta(index: int, message: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": message, "finish_reason": None, "logprobs": None}


def now() -> int:
    """Seconds since 1970, which answers are stamped with."""
    return int(time.time())
