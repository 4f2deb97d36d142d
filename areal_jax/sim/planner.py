"""Cluster planner: simulate candidate splits of a cluster, and choose the fastest."""

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
from areal_jax.sim.simulation import Outcome, SimulatedCluster, Workload, simulate

MIN_SEQUENCES = 8
"""Number of the longest sequences that an engine holds at least: fewer use its bandwidth badly."""

WORTH_WIDENING = 1.02
"""Speed-up from which an engine is sharded over more devices than necessary."""

NUM_UNITS = 16
"""Granularity of splits: sixteenths of the cluster."""

MIN_GROUPS = 64
"""Minimum number of groups of a simulated batch, so that averages over lengths converge."""


@dataclass(frozen=True)
class Candidate:
    """A split and its simulated speed."""

    rollout_devices: int
    train_devices: int
    devices_per_engine: int
    outcome: Outcome
    tokens_per_s: float
    """Trained tokens per second of the whole cluster."""


@dataclass(frozen=True)
class ClusterPlan:
    """Result of the planner: the candidates, and the fastest of them."""

    question: ClusterQuestion
    model: ModelConfig
    device: Device
    candidates: tuple[Candidate, ...]
    best: Candidate
    synchronous: Candidate
    """The best split without staleness."""

    @property
    def hours(self) -> float:
        """Hours for the requested number of steps."""
        return self.question.steps * self.best.outcome.step_s / 3600

    def bound(self) -> str:
        """Describe the bottleneck."""
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
        other_shares = {
            cause: share for cause, share in shares.items() if cause not in ("decode", "idle")
        }
        cause, share = max(other_shares.items(), key=lambda item: item[1], default=("", 0.0))
        return f"generation: {waits}" + (
            f"; {share:.0%} of the engines' time is {cause}" if share > 0.05 else ""
        )

    def text(self) -> str:
        """Format the plan, one property per line."""
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
                f"{best.rollout_devices} rollout devices in {best.rollout_devices // tensor} "
                f"engines of {tensor}, {best.train_devices} train devices",
            ),
            (
                "memory",
                (
                    f"KV cache of {engine.kv_tokens:,} tokens per engine; {trainer / 1e9:,.1f} GB "
                    "of state per train device"
                ),
            ),
            (
                "speed",
                (
                    f"{best.tokens_per_s:,.0f} tokens trained per second, "
                    f"{best.outcome.step_s:,.0f} s per step"
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
                f"({self.synchronous.rollout_devices} rollout and "
                f"{self.synchronous.train_devices} train devices): {gain:.2f} times slower",
            ),
        )
        return "\n".join(f"{name:<12}  {line}" for name, line in lines)


def plan_cluster(question: ClusterQuestion, model: ModelConfig) -> ClusterPlan:
    """Find the fastest split for a model on a cluster.

    Raises:
        ConfigError: no split is possible; the message has the numbers.
    """
    if problems := list(find_obstacles(question, model)):
        raise ConfigError("\n".join(problems))
    device, tensor = known_device(question.device), engine_size(question, model)
    splits = _list_splits(question, model, tensor)
    candidates = tuple(
        _simulate_split(question, model, rollout, tensor, question.max_staleness)
        for rollout in splits
    )
    best = max(candidates, key=lambda candidate: candidate.tokens_per_s)
    for wider in _list_wider_engines(question, best):
        found = _simulate_split(
            question, model, best.rollout_devices, wider, question.max_staleness
        )
        if found.tokens_per_s > WORTH_WIDENING * best.tokens_per_s:
            best = found
    turns = (
        [_simulate_split(question, model, rollout, tensor, 0) for rollout in splits]
        if question.max_staleness != 0
        else candidates
    )
    synchronous = max(turns, key=lambda candidate: candidate.tokens_per_s)
    return ClusterPlan(question, model, device, candidates, best, synchronous)


def find_obstacles(question: ClusterQuestion, model: ModelConfig) -> Iterator[str]:
    """Find the reasons why no plan exists, each as a sentence with the numbers.

    The function has more than 60 lines because it is a list of checks, each of which needs the
    previous ones.
    """
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
        found = ", ".join(f"{name}={getattr(question, name)}" for name in wrong)
        yield (
            "expected counts of at least 1, shares between 0 and 1 and no negative value; found "
            f"{found}"
        )
        return
    try:
        device = known_device(question.device)
    except ValueError as error:
        yield f"device={question.device}: {error}"
        return
    if question.context <= question.prompt_tokens:
        yield (
            f"expected context to be above prompt_tokens={question.prompt_tokens}, found "
            f"context={question.context}; raise context or lower prompt_tokens"
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
            f"beside weights of {engine.weight_bytes / 1e9:,.1f} GB, the KV cache holds "
            f"{max(0, engine.kv_tokens):,} tokens, expected at least context={question.context}; "
            f"an engine has at most {device.per_host} devices, those with fast links"
        )
        return
    need, rollout = trainer_size(model, device), question.rollout_devices
    if rollout is not None and not tensor <= rollout < question.devices:
        yield (
            f"rollout_devices={rollout} of devices={question.devices}: expected at least the "
            f"{tensor} of an engine, and some for training"
        )
    elif rollout is not None and rollout % tensor:
        yield f"rollout_devices={rollout} does not divide into engines of {tensor} devices"
    elif question.devices - (rollout or tensor) < need:
        state = BYTES_PER_TRAINED_WEIGHT * model.num_params / 1e9
        yield (
            f"devices={question.devices} are too few for model={name}: expected "
            f"{rollout or tensor} rollout devices and at least {need} x {question.device} for "
            f"{state:,.0f} GB of "
            "parameters, gradients and moments, besides activations"
        )


def engine_size(question: ClusterQuestion, model: ModelConfig) -> int:
    """Return the number of devices that an engine is sharded over."""
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
    """Return the smallest number of devices that can train."""
    size = 1
    while not TrainerCosts(model, device, size).fits:
        size += 1
    return size


def rank_splits(devices: int, generate_s: float, train_s: float) -> list[int]:
    """Rank the numbers of rollout devices by the time of the slower side per batch, best first.

    The best is about `devices * generate_s / (generate_s + train_s)`.

    Args:
        devices: number of all devices.
        generate_s: device-seconds of generating a batch.
        train_s: device-seconds of training on it.
    """
    return sorted(
        range(1, devices),
        key=lambda rollout: max(generate_s / rollout, train_s / (devices - rollout)),
    )


def estimate_stage_seconds(
    question: ClusterQuestion, model: ModelConfig, tensor: int
) -> tuple[float, float]:
    """Estimate the device-seconds of generating a batch in full engines, and of training on it."""
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


def _list_splits(question: ClusterQuestion, model: ModelConfig, tensor: int) -> list[int]:
    """List the numbers of rollout devices to simulate: the given one, or those near balance."""
    if question.rollout_devices is not None:
        return [question.rollout_devices]
    need = trainer_size(model, known_device(question.device))
    unit = max(tensor, question.devices // NUM_UNITS // tensor * tensor)
    generate_s, train_s = estimate_stage_seconds(question, model, tensor)
    most = question.devices - need
    whole = (
        rollout
        for rollout in rank_splits(question.devices, generate_s, train_s)
        if rollout % unit == 0 and rollout <= most
    )
    middle = next(whole, most // tensor * tensor)
    around = (middle + shift * unit for shift in range(-3, 4))
    return [rollout for rollout in around if tensor <= rollout <= most]


def _list_wider_engines(question: ClusterQuestion, best: Candidate) -> list[int]:
    """List larger numbers of devices per engine to try; empty if the number is given."""
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


def _simulate_split(
    question: ClusterQuestion,
    model: ModelConfig,
    rollout: int,
    tensor: int,
    max_staleness: int | None,
) -> Candidate:
    """Simulate a split with cluster and batch scaled down by the same factor."""
    train = question.devices - rollout
    shrink = max(1, question.groups_per_batch // MIN_GROUPS)
    while math.gcd(rollout // tensor, train) % shrink or question.groups_per_batch % shrink:
        shrink -= 1
    groups = question.groups_per_batch // shrink
    slots = question.slots * tensor // engine_size(question, model)
    cluster = SimulatedCluster(
        model,
        known_device(question.device),
        rollout // shrink,
        train // shrink,
        tensor,
        efficiency=_efficiency(question),
        # Slots per device are constant, whatever the number of devices per engine.
        behavior=EngineBehavior(
            slots, question.on_update, tokens_per_entry=max(1, question.context // 256)
        ),
    )
    # Groups that fill all slots, twice, and at least a batch, so that no engine is idle.
    filling = slots * cluster.num_engines // question.samples_per_group
    workload = Workload(
        _lengths(question),
        question.context - question.prompt_tokens,
        question.prompt_tokens,
        groups,
        question.samples_per_group,
        max_staleness,
        max_running_groups=max(groups, 2 * filling),
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
