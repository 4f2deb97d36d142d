"""Which split of a cluster trains fastest, what it gives, and what bounds it: found by simulating
the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from areal_jax.errors import ConfigError
from areal_jax.models.architecture import ModelConfig
from areal_jax.sim.config import ClusterQuestion
from areal_jax.sim.costs import BYTES_PER_TRAINED_WEIGHT, Efficiency, EngineCosts, TrainerCosts
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.hardware import Device, known_device
from areal_jax.sim.lengths import LogNormal, capped_mean
from areal_jax.sim.simulation import Cluster, Outcome, Workload, simulate

MIN_SEQUENCES = 8
"""An engine that holds fewer of the longest sequences reads its weights for too few of them."""

WORTH_WIDENING = 1.02
"""An engine over twice the devices has fewer engines beside it, and waits for its own links: it
must be faster by so much."""

NUM_UNITS = 16
"""A cluster is split in sixteenths."""

MIN_GROUPS = 64
"""A simulated batch is cut down, with the cluster, to no fewer: averages over lengths must
settle."""


@dataclass(frozen=True)
class Candidate:
    """A split and what it gives."""

    rollout_devices: int
    train_devices: int
    devices_per_engine: int
    outcome: Outcome
    tokens_per_s: float
    """Trained on by the whole cluster."""


@dataclass(frozen=True)
class ClusterPlan:
    """An answer to a question."""

    question: ClusterQuestion
    model: ModelConfig
    device: Device
    candidates: tuple[Candidate, ...]
    best: Candidate
    synchronous: Candidate
    """The best split without staleness."""

    @property
    def hours(self) -> float:
        """Of the steps that were asked for."""
        return self.question.steps * self.best.outcome.step_s / 3600

    def bound(self) -> str:
        """What would have to be faster for all to be faster."""
        outcome = self.best.outcome
        shares = outcome.shares
        if outcome.trainer_waits < 0.1:
            return f"training: {outcome.train_s:,.0f} of the {outcome.step_s:,.0f} s of a step"
        waits = f"the trainer waits {outcome.trainer_waits:.0%} of its time"
        if shares.get("idle", 0.0) > 0.1:
            return (
                f"max_staleness={self.question.max_staleness}: engines idle "
                f"{shares['idle']:.0%} of their time, {waits}"
            )
        beside = {
            cause: share for cause, share in shares.items() if cause not in ("decode", "idle")
        }
        cause, share = max(beside.items(), key=lambda item: item[1], default=("", 0.0))
        return f"generation: {waits}" + (
            f"; {share:.0%} of the engines' time is {cause}" if share > 0.05 else ""
        )

    def text(self) -> str:
        """All of it, a line each."""
        question, best = self.question, self.best
        tensor, engine = (
            best.devices_per_engine,
            EngineCosts(self.model, self.device, best.devices_per_engine),
        )
        trainer = BYTES_PER_TRAINED_WEIGHT * self.model.num_params / best.train_devices
        gain = best.tokens_per_s / self.synchronous.tokens_per_s
        lines = (
            ("policy", f"{question.model}: {self.model.num_params / 1e9:,.2f} B parameters"),
            ("cluster", f"{question.devices} x {question.device}"),
            (
                "split",
                f"{best.rollout_devices} decode in {best.rollout_devices // tensor} engines of "
                f"{tensor}, {best.train_devices} train",
            ),
            (
                "memory",
                (
                    f"{engine.kv_tokens:,} tokens of KV caches an engine; {trainer / 1e9:,.1f} GB "
                    "of state a train device"
                ),
            ),
            (
                "speed",
                (
                    f"{best.tokens_per_s:,.0f} tokens trained per second, "
                    f"{best.outcome.step_s:,.0f} s a step"
                ),
            ),
            ("time", f"{self.hours:,.1f} hours for {question.steps} steps"),
            ("bounded by", self.bound()),
            (
                "staleness",
                (
                    f"{best.outcome.staleness:.1f} versions on average, {best.outcome.masked:.1%} "
                    "of tokens too old"
                ),
            ),
            (
                "synchronous",
                f"{self.synchronous.tokens_per_s:,.0f} tokens/s at best "
                f"({self.synchronous.rollout_devices} decode, "
                f"{self.synchronous.train_devices} train): {gain:.2f} times slower",
            ),
        )
        return "\n".join(f"{name:<12}  {line}" for name, line in lines)


def plan_cluster(question: ClusterQuestion, model: ModelConfig) -> ClusterPlan:
    """The best split for a question about `model`. ConfigError, with the numbers, where none can
    be.
    """
    if problems := list(impossible(question, model)):
        raise ConfigError("\n".join(problems))
    device, tensor = known_device(question.device), engine_size(question, model)
    splits = _splits(question, model, tensor)
    candidates = tuple(
        _simulated(question, model, rollout, tensor, question.max_staleness) for rollout in splits
    )
    best = max(candidates, key=lambda candidate: candidate.tokens_per_s)
    for wider in _wider(question, best):
        found = _simulated(question, model, best.rollout_devices, wider, question.max_staleness)
        if found.tokens_per_s > WORTH_WIDENING * best.tokens_per_s:
            best = found
    turns = (
        [_simulated(question, model, rollout, tensor, 0) for rollout in splits]
        if question.max_staleness != 0
        else candidates
    )
    synchronous = max(turns, key=lambda candidate: candidate.tokens_per_s)
    return ClusterPlan(question, model, device, candidates, best, synchronous)


def impossible(question: ClusterQuestion, model: ModelConfig) -> Iterator[str]:
    """Why a question has no answer, each in a sentence with the numbers; nothing where it has."""
    counts = (
        "devices",
        "context",
        "steps",
        "groups_per_batch",
        "samples_per_group",
        "prompt_tokens",
        "slots",
    )
    shares = ("train_share", "decode_share")
    wrong = [name for name in counts if getattr(question, name) < 1]
    wrong += [name for name in shares if not 0 < getattr(question, name) <= 1]
    given = [
        name
        for name in ("median_length", "devices_per_engine")
        if getattr(question, name) is not None
    ]
    wrong += [name for name in given if getattr(question, name) < 1]
    wrong += [
        name
        for name in ("sigma", "decode_step_s", "max_staleness")
        if (getattr(question, name) or 0) < 0
    ]
    if wrong:
        came = ", ".join(f"{name}={getattr(question, name)}" for name in wrong)
        yield (
            "expected counts of at least 1, shares between 0 and 1 and nothing below 0; came "
            f"{came}"
        )
        return
    try:
        device = known_device(question.device)
    except ValueError as error:
        yield f"device={question.device}: {error}"
        return
    if question.context <= question.prompt_tokens:
        yield (
            f"context={question.context} leaves not enough resources for an answer behind "
            f"prompt_tokens={question.prompt_tokens}"
        )
        return
    name, positions = question.model, model.max_position_embeddings
    if question.context > positions:
        yield f"context={question.context} is longer than the {positions} positions of model={name}"
    tensor = question.devices_per_engine or engine_size(question, model)
    engine, size = EngineCosts(model, device, tensor), tensor * device.memory_bytes / 1e9
    if tensor > device.per_host or engine.kv_tokens < question.context:
        yield (
            f"an engine of {tensor} x {question.device} ({size:,.0f} GB) cannot hold model={name}: "
            f"weights of {engine.weight_bytes / 1e9:,.1f} GB leave room for "
            f"{max(0, engine.kv_tokens):,} tokens of KV caches, a sequence of "
            f"context={question.context} needs as many; at most {device.per_host} devices are near "
            "enough to be one engine"
        )
        return
    need, rollout = trainer_size(model, device), question.rollout_devices
    if rollout is not None and not tensor <= rollout < question.devices:
        yield (
            f"rollout_devices={rollout} of devices={question.devices}: expected at least the "
            f"{tensor} of an engine, and some left to train"
        )
    elif rollout is not None and rollout % tensor:
        yield f"rollout_devices={rollout} does not divide into engines of {tensor} devices"
    elif question.devices - (rollout or tensor) < need:
        state = BYTES_PER_TRAINED_WEIGHT * model.num_params / 1e9
        yield (
            f"devices={question.devices} are too few for model={name}: {rollout or tensor} decode, "
            f"and training needs at least {need} x {question.device} for {state:,.0f} GB of "
            "parameters, gradients and moments beside activations"
        )


def engine_size(question: ClusterQuestion, model: ModelConfig) -> int:
    """Over how many devices an engine is cut."""
    if question.devices_per_engine is not None:
        return question.devices_per_engine
    device, size = known_device(question.device), 1
    while (
        size < device.per_host
        and EngineCosts(model, device, size).kv_tokens < MIN_SEQUENCES * question.context
    ):
        size *= 2
    return size


def trainer_size(model: ModelConfig, device: Device) -> int:
    """The fewest devices that can train."""
    size = 1
    while not TrainerCosts(model, device, size).fits:
        size += 1
    return size


def by_balance(devices: int, generate_s: float, train_s: float) -> list[int]:
    """How many of the devices decode, of every split, best first: by what the slower side takes for
    a batch, given the device-seconds of generating it and of training on it. Best is about `devices
    * generate_s / (generate_s + train_s)`.
    """
    return sorted(
        range(1, devices),
        key=lambda rollout: max(generate_s / rollout, train_s / (devices - rollout)),
    )


def stage_seconds(
    question: ClusterQuestion, model: ModelConfig, tensor: int
) -> tuple[float, float]:
    """Device-seconds of generating a batch in full engines, and of training on it, in closed
    form.
    """
    device, efficiency, longest = (
        known_device(question.device),
        _efficiency(question),
        question.context - question.prompt_tokens,
    )
    engine, mean = (
        EngineCosts(model, device, tensor, efficiency),
        capped_mean(_lengths(question), longest),
    )
    context = question.prompt_tokens + mean / 2
    live = max(1, min(question.slots, int(0.9 * engine.kv_tokens / context)))
    step = engine.step(live)
    samples = question.groups_per_batch * question.samples_per_group
    generate_s = samples * mean / live * (step.fixed_s + step.context_s * live * context) * tensor
    length = question.prompt_tokens + mean
    one = replace(
        TrainerCosts(model, device, 1, efficiency), efficiency=replace(efficiency, update_s=0.0)
    )
    return generate_s, one.train_tokens_s(samples * length, samples * length**2 / 2)


def _splits(question: ClusterQuestion, model: ModelConfig, tensor: int) -> list[int]:
    """Rollout devices of the splits to simulate: the one asked for, or some around the balanced
    one.
    """
    if question.rollout_devices is not None:
        return [question.rollout_devices]
    need = trainer_size(model, known_device(question.device))
    unit = max(tensor, question.devices // NUM_UNITS // tensor * tensor)
    generate_s, train_s = stage_seconds(question, model, tensor)
    most = question.devices - need
    whole = (
        rollout
        for rollout in by_balance(question.devices, generate_s, train_s)
        if rollout % unit == 0 and rollout <= most
    )
    middle = next(whole, most // tensor * tensor)
    around = (middle + shift * unit for shift in range(-3, 4))
    return [rollout for rollout in around if tensor <= rollout <= most]


def _wider(question: ClusterQuestion, best: Candidate) -> list[int]:
    """Numbers of devices that an engine may be cut over beside the fewest, unless one was asked
    for.
    """
    most = (
        0
        if question.devices_per_engine
        else min(known_device(question.device).per_host, best.rollout_devices)
    )
    tensor = best.devices_per_engine
    return [
        wider
        for wider in (2 * tensor, 4 * tensor)
        if wider <= most and best.rollout_devices % wider == 0
    ]


def _simulated(
    question: ClusterQuestion,
    model: ModelConfig,
    rollout: int,
    tensor: int,
    max_staleness: int | None,
) -> Candidate:
    """A split, simulated on a part of the cluster that is as large a part of the batch."""
    train = question.devices - rollout
    shrink = max(1, question.groups_per_batch // MIN_GROUPS)
    while math.gcd(rollout // tensor, train) % shrink or question.groups_per_batch % shrink:
        shrink -= 1
    groups = question.groups_per_batch // shrink
    slots = question.slots * tensor // engine_size(question, model)
    cluster = Cluster(
        model,
        known_device(question.device),
        rollout // shrink,
        train // shrink,
        tensor,
        efficiency=_efficiency(question),
        # As many slots a device, over however many an engine is cut.
        behavior=EngineBehavior(
            slots, question.on_update, tokens_per_entry=max(1, question.context // 256)
        ),
    )
    # As many as fill the slots, and a batch at least: engines must not run dry for want of groups.
    seats = slots * cluster.num_engines // question.samples_per_group
    workload = Workload(
        _lengths(question),
        question.context - question.prompt_tokens,
        question.prompt_tokens,
        groups,
        question.samples_per_group,
        max_staleness,
        max_running_groups=max(groups, 2 * seats),
    )
    if max_staleness == 0:
        outcome = simulate(cluster, workload, num_steps=3, first_counted=1)
    else:
        outcome = simulate(cluster, workload, num_steps=8, first_counted=4)
    return Candidate(rollout, train, tensor, outcome, shrink * outcome.trained_per_s)


def _lengths(question: ClusterQuestion) -> LogNormal:
    return LogNormal(float(question.median_length or max(1, question.context // 4)), question.sigma)


def _efficiency(question: ClusterQuestion) -> Efficiency:
    return Efficiency(
        decode_bandwidth=question.decode_share,
        train_flops=question.train_share,
        step_s=question.decode_step_s,
    )
