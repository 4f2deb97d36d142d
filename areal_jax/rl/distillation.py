"""Distillation of a teacher's predictions: losses, divergences, and spans of two tokenizers.

Axes: B rows, T tokens, C tokens of a chunk, K most likely tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from areal_jax.rl.config import CrossTokenizer, JensenShannon, SampledTokens
from areal_jax.rl.token_losses import PolicyLoss, masked_sum, mean_loss, zero_outside

LOG_ZERO = -1e9
"""Log-prob of a token that does not exist. Finite, so that 0 times it is 0."""


class TeacherTargets(NamedTuple):
    """What a teacher predicts at the places of the policy's tokens.

    With another tokenizer than the policy's it is compared where tokens of both end at one place of
    the text: once per span.
    """

    ids: Int[Array | np.ndarray, "*B T K"]
    """Its most likely tokens, by their ids for the policy; -1: a token that the policy lacks."""
    logp: Float[Array | np.ndarray, "*B T K"]
    """Their log-probs, times those of the teacher's earlier tokens in the same span of text."""
    remaining: Int[Array | np.ndarray, "*B T"]
    """Tokens of the span from here to its end: 1 where the distributions are compared; 0 outside
    of all spans."""
    weight: Float[Array | np.ndarray, "*B T"]
    """Weight in the mean that the loss is."""


class TeacherVocabulary(NamedTuple):
    """Which of a teacher's tokens are tokens of the policy."""

    own_ids: Int[np.ndarray, "_"]
    """By the teacher's id, the policy's id of the token; -1: the policy lacks it."""
    shared: Bool[np.ndarray, "V"]
    """By the policy's id, whether the teacher has the token."""

    @classmethod
    def from_ids(cls, own_ids: Int[np.ndarray, "_"], vocab_size: int) -> TeacherVocabulary:
        """Make it from the policy's id of each of the teacher's tokens (-1: none)."""
        shared = np.zeros(vocab_size, bool)
        shared[own_ids[own_ids >= 0]] = True
        return cls(own_ids.astype(np.int32), shared)


def sampled_distillation_loss(
    config: SampledTokens,
    logp: Float[Array | np.ndarray, "*B T"],
    teacher_logp: Float[Array | np.ndarray, "*B T"],
    behave_logp: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    weights: Float[Array | np.ndarray, "*B T"] | None = None,
    *,
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """Compute 1/N sum_t weight_t (-keep_t g_t r_t + drift_coef (log r_t)²).

    g = log(teacher/theta) carries no gradient and r = theta/behave does. keep is false where theta
    lost more than `max_probability_drop` of behave's probability (SDFT, arXiv:2601.19897).

    Args:
        config: Bound and drift penalty.
        logp: Log-probs of the policy being trained (theta).
        teacher_logp: Log-probs of the teacher; nan where it has read nothing.
        behave_logp: Log-probs of the behaviour policy.
        mask: True (or 1) where the token counts.
        weights: Weight of every token, from `mean_weights`; None: 1.
        num_tokens: N. None: the mask's count; for a micro-batch, the whole mini-batch's count.
    """
    mask = jnp.asarray(mask).astype(bool)
    logp = zero_outside(mask, logp)
    teacher_logp, behave_logp = (
        jax.lax.stop_gradient(zero_outside(mask, constant))
        for constant in (teacher_logp, behave_logp)
    )
    log_ratio = logp - behave_logp
    drop = jnp.exp(behave_logp) - jnp.exp(jax.lax.stop_gradient(logp))
    kept = mask & (drop <= config.max_probability_drop) & jnp.isfinite(teacher_logp)
    gain = jax.lax.stop_gradient(jnp.where(kept, teacher_logp - logp, 0.0))
    gain *= jnp.exp(jnp.where(kept, log_ratio, 0.0))
    token_loss = config.drift_coef * log_ratio**2 - jnp.where(kept, gain, 0.0)
    if weights is not None:
        token_loss *= zero_outside(mask, weights)
    count = jnp.sum(mask, dtype=token_loss.dtype)
    sums = {"loss": jnp.sum(token_loss), "distillation_kept_fraction": masked_sum(mask, kept)}
    return mean_loss(sums, count, num_tokens)


def generalized_jsd(
    logp: Float[Array, "*B K"], teacher_logp: Float[Array, "*B K"], alpha: float
) -> Float[Array, "*B"]:
    """Compute alpha KL(teacher || m) + (1 - alpha) KL(policy || m) with
    m = alpha teacher + (1 - alpha) policy (GKD, arXiv:2306.13649, equation 2).

    At the ends, where this is 0, it is KL(teacher || policy) for alpha 0 and KL(policy || teacher)
    for alpha 1: the limits of it divided by alpha or by 1 - alpha. Probabilities need not sum to 1.
    """

    def kl(p: Array, q: Array) -> Array:
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    if alpha == 0.0:
        return kl(teacher_logp, logp)
    if alpha == 1.0:
        return kl(logp, teacher_logp)
    mixture = jnp.logaddexp(jnp.log1p(-alpha) + logp, jnp.log(jnp.float32(alpha)) + teacher_logp)
    return alpha * kl(teacher_logp, mixture) + (1.0 - alpha) * kl(logp, mixture)


def sorted_distance(
    probs: Float[Array, "*B K"], teacher_probs: Float[Array, "*B L"]
) -> Float[Array, "*B"]:
    """Compute the sum of |p_i - q_i| over ranks i, the shorter distribution padded with zeros
    (universal logit distillation, arXiv:2402.12030, equation 3).
    """
    p, q = (jnp.flip(jnp.sort(each, axis=-1), axis=-1) for each in (probs, teacher_probs))
    num = max(p.shape[-1], q.shape[-1])
    p, q = (
        jnp.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, num - each.shape[-1])]) for each in (p, q)
    )
    return jnp.sum(jnp.abs(p - q), axis=-1)


def common_ends(
    ends: Int[np.ndarray, "_"], other_ends: Int[np.ndarray, "_"], length: int
) -> tuple[Int[np.ndarray, "G"], Int[np.ndarray, "G"]]:
    """Return where two tokenizations of a text end a token at the same place.

    Args:
        ends: Characters of the text that are whole after each token.
        other_ends: The same of the other tokenization.
        length: Characters of the text that are equal in both.

    Returns:
        Of either, the number of tokens up to each common place.
    """
    common = np.intersect1d(ends, other_ends)
    common = common[(common > 0) & (common <= length)]
    # The first token that completes them: later ones of equal end begin the next character.
    counts = (np.searchsorted(each, common) + 1 for each in (ends, other_ends))
    own, other = (each.astype(np.int64) for each in counts)
    return own, other


def earlier_logprobs(
    logp: Float[Array, "B T"], remaining: Int[Array | np.ndarray, "B T"]
) -> Float[Array, "B T"]:
    """Return, where a span ends, the sum of its earlier tokens' log-probs.

    Args:
        logp: Log-prob of every token.
        remaining: As in `TeacherTargets`.
    """

    def of_row(logp: Array, remaining: Array) -> Array:
        is_end = remaining == 1
        # The number of ends from here on: equal for the tokens of one span.
        span = jnp.flip(jnp.cumsum(jnp.flip(is_end)))
        sums = jax.ops.segment_sum(
            jnp.where(remaining > 1, logp, 0.0), span, num_segments=len(span) + 1
        )
        return jnp.where(is_end, sums[span], 0.0)

    return jax.vmap(of_row)(logp, jnp.asarray(remaining))


def merged_logprobs(
    logp: Float[np.ndarray, "T K"],
    sampled_logp: Float[np.ndarray, "T"],
    starts: Int[np.ndarray, "G"],
    stops: Int[np.ndarray, "G"],
) -> Float[np.ndarray, "G K"]:
    """Return the log-probs at the last tokens of spans, times those of the earlier tokens (the
    chain rule: GOLD's "bayesian" merge).

    Args:
        logp: Log-probs at each token.
        sampled_logp: Log-prob of each token.
        starts: First token of each span.
        stops: Token after each span.
    """
    before = np.concatenate([[0.0], np.cumsum(sampled_logp, dtype=np.float64)])
    earlier = before[stops - 1] - before[starts]
    return (logp[stops - 1] + earlier[:, None]).astype(np.float32)


def span_divergence(
    config: JensenShannon | CrossTokenizer,
    vocabulary: TeacherVocabulary,
    log_softmax: Float[Array, "B C V"],
    targets: TeacherTargets,
    log_scale: Float[Array, "B C"],
) -> Float[Array, "B C"]:
    """Return the divergence of policy and teacher at each token; 0 where nothing is compared.

    Args:
        config: Which divergence.
        vocabulary: The teacher's.
        log_softmax: The policy's log-probs of all tokens.
        targets: The teacher's predictions at the same places.
        log_scale: Log-prob of the earlier tokens of the span, under the policy.
    """
    ids, compared = jnp.asarray(targets.ids), jnp.asarray(targets.remaining == 1)
    is_shared, ids = ids >= 0, jnp.maximum(ids, 0)
    policy_logp = jnp.where(is_shared, jnp.take_along_axis(log_softmax, ids, axis=-1), LOG_ZERO)
    teacher_logp = jnp.where(is_shared & compared[..., None], targets.logp, LOG_ZERO)
    if isinstance(config, JensenShannon):
        divergence = generalized_jsd(
            jax.nn.log_softmax(policy_logp, axis=-1),
            jax.nn.log_softmax(teacher_logp, axis=-1),
            config.alpha,
        )
        return jnp.where(compared, divergence, 0.0)
    policy_logp += log_scale[..., None]
    shared = vocabulary.shared
    everything = jax.nn.logsumexp(jnp.where(shared, log_softmax, LOG_ZERO), axis=-1)
    policy_rest = _rest(compared, everything + log_scale, policy_logp)
    divergence = generalized_jsd(
        jnp.concatenate([policy_logp, policy_rest], axis=-1),
        jnp.concatenate([teacher_logp, jnp.full_like(policy_rest, LOG_ZERO)], axis=-1),
        config.alpha,
    )
    num = min(config.num_tokens, log_softmax.shape[-1])
    own, _ = jax.lax.top_k(jnp.where(shared, LOG_ZERO, log_softmax), num)
    distance = sorted_distance(
        jnp.exp(own + log_scale[..., None]),
        jnp.where(~is_shared & compared[..., None], jnp.exp(targets.logp), 0.0),
    )
    weight = config.shared_weight
    if weight is None:
        weight = float(np.mean(vocabulary.own_ids >= 0))
    return jnp.where(compared, weight * divergence + (1.0 - weight) * distance, 0.0)


def _rest(
    compared: Bool[Array, "B C"], log_total: Float[Array, "B C"], logp: Float[Array, "B C K"]
) -> Float[Array, "B C 1"]:
    """Return the log of what a total has beyond these tokens."""
    share = jnp.exp(jax.nn.logsumexp(logp, axis=-1) - log_total)
    # Nothing but rounding is left where every token is among them.
    left = jnp.where(compared & (share < 1.0 - 1e-6), 1.0 - share, 0.0)
    log_left = jnp.log(jnp.where(left > 0.0, left, 1.0))
    return jnp.where(left > 0.0, log_total + log_left, LOG_ZERO)[..., None]
