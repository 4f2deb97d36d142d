from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.protocols import Tokenizer
from areal_jax.records import Message

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
CONVERSATION = [Message("system", "Be brief."), Message("user", "1+1? <b> & 'ß'")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a byte-level BPE of 303 tokens and no template."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["what is one plus one", "the answer is two"], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|end|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, eos_token="<|im_end|>", chat_template=None)
    return tmp_path


def write(folder: Path, **settings: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def rendered(folder: Path, messages: list[Message] = CONVERSATION) -> str:
    tokenizer = HFTokenizer.from_folder(folder)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return inner.decode(tokenizer.render(messages).tolist(), skip_special_tokens=False)


def id_of(folder: Path, token: str) -> int:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()[token]


def test_decoding_inverts_encoding(folder: Path) -> None:
    tokenizer = HFTokenizer.from_folder(folder)
    text = "one + two = $\\boxed{3}$, größer 日本 🙂\n\n  x"
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text
    assert isinstance(tokenizer, Tokenizer)


def test_special_tokens_are_single_and_not_decoded(folder: Path) -> None:
    tokenizer = HFTokenizer.from_folder(folder)
    tokens = tokenizer.encode("two<|im_end|>")
    assert tokens[-1] == id_of(folder, "<|im_end|>")
    assert tokenizer.decode(tokens) == "two"
    assert tokenizer.vocab_size == max(tokens) + 1


def test_only_prompts_get_a_bos_token(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = id_of(folder, "<|end|>")
    inner.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", begin)]
    )
    inner.save(str(folder / "tokenizer.json"))
    tokenizer = HFTokenizer.from_folder(folder)
    assert tokenizer.encode_prompt("one").tolist() == [begin, *tokenizer.encode("one").tolist()]
    assert begin not in tokenizer.encode("one")


def test_rendering_ends_with_the_generation_prompt(
    folder: Path,
) -> None:
    write(folder, eos_token="<|im_end|>", chat_template=CHATML)
    assert rendered(folder) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1? <b> & "
        "'ß'<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = HFTokenizer.from_folder(folder).render(CONVERSATION)
    assert tokens.dtype == np.int32
    assert tokens[0] == id_of(folder, "<|im_start|>")


def test_template_file_has_precedence_over_config(
    folder: Path,
) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "one of several"},
    ]
    write(folder, eos_token="<|im_end|>", chat_template=named)
    assert rendered(folder) == "one of several"
    (folder / "chat_template.jinja").write_text("from the file\n")
    assert rendered(folder) == "from the file"


def test_templates_have_the_context_of_transformers(folder: Path) -> None:
    template = """{%- for message in messages %}
    {%- if loop.index0 == 1 %}{% continue %}{% endif %}
    {{- bos_token }}{{ message | tojson }}
{%- endfor %}
{% generation %}{{ tools is none }}{% endgeneration %}
    {% if true %}
|{{ strftime_now('%Y') }}|{{ undefined_name }}|
    {% endif %}
"""
    write(
        folder,
        bos_token={"content": "<|end|>", "special": True},
        eos_token="<|im_end|>",
        chat_template=template,
    )
    year = datetime.now().year
    assert rendered(folder) == f'<|end|>{{"role": "system", "content": "Be brief."}}True|{year}||\n'


def test_template_refusals_are_reported(folder: Path) -> None:
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
        "supported') }}{% endif %}"
    )
    write(folder, eos_token="<|im_end|>", chat_template=refusing)
    with pytest.raises(ValueError, match="refuses the conversation: System role not supported"):
        HFTokenizer.from_folder(folder).render(CONVERSATION)


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        (
            "{% for name, value in messages[0]['content'] | items %}{% endfor %}",
            "TypeError: Can only get item pairs from a mapping",
        ),
        ("{{ 'no' + messages[0]['content'] | length }}", "TypeError: can only concatenate str"),
        ("{{ strftime_now(1) }}", "TypeError"),
        ("{{ 1 // (messages | length - 2) }}", "ZeroDivisionError"),
        ("{{ messages[0]['content'].index('@') }}", "ValueError: substring not found"),
    ],
)
def test_template_failures_are_reported(folder: Path, failing: str, words: str) -> None:
    write(folder, eos_token="<|im_end|>", chat_template=failing)
    with pytest.raises(ValueError, match=f"the chat template failed on the conversation: {words}"):
        HFTokenizer.from_folder(folder).render(CONVERSATION)


@pytest.mark.parametrize(
    "attack", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"]
)
def test_template_sandbox_blocks_attacks(folder: Path, attack: str) -> None:
    write(folder, eos_token="<|im_end|>", chat_template=attack)
    with pytest.raises(ValueError, match="refuses the conversation"):
        HFTokenizer.from_folder(folder).render(CONVERSATION)


def test_prompts_without_template_are_plain_text_with_added_tokens(
    folder: Path,
) -> None:
    assert rendered(folder) == "Be brief.\n\n1+1? <b> & 'ß'\n"
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", id_of(folder, "<|end|>"))]
    )
    inner.save(str(folder / "tokenizer.json"))
    assert rendered(folder) == "<|end|>Be brief.\n\n1+1? <b> & 'ß'\n"
    # No tokens are added to an encoded answer.
    assert id_of(folder, "<|end|>") not in HFTokenizer.from_folder(folder).encode("two")


def rendered_answer(folder: Path, answer: str, template: str | None) -> str:
    write(folder, eos_token="<|im_end|>", chat_template=template)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return inner.decode(
        HFTokenizer.from_folder(folder).render_answer(CONVERSATION, answer).tolist(),
        skip_special_tokens=False,
    )


# Templates of reasoning models: both remove the reasoning from finished answers; the newer R1
# template also starts the reasoning in the prompt.
REMOVES_REASONING = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>' + "
    "message['content'].split('</think>')[-1] + '<|im_end|>' }}{% else %}{{ message['content'] "
    "}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
STARTS_REASONING = REMOVES_REASONING.replace(
    "{{ '<|im_start|>' }}{% endif %}", "{{ '<|im_start|><think>\n' }}{% endif %}"
)
ADDS_REASONING = CHATML.replace(
    "+ message['content'] +",
    "+ ('<think></think>' if message['role'] == 'assistant' else '') + message['content'] | trim +",
)


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        # The line break after the stop token belongs to the template, not to the answer.
        (CHATML, "one", "one<|im_end|>"),
        # Text that the template adds to the answer is part of it, since a policy must generate it.
        (ADDS_REASONING, " one ", "<think></think>one<|im_end|>"),
        (None, "one", "one<|im_end|>"),
        (REMOVES_REASONING, "<think>\nhm</think>one", "<think>\nhm</think>one<|im_end|>"),
        (STARTS_REASONING, "<think>\nhm</think>one", "hm</think>one<|im_end|>"),
        (STARTS_REASONING, "one", "one<|im_end|>"),
        # The template ends turns with another token: the answer still ends with a stop token.
        (CHATML.replace("<|im_end|>", "<|end|>"), "one", "one<|end|>\n<|im_end|>"),
    ],
    ids=["chatml", "adds", "no template", "forgets", "begins, answer too", "begins", "no stop"],
)
def test_rendered_answers_end_with_a_stop_token(
    folder: Path, template: str | None, answer: str, expected: str
) -> None:
    assert rendered_answer(folder, answer, template) == expected


def test_stored_truncation_and_padding_are_disabled(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(folder / "tokenizer.json"))
    tokenizer = HFTokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("what is one plus one")) == "what is one plus one"
    assert len(tokenizer.encode("?")) == 1


def test_stop_tokens_are_collected_from_all_configs(
    folder: Path,
) -> None:
    end, turn = id_of(folder, "<|end|>"), id_of(folder, "<|im_end|>")
    assert HFTokenizer.from_folder(folder).stop_token_ids == (turn,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": end}))
    assert HFTokenizer.from_folder(folder).stop_token_ids == (turn, end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, turn, 5]}))
    assert HFTokenizer.from_folder(folder).stop_token_ids == (turn, end, 5)
    (folder / "tokenizer_config.json").unlink()
    assert HFTokenizer.from_folder(folder).stop_token_ids == (end, turn, 5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"eos_token": "<|new|>"}, "eos_token='<|new|>' is not a token of tokenizer.json"),
        (
            {"added_tokens_decoder": {"900": {"content": "<|new|>"}}},
            "'<|new|>', which is missing there",
        ),
        (
            {"added_tokens_decoder": {"900": {"content": "<|im_end|>"}}},
            "'<|im_end|>', which is missing there or has another id",
        ),
        ({"additional_special_tokens": ["<|new|>"]}, "'<|new|>', which is missing there"),
        ({"extra_special_tokens": [{"content": "<|new|>"}]}, "'<|new|>', which is missing there"),
    ],
)
def test_added_tokens_missing_in_tokenizer_json_are_refused(
    folder: Path, settings: dict[str, object], named: str
) -> None:
    write(folder, **({"eos_token": "<|im_end|>"} | settings))
    with pytest.raises(ValueError, match=re.escape(named)):
        HFTokenizer.from_folder(folder)


def test_added_tokens_in_tokenizer_json_are_accepted(folder: Path) -> None:
    end = id_of(folder, "<|im_end|>")
    named = {
        "added_tokens_decoder": {str(end): {"content": "<|im_end|>"}},
        "additional_special_tokens": ["<|im_end|>"],
    }
    write(folder, eos_token="<|im_end|>", pad_token="<|im_end|>", extra_special_tokens={}, **named)
    tokenizer = HFTokenizer.from_folder(folder)
    assert tokenizer.stop_token_ids == (end,) and tokenizer.pad_token_id == end


@pytest.mark.parametrize("key", ["unk_token", "pad_token", "image_token"])
def test_missing_special_tokens_are_refused(folder: Path, key: str) -> None:
    write(folder, eos_token="<|im_end|>", **{key: "<|new|>"})
    with pytest.raises(ValueError, match=re.escape("'<|new|>', which is missing there")):
        HFTokenizer.from_folder(folder)


def test_older_files_supply_unlisted_added_tokens(folder: Path) -> None:
    end, turn = id_of(folder, "<|end|>"), id_of(folder, "<|im_end|>")
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}})
    )
    assert HFTokenizer.from_folder(folder).stop_token_ids == (end,)
    write(folder, eos_token="<|im_end|>", added_tokens_decoder={})
    assert HFTokenizer.from_folder(folder).stop_token_ids == (turn,)
    write(folder, eos_token="<|im_end|>")
    (folder / "added_tokens.json").write_text(json.dumps({"<|new|>": 900}))
    with pytest.raises(ValueError, match=re.escape("'<|new|>', which is missing there")):
        HFTokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("generation_config.json", "stop_strings", ["</answer>"]),
        ("generation_config.json", "suppress_tokens", [3]),
        ("generation_config.json", "begin_suppress_tokens", [3]),
        ("generation_config.json", "bad_words_ids", [[3]]),
        ("generation_config.json", "forced_bos_token_id", 0),
        ("generation_config.json", "forced_eos_token_id", 0),
        ("tokenizer_config.json", "split_special_tokens", True),
        ("tokenizer_config.json", "fast_tokenizer_files", ["tokenizer.4.json"]),
        ("tokenizer_config.json", "auto_map", {"AutoTokenizer": ["mine.Mine", None]}),
        ("tokenizer_config.json", "add_prefix_space", True),
        ("tokenizer_config.json", "add_bos_token", True),
        ("tokenizer_config.json", "add_eos_token", True),
    ],
)
def test_keys_that_change_tokens_are_refused_by_name(
    folder: Path, file: str, key: str, value: object
) -> None:
    path = folder / file
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|end|>"}
    write(folder, **settings)
    path.write_text(
        json.dumps({**(settings if file == "tokenizer_config.json" else {}), key: value})
    )
    with pytest.raises(
        ValueError, match=rf"{re.escape(file)}: .*{key}=.*policy\.ignore_config_keys={key}$"
    ):
        HFTokenizer.from_folder(folder)
    assert HFTokenizer.from_folder(folder, (key,)).encode("one").size


def test_bos_setting_is_ignored_with_a_template(folder: Path) -> None:
    write(
        folder,
        eos_token="<|im_end|>",
        bos_token="<|end|>",
        add_bos_token=True,
        chat_template=CHATML,
    )
    assert HFTokenizer.from_folder(folder).has_template


def test_sampling_defaults_and_inert_keys_are_accepted(folder: Path) -> None:
    sampling = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "suppress_tokens": None,
    }
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    inert = {
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": True,
        "padding_side": "left",
        "frobnicate": 2,
    }
    off = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "split_special_tokens": False,
        "auto_map": None,
    }
    write(folder, eos_token="<|im_end|>", **inert, **off)
    assert HFTokenizer.from_folder(folder).stop_token_ids == (id_of(folder, "<|im_end|>"),)


def test_tool_template_is_used_with_tools(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "none"}]
    write(folder, eos_token="<|im_end|>", chat_template=named)

    def texts() -> list[str]:
        tokenizer = HFTokenizer.from_folder(folder)
        return [
            tokenizer.decode(tokenizer.render(CONVERSATION, tools))
            for tools in ((), ({"type": "function"},))
        ]

    assert texts() == ["none", "tools"]
    (folder / "chat_template.jinja").write_text("file")
    assert texts() == ["file", "file"]
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools in a file")
    assert texts() == ["file", "tools in a file"]
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(
        ValueError, match="expected a chat template named 'default', found 'tool_use'"
    ):
        HFTokenizer.from_folder(folder)


def test_padding_token_is_no_stop_token(folder: Path) -> None:
    write(folder, eos_token="<|im_end|>", pad_token="<|end|>")
    assert HFTokenizer.from_folder(folder).find_pad_token_id() == id_of(folder, "<|end|>")
    write(folder, eos_token="<|end|>", pad_token="<|end|>")
    assert HFTokenizer.from_folder(folder).find_pad_token_id() == id_of(folder, "<|im_start|>")


def test_unusable_tokenizer_error_names_what_is_missing(folder: Path) -> None:
    write(folder)
    with pytest.raises(ValueError, match="at least one stop token, found none; set eos_token"):
        HFTokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json"):
        HFTokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("tokenizer.json", "{}", "expected a tokenizer"),
        ("tokenizer_config.json", "[]", "expected a JSON object, found list"),
        ("tokenizer_config.json", "{", "expected JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "line 1 of the chat template"),
        ("tokenizer_config.json", '{"chat_template": 3}', "expected chat_template to be text"),
        ("chat_template.jinja", "\n{% for %}", "line 2 of the chat template"),
        ("config.json", "[]", "expected a JSON object"),
        ("generation_config.json", '{"eos_token_id": "2"}', "expected eos_token_id"),
    ],
)
def test_unreadable_file_is_named(folder: Path, name: str, text: str, wrong: str) -> None:
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{folder}/{name}: {wrong}"):
        HFTokenizer.from_folder(folder)


REASONING = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<A>' + "
    "message['content'].split('</think>')[-1].strip() + '<|im_end|>' }}{% else %}{{ '<U>' + "
    "message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<A><think>\n' "
    "}}{% endif %}"
)
"""Like DeepSeek's: reasoning starts in the prompt, and is removed from earlier turns."""


def next_text(folder: Path, template: str | None, *messages: Message) -> str:
    write(folder, eos_token="<|im_end|>", chat_template=template)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = HFTokenizer.from_folder(folder).render_next(messages)
    assert tokens.dtype == np.int32
    return inner.decode(tokens.tolist(), skip_special_tokens=False)


def test_next_turn_follows_the_stop_token(
    folder: Path,
) -> None:
    text = next_text(folder, CHATML, Message("user", "Sure?"), Message("tool", "2"))
    assert (
        text
        == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_removed_reasoning_does_not_change_the_next_turn(
    folder: Path,
) -> None:
    assert next_text(folder, REASONING, Message("user", "Sure?")) == "<U>Sure?<A><think>\n"


def test_next_turn_of_a_template_without_stop_token(
    folder: Path,
) -> None:
    # The first stop token of this template ends the question.
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ('' if m['role'] == "
        "'assistant' else '<|im_end|>') }}"
    )
    assert (
        next_text(folder, template + "{% endfor %}", Message("user", "Sure?"))
        == "user:Sure?<|im_end|>"
    )


def test_next_turn_uses_the_tool_template(folder: Path) -> None:
    with_tools = "{{ tools[0]['name'] + '\\n' }}" + CHATML.replace("<|im_start|>", "<|im_start|>>")
    templates = [
        {"name": "tool_use", "template": with_tools},
        {"name": "default", "template": CHATML},
    ]
    write(folder, eos_token="<|im_end|>", chat_template=templates)
    tokenizer = HFTokenizer.from_folder(folder)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(tools: Sequence[Mapping[str, Any]]) -> str:
        tokens = tokenizer.render_next([Message("user", "Sure?")], tools)
        return inner.decode(tokens.tolist(), skip_special_tokens=False)

    # The tool has the name of the placeholder.
    assert (
        text([{"name": "areal_jax"}])
        == "\n<|im_start|>>user\nSure?<|im_end|>\n<|im_start|>>assistant\n"
    )
    assert text(()) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_next_turn_without_template_follows_an_empty_line(folder: Path) -> None:
    assert (
        next_text(folder, None, Message("user", "Sure?"), Message("user", "Yes?"))
        == "\n\nSure?\n\nYes?\n"
    )


def test_single_turn_template_is_refused_for_a_second_turn(folder: Path) -> None:
    with pytest.raises(ValueError, match="leaves out the assistant's answers"):
        next_text(folder, "{{ messages[0].content }}=", Message("user", "Sure?"))
