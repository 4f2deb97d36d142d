"""Tokenizers in the Hugging Face format: tokenizer.json for the tokens, a jinja template for
conversations."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import numpy as np
import tokenizers
from jaxtyping import Int32
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_jax.errors import InvalidRequest
from areal_jax.json_files import read_json
from areal_jax.records import Message

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Names under which a template finds the special tokens of tokenizer_config.json."""

Turn: TypeAlias = Message | Mapping[str, Any]
"""A message, or one as chat templates and OpenAI's protocol write it, with calls of tools and all
else."""

_SETTINGS = "tokenizer_config.json"
_GENERATION = "generation_config.json"

_ABSENT = (None, False, [], {})

_UNSUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    _SETTINGS: {
        "split_special_tokens": _ABSENT,
        "fast_tokenizer_files": (*_ABSENT, ["tokenizer.json"]),
        "auto_map": _ABSENT,
    },
    # They change where an answer ends, or which tokens it may have.
    _GENERATION: dict.fromkeys(
        (
            *(
                "stop_strings",
                "forced_bos_token_id",
                "forced_eos_token_id",
                "forced_decoder_ids",
                "suppress_tokens",
            ),
            *("begin_suppress_tokens", "bad_words_ids", "force_words_ids", "sequence_bias"),
        ),
        _ABSENT,
    ),
}
"""Keys that change tokens in transformers 5.23 and are refused with any value but these.

The others are read, or harmless: sampling defaults, because the experiment sets sampling;
model_max_length and the sides of padding and truncation, because texts are neither cut nor padded;
clean_up_tokenization_spaces, because tokens are kept."""

_PREFIX_SPACES = ("\u0120", "\u2581")
"""How byte-level BPE and sentencepiece write a space at the beginning of a token."""

_LONG_TEXT = 4096
"""Characters from which on a text is encoded by a call that lets other threads run meanwhile."""

_STAND_IN = "areal_jax"
"""An answer that no template changes and that stands nowhere else in a conversation."""


class HFTokenizer:
    """Renders conversations as `transformers` does, through the template of the folder.

    A folder without a template gets plain text: the contents of the messages with an empty line
    between them, a line break at the end, and whatever special tokens tokenizer.json puts around a
    text.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: str | None,
        settings: Mapping[str, Any],
        stops: Sequence[int],
        tool_template: str | None = None,
    ) -> None:
        """Args: settings: tokenizer_config.json. stops: ids that end an answer, the one that ends a
        turn first. tool_template: in place of `template` where there are tools."""
        if not stops:
            raise ValueError(
                "expected at least one stop token: eos_token of tokenizer_config.json or "
                "eos_token_id of config.json"
            )
        self._tokenizer = tokenizer
        self._template = _compile(template) if template else None
        self._tool_template = _compile(tool_template) if tool_template else self._template
        self._special = {
            name: text for name in SPECIAL_TOKENS if (text := _text(settings.get(name))) is not None
        }
        self.stop_token_ids: tuple[int, ...] = tuple(stops)
        self.pad_token_id: int | None = (
            tokenizer.token_to_id(self._special["pad_token"])
            if "pad_token" in self._special
            else None
        )
        self.has_template = template is not None
        # Ids may leave gaps, so that they reach further than there are tokens.
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self._bytes_per_token = _bytes_per_token(tokenizer, vocabulary)

    @classmethod
    def from_folder(cls, folder: Path, ignored_keys: Collection[str] = ()) -> HFTokenizer:
        """Read tokenizer.json with its settings, template and stop tokens from a Hugging Face
        folder.

        Args:
            ignored_keys: keys of tokenizer_config.json and generation_config.json that are passed
                over instead of refused.

        Raises:
            ValueError: naming the file and the key that is not supported or contradicts
                tokenizer.json."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json; a tokenizer in another format must be "
                "converted to it first"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise ValueError(
                f"{file}: expected a tokenizer as Hugging Face's tokenizers write it, came "
                "none "
                f"({error})"
            ) from error
        # Some files carry the truncation and padding of whoever saved them.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _settings(folder)
        written_in, templates = _templates(folder, settings)
        for name, content in ((_SETTINGS, settings), (_GENERATION, _read(folder / _GENERATION))):
            _check_keys(folder / name, content, ignored_keys)
        _check_added(folder / _SETTINGS, tokenizer, settings)
        _check_surroundings(folder / _SETTINGS, tokenizer, settings, bool(templates), ignored_keys)
        stops = _stops(folder, tokenizer, settings)
        try:
            return cls(
                tokenizer, templates.get("default"), settings, stops, templates.get("tool_use")
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"{written_in}: line {error.lineno} of the chat template cannot be read: {error}"
            ) from error

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Int32[np.ndarray, "T"]:
        """Tokens of a conversation through the chat template, ready for the assistant's next words.

        Args:
            tools: descriptions of functions that the assistant may call, in OpenAI's form, for
                templates that know them.
            max_tokens: as that of `encode_prompt`.

        Raises:
            ValueError: the template refuses the conversation.
        """
        if self._template is None:
            return self.encode_prompt(_plain(messages) + "\n", max_tokens)
        text = self._text(messages, is_asked=True, tools=tools)
        self._require_short(text, max_tokens)
        return self.encode(text)

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template tells the policy of tools."""
        if self._template is None:
            return False
        asks, named = (
            [Message("user", "?")],
            [{"type": "function", "function": {"name": _STAND_IN, "parameters": {}}}],
        )
        return self._text(asks, is_asked=True, tools=named) != self._text(asks, is_asked=True)

    def render_answer(self, prompt: Sequence[Message], answer: str) -> Int32[np.ndarray, "T"]:
        """Tokens that a policy which is asked `render(prompt)` says to give this answer, up to the
        one that ends its turn.

        The template's own rendering of the answer, where that resumes from the prompt and says all
        of it. Else (templates of reasoning models begin the reasoning in the prompt, and cut it out
        of finished answers) the words of the answer, less those that the prompt has already put
        into the policy's mouth. ValueError where the template refuses the conversation.
        """
        said = answer
        if self._template is not None:
            asked = self._text(prompt, is_asked=True)
            finished = self._text([*prompt, Message("assistant", answer)], is_asked=False)
            if finished.startswith(asked) and answer.strip() in finished[len(asked) :]:
                said = finished[len(asked) :]
            else:
                in_common = next(
                    n for n in range(len(asked), -1, -1) if finished.startswith(asked[:n])
                )
                said = answer.removeprefix(asked[in_common:])
        tokens = self.encode(said)
        ends = np.flatnonzero(np.isin(tokens, self.stop_token_ids))
        return (
            tokens[: ends[0] + 1]
            if len(ends)
            else np.append(tokens, np.int32(self.stop_token_ids[0]))
        )

    def render_next(
        self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Int32[np.ndarray, "T"]:
        """Tokens that follow an answer and the token that ended it, up to the assistant's next
        words.

        They are read off a conversation in which another answer stands for the one that was given:
        that is not rendered again, whatever the template would make of it.

        Args:
            tools: those with which the beginning of the conversation was rendered; they decide the
                template.

        Raises:
            ValueError: the template refuses the conversation or leaves answers out.
        """
        if self._template is None:
            return self.encode("\n\n" + _plain(messages) + "\n")
        stand_in = _STAND_IN
        while stand_in in str(tools):
            stand_in += "_"
        answered = [Message("user", "?"), Message("assistant", stand_in)]
        text = self._text([*answered, *messages], is_asked=True, tools=tools)
        _, found, after = text.partition(stand_in)
        if not found:
            raise ValueError(
                "the chat template leaves out what the assistant has said: it is for one turn only"
            )
        # A turn that nothing ends in the template ends in the token that the policy drew.
        _, _, end = self._text(answered, is_asked=False, tools=tools).partition(stand_in)
        stops = np.flatnonzero(np.isin(self.encode(end), self.stop_token_ids))
        tokens = self.encode(after)
        if len(stops):
            tokens = tokens[np.flatnonzero(np.isin(tokens, self.stop_token_ids))[0] + 1 :]
        return tokens

    def _text(
        self, messages: Sequence[Turn], *, is_asked: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """A conversation through the template, to be answered or as it is."""
        template = self._tool_template if tools else self._template
        assert template is not None
        turns = [
            {"role": turn.role, "content": turn.content} if isinstance(turn, Message) else turn
            for turn in messages
        ]
        try:
            return template.render(
                messages=turns,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=is_asked,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        except Exception as error:
            # A template is untrusted program, and what it makes of untrusted words may be anything.
            raise ValueError(
                f"the chat template fails over the conversation: {type(error).__name__}: {error}"
            ) from error

    def encode(self, text: str) -> Int32[np.ndarray, "T"]:
        """Tokens of a text, without any around it; special tokens written in it are recognised."""
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str, max_tokens: int | None = None) -> Int32[np.ndarray, "T"]:
        """Tokens of a text that a policy is to resume from, with those that tokenizer.json puts
        around it: in some families one begins every text.

        Args:
            max_tokens: refuse, before any work, a text of more bytes than so many tokens can hold.
                One that passes may still be
                longer.

        Raises:
            Unservable: the text has too many bytes.
        """
        self._require_short(text, max_tokens)
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> Int32[np.ndarray, "T"]:
        # `encode` holds the interpreter's lock throughout: 6.6 s for 4 MB. A batch does not; for
        # short texts it costs more.
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
        num_bytes, most = len(text.encode(errors="replace")), max_tokens * self._bytes_per_token
        if num_bytes > most:
            raise InvalidRequest(
                f"the prompt has {num_bytes} bytes, expected at most {most}: "
                f"engine.max_prompt_tokens={max_tokens} tokens of at most "
                f"{self._bytes_per_token} bytes each"
            )

    def difference(self, other: HFTokenizer) -> str:
        """Which tokens have another id there, or none, in words; empty where all are the same."""
        ours, theirs = (each._tokenizer.get_vocab(with_added_tokens=True) for each in (self, other))
        differing = sorted(
            token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)
        )
        if not differing:
            return ""
        first = differing[0]
        return (
            f"{len(differing)} tokens differ, such as {first!r}, which is {ours.get(first)} "
            f"here and {theirs.get(first)} there"
        )

    def find_pad_token_id(self) -> int | None:
        """The padding token, or another special one, that ends no answer; none where there is
        none."""
        special = [
            (id, token.content)
            for id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        ]
        named = sorted(special, key=lambda pair: ("pad" not in pair[1].lower(), pair[0]))
        candidates = [self.pad_token_id, *(id for id, _ in named)]
        return next(
            (id for id in candidates if id is not None and id not in self.stop_token_ids), None
        )

    def decode(self, tokens: Int32[np.ndarray, "T"]) -> str:
        """Text of the tokens without special tokens."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """Text of one token, special ones too; what is part of a character only is \ufffd."""
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _bytes_per_token(tokenizer: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int | None:
    """Bytes of text that one token can stand for at most; None where a token can stand for any
    text."""
    if getattr(tokenizer.model, "unk_token", None) and not getattr(
        tokenizer.model, "byte_fallback", False
    ):
        return None
    # Unicode's normal forms make of a text at least a quarter of its bytes, such as a letter of a
    # mathematical alphabet.
    shrinks = 1 if tokenizer.normalizer is None else 4
    return shrinks * max((len(token.encode(errors="replace")) for token in vocabulary), default=1)


def _plain(messages: Sequence[Turn]) -> str:
    """What is said, an empty line between two."""
    return "\n\n".join(
        turn.content if isinstance(turn, Message) else turn.get("content") or ""
        for turn in messages
    )


class GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's words in training templates; here it renders what it
    holds."""

    tags = {"generation"}  # jinja2 declares it as an instance variable  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlocks, loopcontrols],
        keep_trailing_newline=False,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """jinja2's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the older files that transformers reads where it does not list
    the added tokens."""
    settings = _read(folder / _SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings |= _read(folder / "special_tokens_map.json")
        added = _read(folder / "added_tokens.json")
        settings["added_tokens_decoder"] = {id: {"content": token} for token, id in added.items()}
    return settings


def _templates(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, dict[str, str]]:
    """Where the templates are written, and each by its name: files go before
    tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if files := ({"default": file} if file.is_file() else {}) | {each.stem: each for each in more}:
        try:
            templates: object = {
                name: path.read_text(encoding="utf-8") for name, path in files.items()
            }
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected UTF-8, came something else ({error})") from error
    else:
        file, templates = folder / _SETTINGS, settings.get("chat_template")
    if isinstance(templates, list):
        templates = {
            named.get("name"): named.get("template")
            for named in templates
            if isinstance(named, Mapping)
        }
    elif not isinstance(templates, Mapping):
        templates = {} if templates is None else {"default": templates}
    if wrong := [template for template in templates.values() if not isinstance(template, str)]:
        raise ValueError(
            f"{file}: expected chat_template to be text, or a list of templates by name; came "
            f"{wrong[0]!r}"
        )
    if templates and "default" not in templates:
        raise ValueError(
            f"{file}: expected a chat template named 'default'; came "
            f"{', '.join(map(repr, templates))}; "
            "write the one to use into chat_template.jinja"
        )
    return file, dict(templates)


def _check_keys(file: Path, content: Mapping[str, Any], ignored_keys: Collection[str]) -> None:
    """ValueError naming the keys of a file that are not supported."""
    wrong = {
        key: content[key]
        for key, accepted in _UNSUPPORTED[file.name].items()
        if key in content and key not in ignored_keys and not _is_one_of(content[key], accepted)
    }
    if wrong:
        shown = "; ".join(f"{key}={value!r} is not supported" for key, value in wrong.items())
        raise ValueError(f"{file}: {shown}. {_to_ignore(wrong)}")


def _is_one_of(value: object, accepted: Collection[object]) -> bool:
    # In JSON 0 is not false.
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted
    )


def _to_ignore(keys: Collection[str]) -> str:
    return f"To load it as if this were not there, set policy.ignore_config_keys={','.join(keys)}"


def _check_surroundings(
    file: Path,
    tokenizer: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    has_template: bool,
    ignored_keys: Collection[str],
) -> None:
    """ValueError where tokenizer_config.json and tokenizer.json disagree about what is put around a
    text."""
    text = tokenizer.encode("a", add_special_tokens=False).tokens
    whole = tokenizer.encode("a", add_special_tokens=True).tokens
    found = {"add_prefix_space": bool(text) and text[0].startswith(_PREFIX_SPACES)}
    if not has_template:
        # A template writes both tokens itself.
        for key, name, end in (
            ("add_bos_token", "bos_token", 0),
            ("add_eos_token", "eos_token", -1),
        ):
            if (token := _text(settings.get(name))) is not None:
                found[key] = bool(whole) and whole[end] == token
    wrong = [
        key
        for key, is_added in found.items()
        if key not in ignored_keys and settings.get(key) not in (None, is_added)
    ]
    if wrong:
        raise ValueError(
            f"{file}: expected what tokenizer.json does, "
            f"{', '.join(f'{key}={str(found[key]).lower()}' for key in wrong)}; "
            f"came {', '.join(f'{key}={settings[key]!r}' for key in wrong)}. Correct either "
            f"file. {_to_ignore(wrong)}"
        )


def _check_added(file: Path, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """ValueError where a file beside tokenizer.json adds a token that this lacks, which
    transformers would give an id."""
    added = settings.get("added_tokens_decoder") or {}
    named = (
        {_text(token): int(id) for id, token in added.items()} if isinstance(added, dict) else {}
    )
    extra = [settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    listed = [token for tokens in extra if isinstance(tokens, list) for token in map(_text, tokens)]
    listed += [
        token
        for tokens in extra
        if isinstance(tokens, dict)
        for token in map(_text, tokens.values())
    ]
    # The loader names the end-of-sequence token itself.
    listed += [
        _text(token)
        for key, token in settings.items()
        if key.endswith("_token") and key != "eos_token"
    ]
    expected = {**{token: tokenizer.token_to_id(token) for token in listed if token}, **named}
    wrong = [
        token
        for token, id in expected.items()
        if token and (id is None or tokenizer.token_to_id(token) != id)
    ]
    if wrong:
        raise ValueError(
            f"{file}: expected the tokens of tokenizer.json, came "
            f"{', '.join(map(repr, wrong[:5]))}, which it lacks or gives "
            "another id; save the tokenizer again with transformers"
        )


def _stops(folder: Path, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> list[int]:
    """The tokenizer's eos, which ends a turn, then those of generation_config.json and
    config.json."""
    eos = _text(settings.get("eos_token"))
    if eos is not None and tokenizer.token_to_id(eos) is None:
        raise ValueError(
            f"{folder / _SETTINGS}: eos_token={eos!r} is not a token of tokenizer.json"
        )
    stops = [] if eos is None else [tokenizer.token_to_id(eos)]
    for name in (_GENERATION, "config.json"):
        found = _read(folder / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if any(isinstance(id, bool) or not isinstance(id, int | None) for id in ids):
            raise ValueError(
                f"{folder / name}: expected eos_token_id to be a whole number or some; came "
                f"{found!r}"
            )
        stops += ids
    return list(dict.fromkeys(id for id in stops if id is not None))


def _text(token: object) -> str | None:
    """A special token is written as text, or as an object that holds it."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
