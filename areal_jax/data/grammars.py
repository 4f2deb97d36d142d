"""Grammars that answers must match, and the tokens that may follow in them, by llguidance.

A grammar is text in llguidance's format, which names no tokenizer: it can be sent to any engine.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

from areal_jax.errors import InvalidRequest

if TYPE_CHECKING:
    import llguidance

    from areal_jax.data.tokenizer import HFTokenizer

MAX_GRAMMAR_BYTES = 1 << 16
"""Largest grammar, in bytes: what is to be compiled is bounded, because compiling is."""

_LIMITS = {
    "max_grammar_size": 50_000,
    "max_lexer_states": 10_000,
    "step_max_items": 5_000,
    "verbose_errors": False,
}
"""Limits of llguidance, below its defaults. Measured with 151 936 tokens: hostile grammars are
refused within 0.2 s of CPU time and at any token within 0.03 s, and use less than 50 MB; the masks
of a common schema take 0.05 ms."""

_MAX_COMPILED = 64
"""Compiled grammars that are kept."""

_WHITESPACE = r"( |\n[ \t]{0,8})"
"""Between the tokens of JSON: as writers of JSON indent. Without a bound a policy may go on with it
to its token budget."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of the JSON values of a schema."""
    return _grammar(_part("answer", json_schema=schema))


def merged_grammar(lark: str, schemas: Mapping[str, Mapping[str, Any]], answer: str = "") -> str:
    """Return a grammar of rules in the format of Lark that refer to other grammars.

    Args:
        lark: rules, of which `start` is the first.
        schemas: JSON schemas by name; `@NAME` in a rule stands for their values.
        answer: grammar for which `@answer` stands.
    """
    parts = [_part(name, json_schema=schema) for name, schema in schemas.items()]
    if answer:
        first, *others = json.loads(answer)["grammars"]
        parts += [{**first, "name": "answer"}, *others]
    return _grammar({"name": "start", "lark_grammar": lark}, *parts)


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of some texts."""
    return merged_grammar("start: " + " | ".join(map(quoted, choices)), {})


def regex_grammar(pattern: str) -> str:
    """Return the grammar of a regular expression, in the syntax of Rust's crate `regex`.

    Raises:
        InvalidRequest: llguidance is not installed.
    """
    return _library().LLMatcher.grammar_from_regex(pattern)


def text_grammar(text: str) -> str:
    """Return the grammar of rules in the format of Lark or of GBNF.

    Raises:
        InvalidRequest: llguidance is not installed, or the rules are of neither format.
    """
    try:
        return _library().grammar_from("grammar", text)
    except ValueError as error:
        raise InvalidRequest(
            f"expected a grammar in the format of Lark or GBNF: {error}"
        ) from error


def quoted(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text)


def _part(name: str, *, json_schema: Mapping[str, Any]) -> dict[str, Any]:
    spaced = {**json_schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return {"name": name, "json_schema": spaced}


def _grammar(*parts: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequest(
            "expected llguidance for answers in a given format, found no such package; install "
            "areal-jax[grammar]"
        ) from error
    return llguidance


class Grammars:
    """Compiled grammars for one tokenizer; may be used from several threads."""

    def __init__(
        self, tokenizer: Callable[[], str], vocab_size: int, stop_token_ids: Sequence[int]
    ):
        """
        Args:
            tokenizer: returns the content of tokenizer.json.
            vocab_size: tokens of the policy, which may be more than the tokenizer's.
            stop_token_ids: tokens of which one may follow where an answer is complete.
        """
        self.vocab_size = vocab_size
        self._source, self._stop_token_ids = tokenizer, list(stop_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled = OrderedDict[str, "llguidance.LLMatcher"]()
        # `_compiling` is held for seconds; `_lock` guards `_compiled`, and copies, which are quick.
        self._compiling, self._lock = threading.Lock(), threading.Lock()

    @classmethod
    def of(cls, tokenizer: HFTokenizer, vocab_size: int) -> Grammars:
        """Return the grammars of a policy with this tokenizer and number of logits."""
        return cls(tokenizer.to_json, vocab_size, tokenizer.stop_token_ids)

    def matcher(self, grammar: str) -> Matcher:
        """Return the start of an answer in a grammar, which is compiled at its first use.

        Raises:
            InvalidRequest: the grammar is invalid or too large; the message says why.
        """
        if (found := self._copy(grammar)) is None:
            with self._compiling:
                if (found := self._copy(grammar)) is None:
                    compiled = self._compile(grammar)
                    with self._lock:
                        self._compiled[grammar] = compiled
                        if len(self._compiled) > _MAX_COMPILED:
                            self._compiled.popitem(last=False)
                    found = compiled.deep_copy()
        return Matcher(found)

    def _copy(self, grammar: str) -> llguidance.LLMatcher | None:
        with self._lock:
            if grammar not in self._compiled:
                return None
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        library, size = _library(), len(grammar.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"expected a grammar of at most {MAX_GRAMMAR_BYTES} bytes, found {size}"
            )
        if self._tokenizer is None:
            try:
                self._tokenizer = library.LLTokenizer(
                    self._source(), n_vocab=self.vocab_size, eos_token=self._stop_token_ids
                )
            except ValueError as error:
                raise InvalidRequest(
                    f"the policy's tokenizer does not support grammars: {error}"
                ) from error
        found = library.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=library.LLParserLimits(**_LIMITS)
        )
        # Some limits are reached with the first tokens only.
        Matcher(found.deep_copy()).allowed(np.zeros(-(-self.vocab_size // 32), np.int32))
        return found


class Matcher:
    """An answer's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher
        self.num_tokens = 0
        """Tokens that it has consumed."""

    def consume(self, tokens: Int32[np.ndarray, "T"]) -> None:
        """Go on by sampled tokens.

        Raises:
            InvalidRequest: they do not match the grammar, or reach a limit.
        """
        self._matcher.consume_tokens(tokens.tolist())
        self.num_tokens += len(tokens)
        self._require_valid()

    def allowed(self, bits: Int32[np.ndarray, "_"]) -> None:
        """Write which tokens may follow: bit v % 32 of word v // 32 for token v.

        Raises:
            InvalidRequest: a limit is reached.
        """
        assert bits.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._require_valid()

    def _require_valid(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("<non-verbose/>")[0].strip()
            if reason == "NoExtensionBias":
                reason = "no token of the policy may follow"
            raise InvalidRequest(f"the grammar of the answer is not supported: {reason[:500]}")
