"""One batch of groups in, one version of the policy out. Axes: G samples of a group, T tokens of a
sample."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Shaped

from areal_jax.data.packing import Layout, TrainingSequence, pack
from areal_jax.errors import CorruptedState
from areal_jax.metrics.meters import Mean, Meters, Metrics
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import fetch
from areal_jax.records import Group, Sample, StepResult
from areal_jax.rl.advantages import (
    Trajectory,
    compute_advantages,
    mean_weights,
    shape_rewards,
    value_targets,
)
from areal_jax.rl.config import GAE, M2PO, PPO, KLInLoss, KLInReward, Proximal, ProximalLoss
from areal_jax.rl.kl import distilled_advantages, kl_estimate, kl_loss, kl_penalty
from areal_jax.rl.losses import PolicyLoss, interpolated_proximal, policy_loss, second_moment_mask
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.critic import CriticWeights, critic_learner, describe_values, with_values
from areal_jax.trainer.forward import DeviceBatch, FrozenPolicy
from areal_jax.trainer.step import Learner
from areal_jax.trainer.versions import Versions

T = TypeVar("T")

Trained: TypeAlias = Sequence[Sequence[Bool[np.ndarray, "_"]]]
"""By group and sample, the tokens in the loss."""

Place: TypeAlias = tuple[int, int]
"""A group of the batch, and a sample of the group."""

ByToken: TypeAlias = list[list[Float32[np.ndarray, "_"]]]
"""By group and sample, one number per token."""


class MiniBatch(NamedTuple):
    """The share of a batch that one optimizer update sees, packed and on its way to the device."""

    batches: list[DeviceBatch]
    layout: Layout
    places: list[Place]
    """Whose every sequence of the layout is."""
    weights: Float32[np.ndarray, "_"]
    """What the tokens of every sequence count in the mean that the loss is."""
    num_loss_tokens: int


class Trainer(Versions):
    """Policy optimization on the train mesh: `step` turns a batch of groups into the next version
    of the parameters."""

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
        critic: CriticWeights | None = None,
        reference: FrozenPolicy | None = None,
        teacher: FrozenPolicy | None = None,
        staleness_of_kind: Mapping[str, int | None] | None = None,
    ):
        """
        Args:
            params: copied to the train mesh; the caller's stay as they are.
            num_updates: of the whole run, which the learning rate's schedule spans: steps times
                `num_mini_batches`. That of
                the policy spans those after the critic's warm-up.
            max_staleness: a token sampled more versions ago than this is not trained on; None
                trains on all.
            temperature: at which the engine draws.
            row_tokens: tokens of a packed row; no sample may be longer.
            max_new_tokens: the engine's limit to an answer.
            base: with an adapter in `params`, the frozen parameters beside it, on the train mesh.
            critic: what advantages=GAE begins with; copied too.
            reference, teacher: the policies that `config.reference` and `config.teacher` name;
            ValueError where one is given
                and not named, or named and not given.
            staleness_of_kind: `max_staleness` of kinds of tasks that have their own.
        """
        if isinstance(config.advantages, GAE) != (critic is not None):
            raise ValueError(
                f"trainer.advantages={type(config.advantages).__name__} came "
                f"with{'out' if critic is None else ''} a critic; "
                "GAE asks one, and nothing else does"
            )
        self.config, self.max_staleness, self.max_new_tokens = config, max_staleness, max_new_tokens
        self._staleness_of_kind = dict(staleness_of_kind or {})
        self._reference = _as_configured("reference", config.reference, reference)
        self._teacher = _as_configured("teacher", config.teacher, teacher)
        self._kl = None if config.reference is None else config.reference.kl
        match config.loss:
            case PPO():
                proximal: Proximal = "behave"
            case ProximalLoss():
                proximal = config.loss.proximal
            case _:
                proximal = "recompute"

        def objective(
            logp: Array,
            batch: DeviceBatch,
            num_tokens: Float[Array, ""],
            proximal_is_current: Bool[Array, ""],
        ) -> PolicyLoss:
            match proximal:
                case "recompute":
                    proximal_logp = jnp.where(
                        proximal_is_current, jax.lax.stop_gradient(logp), batch.proximal_logp
                    )
                case "interpolate":
                    proximal_logp = interpolated_proximal(logp, batch.behave_logp, batch.age)
                case "behave":
                    proximal_logp = batch.behave_logp
            mask, metrics = batch.loss_mask, {}
            if isinstance(config.loss, M2PO):
                near = _near(config.loss, proximal_logp, batch.behave_logp, mask)
                mask = jnp.where(proximal_is_current, near, mask)
                counts = (
                    jnp.stack([near.sum(), batch.loss_mask.sum()]).astype(jnp.float32)
                    * proximal_is_current
                )
                metrics = {"m2po_kept_fraction": Mean(counts[0], counts[1])}
            loss = policy_loss(
                config.loss,
                logp,
                proximal_logp,
                batch.behave_logp,
                batch.advantages,
                mask,
                batch.segment_ids,
                num_tokens=num_tokens,
            )
            loss = loss._replace(metrics=loss.metrics | metrics)
            if isinstance(self._kl, KLInLoss) and batch.reference_logp is not None:
                loss = loss.plus(
                    kl_loss(
                        self._kl,
                        logp,
                        batch.reference_logp,
                        mask,
                        batch.weights,
                        num_tokens=num_tokens,
                    )
                )
            return loss

        num_awaited = (
            config.critic.warmup_steps * config.num_mini_batches if critic is not None else 0
        )
        learner = Learner(
            config,
            policy,
            params,
            mesh,
            compute_dtype,
            max(0, num_updates - num_awaited),
            objective=objective,
            temperature=temperature,
            row_tokens=row_tokens,
            base=base,
            columns=self._columns(),
        )
        self._recomputes = proximal == "recompute"
        super().__init__(
            learner,
            reads_logprobs=self._recomputes
            and (config.num_mini_batches > 1 or isinstance(config.loss, M2PO)),
            critic=None
            if critic is None
            else critic_learner(
                config, critic, mesh, compute_dtype, num_updates, row_tokens=row_tokens
            ),
        )

    def _columns(self) -> list[str]:
        if not isinstance(self._kl, KLInLoss):
            return []
        return ["reference_logp", *(["weights"] if self.config.loss_mean != "tokens" else [])]

    @property
    def num_compilations(self) -> int:
        return super().num_compilations + sum(frozen.num_compilations for frozen in self._frozen())

    def warm_up(self) -> None:
        super().warm_up()
        for frozen in self._frozen():
            frozen.warm_up()

    def _frozen(self) -> list[FrozenPolicy]:
        return [frozen for frozen in (self._reference, self._teacher) if frozen is not None]

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on a batch: `num_mini_batches` optimizer updates, after which `version` is one
        higher.

        Tokens more than `max_staleness` versions old are context only. Proximal log-probs are those
        of the parameters before the first update. A mini-batch in which no token is left to train
        on updates nothing.

        Raises ValueError where the batch cannot be trained on, before anything changes, and
        FloatingPointError where loss, gradient or the log-probability of a sampled token is not
        finite: the update that met it is not applied, and the version stays. That is CorruptedState unless
        all is as it was before the step and the policy is not to blame: only then other settings
        can train the same batch.
        """
        started = time.perf_counter()
        self._check(groups)
        stale = [
            [self._is_stale(sample, group.task.kind) for sample in group.samples]
            for group in groups
        ]
        trained = [
            [sample.loss_mask & ~old for sample, old in zip(group.samples, olds, strict=True)]
            for group, olds in zip(groups, stale, strict=True)
        ]
        sizes = [sum(len(sample.tokens) for sample in group.samples) for group in groups]
        mini_batches = [
            self._pack(groups, trained, share)
            for share in _deal(sizes, self.config.num_mini_batches)
        ]
        packed = time.perf_counter()
        # First, because its lessons have none of the columns that follow.
        critic_batches = (
            []
            if self._critic is None
            else [_read(self._critic, mini_batch) for mini_batch in mini_batches]
        )
        valued = time.perf_counter()
        mini_batches = self._beside_reference(mini_batches)
        reference_logp = (
            self._heard(self._reference, groups, mini_batches)
            if isinstance(self._kl, KLInReward)
            else None
        )
        teacher_logp = self._heard(self._teacher, groups, mini_batches)
        asked = time.perf_counter()
        trajectories = self._trajectories(groups, trained, reference_logp)
        if critic_batches:
            trajectories = self._with_values(groups, trajectories, critic_batches)
        advantages = compute_advantages(self.config.advantages, trajectories)
        advantages = self._distilled(groups, advantages, teacher_logp)
        mini_batches = [
            self._with_advantages(mini_batch, advantages) for mini_batch in mini_batches
        ]
        meters = Meters()
        meters.update(self._describe(groups, trained, advantages))
        for name, logp in (("kl_reference", reference_logp), ("kl_teacher", teacher_logp)):
            meters.update({name: _divergence(groups, trained, logp)} if logp is not None else {})
        if isinstance(self.config.advantages, GAE):
            targets = value_targets(self.config.advantages, trajectories)
            critic_batches = [
                self._with_advantages(
                    critic_batch._replace(weights=np.ones_like(critic_batch.weights)), targets
                )
                for critic_batch in critic_batches
            ]
            meters.update(describe_values(trajectories, targets))
        ready = time.perf_counter()
        trains_policy = not critic_batches or self.version >= self.config.critic.warmup_steps
        read = [
            trains_policy and self._must_read(i, mini_batch)
            for i, mini_batch in enumerate(mini_batches)
        ]
        for i in np.flatnonzero(read):
            mini_batches[i] = _read(self._learner, mini_batches[i])
            if isinstance(self.config.loss, M2PO):
                mini_batches[i], kept = self._without_far(mini_batches[i], self.config.loss)
                meters.update({"m2po_kept_fraction": kept})
        forwarded = time.perf_counter()
        num_updates = applied = 0
        for i, mini_batch in enumerate(mini_batches):
            if mini_batch.num_loss_tokens:
                if trains_policy:
                    meters.update(
                        self._update(i, applied, mini_batch, proximal_is_current=not read[i])
                    )
                    applied += 1
                if critic_batches:
                    meters.update(self._teach(i, applied, critic_batches[i]))
                    applied += 1
                num_updates += 1
        done = time.perf_counter()
        self.version += 1

        num_tokens, num_places = map(
            sum, zip(*(mini_batch.layout.filled for mini_batch in mini_batches), strict=True)
        )
        meters.update(
            {
                "num_updates": float(num_updates),
                "packing_efficiency": Mean(num_tokens, num_places),
                "seconds_packing": packed - started + ready - asked,
                "seconds_values": valued - packed,
                "seconds_frozen": asked - valued,
                "seconds_proximal": forwarded - ready,
                "seconds_update": done - forwarded,
                "seconds_step": done - started,
                "tokens_per_second": Mean(num_tokens, done - started),
                "num_compilations": float(self.num_compilations),
            }
        )
        return StepResult(meters.metrics(), stale, advantages)

    def _check(self, groups: Sequence[Group]) -> None:
        if len(groups) < self.config.num_mini_batches:
            raise ValueError(
                f"a batch of {len(groups)} groups cannot be split into "
                f"{self.config.num_mini_batches} mini-batches; lower "
                "trainer.num_mini_batches or raise rollout.groups_per_batch"
            )
        for group in groups:
            for i, sample in enumerate(group.samples):
                where = f"sample {i} of group {group.id} (task {group.task.id})"
                if not np.isfinite(sample.reward):
                    raise ValueError(f"{where} has a reward that is not finite: {sample.reward}")
                if not np.isfinite(sample.behave_logp[sample.loss_mask]).all():
                    raise CorruptedState(
                        f"step {self.version}: {where} has a behaviour log-probability that is "
                        "not finite: the policy that "
                        "drew it has diverged. Lower trainer.optimizer.learning_rate or "
                        "trainer.optimizer.max_grad_norm"
                    )
                if sample.loss_mask[:1].any():
                    raise ValueError(
                        f"{where} begins with a token to be trained on, which nothing "
                        "predicts; "
                        "expected a prompt"
                    )

    def _beside_reference(self, mini_batches: list[MiniBatch]) -> list[MiniBatch]:
        """With what the loss reads of a reference, where it reads one."""
        if self._reference is None or not isinstance(self._kl, KLInLoss):
            return mini_batches
        columns = _asked(self._reference, mini_batches)
        # Waited for, so that the time is counted where it is spent.
        jax.block_until_ready(columns)
        mini_batches = [
            _with_column(each, "reference_logp", of)
            for each, of in zip(mini_batches, columns, strict=True)
        ]
        if "weights" in self._learner.columns:
            mini_batches = [
                self._put(each, "weights", each.weights.tolist()) for each in mini_batches
            ]
        return mini_batches

    def _heard(
        self,
        frozen: FrozenPolicy | None,
        groups: Sequence[Group],
        mini_batches: Sequence[MiniBatch],
    ) -> ByToken | None:
        """What a frozen policy says of every sample's packed tokens; of the rest, which is not
        trained on, what behave said.

        In one transfer to the host."""
        if frozen is None:
            return None
        heard = [[sample.behave_logp.copy() for sample in group.samples] for group in groups]
        for mini_batch, columns in zip(
            mini_batches, fetch(_asked(frozen, mini_batches)), strict=True
        ):
            if columns:
                for (i, j), logp in zip(
                    mini_batch.places, mini_batch.layout.gather(np.stack(columns)), strict=True
                ):
                    heard[i][j][: len(logp)] = logp
        return heard

    def _trajectories(
        self, groups: Sequence[Group], trained: Trained, reference_logp: ByToken | None
    ) -> list[list[Trajectory]]:
        def earned(i: int, j: int, sample: Sample) -> Float[np.ndarray, "T"] | None:
            if reference_logp is None or not isinstance(self._kl, KLInReward):
                return None
            return kl_penalty(self._kl, sample.behave_logp, reference_logp[i][j], sample.loss_mask)

        return [
            [
                Trajectory(float(reward), sample.loss_mask, trained[i][j], earned(i, j, sample))
                for j, (reward, sample) in enumerate(
                    zip(self._shaped(group), group.samples, strict=True)
                )
            ]
            for i, group in enumerate(groups)
        ]

    def _distilled(
        self, groups: Sequence[Group], advantages: ByToken, teacher_logp: ByToken | None
    ) -> ByToken:
        """Advantages with what the teacher has to say of every token."""
        config = self.config.teacher
        if teacher_logp is None or config is None:
            return advantages
        return [
            [
                distilled_advantages(
                    config,
                    advantages[i][j],
                    sample.behave_logp,
                    teacher_logp[i][j],
                    sample.loss_mask,
                )
                for j, sample in enumerate(group.samples)
            ]
            for i, group in enumerate(groups)
        ]

    def _shaped(self, group: Group) -> Float[np.ndarray, "G"]:
        rewards_G = np.array([sample.reward for sample in group.samples])
        num_sampled_G = np.array([sample.loss_mask.sum() for sample in group.samples])
        return shape_rewards(self.config.shaping, rewards_G, num_sampled_G, self.max_new_tokens)

    def _is_stale(self, sample: Sample, kind: str) -> Bool[np.ndarray, "T"]:
        bound = self._staleness_of_kind.get(kind, self.max_staleness)
        if bound is None:
            return np.zeros(sample.loss_mask.shape, bool)
        return sample.loss_mask & (self.version - sample.versions > bound)

    def _pack(self, groups: Sequence[Group], trained: Trained, share: Sequence[int]) -> MiniBatch:
        """What is needed of each sample to train on it: nothing after the last token that the
        policy drew, and nothing at all of a sample without one to train on.

        Args: share: the groups that are in it."""
        places = [(i, j) for i in share for j, mask in enumerate(trained[i]) if mask.any()]
        masks = [trained[i][j] for i, j in places]
        num_trained = np.array([mask.sum() for mask in masks], np.int64)
        sequences = []
        for (i, j), mask in zip(places, masks, strict=True):
            sample = groups[i].samples[j]
            end = len(mask) - int(sample.loss_mask[::-1].argmax())
            age = self.version - sample.versions[:end]
            sequences.append(
                TrainingSequence(sample.tokens[:end], mask[:end], sample.behave_logp[:end], age)
            )
        batches, layout = pack(
            sequences, rows=self._learner.rows, row_tokens=self._learner.row_tokens
        )
        return MiniBatch(
            [self._learner.put(batch) for batch in batches],
            layout,
            places,
            mean_weights(self.config.loss_mean, num_trained, self.max_new_tokens),
            num_loss_tokens=int(num_trained.sum()),
        )

    def _with_advantages(self, mini_batch: MiniBatch, advantages: ByToken) -> MiniBatch:
        of_sequences = zip(
            mini_batch.places, mini_batch.weights, mini_batch.layout.lengths, strict=True
        )
        return self._put(
            mini_batch,
            "advantages",
            [weight * advantages[i][j][:n] for (i, j), weight, n in of_sequences],
        )

    def _put(
        self, mini_batch: MiniBatch, name: str, values: Iterable[Shaped[np.ndarray, "_"] | float]
    ) -> MiniBatch:
        """With a column of these values, of every sequence one a token or one for all, on their way
        to the device."""
        return _with_column(
            mini_batch,
            name,
            self._learner.put_column(mini_batch.layout.scatter(values, np.float32)),
        )

    def _with_values(
        self,
        groups: Sequence[Group],
        trajectories: Sequence[Sequence[Trajectory]],
        critic_batches: Sequence[MiniBatch],
    ) -> list[list[Trajectory]]:
        """What the critic says of every sample that is trained on."""
        following: dict[tuple[int, int], Float32[np.ndarray, "_"]] = {}
        for critic_batch in critic_batches:
            read = np.reshape(
                fetch([batch.proximal_logp for batch in critic_batch.batches]),
                critic_batch.layout.shape,
            )
            following |= zip(critic_batch.places, critic_batch.layout.gather(read), strict=True)
        if not all(np.isfinite(values).all() for values in following.values()):
            raise CorruptedState(
                f"step {self.version}: the critic's values are not finite: it has diverged. Lower "
                "trainer.critic.optimizer.learning_rate or trainer.critic.optimizer.max_grad_norm"
            )
        nothing = np.zeros(0, np.float32)
        return [
            [
                with_values(
                    trajectory,
                    following.get((i, j), nothing),
                    was_cut_off=sample.stop_reason == "length",
                )
                for j, (trajectory, sample) in enumerate(zip(of_group, group.samples, strict=True))
            ]
            for i, (of_group, group) in enumerate(zip(trajectories, groups, strict=True))
        ]

    def _must_read(self, i: int, mini_batch: MiniBatch) -> bool:
        """Whether proximal log-probs are needed before the mini-batch's own forward pass: after the
        first update, and for M2PO, which looks at those of a whole mini-batch before any of it is
        trained on, where that is more than one micro-batch."""
        return self._recomputes and (
            i > 0 or (isinstance(self.config.loss, M2PO) and len(mini_batch.batches) > 1)
        )

    def _without_far(self, mini_batch: MiniBatch, loss: M2PO) -> tuple[MiniBatch, Mean]:
        """Without the tokens that M2PO leaves out, though they count in the loss's denominator; and
        the share that stays."""
        hosts = [
            fetch((batch.proximal_logp, batch.behave_logp, batch.loss_mask))
            for batch in mini_batch.batches
        ]
        if not hosts:
            return mini_batch, Mean(0.0, 0.0)
        proximal, behave, mask = (np.stack(arrays) for arrays in zip(*hosts, strict=True))
        kept = np.asarray(_near(loss, proximal.astype(np.float64), behave, mask))
        return _with_column(mini_batch, "loss_mask", self._learner.put_column(kept)), Mean(
            float(kept.sum()), float(mask.sum())
        )

    def _update(
        self, i: int, applied: int, mini_batch: MiniBatch, *, proximal_is_current: bool
    ) -> Metrics:
        """The policy's update. Args: applied: updates of this step before it, policy's and
        critic's."""
        try:
            return self._learner.update(
                mini_batch.batches,
                mini_batch.num_loss_tokens,
                proximal_is_current=proximal_is_current,
            )
        except FloatingPointError as error:
            advice = (
                "Lower trainer.optimizer.learning_rate or trainer.optimizer.max_grad_norm, or set "
                "trainer.loss.importance_weighting=Masked with a "
                "trainer.loss.importance_weighting.cap"
            )
            is_corrupted = applied > 0 or not self._is_finite(mini_batch)
            raise self._not_applied(
                i, applied, f"{error}", advice, is_corrupted=is_corrupted
            ) from None

    def _teach(self, i: int, applied: int, critic_batch: MiniBatch) -> Metrics:
        """The critic's update. Args: as those of `_update`."""
        assert self._critic is not None
        try:
            metrics = self._critic.update(
                critic_batch.batches, critic_batch.num_loss_tokens, proximal_is_current=False
            )
        except FloatingPointError as error:
            advice = (
                "Lower trainer.critic.optimizer.learning_rate or "
                "trainer.critic.optimizer.max_grad_norm"
            )
            # Its values of the batch are finite, or it would have been told before.
            raise self._not_applied(
                i, applied, f"the critic's {error}", advice, is_corrupted=applied > 0
            ) from None
        return {f"value_{name}": value for name, value in metrics.items()}

    def _is_finite(self, mini_batch: MiniBatch) -> bool:
        """Whether the policy as it is gives every loss token a probability: then a loss that is not
        finite has other causes."""
        return all(
            bool(np.isfinite(logp[mask]).all())
            for logp, mask in (
                fetch((self._learner.logprobs(batch), batch.loss_mask))
                for batch in mini_batch.batches
            )
        )

    def _not_applied(
        self, i: int, applied: int, what: str, advice: str, *, is_corrupted: bool
    ) -> FloatingPointError:
        left = f"the last good version is {self.version}"
        if applied:
            left = (
                f"{applied} before it were, so that version {self.version} is gone and "
                f"{self.version + 1} not there yet"
            )
        elif is_corrupted:
            left = f"version {self.version} itself predicts no finite probabilities"
        return (CorruptedState if is_corrupted else FloatingPointError)(
            f"step {self.version}, update {i + 1} of {self.config.num_mini_batches}: {what}. The "
            "update was not applied; "
            f"{left}. {advice}"
        )

    def _describe(
        self,
        groups: Sequence[Group],
        trained: Trained,
        advantages: ByToken,
    ) -> Metrics:
        """What can be said of a batch before it is trained on."""
        samples = [sample for group in groups for sample in group.samples]
        masks = [mask for group_masks in trained for mask in group_masks]
        rewards = np.array([sample.reward for sample in samples])
        num_trained = np.array([mask.sum() for mask in masks])
        num_sampled = np.array([sample.loss_mask.sum() for sample in samples])
        ages = self.version - np.concatenate(
            [sample.versions[mask] for sample, mask in zip(samples, masks, strict=True)]
        )
        per_token = np.concatenate(
            [values[mask] for values, mask in zip(chain(*advantages), masks, strict=True)],
            dtype=np.float64,
        )
        tokens, count = float(num_trained.sum()), float(len(samples))
        return {
            "reward": Mean(float(rewards.sum()), count),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "reward_std": float(rewards.std()),
            "advantage": Mean(float(per_token.sum()), tokens),
            "advantage_squared": Mean(float((per_token**2).sum()), tokens),
            "groups_without_signal": Mean(
                float(sum(not any(values.any() for values in of_group) for of_group in advantages)),
                float(len(groups)),
            ),
            "correct_fraction": Mean(
                float(sum(sample.grade == "correct" for sample in samples)), count
            ),
            "no_answer_fraction": Mean(
                float(sum(sample.grade == "no_answer" for sample in samples)), count
            ),
            "turns": Mean(float(sum(_num_turns(sample) for sample in samples)), count),
            "truncated_fraction": Mean(
                float(sum(sample.stop_reason == "length" for sample in samples)), count
            ),
            "answer_tokens": Mean(float(num_sampled.sum()), count),
            "staleness": Mean(float(ages.sum()), tokens),
            "staleness_max": float(ages.max(initial=0)),
            "tokens_stale": float((num_sampled - num_trained).sum()),
            "tokens_trained": tokens,
        }


def _num_turns(sample: Sample) -> int:
    """Stretches of tokens that the policy drew, between others: turns of a conversation."""
    return int(np.count_nonzero(np.diff(sample.loss_mask, prepend=False) & sample.loss_mask))


def _as_configured(name: str, wanted: object | None, given: T | None) -> T | None:
    """What is given. ValueError where it is not what the configuration asks for: nothing is left
    out in silence."""
    if (wanted is None) != (given is None):
        there, missing = (
            ("a policy", "the setting") if wanted is None else ("the setting", "a policy")
        )
        raise ValueError(
            f"trainer.{name}: there is {there} and not {missing}; give both or neither"
        )
    return given


def _near(
    loss: M2PO,
    proximal_logp: Float[Array | np.ndarray, "*B T"],
    behave_logp: Float[Array | np.ndarray, "*B T"],
    mask: Bool[Array | np.ndarray, "*B T"],
) -> Bool[Array | np.ndarray, "*B T"]:
    """The loss tokens that M2PO keeps, of all those of a mini-batch."""
    log_weight = (proximal_logp - behave_logp).reshape(-1)
    return second_moment_mask(log_weight, mask.reshape(-1), loss.max_second_moment).reshape(
        mask.shape
    )


def _with_column(mini_batch: MiniBatch, name: str, columns: Sequence[Array]) -> MiniBatch:
    return mini_batch._replace(
        batches=[
            batch._replace(**{name: of})
            for batch, of in zip(mini_batch.batches, columns, strict=True)
        ]
    )


def _asked(frozen: FrozenPolicy, mini_batches: Sequence[MiniBatch]) -> list[list[Array]]:
    """Its log-probabilities of all micro-batches, by mini-batch; on the device, not waited for."""
    found = iter(
        frozen.logprobs([batch for mini_batch in mini_batches for batch in mini_batch.batches])
    )
    return [[next(found) for _ in mini_batch.batches] for mini_batch in mini_batches]


def _divergence(groups: Sequence[Group], trained: Trained, logp: ByToken) -> Mean:
    """KL of the policy that drew the tokens in the loss from one that gives them these
    log-probabilities: sum and number."""
    samples, masks = [sample for group in groups for sample in group.samples], chain(*trained)
    strayed = np.concatenate(
        [
            (sample.behave_logp - of)[mask]
            for sample, of, mask in zip(samples, chain(*logp), masks, strict=True)
        ]
    )
    # Of all estimates k3 tells most.
    return Mean(float(np.sum(kl_estimate("k3", strayed))), float(len(strayed)))


def _deal(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Places of `sizes` dealt to shares of like number and like total: largest first, in turn, and
    back."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for turn, i in enumerate(np.argsort(-np.asarray(sizes), kind="stable")):
        lap, seat = divmod(turn, num_shares)
        shares[num_shares - 1 - seat if lap % 2 else seat].append(int(i))
    return [sorted(share) for share in shares]


def _read(learner: Learner, mini_batch: MiniBatch) -> MiniBatch:
    """With what a learner reads out before its first update, as proximal log-probs; a critic's are
    values."""
    columns = [learner.logprobs(batch) for batch in mini_batch.batches]
    # Waited for, so that the time is counted where it is spent.
    jax.block_until_ready(columns)
    return _with_column(mini_batch, "proximal_logp", columns)
