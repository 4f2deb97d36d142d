"""Policy optimization: one batch of groups becomes one version of the policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, get_args

from areal_jax.metrics.meters import Mean, Meters
from areal_jax.parallel.compilation import Program
from areal_jax.parallel.sharding import Moved
from areal_jax.records import Group, StepResult
from areal_jax.rl.config import GAE, SPO, VCPO, KLInLoss, KLInReward
from areal_jax.trainer import stages
from areal_jax.trainer.batch_metrics import describe_batch
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.critic import describe_values
from areal_jax.trainer.distillation import TeacherInput, distillation
from areal_jax.trainer.frozen import FrozenPolicy, ReadOnlyPolicy
from areal_jax.trainer.objective import num_top_tokens
from areal_jax.trainer.pipeline import (
    AdvantageEstimate,
    PackedRollouts,
    SampleLimits,
    Stage,
    StageOutput,
    check_groups,
    critic_batches,
    estimate_advantages,
    pack_rollouts,
    policy_batches,
    select_tokens,
)
from areal_jax.trainer.step import Learner
from areal_jax.trainer.success_rates import SuccessRates
from areal_jax.trainer.updates import Update, apply_updates
from areal_jax.trainer.versions import HostState, Versions

Phase = Literal["packing", "values", "frozen", "proximal", "update"]


class Trainer(Versions):
    """Policy optimization on the train mesh.

    `step` is the pipeline of `pipeline.py`, with the stages that the settings ask for.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        limits: SampleLimits,
        policy: Learner,
        critic: Learner | None = None,
        reference: ReadOnlyPolicy | None = None,
        teacher: ReadOnlyPolicy | None = None,
        teacher_input: TeacherInput | None = None,
    ):
        """
        Args:
            config: Settings of the step.
            limits: Limits of the samples.
            policy: Learner with the objective of `config`: see `objective.policy_learner`.
            critic: Learner of values, with advantages=GAE: see `critic.critic_learner`.
            reference: The policy that `config.reference` names.
            teacher: The policy that `config.teacher` names.
            teacher_input: How it reads samples; None: as they are.

        Raises:
            ValueError: Settings and policies do not match.
        """
        if isinstance(config.advantages, GAE) != (critic is not None):
            raise ValueError(
                f"trainer.advantages={type(config.advantages).__name__} was given "
                f"with{'out' if critic is None else ''} a critic; "
                "GAE needs one, and no other estimator reads one"
            )
        for name, setting, given in (
            ("reference", config.reference, reference),
            ("teacher", config.teacher, teacher),
        ):
            if (setting is None) != (given is None):
                there, missing = (
                    ("a policy", "the setting") if setting is None else ("the setting", "a policy")
                )
                raise ValueError(
                    f"trainer.{name}: there is {there} and not {missing}; give both or neither"
                )
        spo = config.advantages if isinstance(config.advantages, SPO) else None
        reads_logprobs = stages.reads_proximal(config) or spo is not None
        super().__init__(
            policy,
            reads_logprobs=reads_logprobs,
            reads_gradient_norms=isinstance(config.advantages, VCPO),
            critic=critic,
        )
        self._rates = None if spo is None else SuccessRates(spo)
        self.config, self.limits = config, limits
        self._reference, self._teacher = reference, teacher
        self._teacher_input = teacher_input or TeacherInput()

    @property
    def num_compilations(self) -> int:
        return super().num_compilations + sum(frozen.num_compilations for frozen in self._frozen())

    @property
    def host_state(self) -> HostState | None:
        return None if self._rates is None else self._rates.state()

    def restore_host_state(self, state: HostState) -> None:
        assert self._rates is not None
        self._rates.restore(state)

    def _exchange(self, other: Versions, moved: Moved) -> None:
        assert isinstance(other, Trainer)
        super()._exchange(other, moved)
        for mine, others in zip(self._frozen(), other._frozen(), strict=True):
            if isinstance(mine, FrozenPolicy) and isinstance(others, FrozenPolicy):
                others.take_over(mine, moved)
        self._reference, other._reference = other._reference, self._reference
        self._teacher, other._teacher = other._teacher, self._teacher

    def list_programs(self) -> list[Program]:
        programs = super().list_programs()
        if self._reference is not None:
            programs.append(("reference logprobs", self._reference.compile))
        if self._teacher is not None and self.config.teacher is not None:
            num_top = num_top_tokens(self.config.teacher)
            programs.append(("teacher logprobs", partial(self._teacher.compile, num_top)))
        return programs

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on a batch with `num_mini_batches` optimizer updates, and increase `version` by
        one.

        Tokens more than `max_staleness` versions old are context only. Proximal log-probs are those
        of the parameters before the first update. A mini-batch without a loss token updates
        nothing.

        Args:
            groups: The batch.

        Returns:
            Metrics, stale tokens and advantages.

        Raises:
            ValueError: The batch cannot be trained on. Nothing has changed.
            FloatingPointError: A loss or gradient is not finite. The update is not applied, and the
                version stays; other settings can train the same batch.
            CorruptedState: The same, but parameters are between two versions or predict no finite
                log-probs, or the behaviour log-probs of the batch are not finite.
        """
        timer, meters = PhaseTimer(), Meters()
        with timer.phase("packing"):
            check_groups(groups, self.config.num_mini_batches, self.version)
            batch = select_tokens(groups, self.version, self.limits)
            packed = pack_rollouts(batch, self.config, self.limits, self._learner)
        contributions = list[StageOutput]()
        for phase, stage in self._stages():
            with timer.phase(phase):
                contributions.append(stage(packed))
                meters.update(contributions[-1].metrics)
        with timer.phase("packing"):
            estimate = estimate_advantages(batch, self.config, self.limits, contributions)
            updates = self._updates(packed, estimate, contributions)
            meters.update(describe_batch(batch, estimate.advantages, self.limits))
            if estimate.value_targets is not None:
                meters.update(describe_values(estimate.trajectories, estimate.value_targets))
        with timer.phase("update"):
            meters.update(apply_updates(updates, self.version))
        for contribution in contributions:
            contribution.on_trained()
        self.version += 1

        layouts = [each.layout for each in packed.mini_batches]
        num_packed, num_places = map(sum, zip(*(each.filled for each in layouts), strict=True))
        num_shared, num_tokens = map(sum, zip(*(each.shared for each in layouts), strict=True))
        meters.update(
            {
                "num_updates": sum(each.num_loss_tokens > 0 for each in packed.mini_batches),
                "packing_efficiency": Mean(num_packed, num_places),
                "shared_token_fraction": Mean(num_shared, num_tokens),
                **timer.metrics(num_tokens),
                "num_compilations": self.num_compilations,
            }
        )
        return StepResult(meters.metrics(), batch.stale, estimate.advantages)

    def _frozen(self) -> list[ReadOnlyPolicy]:
        return [frozen for frozen in (self._reference, self._teacher) if frozen is not None]

    def _trains_policy(self) -> bool:
        """Whether the critic's warm-up is over."""
        return self._critic is None or self.version >= self.config.critic.warmup_steps

    def _stages(self) -> Iterator[tuple[Phase, Stage]]:
        """Yield the stages of the next step, and the phase for which their time counts."""
        config = self.config
        kl = None if config.reference is None else config.reference.kl
        if self._reference is not None and isinstance(kl, KLInLoss):
            yield "frozen", partial(stages.reference_in_loss, reference=self._reference)
        if self._reference is not None and isinstance(kl, KLInReward):
            yield "frozen", partial(stages.reference_in_reward, reference=self._reference, kl=kl)
        if self._teacher is not None and config.teacher is not None:
            yield (
                "frozen",
                partial(
                    distillation,
                    teacher=self._teacher,
                    config=config.teacher,
                    read_as=self._teacher_input,
                    learner=self._learner,
                ),
            )
        if self._critic is not None:
            yield "values", partial(stages.critic_values, critic=self._critic)
        if isinstance(config.advantages, VCPO):
            yield "values", partial(stages.gradient_norms, learner=self._learner)
        if self._rates is not None:
            yield "values", partial(self._rates.stage, learner=self._learner)
        if self._trains_policy():
            yield (
                "proximal",
                partial(stages.proximal_logprobs, learner=self._learner, config=config),
            )

    def _updates(
        self,
        packed: PackedRollouts,
        estimate: AdvantageEstimate,
        contributions: Sequence[StageOutput],
    ) -> list[list[Update]]:
        """Return, by mini-batch, the updates of policy and critic."""
        by_learner: list[list[Update]] = []
        if self._trains_policy():
            batches = policy_batches(packed, estimate, contributions, self._learner)
            by_learner.append([Update(self._learner, each) for each in batches])
        if self._critic is not None:
            batches = critic_batches(packed, estimate, contributions, self._critic)
            by_learner.append([Update(self._critic, each, is_critic=True) for each in batches])
        return [list(of_mini_batch) for of_mini_batch in zip(*by_learner, strict=True)]


class PhaseTimer:
    """Seconds of one step, by phase."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Add the time inside to a phase."""
        started_s = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - started_s

    def metrics(self, num_tokens: float) -> dict[str, float | Mean]:
        """Return the seconds of all phases and of the step so far, and its tokens per second."""
        step_s = time.perf_counter() - self._started_s
        phases = {f"seconds_{phase}": seconds for phase, seconds in self._seconds.items()}
        return {**phases, "seconds_step": step_s, "tokens_per_second": Mean(num_tokens, step_s)}
