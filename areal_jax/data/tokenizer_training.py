"""Train the tokenizers of the embedded policies: byte-level BPE like Qwen2's.

    python -m areal_jax.data.tokenizer_training areal_jax/models/embedded
    python -m areal_jax.data.tokenizer_training areal_jax/models/embedded_vision --images

The first one learns from generated problems, the second one from exercises with images.

Training is deterministic. Each digit is a token, so that arithmetic works digit by digit. All 256
bytes are in the vocabulary and nothing is normalized, so that decoding inverts encoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.trainers import BpeTrainer

from areal_jax.data.exercises import GeneratedExercises
from areal_jax.data.problems import SyntheticProblems

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

# As in Qwen2: words with the character before them, single digits, runs of punctuation, line ends,
# spaces.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)

_CONTENT = (
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
)

IMAGE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    _CONTENT,
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}{{ "
    "message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == "
    "'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}",
)


def problem_texts(num_problems: int) -> Iterator[str]:
    """Yield problems of each difficulty with their solutions."""
    for difficulty in ("easy", "medium", "hard"):
        for problem in SyntheticProblems(num_problems, difficulty=difficulty):
            yield f"system\nuser\n{problem.question}\nassistant\n{problem.solution}"
            yield from problem.wrong_solutions


def image_texts() -> Iterator[str]:
    """Yield exercises with images and their demonstrations."""
    for exercise in GeneratedExercises(400, "train", ("count_shapes",)):
        yield f"system\nuser\n{exercise.question}\nassistant\n{exercise.correct[0][0].content}"
        yield "\n".join(exercise.drill or ())


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """Train a tokenizer on texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Steps(
        [Split(Regex(WORDS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(chat_template: str = CHAT_TEMPLATE) -> dict[str, object]:
    """Content of tokenizer_config.json."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": chat_template,
    }


def main() -> None:
    """Train a tokenizer and save it to a folder."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of an embedded policy.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", action="store_true", help="of the policy that reads images")
    arguments = parser.parse_args()
    tokenizer, template = (
        (train_tokenizer(image_texts(), 384, SPECIAL_TOKENS + IMAGE_TOKENS), IMAGE_CHAT_TEMPLATE)
        if arguments.images
        else (train_tokenizer(problem_texts(1600), 768), CHAT_TEMPLATE)
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.folder / "tokenizer.json"))
    (arguments.folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(template), indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
