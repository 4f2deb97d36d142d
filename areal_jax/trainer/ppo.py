"""One batch of groups in, one version of the policy out. Axes: G samples of a group, T tokens of a sample."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32

from areal_jax.data.packing import Layout, TrainingSequence, pack
from areal_jax.models.decoder import Params, Policy
from areal_jax.records import Group, Sample
from areal_jax.rl.advantages import Trajectory, compute_advantages, mean_weights, shaped_rewards
from areal_jax.rl.config import M2PO, PPO, Centred, Proximal
from areal_jax.rl.losses import PolicyLoss, interpolated_proximal, policy_loss, second_moment_mask
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.step import Learner, Metrics
from areal_jax.trainer.versions import Versions


class StepResult(NamedTuple):
    """What one step did, and to which tokens."""

    metrics: Metrics
    advantages: list[list[Float32[np.ndarray, "_"]]]
    """By group and sample, one per token."""
    stale: list[list[Bool[np.ndarray, "_"]]]
    """By group and sample: true where a token was too old to be trained on, and served as context."""


class MiniBatch(NamedTuple):
    """The share of a batch that one optimizer update sees, packed and on its way to the device."""

    batches: list[DeviceBatch]
    layout: Layout
    places: list[tuple[int, int]]
    """Of every sequence of the layout, its group in the batch and its sample in the group."""
    weights: Float32[np.ndarray, "_"]
    """What the tokens of every sequence count in the mean that the loss is."""
    num_loss_tokens: int


class Trainer(Versions):
    """Policy optimization on the train mesh: `step` turns a batch of groups into the next version of the parameters."""

    def __init__(
        self,
        config: TrainerConfig,
        policy: Policy,
        params: Params,
        mesh: Mesh,
        compute_dtype: DTypeLike,
        *,
        num_updates: int,
        max_staleness: int | None,
        temperature: float,
        row_tokens: int,
        max_new_tokens: int,
        base: Params | None = None,
    ):
        """
        Args:
            params: copied to the train mesh; the caller's stay as they are.
            num_updates: of the whole run, which the learning rate's schedule spans: steps times `num_mini_batches`.
            max_staleness: a token drawn more versions ago than this is not trained on; None trains on all.
            temperature: at which the engine draws.
            row_tokens: tokens of a packed row; no sample may be longer.
            max_new_tokens: the engine's limit to an answer.
            base: with an adapter in `params`, the frozen parameters beside it, on the train mesh.
        """
        self.config, self.max_staleness, self.max_new_tokens = config, max_staleness, max_new_tokens
        match config.loss:
            case PPO():
                proximal: Proximal = "behave"
            case Centred():
                proximal = config.loss.proximal
            case _:
                proximal = "recompute"

        def objective(logp: Array, proximal_logp: Array, batch: DeviceBatch, num_tokens: Float[Array, ""]) -> PolicyLoss:
            match proximal:
                case "interpolate":
                    proximal_logp = interpolated_proximal(logp, batch.behave_logp, batch.age)
                case "behave":
                    proximal_logp = batch.behave_logp
            return policy_loss(
                config.loss,
                logp,
                proximal_logp,
                batch.behave_logp,
                batch.advantages,
                batch.loss_mask,
                batch.segment_ids,
                num_tokens=num_tokens,
            )

        learner = Learner(
            config,
            policy,
            params,
            mesh,
            compute_dtype,
            num_updates,
            objective=objective,
            temperature=temperature,
            row_tokens=row_tokens,
            base=base,
        )
        # The first mini-batch reads proximal log-probs off its own forward pass, but for M2PO, which looks at all of a
        # mini-batch's before any of it is trained on.
        if proximal != "recompute":
            self._first_to_read = config.num_mini_batches
        else:
            self._first_to_read = 0 if isinstance(config.loss, M2PO) else 1
        super().__init__(learner, reads_logprobs=self._first_to_read < config.num_mini_batches)

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on a batch: `num_mini_batches` optimizer updates, after which `version` is one higher.

        Tokens more than `max_staleness` versions old are context only. Proximal log-probs are those of the parameters before
        the first update. A mini-batch in which no token is left to train on updates nothing.

        Raises ValueError where the batch cannot be trained on, before anything changes, and FloatingPointError where loss,
        gradient or the log-probability of a drawn token is not finite: the update that met it is not applied, and the version
        stays.
        """
        started = time.perf_counter()
        self._check(groups)
        stale = [[self._is_stale(sample) for sample in group.samples] for group in groups]
        trained = [
            [sample.loss_mask & ~old for sample, old in zip(group.samples, olds, strict=True)]
            for group, olds in zip(groups, stale, strict=True)
        ]
        sizes = [sum(len(sample.tokens) for sample in group.samples) for group in groups]
        mini_batches = [self._pack(groups, trained, share) for share in _deal(sizes, self.config.num_mini_batches)]
        advantages = compute_advantages(self.config.advantages, self._trajectories(groups, trained))
        mini_batches = [self._with_advantages(mini_batch, advantages) for mini_batch in mini_batches]
        metrics = self._describe(groups, trained, advantages)
        packed = time.perf_counter()
        for i in range(self._first_to_read, len(mini_batches)):
            mini_batches[i] = self._with_proximal(mini_batches[i])
            if isinstance(self.config.loss, M2PO):
                mini_batches[i], kept = self._near(mini_batches[i], self.config.loss.max_second_moment)
                _merge(metrics, {"m2po_kept_fraction": kept})
        forwarded = time.perf_counter()
        num_updates = 0
        for i, mini_batch in enumerate(mini_batches):
            if mini_batch.num_loss_tokens:
                _merge(metrics, self._update(i, mini_batch, proximal_is_current=num_updates == 0))
                num_updates += 1
        done = time.perf_counter()
        self.version += 1

        num_tokens = sum(int(mini_batch.layout.lengths.sum()) for mini_batch in mini_batches)
        num_places = sum(math.prod(mini_batch.layout.shape) for mini_batch in mini_batches)
        metrics |= {
            "num_updates": float(num_updates),
            "packing_efficiency": (float(num_tokens), float(num_places)),
            "seconds_packing": packed - started,
            "seconds_proximal": forwarded - packed,
            "seconds_update": done - forwarded,
            "seconds_step": done - started,
            "tokens_per_second": (float(num_tokens), done - started),
            "num_compilations": float(self.num_compilations),
        }
        return StepResult(metrics, advantages, stale)

    def _check(self, groups: Sequence[Group]) -> None:
        if len(groups) < self.config.num_mini_batches:
            raise ValueError(
                f"a batch of {len(groups)} groups cannot be split into {self.config.num_mini_batches} mini-batches; lower "
                "trainer.num_mini_batches or raise rollout.groups_per_batch"
            )
        for group in groups:
            for i, sample in enumerate(group.samples):
                where = f"sample {i} of group {group.id} (task {group.task.id})"
                if not np.isfinite(sample.reward):
                    raise ValueError(f"{where} has a reward that is not finite: {sample.reward}")
                if not np.isfinite(sample.behave_logp[sample.loss_mask]).all():
                    raise FloatingPointError(
                        f"step {self.version}: {where} has a behaviour log-probability that is not finite: the policy that "
                        "drew it has diverged. Lower trainer.optimizer.learning_rate or trainer.optimizer.max_grad_norm"
                    )
                if sample.loss_mask[:1].any():
                    raise ValueError(f"{where} begins with a token to be trained on, which nothing predicts; expected a prompt")

    def _trajectories(
        self, groups: Sequence[Group], trained: Sequence[Sequence[Bool[np.ndarray, "_"]]]
    ) -> list[list[Trajectory]]:
        return [
            [
                Trajectory(float(reward), sample.loss_mask, mask)
                for reward, sample, mask in zip(self._shaped(group), group.samples, masks, strict=True)
            ]
            for group, masks in zip(groups, trained, strict=True)
        ]

    def _shaped(self, group: Group) -> Float[np.ndarray, "G"]:
        rewards_G = np.array([sample.reward for sample in group.samples])
        num_drawn_G = np.array([sample.loss_mask.sum() for sample in group.samples])
        return shaped_rewards(self.config.shaping, rewards_G, num_drawn_G, self.max_new_tokens)

    def _is_stale(self, sample: Sample) -> Bool[np.ndarray, "T"]:
        if self.max_staleness is None:
            return np.zeros(sample.loss_mask.shape, bool)
        return sample.loss_mask & (self.version - sample.versions > self.max_staleness)

    def _pack(
        self, groups: Sequence[Group], trained: Sequence[Sequence[Bool[np.ndarray, "_"]]], share: Sequence[int]
    ) -> MiniBatch:
        """What is needed of each sample to train on it: nothing after its last trained token, and nothing at all of a sample
        without one.

        Args: share: the groups that are in it."""
        places = [(i, j) for i in share for j, mask in enumerate(trained[i]) if mask.any()]
        masks = [trained[i][j] for i, j in places]
        num_trained = np.array([mask.sum() for mask in masks], np.int64)
        sequences = []
        for (i, j), mask in zip(places, masks, strict=True):
            sample, end = groups[i].samples[j], len(mask) - int(mask[::-1].argmax())
            age = self.version - sample.versions[:end]
            sequences.append(TrainingSequence(sample.tokens[:end], mask[:end], sample.behave_logp[:end], age))
        batches, layout = pack(sequences, rows=self._learner.rows, row_tokens=self._learner.row_tokens)
        return MiniBatch(
            [self._learner.put(batch) for batch in batches],
            layout,
            places,
            mean_weights(self.config.loss_mean, num_trained, self.max_new_tokens),
            num_loss_tokens=int(num_trained.sum()),
        )

    def _with_advantages(self, mini_batch: MiniBatch, advantages: Sequence[Sequence[Float32[np.ndarray, "_"]]]) -> MiniBatch:
        layout = mini_batch.layout
        values = [
            weight * advantages[i][j][:length]
            for (i, j), weight, length in zip(mini_batch.places, mini_batch.weights, layout.lengths, strict=True)
        ]
        columns = self._learner.put_column(layout.scatter(values, np.float32))
        batches = [batch._replace(advantages=of) for batch, of in zip(mini_batch.batches, columns, strict=True)]
        return mini_batch._replace(batches=batches)

    def _with_proximal(self, mini_batch: MiniBatch) -> MiniBatch:
        batches = [batch._replace(proximal_logp=self._learner.logprobs(batch)) for batch in mini_batch.batches]
        # Waited for, so that the time is counted where it is spent.
        jax.block_until_ready([batch.proximal_logp for batch in batches])
        return mini_batch._replace(batches=batches)

    def _near(self, mini_batch: MiniBatch, max_second_moment: float) -> tuple[MiniBatch, tuple[float, float]]:
        """Without the tokens that M2PO leaves out, though they count in the loss's denominator; and the share that stays."""
        hosts = [jax.device_get((batch.proximal_logp, batch.behave_logp, batch.loss_mask)) for batch in mini_batch.batches]
        if not hosts:
            return mini_batch, (0.0, 0.0)
        proximal, behave, mask = (np.stack(arrays) for arrays in zip(*hosts, strict=True))
        kept = second_moment_mask((proximal - behave).reshape(-1), mask.reshape(-1), max_second_moment).reshape(mask.shape)
        columns = self._learner.put_column(kept)
        batches = [batch._replace(loss_mask=of) for batch, of in zip(mini_batch.batches, columns, strict=True)]
        return mini_batch._replace(batches=batches), (float(kept.sum()), float(mask.sum()))

    def _update(self, i: int, mini_batch: MiniBatch, *, proximal_is_current: bool) -> Metrics:
        try:
            return self._learner.update(mini_batch.batches, mini_batch.num_loss_tokens, proximal_is_current=proximal_is_current)
        except FloatingPointError as error:
            done = f", with {i} of its {self.config.num_mini_batches} updates applied" if i else ""
            raise FloatingPointError(
                f"step {self.version}, update {i + 1} of {self.config.num_mini_batches}: {error}. The update was not applied; "
                f"the last good version is {self.version}{done}. Lower trainer.optimizer.learning_rate or "
                "trainer.optimizer.max_grad_norm, or set trainer.loss.correction=Masked with a trainer.loss.correction.cap"
            ) from None

    def _describe(
        self,
        groups: Sequence[Group],
        trained: Sequence[Sequence[Bool[np.ndarray, "_"]]],
        advantages: Sequence[Sequence[Float32[np.ndarray, "_"]]],
    ) -> Metrics:
        """What can be said of a batch before it is trained on."""
        samples = [sample for group in groups for sample in group.samples]
        masks = [mask for group_masks in trained for mask in group_masks]
        rewards = np.array([sample.reward for sample in samples])
        num_trained = np.array([mask.sum() for mask in masks])
        num_drawn = np.array([sample.loss_mask.sum() for sample in samples])
        ages = self.version - np.concatenate([sample.versions[mask] for sample, mask in zip(samples, masks, strict=True)])
        per_token = np.concatenate(
            [values[mask] for values, mask in zip(chain(*advantages), masks, strict=True)], dtype=np.float64
        )
        tokens, count = float(num_trained.sum()), float(len(samples))
        return {
            "reward": (float(rewards.sum()), count),
            "advantage": (float(per_token.sum()), tokens),
            "advantage_squared": (float((per_token**2).sum()), tokens),
            "groups_without_signal": (
                float(sum(not any(values.any() for values in of_group) for of_group in advantages)),
                float(len(groups)),
            ),
            "truncated_fraction": (float(sum(sample.stop_reason == "length" for sample in samples)), count),
            "answer_tokens": (float(num_drawn.sum()), count),
            "staleness": (float(ages.sum()), tokens),
            "staleness_max": float(ages.max(initial=0)),
            "tokens_stale": float((num_drawn - num_trained).sum()),
            "tokens_trained": tokens,
        }


def _deal(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Places of `sizes` dealt to shares of like number and like total: largest first, in turn, and back."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for turn, i in enumerate(np.argsort(-np.asarray(sizes), kind="stable")):
        lap, seat = divmod(turn, num_shares)
        shares[num_shares - 1 - seat if lap % 2 else seat].append(int(i))
    return [sorted(share) for share in shares]


def _merge(metrics: Metrics, more: Metrics) -> None:
    """Add sums to sums and weights to weights."""
    for name, value in more.items():
        old = metrics.get(name)
        metrics[name] = (old[0] + value[0], old[1] + value[1]) if isinstance(old, tuple) and isinstance(value, tuple) else value
