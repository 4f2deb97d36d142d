from __future__ import annotations

import pytest

from areal_jax.models.known import KNOWN, known_shape


# Billions of parameters according to the model cards.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.49),
        ("qwen2.5-1.5b", 1.54),
        ("qwen2.5-7b", 7.61),
        ("qwen2.5-14b", 14.7),
        ("qwen2.5-32b", 32.5),
        ("llama-3.1-8b", 8.03),
        ("qwen3-0.6b", 0.6),
        ("qwen3-30b-a3b", 30.5),
        ("qwen1.5-moe-a2.7b", 14.3),
        ("mistral-7b-v0.3", 7.25),
        ("olmo-2-7b", 7.3),
        ("olmo-3-7b", 7.3),
        ("phi-4", 14.7),
        ("glm-4-9b", 9.4),
        ("glm-4.5-air", 106.0),
        ("gemma-3-1b", 1.0),
        ("deepseek-v3", 671.0),
        ("moonlight-16b-a3b", 15.96),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
    ],
)
def test_known_policies_have_the_parameters_of_their_card(name: str, billions: float) -> None:
    assert known_shape(name).num_params / 1e9 == pytest.approx(billions, rel=0.02)


def test_matmul_params_count_active_experts_and_head() -> None:
    # According to the card 3.3 B activated, including 0.3 B of the embedding.
    assert known_shape("qwen3-30b-a3b").matmul_params / 1e9 == pytest.approx(3.04, rel=0.01)
    # According to the cards 3.6 B and 5.1 B active, without the embedding of 0.58 B.
    assert known_shape("gpt-oss-20b").matmul_params / 1e9 == pytest.approx(3.6, rel=0.01)
    assert known_shape("gpt-oss-120b").matmul_params / 1e9 == pytest.approx(5.1, rel=0.01)
    # According to the card 37 B activated, including 0.93 B of the embedding; its cache holds 512 + 64
    # numbers per token and layer.
    assert known_shape("deepseek-v3").matmul_params / 1e9 == pytest.approx(37.0 - 0.4, rel=0.02)
    assert known_shape("deepseek-v3").cached_per_token == 61 * 576
    # 7.62 B less 152064 x 3584 of the embedding, biases and norms.
    assert known_shape("qwen2.5-7b").matmul_params / 1e9 == pytest.approx(7.62 - 0.545, rel=0.001)
    # 28 layers, keys and values, 2 heads of 128: 14336 numbers.
    assert known_shape("qwen2.5-1.5b").cached_per_token == 28 * 2 * 2 * 128


@pytest.mark.parametrize("name", KNOWN)
def test_decoder_declares_every_known_policy(name: str) -> None:
    shape = known_shape(name)
    assert shape.matmul_params < 1.1 * shape.num_params


def test_unknown_name_is_refused_with_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"known policy \(qwen2.5-0.5b, qwen2.5-1.5b.*found 'gpt-5'"
    ):
        known_shape("gpt-5")
