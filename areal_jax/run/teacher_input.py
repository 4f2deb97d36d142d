"""What a teacher reads of a sample: a hint before the prompt, or the text in its own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Message, Sample, Task
from areal_jax.rl.config import CrossTokenizer, Teacher
from areal_jax.rl.distillation import TeacherVocabulary, common_ends
from areal_jax.serve.detokenizer import Detokenizer
from areal_jax.trainer.distillation import TeacherInput, TeacherReading


def teacher_input(
    teacher: Teacher,
    tokenizer: HFTokenizer,
    vocab_size: int,
    teacher_tokenizer: HFTokenizer,
    teacher_vocab_size: int,
) -> TeacherInput:
    """Return how a teacher reads samples.

    Args:
        teacher: Its settings.
        tokenizer: The policy's.
        vocab_size: Number of the policy's logits.
        teacher_tokenizer: The teacher's; the policy's, unless distillation=CrossTokenizer.
        teacher_vocab_size: Number of the teacher's logits.
    """
    own_ids = np.full(teacher_vocab_size, -1, np.int32)
    if not isinstance(teacher.distillation, CrossTokenizer):
        num = min(vocab_size, teacher_vocab_size)
        own_ids[:num] = np.arange(num)
        prompts = _Prompts(teacher.hint, tokenizer)
        return TeacherInput(
            None if teacher.hint is None else _HintedReading(prompts),
            TeacherVocabulary.from_ids(own_ids, vocab_size),
        )
    own = tokenizer.vocabulary()
    for token, token_id in teacher_tokenizer.vocabulary().items():
        if token_id < teacher_vocab_size:
            own_ids[token_id] = own.get(token, -1)
    # The ends of an answer mean the same, whatever they are called.
    own_ids[teacher_tokenizer.stop_token_ids[0]] = tokenizer.stop_token_ids[0]
    return TeacherInput(
        _TextReading(_Prompts(teacher.hint, teacher_tokenizer), tokenizer, teacher_tokenizer),
        TeacherVocabulary.from_ids(own_ids, vocab_size),
    )


class _Prompts:
    """Prompts of tasks in the teacher's tokens, with the hint as a system message."""

    def __init__(self, hint: str | None, tokenizer: HFTokenizer):
        self._hint, self._tokenizer = hint, tokenizer
        # The samples of a group follow each other.
        self.of = lru_cache(maxsize=64)(self._render)

    def _render(self, task: Task) -> Int32[np.ndarray, "_"]:
        messages = list(task.prompt)
        if self._hint is not None:
            hint = self._hint.replace("{answer}", task.answer)
            if messages and messages[0].role == "system":
                hint = f"{messages.pop(0).content}\n\n{hint}"
            messages.insert(0, Message("system", hint))
        return self._tokenizer.render(messages)


@dataclass(frozen=True, eq=False)
class _HintedReading:
    """The sample's own tokens after a prompt with a hint."""

    prompts: _Prompts

    def __call__(self, task: Task, sample: Sample) -> TeacherReading:
        start = int(sample.loss_mask.argmax())
        prompt = self.prompts.of(task)
        own_stops = np.flatnonzero(sample.loss_mask) + 1
        stops = own_stops + (len(prompt) - start)
        return TeacherReading(
            np.concatenate([prompt, sample.tokens[start:]]),
            own_stops - 1,
            own_stops,
            stops - 1,
            stops,
        )


@dataclass(frozen=True, eq=False)
class _TextReading:
    """The text of a sample's one answer in the tokens of the teacher."""

    prompts: _Prompts
    tokenizer: HFTokenizer
    teacher_tokenizer: HFTokenizer

    def __call__(self, task: Task, sample: Sample) -> TeacherReading:
        start = int(sample.loss_mask.argmax())
        prompt, answer = self.prompts.of(task), sample.tokens[start:]
        is_ended = int(answer[-1]) in self.tokenizer.stop_token_ids
        answer = answer[:-1] if is_ended else answer
        text = self.tokenizer.decode(answer)
        theirs = self.teacher_tokenizer.encode(text)
        # Up to where its normalization changes the text, if it does.
        read = self.teacher_tokenizer.decode(theirs)
        pairs = enumerate(zip(text, read, strict=False))
        num_equal = next((i for i, (a, b) in pairs if a != b), min(len(text), len(read)))
        own, other = common_ends(
            _whole_characters(self.tokenizer, answer),
            _whole_characters(self.teacher_tokenizer, theirs),
            num_equal,
        )
        if is_ended and num_equal == len(text):
            theirs = np.append(theirs, np.int32(self.teacher_tokenizer.stop_token_ids[0]))
            own, other = np.append(own, len(answer) + 1), np.append(other, len(theirs))
        return TeacherReading(
            np.concatenate([prompt, theirs]).astype(np.int32),
            start + np.concatenate([[0], own[:-1]]).astype(np.int64),
            start + own,
            len(prompt) + np.concatenate([[0], other[:-1]]).astype(np.int64),
            len(prompt) + other,
        )


def _whole_characters(
    tokenizer: HFTokenizer, tokens: Int32[np.ndarray, "T"]
) -> Int64[np.ndarray, "T"]:
    """Return the number of characters that are whole after each token."""

    def decode(tokens: Any) -> str:
        return tokenizer.decode(np.asarray(tokens, np.int32))

    growing = Detokenizer(decode)
    return np.cumsum([len(growing.push([token])) for token in tokens.tolist()], dtype=np.int64)
