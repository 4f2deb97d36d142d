from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import areal_jax
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.records import NO_VERSION, Completion, Message, RewardResult, Sample, StopReason
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.rl.losses import decoupled_ppo_loss
from areal_jax.workflows.conversation import Call, Export, build_next_prompt, make_samples

EMBEDDED = HFTokenizer.from_folder(Path(areal_jax.__file__).parent / "models" / "embedded")
STOP = EMBEDDED.stop_token_ids[0]


def completion(
    rng: np.random.Generator, stop: StopReason, vocab_size: int = EMBEDDED.vocab_size
) -> Completion:
    """Arbitrary tokens without stop tokens: bytes of broken characters, special ones, text cut
    where no tokenizer would."""
    sampled = rng.integers(0, vocab_size, rng.integers(1, 9)).astype(np.int32)
    sampled = np.append(sampled[sampled != STOP], [STOP] if stop == "stop" else [1]).astype(
        np.int32
    )
    return Completion(
        sampled,
        -rng.random(len(sampled), np.float32),
        rng.integers(0, 9, len(sampled)).astype(np.int32),
        stop,
    )


def conversation(rng: np.random.Generator) -> list[Call]:
    calls = [Call(EMBEDDED.render([Message("user", "1+1?")]), completion(rng, "stop"))]
    for _ in range(rng.integers(0, 5)):
        text = "".join(chr(c) for c in rng.integers(32, 0x3000, rng.integers(0, 6)))
        prompt = build_next_prompt(
            EMBEDDED, calls[-1], [Message(str(rng.choice(["user", "tool"])), text)]
        )
        calls.append(Call(prompt, completion(rng, "stop" if rng.random() < 0.7 else "length")))
    return calls


def drawn_of(calls: list[Call]) -> list[int]:
    return np.concatenate([call.completion.tokens for call in calls]).tolist()


@pytest.mark.parametrize("export", ["concatenated", "per_call"])
def test_trained_tokens_are_the_sampled_tokens(export: Export) -> None:
    changed_by_text = 0
    for seed in range(100):
        calls = conversation(np.random.default_rng(seed))
        samples = make_samples(calls, [1.0] * len(calls), RewardResult("correct"), export=export)
        assert len(samples) == (1 if export == "concatenated" else len(calls))
        for name, of_call in (
            ("tokens", "tokens"),
            ("behave_logp", "logp"),
            ("versions", "versions"),
        ):
            trained = np.concatenate(
                [getattr(sample, name)[sample.loss_mask] for sample in samples]
            )
            given = np.concatenate([getattr(call.completion, of_call) for call in calls])
            assert trained.dtype == given.dtype
            assert trained.tolist() == given.tolist()
        for sample in samples:
            assert not sample.behave_logp[~sample.loss_mask].any()
            assert (sample.versions[~sample.loss_mask] == NO_VERSION).all()
        changed_by_text += (
            EMBEDDED.encode(EMBEDDED.decode(samples[-1].tokens)).tolist()
            != samples[-1].tokens.tolist()
        )
    # The test is not vacuous: re-tokenized text nearly always differs.
    assert changed_by_text > 90


def test_every_call_is_trained_on_with_its_own_prompt_as_prefix() -> None:
    for seed in range(100):
        calls = conversation(np.random.default_rng(seed))
        (sample,) = make_samples(calls, [1.0] * len(calls), RewardResult("correct"))
        for call in calls:
            assert np.array_equal(sample.tokens[: len(call.tokens)], call.tokens)


def test_tokens_between_turns_are_those_of_the_chat_template() -> None:
    answer_tokens = EMBEDDED.encode("2")
    ended = Call(
        EMBEDDED.render([Message("user", "1+1?")]), answer([*answer_tokens.tolist(), STOP], "stop")
    )
    whole = EMBEDDED.render(
        [Message("user", "1+1?"), Message("assistant", "2"), Message("user", "Sure?")]
    )
    assert build_next_prompt(EMBEDDED, ended, [Message("user", "Sure?")]).tolist() == whole.tolist()
    # One that was cut is ended for it; the token that ends it is context.
    cut = Call(ended.prompt, answer(answer_tokens.tolist(), "length"))
    assert build_next_prompt(EMBEDDED, cut, [Message("user", "Sure?")]).tolist() == whole.tolist()
    # So is one in which nothing was sampled.
    nothing = build_next_prompt(
        EMBEDDED, Call(ended.prompt, answer([], "length")), [Message("user", "Sure?")]
    )
    assert nothing[: len(ended.prompt) + 1].tolist() == [*ended.prompt.tolist(), STOP]
    (sample,) = make_samples(
        [cut, Call(whole, answer([5], "length"))], [0.0, 1.0], RewardResult("correct")
    )
    assert sample.tokens[sample.loss_mask].tolist() == [*answer_tokens.tolist(), 5]


def answer(tokens: list[int], stop: StopReason) -> Completion:
    return Completion(
        np.array(tokens, np.int32),
        -np.ones(len(tokens), np.float32),
        np.zeros(len(tokens), np.int32),
        stop,
    )


def test_experts_are_those_of_the_call_that_first_fed_a_token() -> None:
    def call(prompt: list[int], tokens: list[int], expert: int) -> Call:
        experts = np.full((len(prompt) + len(tokens) - 1, 2, 1), expert, np.uint8)
        completion = dataclasses.replace(answer(tokens, "stop"), experts=experts)
        return Call(np.array(prompt, np.int32), completion)

    calls = [call([3, 4], [5, STOP], 1), call([3, 4, 5, STOP, 6], [7, 8], 2)]
    (sample,) = make_samples(calls, [0.0, 1.0], RewardResult("correct"))
    # The first call feeds three tokens; the second one also its last token, the next prompt's, and
    # the first one that it samples. No call feeds the last token.
    assert sample.experts is not None and sample.experts.shape == (7, 2, 1)
    assert sample.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 255]
    without = [calls[0], Call(calls[1].prompt, answer([7, 8], "stop"))]
    assert make_samples(without, [0.0, 1.0], RewardResult("correct"))[0].experts is None


def test_calls_that_extend_no_other_are_separate_samples() -> None:
    first = Call(np.array([3, 4], np.int32), answer([5, STOP], "stop"))
    second = Call(np.array([3, 4, 5, STOP, 6], np.int32), answer([7], "length"))
    # Extends the first too, so that the completion of the first is context; and one of which
    # nothing was before.
    branch = Call(np.array([3, 4, 5, STOP, 8], np.int32), answer([9, STOP], "stop"))
    other = Call(np.array([3, 10], np.int32), answer([11, STOP], "stop"))
    # Its prompt holds another answer than the previous call sampled, so it extends no call.
    rewritten = Call(np.array([3, 10, 6, STOP, 12], np.int32), answer([13, STOP], "stop"))
    samples = make_samples(
        [first, second, branch, other, rewritten],
        [0.1, 0.2, 0.3, 0.4, 0.5],
        RewardResult("correct"),
    )
    trained = [sample.tokens[sample.loss_mask].tolist() for sample in samples]
    assert trained == [[5, STOP, 7], [9, STOP], [11, STOP], [13, STOP]]
    assert [sample.reward for sample in samples] == [0.2, 0.3, 0.4, 0.5]
    assert [sample.stop_reason for sample in samples] == ["length", "stop", "stop", "stop"]
    # One call each: the reward of each, its own prompt for context.
    alone = make_samples(
        [first, second, branch, other],
        [0.1, 0.2, 0.3, 0.4],
        RewardResult("correct"),
        export="per_call",
    )
    assert [sample.reward for sample in alone] == [0.1, 0.2, 0.3, 0.4]
    assert [sample.tokens[sample.loss_mask].tolist() for sample in alone] == [
        [5, STOP],
        [7],
        [9, STOP],
        [11, STOP],
    ]


POLICY = Policy(
    ModelConfig.from_hf(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": EMBEDDED.vocab_size,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
        },
        source="a test",
    )
)
ROWS, ROW_TOKENS = 24, 160


def rows(samples: list[Sample]) -> tuple[np.ndarray, ...]:
    """One sample as a row: tokens, mask, behaviour log-probs, advantage on every token."""
    filled = [
        np.zeros((ROWS, ROW_TOKENS), dtype)
        for dtype in (np.int32, np.bool_, np.float32, np.float32)
    ]
    for row, sample in enumerate(samples):
        for array, values in zip(
            filled,
            (sample.tokens, sample.loss_mask, sample.behave_logp, sample.reward),
            strict=True,
        ):
            array[row, : len(sample.tokens)] = values
    return tuple(filled)


@pytest.mark.slow
def test_both_exports_give_the_same_policy_gradient() -> None:
    def loss(
        params: Params, tokens: Array, mask: Array, behave_logp: Array, advantages: Array
    ) -> Float[Array, ""]:
        places, ones = jnp.broadcast_to(jnp.arange(ROW_TOKENS), tokens.shape), jnp.ones_like(tokens)
        hidden, _, _ = POLICY.hidden(
            params, tokens, places, packed_attention(ones), compute_dtype=jnp.float32
        )
        logp, _ = token_logprobs(hidden, POLICY.head(params), tokens, ones, chunk_tokens=ROW_TOKENS)
        return decoupled_ppo_loss(
            logp, jax.lax.stop_gradient(logp), behave_logp, advantages, mask
        ).loss

    gradient = jax.jit(jax.grad(loss))
    params = POLICY.init(jax.random.key(0))
    conversations = [conversation(np.random.default_rng(seed)) for seed in range(4)]
    rewards = (1.0, -1.0, 0.5, -2.0)
    of_export = {}
    for export in ("concatenated", "per_call"):
        samples = [
            sample
            for calls, reward in zip(conversations, rewards, strict=True)
            for sample in make_samples(
                calls, [reward] * len(calls), RewardResult("correct"), export=export
            )
        ]
        of_export[export] = (len(samples), gradient(params, *rows(samples)))
    (few, concatenated), (many, per_call) = of_export["concatenated"], of_export["per_call"]
    assert few == 4 < many
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(concatenated))
    assert largest > 1e-6
    for ours, theirs in zip(jax.tree.leaves(concatenated), jax.tree.leaves(per_call), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * largest)
