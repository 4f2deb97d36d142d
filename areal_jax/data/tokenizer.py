"""Tokenizers in the Hugging Face format: tokenizer.json and a jinja chat template.

The file has more than 400 lines because it checks every key of the files that changes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import jinja2
import numpy as np
import tokenizers
from jaxtyping import Int32
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_jax.data.tool_dialects import choose_dialect
from areal_jax.errors import InvalidRequest
from areal_jax.image_files import ImageFile
from areal_jax.json_files import read_json
from areal_jax.records import IMAGE, Message

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens of tokenizer_config.json that templates can use as variables."""

Turn: TypeAlias = Message | Mapping[str, Any]
"""A message, or a mapping as in chat templates and OpenAI's API, which may hold tool calls."""

_SETTINGS = "tokenizer_config.json"
_GENERATION = "generation_config.json"

_ABSENT = (None, False, [], {})

_UNSUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    _SETTINGS: {
        "split_special_tokens": _ABSENT,
        "fast_tokenizer_files": (*_ABSENT, ["tokenizer.json"]),
        "auto_map": _ABSENT,
    },
    # These change where an answer ends, or which tokens it may contain.
    _GENERATION: dict.fromkeys(
        (
            "stop_strings",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "forced_decoder_ids",
            "suppress_tokens",
            "begin_suppress_tokens",
            "bad_words_ids",
            "force_words_ids",
            "sequence_bias",
        ),
        _ABSENT,
    ),
}
"""Keys that change tokens in transformers 5.23, and the only values that are accepted.

Other keys are supported or have no effect: sampling defaults, because the experiment sets sampling;
model_max_length and the sides of padding and truncation, because texts are neither truncated nor
padded; clean_up_tokenization_spaces, because tokens are not re-encoded."""

_PREFIX_SPACES = ("\u0120", "\u2581")
"""Leading space of a token in byte-level BPE and in sentencepiece."""

_LONG_TEXT = 4096
"""Characters from which a text is encoded by a call that releases the interpreter's lock."""

_PLACEHOLDER = "areal_jax"
"""An answer that no template changes and that occurs nowhere else in a conversation."""


class HFTokenizer:
    """Tokenizer that renders conversations as `transformers` does, with the folder's chat template.

    Without a template, conversations are rendered as plain text: the contents of the messages,
    separated by empty lines, a line break at the end, and the special tokens that tokenizer.json
    adds to a text. The class has more than 200 lines because every text passes the same checks of
    its length, special tokens and images.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: str | None,
        settings: Mapping[str, Any],
        stops: Sequence[int],
        tool_template: str | None = None,
    ) -> None:
        """Compile the templates.

        Args:
            tokenizer: content of tokenizer.json.
            template: chat template; None for plain text.
            settings: content of tokenizer_config.json.
            stops: ids of stop tokens; the first one ends a turn.
            tool_template: chat template for conversations with tools; None for `template`.
        """
        if not stops:
            raise ValueError(
                "expected at least one stop token, found none; set eos_token in "
                "tokenizer_config.json or eos_token_id in config.json"
            )
        self._tokenizer = tokenizer
        self.template = template
        """The chat template; None for plain text."""
        self._template = _compile(template) if template else None
        self._tool_template = _compile(tool_template) if tool_template else self._template
        self._variables = _variables(template) | _variables(tool_template)
        self.tool_dialect = choose_dialect(tool_template or template)
        """Format of tool calls."""
        added = tokenizer.get_added_tokens_decoder().items()
        self._call_tokens = {
            token_id: token.content
            for token_id, token in added
            if token.content in self.tool_dialect.special
        }
        self._special = {
            name: text
            for name in SPECIAL_TOKENS
            if (text := _token_content(settings.get(name))) is not None
        }
        self.stop_token_ids: tuple[int, ...] = tuple(stops)
        self.pad_token_id: int | None = (
            tokenizer.token_to_id(self._special["pad_token"])
            if "pad_token" in self._special
            else None
        )
        self.has_template = template is not None
        self._image_token, self._count_image_tokens = "", _refuse_images
        # Ids may have gaps, so the largest one may exceed the number of tokens.
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self._bytes_per_token = _bytes_per_token(tokenizer, vocabulary)

    @classmethod
    def from_folder(cls, folder: Path, ignored_keys: Collection[str] = ()) -> HFTokenizer:
        """Read tokenizer.json with its settings, template and stop tokens from a Hugging Face
        folder.

        Args:
            folder: a Hugging Face folder.
            ignored_keys: unsupported keys of tokenizer_config.json and generation_config.json to
                ignore.

        Raises:
            FileNotFoundError: the folder has no tokenizer.json.
            ValueError: a file has an unsupported key or contradicts tokenizer.json.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json; convert a tokenizer of another format to it, "
                "for example with transformers"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # an untrusted file; the start is refused
            raise ValueError(
                f"{file}: expected a tokenizer in the format of Hugging Face's tokenizers ({error})"
            ) from error
        # Some files contain truncation and padding settings of their authors.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _settings(folder)
        template_file, templates = _templates(folder, settings)
        for name, content in ((_SETTINGS, settings), (_GENERATION, _read(folder / _GENERATION))):
            _check_keys(folder / name, content, ignored_keys)
        _check_added_tokens(folder / _SETTINGS, tokenizer, settings)
        _check_added_affixes(folder / _SETTINGS, tokenizer, settings, bool(templates), ignored_keys)
        stops = _stops(folder, tokenizer, settings)
        try:
            return cls(
                tokenizer, templates.get("default"), settings, stops, templates.get("tool_use")
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"{template_file}: line {error.lineno} of the chat template is invalid: {error}"
            ) from error

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        images: Sequence[ImageFile] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Int32[np.ndarray, "T"]:
        """Render a conversation with the chat template, up to the start of the assistant's turn.

        Args:
            messages: the conversation.
            tools: functions that the assistant may call, in OpenAI's format.
            max_tokens: as in `encode_prompt`.
            images: images of the turns that are no `Message`, in order.
            variables: further variables of the chat template.

        Raises:
            InvalidRequest: the text has too many bytes for `max_tokens`.
            ValueError: the template refuses the conversation.
        """
        images = images or [
            image for turn in messages if isinstance(turn, Message) for image in turn.images
        ]
        if self._template is None:
            if images:
                _refuse_images(images[0])
            return self.encode_prompt(_plain(messages) + "\n", max_tokens)
        text = self._render_text(
            messages, add_generation_prompt=True, tools=tools, variables=variables
        )
        self._require_short(text, max_tokens)
        return self.encode(self._expand_images(text, images) if images else text)

    def read_images(self, image_token_id: int, count_tokens: Callable[[ImageFile], int]) -> None:
        """Render the images of messages.

        Args:
            image_token_id: token that stands for a part of an image.
            count_tokens: returns the number of tokens of an image.
        """
        self._image_token = self._tokenizer.id_to_token(image_token_id) or ""
        self._count_image_tokens = count_tokens

    def _expand_images(self, text: str, images: Sequence[ImageFile]) -> str:
        """Repeat the token that the chat template renders for each image.

        Raises:
            ValueError: the policy or its chat template does not read images, or an image cannot be
                read.
        """
        counts = [self._count_image_tokens(image) for image in images]
        parts = text.split(self._image_token)
        if len(parts) != len(images) + 1:
            raise ValueError(
                f"expected a chat template that renders {len(images)} images as "
                f"{self._image_token}, found {len(parts) - 1}"
            )
        repeated = (self._image_token * count for count in counts)
        return parts[0] + "".join(map("".join, zip(repeated, parts[1:], strict=True)))

    def reasoning_variables(self, effort: str) -> dict[str, Any]:
        """Return the variables of the chat template that stand for a reasoning effort.

        Args:
            effort: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`.

        Returns:
            None where the template knows no reasoning. A switch is off for `none` and `minimal`;
            a template with levels has `low`, `medium` and `high`.
        """
        level = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}.get(effort)
        known = dict.fromkeys(("enable_thinking", "thinking"), effort not in ("none", "minimal"))
        known = {**known, "reasoning_effort": level or effort}
        return {name: value for name, value in known.items() if name in self._variables}

    @property
    def can_render_tools(self) -> bool:
        """Whether the chat template renders tool definitions."""
        if self._template is None:
            return False
        messages = [Message("user", "?")]
        tools = [{"type": "function", "function": {"name": _PLACEHOLDER, "parameters": {}}}]
        with_tools = self._render_text(messages, add_generation_prompt=True, tools=tools)
        return with_tools != self._render_text(messages, add_generation_prompt=True)

    def render_answer(self, prompt: Sequence[Message], answer: str) -> Int32[np.ndarray, "T"]:
        """Encode the tokens that a policy generates after `render(prompt)` to give this answer.

        They end with the token that ends the turn. If the template's rendering of the conversation
        starts with the prompt and contains the answer, they are the rest of that rendering.
        Otherwise (templates of reasoning models start the reasoning in the prompt, and remove it
        from finished answers) they are the answer without the part that the prompt contains.

        Args:
            prompt: the conversation before the answer.
            answer: text of the answer.

        Raises:
            ValueError: the template refuses the conversation.
        """
        text = answer
        if self._template is not None:
            before = self._render_text(prompt, add_generation_prompt=True)
            finished = self._render_text(
                [*prompt, Message("assistant", answer)], add_generation_prompt=False
            )
            if finished.startswith(before) and answer.strip() in finished[len(before) :]:
                text = finished[len(before) :]
            else:
                in_common = next(
                    n for n in range(len(before), -1, -1) if finished.startswith(before[:n])
                )
                text = answer.removeprefix(before[in_common:])
        tokens = self.encode(text)
        ends = np.flatnonzero(np.isin(tokens, self.stop_token_ids))
        return (
            tokens[: ends[0] + 1]
            if len(ends)
            else np.append(tokens, np.int32(self.stop_token_ids[0]))
        )

    def render_finished(self, messages: Sequence[Message]) -> Int32[np.ndarray, "T"]:
        """Render a conversation that ends with an answer, with all that the chat template adds.

        Raises:
            ValueError: the template refuses the conversation.
        """
        if self._template is None:
            return self.encode_prompt(_plain(messages))
        return self.encode(self._render_text(messages, add_generation_prompt=False))

    def render_next(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Int32[np.ndarray, "T"]:
        """Render the turns after an answer, up to the start of the assistant's next turn.

        The result follows the answer and its stop token. It is taken from a conversation with a
        placeholder as the answer: the policy's own tokens are never rendered again (token-in,
        token-out).

        Args:
            messages: the turns after the answer.
            tools: tools of the conversation; they decide the template.
            variables: further variables of the chat template.

        Raises:
            ValueError: the template refuses the conversation or leaves answers out.
        """
        if any(isinstance(turn, Message) and turn.images for turn in messages):
            raise ValueError(
                "expected images in the first prompt alone, found some in a later turn"
            )
        if self._template is None:
            return self.encode("\n\n" + _plain(messages) + "\n")
        placeholder = _PLACEHOLDER
        while placeholder in str(tools):
            placeholder += "_"
        answered = [Message("user", "?"), Message("assistant", placeholder)]
        text = self._render_text(
            [*answered, *messages], add_generation_prompt=True, tools=tools, variables=variables
        )
        _, found, after = text.partition(placeholder)
        if not found:
            raise ValueError(
                "the chat template leaves out the assistant's answers, so it is for one turn only"
            )
        # If the template does not end a turn, the token that the policy sampled ends it.
        finished = self._render_text(answered, add_generation_prompt=False, tools=tools)
        _, _, end = finished.partition(placeholder)
        stops = np.flatnonzero(np.isin(self.encode(end), self.stop_token_ids))
        tokens = self.encode(after)
        if len(stops):
            tokens = tokens[np.flatnonzero(np.isin(tokens, self.stop_token_ids))[0] + 1 :]
        return tokens

    def _render_text(
        self,
        messages: Sequence[Turn],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        template = self._tool_template if tools else self._template
        assert template is not None
        turns = [
            {"role": turn.role, "content": _content(turn)} if isinstance(turn, Message) else turn
            for turn in messages
        ]
        if self.tool_dialect.text_arguments:
            turns = [_with_text_arguments(turn) for turn in turns]
        try:
            return template.render(
                messages=turns,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**variables, **self._special},
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        except Exception as error:  # a template is untrusted code; the request or the row fails
            raise ValueError(
                f"the chat template failed on the conversation: {type(error).__name__}: {error}"
            ) from error

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by name, such as `eos_token`."""
        return self._special

    def encode(self, text: str) -> Int32[np.ndarray, "T"]:
        """Encode a text without adding tokens; special tokens in the text are recognized."""
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str, max_tokens: int | None = None) -> Int32[np.ndarray, "T"]:
        """Encode a text to be continued, with the tokens that tokenizer.json adds, such as BOS.

        Args:
            text: the prompt.
            max_tokens: refuse, before encoding, a text of more bytes than this many tokens can
                represent. An accepted text may still have more tokens.

        Raises:
            InvalidRequest: the text has too many bytes.
        """
        self._require_short(text, max_tokens)
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> Int32[np.ndarray, "T"]:
        # `encode` holds the interpreter's lock: 6.6 s for 4 MB. The batch call releases it, but is
        # slower for short texts.
        if len(text) < _LONG_TEXT:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            [encoding] = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return np.array(encoding.ids, np.int32)

    def _require_short(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None or self._bytes_per_token is None:
            return
        num_bytes, limit = len(text.encode(errors="replace")), max_tokens * self._bytes_per_token
        if num_bytes > limit:
            raise InvalidRequest(
                f"the prompt has {num_bytes} bytes, expected at most {limit}: "
                f"engine.max_prompt_tokens={max_tokens} tokens of at most "
                f"{self._bytes_per_token} bytes each"
            )

    def describe_difference(self, other: HFTokenizer) -> str:
        """Describe which tokens have different ids in `other`; empty if none has."""
        ours, theirs = self.vocabulary(), other.vocabulary()
        differing = sorted(
            token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)
        )
        if not differing:
            return ""
        first = differing[0]
        return (
            f"{len(differing)} tokens differ, such as {first!r}, which has id {ours.get(first)} "
            f"in one and {theirs.get(first)} in the other"
        )

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, by its text in the vocabulary."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._tokenizer.to_str()

    def find_pad_token_id(self) -> int | None:
        """Find a padding token or another special token that is not a stop token, or None."""
        special = [
            (token_id, token.content)
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        ]
        named = sorted(special, key=lambda pair: ("pad" not in pair[1].lower(), pair[0]))
        candidates = [self.pad_token_id, *(token_id for token_id, _ in named)]
        return next(
            (each for each in candidates if each is not None and each not in self.stop_token_ids),
            None,
        )

    def decode(self, tokens: Int32[np.ndarray, "T"]) -> str:
        """Decode tokens; special tokens are left out."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def decode_calls(self, tokens: Int32[np.ndarray, "T"]) -> str:
        """Decode tokens; of the special ones, those that tool calls have are kept."""
        if not self._call_tokens:
            return self.decode(tokens)
        kept = np.isin(tokens, list(self._call_tokens))
        pieces, start = list[str](), 0
        for place in np.flatnonzero(kept).tolist():
            pieces += [self.decode(tokens[start:place]), self._call_tokens[int(tokens[place])]]
            start = place + 1
        return "".join((*pieces, self.decode(tokens[start:])))

    @property
    def call_tokens(self) -> dict[str, int]:
        """Ids of the special tokens that tool calls have."""
        return {text: token_id for token_id, text in self._call_tokens.items()}

    def decode_token(self, token: int) -> str:
        """Decode one token, special or not; an incomplete character is \ufffd."""
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _with_text_arguments(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn whose calls have their arguments as JSON in a string."""
    calls = [
        call
        | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in turn.get("tool_calls", ())
    ]
    return {**turn, "tool_calls": calls} if calls else turn


def _bytes_per_token(tokenizer: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int | None:
    """Maximum bytes of text per token; None if a token can represent any text (unknown token)."""
    if getattr(tokenizer.model, "unk_token", None) and not getattr(
        tokenizer.model, "byte_fallback", False
    ):
        return None
    # Unicode normalization keeps at least a quarter of the bytes of a text: mathematical letters
    # have 4 bytes and become 1.
    max_shrinkage = 1 if tokenizer.normalizer is None else 4
    return max_shrinkage * max(
        (len(token.encode(errors="replace")) for token in vocabulary), default=1
    )


def _refuse_images(_: ImageFile) -> int:
    raise ValueError(
        "expected a conversation without images, which the policy does not read; set policy.path "
        "to a vision-language policy, or leave the images out"
    )


def _content(message: Message) -> str | list[dict[str, str]]:
    """Return the content as chat templates read it: in parts, if it has images."""
    if not message.images:
        return message.content
    texts = message.content.split(IMAGE)
    if len(texts) != len(message.images) + 1:
        texts = [*[""] * len(message.images), message.content]
    parts = [{"type": "text", "text": texts[0]}]
    for text in texts[1:]:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part["type"] == "image" or part["text"]]


def _plain(messages: Sequence[Turn]) -> str:
    """Join the contents of messages with empty lines."""
    return "\n\n".join(
        turn.content if isinstance(turn, Message) else turn.get("content") or ""
        for turn in messages
    )


class GenerationBlocks(Extension):
    """Renders the content of `{% generation %}`, which marks answers in training templates."""

    tags = {"generation"}  # jinja2 declares it as an instance variable  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _variables(template: str | None) -> set[str]:
    """Return the variables that a template reads and does not set."""
    if template is None:
        return set()
    return meta.find_undeclared_variables(_environment().parse(template))


def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlocks, loopcontrols],
        keep_trailing_newline=False,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """Format JSON without HTML escapes, unlike the filter of jinja2."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and the older files if it does not list the added tokens."""
    settings = _read(folder / _SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings |= _read(folder / "special_tokens_map.json")
        added = _read(folder / "added_tokens.json")
        settings["added_tokens_decoder"] = {
            token_id: {"content": token} for token, token_id in added.items()
        }
    return settings


def _templates(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, dict[str, str]]:
    """Read the templates by name, and the file that holds them.

    Template files have precedence over tokenizer_config.json.
    """
    file = folder / "chat_template.jinja"
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if files := ({"default": file} if file.is_file() else {}) | {path.stem: path for path in more}:
        try:
            templates: object = {
                name: path.read_text(encoding="utf-8") for name, path in files.items()
            }
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected UTF-8 ({error})") from error
    else:
        file, templates = folder / _SETTINGS, settings.get("chat_template")
    if isinstance(templates, list):
        templates = {
            entry.get("name"): entry.get("template")
            for entry in templates
            if isinstance(entry, Mapping)
        }
    elif not isinstance(templates, Mapping):
        templates = {} if templates is None else {"default": templates}
    if wrong := [template for template in templates.values() if not isinstance(template, str)]:
        raise ValueError(
            f"{file}: expected chat_template to be text, or a list of templates by name; found "
            f"{wrong[0]!r}"
        )
    if templates and "default" not in templates:
        raise ValueError(
            f"{file}: expected a chat template named 'default', found "
            f"{', '.join(map(repr, templates))}; write the one to use into chat_template.jinja"
        )
    return file, dict(templates)


def _check_keys(file: Path, content: Mapping[str, Any], ignored_keys: Collection[str]) -> None:
    """Raise ValueError with the keys of a file that are not supported."""
    wrong = {
        key: content[key]
        for key, accepted in _UNSUPPORTED[file.name].items()
        if key in content and key not in ignored_keys and not _is_one_of(content[key], accepted)
    }
    if wrong:
        shown = "; ".join(f"{key}={value!r} is not supported" for key, value in wrong.items())
        raise ValueError(f"{file}: {shown}. {_ignore_hint(wrong)}")


def _is_one_of(value: object, accepted: Collection[object]) -> bool:
    # In JSON 0 is not false, unlike in Python.
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted
    )


def _ignore_hint(keys: Collection[str]) -> str:
    return f"To ignore this, set policy.ignore_config_keys={','.join(keys)}"


def _check_added_affixes(
    file: Path,
    tokenizer: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    has_template: bool,
    ignored_keys: Collection[str],
) -> None:
    """Raise ValueError if the two files disagree about prefix space, BOS or EOS."""
    text = tokenizer.encode("a", add_special_tokens=False).tokens
    with_special = tokenizer.encode("a", add_special_tokens=True).tokens
    actual = {"add_prefix_space": bool(text) and text[0].startswith(_PREFIX_SPACES)}
    if not has_template:
        # A template contains both tokens itself.
        for key, name, end in (
            ("add_bos_token", "bos_token", 0),
            ("add_eos_token", "eos_token", -1),
        ):
            if (token := _token_content(settings.get(name))) is not None:
                actual[key] = bool(with_special) and with_special[end] == token
    wrong = [
        key
        for key, is_added in actual.items()
        if key not in ignored_keys and settings.get(key) not in (None, is_added)
    ]
    if wrong:
        raise ValueError(
            f"{file}: expected as in tokenizer.json "
            f"{', '.join(f'{key}={str(actual[key]).lower()}' for key in wrong)}, "
            f"found {', '.join(f'{key}={settings[key]!r}' for key in wrong)}; correct either "
            f"file. {_ignore_hint(wrong)}"
        )


def _check_added_tokens(
    file: Path, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]
) -> None:
    """Raise ValueError if tokenizer_config.json adds a token that tokenizer.json does not have.

    transformers would assign an id to it.
    """
    added = settings.get("added_tokens_decoder") or {}
    named = (
        {_token_content(token): int(token_id) for token_id, token in added.items()}
        if isinstance(added, dict)
        else {}
    )
    extra = [settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    listed = [
        token
        for tokens in extra
        if isinstance(tokens, list)
        for token in map(_token_content, tokens)
    ]
    listed += [
        token
        for tokens in extra
        if isinstance(tokens, dict)
        for token in map(_token_content, tokens.values())
    ]
    # `_stops` checks eos_token.
    listed += [
        _token_content(token)
        for key, token in settings.items()
        if key.endswith("_token") and key != "eos_token"
    ]
    expected = {**{token: tokenizer.token_to_id(token) for token in listed if token}, **named}
    wrong = [
        token
        for token, token_id in expected.items()
        if token and (token_id is None or tokenizer.token_to_id(token) != token_id)
    ]
    if wrong:
        raise ValueError(
            f"{file}: expected the tokens of tokenizer.json, found "
            f"{', '.join(map(repr, wrong[:5]))}, which is missing there or has another id; save "
            "the tokenizer again with transformers"
        )


def _stops(folder: Path, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> list[int]:
    """Collect stop tokens: the tokenizer's eos, then those of the two config files."""
    eos = _token_content(settings.get("eos_token"))
    if eos is not None and tokenizer.token_to_id(eos) is None:
        raise ValueError(
            f"{folder / _SETTINGS}: eos_token={eos!r} is not a token of tokenizer.json"
        )
    stops = [] if eos is None else [tokenizer.token_to_id(eos)]
    for name in (_GENERATION, "config.json"):
        found = _read(folder / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if any(isinstance(each, bool) or not isinstance(each, int | None) for each in ids):
            raise ValueError(
                f"{folder / name}: expected eos_token_id to be an integer or a list of integers, "
                f"found {found!r}"
            )
        stops += ids
    return list(dict.fromkeys(each for each in stops if each is not None))


def _token_content(token: object) -> str | None:
    """Return the text of a special token, which is text or an object with `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
