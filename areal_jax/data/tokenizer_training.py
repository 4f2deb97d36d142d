"""Train the embedded policy's tokenizer: byte-level BPE like Qwen2's, on generated problems.

    python -m areal_jax.data.tokenizer_training areal_jax/models/embedded

Training is deterministic. Each digit is a token, so that arithmetic works digit by digit. All 256
bytes are in the vocabulary and nothing is normalized, so that decoding inverts encoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from areal_jax.data.problems import SyntheticProblems

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# As in Qwen2: words with the character before them, single digits, runs of punctuation, line ends,
# spaces.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)


def _corpus(num_problems: int) -> Iterator[str]:
    for difficulty in ("easy", "medium", "hard"):
        for problem in SyntheticProblems(num_problems, difficulty=difficulty):
            yield f"system\nuser\n{problem.question}\nassistant\n{problem.solution}"
            yield from problem.wrong_solutions


def train_tokenizer(vocab_size: int, num_problems: int = 1600) -> Tokenizer:
    """Train the tokenizer on `num_problems` problems of each difficulty and their solutions."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(WORDS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_problems), trainer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
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
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    """Train the tokenizer and save it to a folder."""
    parser = argparse.ArgumentParser(description="Train the embedded policy's tokenizer.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab-size", type=int, default=768)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(arguments.vocab_size).save(str(arguments.folder / "tokenizer.json"))
    (arguments.folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(), indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
