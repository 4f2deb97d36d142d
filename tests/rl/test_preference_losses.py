"""Laws and hand-computed numbers of the preference objectives."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest

from areal_jax.rl.config import DPO, IPO, BradleyTerry, Preference
from areal_jax.rl.preference import preference_loss
from areal_jax.rl.token_losses import PolicyLoss

loss_of = jax.jit(preference_loss, static_argnums=0)
EVERY = [DPO(), DPO(beta=0.5, label_smoothing=0.2), IPO(), IPO(beta=0.4), BradleyTerry()]
NAMES = ["DPO", "smoothed DPO", "IPO", "IPO of another beta", "Bradley-Terry"]
LOG_2 = 0.693147


class Rows(NamedTuple):
    """Arguments of a preference loss, in order."""

    values: np.ndarray
    reference: np.ndarray
    mask: np.ndarray
    segment_ids: np.ndarray


def rows_of(
    lengths: list[list[tuple[int, int]]], seed: int, config: Preference = EVERY[0], width: int = 0
) -> Rows:
    """Random values for segments of (prompt, answer) tokens by row, random ones outside the mask
    too, padded to `width`."""
    rng = np.random.default_rng(seed)
    width = width or max(sum(map(sum, row)) for row in lengths)
    segments, mask = np.zeros((2, len(lengths), width), np.int32)
    for b, row in enumerate(lengths):
        start = 0
        for i, (prompt, answer) in enumerate(row):
            segments[b, start : start + prompt + answer] = i + 1
            # A reward model's score stands at the answer's last token.
            mask[
                b,
                start + prompt + (answer - 1 if isinstance(config, BradleyTerry) else 0) : start
                + prompt
                + answer,
            ] = 1
            start += prompt + answer
    values, reference = rng.normal(-1.5, 0.7, (2, *mask.shape)).astype(np.float32)
    return Rows(
        values, reference * (not isinstance(config, BradleyTerry)), mask.astype(bool), segments
    )


def random_rows(
    config: Preference,
    seed: int,
    num_rows: int,
    num_pairs: int = 2,
    longest: int = 4,
    width: int = 0,
) -> Rows:
    rng = np.random.default_rng(seed)
    lengths = [
        [(int(p), int(a)) for p, a in rng.integers(1, longest + 1, (2 * num_pairs, 2))]
        for _ in range(num_rows)
    ]
    return rows_of(lengths, seed, config, width)


def papers_losses(config: Preference, rows: Rows) -> list[float]:
    """The papers' formulas pair by pair, in float64."""
    losses = []
    for values, reference, mask, segments in zip(*rows, strict=True):
        for first in range(1, segments.max(), 2):
            won, lost = (
                values[mask & (segments == s)].astype(np.float64)
                - reference[mask & (segments == s)]
                for s in (first, first + 1)
            )
            match config:
                case DPO():
                    x = config.beta * (won.sum() - lost.sum())
                    right, wrong = -np.log(1 / (1 + np.exp(-x))), -np.log(1 / (1 + np.exp(x)))
                    losses.append(
                        (1 - config.label_smoothing) * right + config.label_smoothing * wrong
                    )
                case IPO():
                    losses.append((won.mean() - lost.mean() - 1 / (2 * config.beta)) ** 2)
                case _:
                    (chosen,), (rejected,) = won, lost
                    losses.append(-np.log(1 / (1 + np.exp(-(chosen - rejected)))))
    return losses


@partial(jax.jit, static_argnums=0)
def gradient_of(config: Preference, rows: Rows, num_pairs: float | None = None) -> jax.Array:
    return jax.grad(
        lambda values: preference_loss(config, values, *rows[1:], num_pairs=num_pairs).loss
    )(rows.values)


def mean(out: PolicyLoss, name: str) -> float:
    total, weight = out.metrics[name]
    return float(total) / float(weight)


def one_pair(chosen: list[float], rejected: list[float], reference: float = -1.0) -> Rows:
    """A pair whose prompts have a token each."""
    values = np.array([[0.0, *chosen, 0.0, *rejected]], np.float32)
    segments = np.array([[1] * (1 + len(chosen)) + [2] * (1 + len(rejected))], np.int32)
    mask = np.ones(values.shape, bool)
    mask[0, [0, 1 + len(chosen)]] = False
    return Rows(values, np.full(values.shape, reference, np.float32), mask, segments)


@pytest.mark.parametrize("config", [DPO(), DPO(label_smoothing=0.3), BradleyTerry()])
def test_equal_answers_give_log_two_and_half_accuracy(config: Preference) -> None:
    # -log sigmoid(0) = log 2, whichever way round.
    out = loss_of(config, *one_pair([-1.5, -0.5], [-1.5, -0.5]))
    assert float(out.loss) == pytest.approx(LOG_2, abs=1e-6)
    assert mean(out, "accuracy") == 0.5


def test_ipo_target_margin_is_five_at_beta_one_tenth() -> None:
    # Nats per token above the reference of -6: chosen 5 and 5, rejected 0: a margin of 5 = 1 / (2 *
    # 0.1).
    rows = one_pair([-1.0, -1.0], [-6.0, -6.0], reference=-6.0)
    assert float(loss_of(IPO(), *rows).loss) == pytest.approx(0.0, abs=1e-6)
    assert np.abs(np.asarray(gradient_of(IPO(), rows))).max() < 1e-6
    # Of 6: (6 - 5)²; of none: 5².
    assert float(loss_of(IPO(), *one_pair([0.0], [-6.0])).loss) == pytest.approx(1.0, abs=1e-5)
    assert float(loss_of(IPO(), *one_pair([-3.0], [-3.0, -3.0])).loss) == pytest.approx(
        25.0, abs=1e-5
    )


def test_preference_losses_equal_hand_computed_numbers() -> None:
    # Above the reference of -1: chosen 0.5 + 0 = 0.5, rejected -1 - 1 - 1 = -3; beta 0.1: rewards
    # 0.05 and -0.3, margin 0.35.
    rows = one_pair([-0.5, -1.0], [-2.0, -2.0, -2.0])
    out = loss_of(DPO(), *rows)
    # log(1 + e^-0.35) = 0.533382 and log(1 + e^0.35) = 0.883382.
    assert float(out.loss) == pytest.approx(0.533382, abs=1e-6)
    assert float(loss_of(DPO(label_smoothing=0.1), *rows).loss) == pytest.approx(0.568382, abs=1e-6)
    assert [
        mean(out, name) for name in ("margin", "chosen_reward", "rejected_reward")
    ] == pytest.approx([0.35, 0.05, -0.3])
    assert mean(out, "accuracy") == 1.0
    # Means of the answers' tokens: -1.5 / 2 and -6 / 3.
    assert [mean(out, name) for name in ("chosen_logp", "rejected_logp")] == pytest.approx(
        [-0.75, -2.0]
    )
    # Per token 0.25 and -1: (1.25 - 5)² = 14.0625.
    assert float(loss_of(IPO(), *rows).loss) == pytest.approx(14.0625, abs=1e-5)
    # Scores 1.5 and 0.2: log(1 + e^-1.3) = 0.241008.
    scores = one_pair([1.5], [0.2])
    assert float(
        loss_of(BradleyTerry(), *scores._replace(reference=np.zeros_like(scores.values))).loss
    ) == pytest.approx(0.241008, abs=1e-6)


@pytest.mark.parametrize("config", EVERY, ids=NAMES)
def test_preference_losses_equal_float64_on_a_thousand_random_pairs(config: Preference) -> None:
    rows = random_rows(config, 0, num_rows=500)
    each = jax.jit(jax.vmap(lambda row: loss_of(config, *(x[None] for x in row)).loss))(rows)
    expected = np.array(papers_losses(config, rows))
    assert expected.shape == (1000,)
    np.testing.assert_allclose(each, expected.reshape(500, 2).mean(1), rtol=1e-6, atol=1e-6)
    assert float(loss_of(config, *rows).loss) == pytest.approx(expected.mean(), rel=1e-6)


@pytest.mark.parametrize("config", EVERY, ids=NAMES)
def test_preference_gradient_equals_finite_differences(config: Preference) -> None:
    with jax.enable_x64(True):
        rows = random_rows(config, 1, num_rows=2)
        rows = rows._replace(values=rows.values.astype(np.float64))
        loss = jax.jit(jax.vmap(lambda values: preference_loss(config, values, *rows[1:]).loss))
        nudges = 1e-6 * np.eye(rows.values.size).reshape(-1, *rows.values.shape)
        slopes = (
            np.asarray(loss(rows.values + nudges)) - np.asarray(loss(rows.values - nudges))
        ) / 2e-6
        gradient = np.asarray(gradient_of(config, rows))
    np.testing.assert_allclose(gradient.reshape(-1), slopes, atol=1e-7)
    assert not gradient[~rows.mask].any() and gradient[rows.mask].all()


@pytest.mark.parametrize("config", EVERY, ids=NAMES)
def test_packed_pair_equals_the_pair_alone(config: Preference) -> None:
    packed = rows_of([[(1, 3), (2, 2), (3, 1), (1, 4)], [(2, 2), (2, 3)]], 2, config, width=20)
    together = np.asarray(gradient_of(config, packed, 3.0))
    for row, first in ((0, 1), (0, 3), (1, 1)):
        inside = (packed.segment_ids == first) | (packed.segment_ids == first + 1)
        inside &= np.arange(2)[:, None] == row
        alone = Rows(
            np.where(inside, packed.values, np.float32(np.nan)),
            np.where(inside, packed.reference, np.float32(np.nan)),
            packed.mask & inside,
            np.where(inside, packed.segment_ids - np.int32(first - 1), 0),
        )
        expected = np.asarray(gradient_of(config, alone, 3.0))
        np.testing.assert_allclose(together[inside], expected[inside], rtol=1e-6)
        assert not expected[~inside].any()


@pytest.mark.parametrize("config", EVERY, ids=NAMES)
def test_preference_losses_are_independent_of_micro_batching(config: Preference) -> None:
    rows = random_rows(config, 3, num_rows=8)
    whole = loss_of(config, *rows)
    parts = [
        loss_of(config, *(x[start:end] for x in rows), num_pairs=16.0)
        for start, end in ((0, 2), (2, 6), (6, 8))
    ]
    assert sum(float(part.loss) for part in parts) == pytest.approx(float(whole.loss), rel=1e-6)
    for name, meter in whole.metrics.items():
        for k in range(2):
            assert sum(float(part.metrics[name][k]) for part in parts) == pytest.approx(
                float(meter[k]), rel=1e-5
            ), name


def test_ipo_is_length_normalised_and_dpo_is_not() -> None:
    short, long = one_pair([-0.5, -1.5], [-2.0]), one_pair([-0.5, -1.5] * 3, [-2.0] * 5)
    assert float(loss_of(IPO(), *short).loss) == pytest.approx(
        float(loss_of(IPO(), *long).loss), rel=1e-6
    )
    assert float(loss_of(DPO(), *short).loss) != pytest.approx(
        float(loss_of(DPO(), *long).loss), rel=1e-3
    )


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_values_outside_the_mask_change_no_preference_loss(poison: float) -> None:
    rows = random_rows(EVERY[0], 4, num_rows=3, width=40)
    dirty = rows._replace(
        values=np.where(rows.mask, rows.values, np.float32(poison)),
        reference=np.where(rows.mask, rows.reference, np.float32(poison)),
    )

    for one, other in zip(
        jax.tree.leaves(loss_of(DPO(), *rows)), jax.tree.leaves(loss_of(DPO(), *dirty)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(gradient_of(DPO(), rows), gradient_of(DPO(), dirty))


def test_reference_gets_no_gradient_and_padding_no_loss() -> None:
    rows = random_rows(EVERY[0], 5, num_rows=2)
    into = jax.jit(
        jax.grad(lambda reference: loss_of(DPO(), rows.values, reference, *rows[2:]).loss)
    )(rows.reference)
    assert not np.any(into)
    empty = rows._replace(
        mask=np.zeros_like(rows.mask), segment_ids=np.zeros_like(rows.segment_ids)
    )
    assert float(loss_of(DPO(), *empty).loss) == 0.0 and not np.any(gradient_of(DPO(), empty))


def test_non_preference_objective_is_refused() -> None:
    with pytest.raises(TypeError, match="found Preference; set loss to DPO"):
        loss_of(Preference(), *one_pair([0.0], [0.0]))
