"""Invariants of the whole loop, on one device, and on a train and a rollout mesh of four each."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from run_laws import broken_laws
from tiny_runs import write_tiny_experts, write_tiny_policy

from areal_jax import loop
from areal_jax.checkpoint.config import CHECKPOINTS, CheckpointConfig
from areal_jax.checkpoint.recovery import decode
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.cli.train import main
from areal_jax.cluster.signals import Stopped
from areal_jax.cluster.watchdog import Stalled
from areal_jax.config.experiment import Experiment, PreferenceExperiment, SFTExperiment
from areal_jax.config.load import CONFIG_FILE, write_config
from areal_jax.data.config import Files, HeldOut, Synthetic
from areal_jax.data.pipeline import TaskStream
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.errors import CorruptedState
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.metrics import jsonl, names
from areal_jax.metrics.config import MetricsConfig
from areal_jax.models import hf, lora
from areal_jax.models.config import LoRA, PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Group, RewardResult, Sampling, StepResult, Task
from areal_jax.rl.config import GAE, PPO, CustomLoss, Reference
from areal_jax.rollout import controller
from areal_jax.rollout.buffer import Buffer
from areal_jax.rollout.calls import JournaledGenerate
from areal_jax.rollout.config import RolloutConfig
from areal_jax.run.build import Run, build_run
from areal_jax.run.make_plan import make_plan
from areal_jax.run.plan import Plan
from areal_jax.run.plan_report import plan_text
from areal_jax.run.start import start
from areal_jax.run.trainer import initial_critic, initial_weights, rl_trainer
from areal_jax.trainer.config import Critic, OptimizerConfig, TrainerConfig
from areal_jax.trainer.frozen import FrozenPolicy
from areal_jax.trainer.ppo import Trainer
from areal_jax.workflows.config import Agent, MultiTurn
from areal_jax.workflows.single_turn import SingleTurn

ONE = PlacementConfig()
# Two engines of two devices each.
FOUR_AND_FOUR = PlacementConfig(
    train_devices=4, train_fsdp=2, train_tensor=2, rollout_devices=4, engines=2
)
PLACEMENTS = pytest.mark.parametrize(
    "placement", [ONE, FOUR_AND_FOUR], ids=["one device", "4 + 4 devices"]
)


async def grade_by_parity(task: Task, answer: str) -> RewardResult:
    """Grade answers of even length as correct: half of a random policy's answers."""
    return RewardResult("wrong" if len(answer) % 2 else "correct")


@pytest.fixture
def tiny_policy(tmp_path: Path) -> Path:
    """Make a Hugging Face folder with a small policy of random weights, for fast steps."""
    return write_tiny_policy(tmp_path / "tiny")


def experiment(
    policy: Path, placement: PlacementConfig, *, num_steps: int, max_staleness: int | None
) -> Experiment:
    return Experiment(
        name="law",
        seed=3,
        num_steps=num_steps,
        policy=PolicyConfig(path=str(policy), random_init=True),
        tasks=Synthetic(num_tasks=1000),
        placement=placement,
        rollout=RolloutConfig(
            groups_per_batch=4,
            samples_per_group=4,
            max_staleness=max_staleness,
            max_running_groups=16,
            batch_timeout_s=120.0,
        ),
        engine=EngineConfig(
            num_slots=16,
            max_prompt_tokens=80,
            max_new_tokens=16,
            steps_per_dispatch=4,
            prefill_chunk_tokens=32,
        ),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0),
            num_mini_batches=2,
            rows_per_micro_batch=2,
        ),
        evaluation=EvaluationConfig(every_steps=0),
        metrics=MetricsConfig(tensorboard=False, trace=False, progress=False),
    )


E = TypeVar("E", SFTExperiment, PreferenceExperiment)


def from_examples(kind: type[E], policy: Path, examples: Path, *, num_steps: int) -> E:
    return kind(
        name="law",
        seed=3,
        num_steps=num_steps,
        policy=PolicyConfig(path=str(policy), random_init=True),
        placement=PlacementConfig(train_devices=1),
        examples=Files(path=str(examples)),
        examples_per_batch=4,
        eval_examples=HeldOut(share=0.2),
        heldout_every_steps=2,
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0),
            row_tokens=64,
            rows_per_micro_batch=2,
            remat="none",
        ),
        evaluation=EvaluationConfig(every_steps=0),
        metrics=MetricsConfig(tensorboard=False, progress=False),
    )


def planned(exp: Experiment) -> Plan:
    """Make the plan; by default on one of the eight devices of tests."""
    if exp.placement != ONE:
        return with_known_engines(make_plan(exp))
    plan = make_plan(
        chz.replace(exp, placement=PlacementConfig(train_devices=1, rollout_devices=1))
    )
    meshes = make_meshes(ONE, jax.devices()[:1])
    return with_known_engines(
        replace(
            plan,
            experiment=exp,
            train_mesh=meshes.train,
            rollout_mesh=meshes.rollout,
            engines=(DecodeEngine(plan.policy, meshes.rollout, exp.engine, plan.compute_dtype),),
        )
    )


KNOWN_ENGINES: dict[Any, tuple[DecodeEngine, ...]] = {}


def with_known_engines(plan: Plan) -> Plan:
    """Reuse engines with compiled programs where they exist; they keep no other state."""
    engines = plan.engines
    key = (
        plan.policy,
        plan.compute_dtype,
        tuple(each.mesh for each in engines),
        repr(engines[0].config),
    )
    return replace(plan, engines=KNOWN_ENGINES.setdefault(key, plan.engines))


def run_loop(plan: Plan, folder: Path, *, resume: bool = False) -> dict[str, np.ndarray]:
    """Train with the loop; return the final parameters."""

    async def go() -> dict[str, np.ndarray]:
        async with build_run(plan, folder, resume=resume, make_trainer=rl_trainer) as run:
            run.grader = run.evaluation.grader = grade_by_parity
            exp = plan.experiment
            assert isinstance(exp, Experiment)
            await loop.train(run, exp)
            return host(run.trainer)

    return asyncio.run(go())


def host(trainer: Trainer) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(trainer.params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def samples(folder: Path) -> list[dict]:
    return list(jsonl.read(folder / "samples.jsonl"))


async def plain_synchronous_loop(run: Run[Trainer], exp: Experiment) -> None:
    """Train synchronously: sample a batch task by task, train on it, update the weights, repeat."""
    tokenizer = run.plan.tokenizer
    workflow = SingleTurn(tokenizer, exp.rollout.samples_per_group, exp.rewards)
    sampling = Sampling(
        exp.engine.max_new_tokens, exp.engine.temperature, stop_token_ids=tokenizer.stop_token_ids
    )
    tasks = TaskStream(run.plan.tasks.tasks, exp.seed)
    size = exp.rollout.groups_per_batch
    for version in range(exp.num_steps):
        groups = []
        for i in range(size):
            task, number = next(tasks), version * size + i
            calls = JournaledGenerate(run.engine, version, sampling, exp.seed, number, {})
            groups.append(Group(number, task, await workflow(task, calls, run.grader)))
        run.trainer.step(groups)
        run.weight_channel.publish(version + 1, run.trainer.params)


@PLACEMENTS
@pytest.mark.slow
def test_synchronous_loop_is_the_plain_one_also_when_it_is_resumed(
    tiny_policy: Path, tmp_path: Path, placement: PlacementConfig
) -> None:
    exp = experiment(tiny_policy, placement, num_steps=5, max_staleness=0)

    async def plain() -> dict[str, np.ndarray]:
        plan = planned(exp)
        async with build_run(
            plan, tmp_path / "plain", resume=False, make_trainer=rl_trainer
        ) as run:
            run.grader = run.evaluation.grader = grade_by_parity
            await plain_synchronous_loop(run, exp)
            return host(run.trainer)

    before = host_initial(exp)
    ours, textbook = run_loop(planned(exp), tmp_path / "whole"), asyncio.run(plain())
    assert any((ours[name] != before[name]).any() for name in ours)
    for name, leaf in textbook.items():
        np.testing.assert_array_equal(ours[name], leaf, err_msg=name)
    rows = samples(tmp_path / "whole")
    assert all(
        version == row["version"] for row in rows for version in row["versions"] if version >= 0
    )

    # Cosine or not, the schedule spans num_steps: a constant one lets a shorter run be the
    # beginning of a longer one.
    run_loop(planned(chz.replace(exp, num_steps=3)), tmp_path / "parts")
    resumed = run_loop(planned(exp), tmp_path / "parts", resume=True)
    for name, leaf in ours.items():
        np.testing.assert_array_equal(resumed[name], leaf, err_msg=name)
    kept = ("version", "group", "number", "tokens", "behave_logp", "versions", "reward")
    assert [[row[name] for name in kept] for row in samples(tmp_path / "parts")] == [
        [row[name] for name in kept] for row in rows
    ]


def host_initial(exp: Experiment) -> dict[str, np.ndarray]:
    params = planned(exp).policy.init(jax.random.key(exp.seed))
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@PLACEMENTS
@pytest.mark.slow
def test_asynchronous_steps_train_each_group_once_and_in_time(
    tiny_policy: Path, tmp_path: Path, placement: PlacementConfig
) -> None:
    max_staleness, num_steps = 2, 25
    exp = experiment(tiny_policy, placement, num_steps=num_steps, max_staleness=max_staleness)
    run_loop(planned(exp), tmp_path)
    rows = samples(tmp_path)
    ages = [
        row["version"] - version
        for row in rows
        for place, version in enumerate(row["versions"])
        if version >= 0 and place not in set(row["stale"])
    ]
    assert min(ages) >= 0 and max(ages) <= max_staleness
    assert max(ages) > 0, "nothing was stale: this run was not asynchronous"
    assert (
        Counter(row["group"] for row in rows).most_common(1)[0][1] == exp.rollout.samples_per_group
    )
    assert len(rows) == num_steps * exp.rollout.groups_per_batch * exp.rollout.samples_per_group
    # A batch has the oldest finished groups, so that no group is delayed for long.
    trained = sorted({row["group"] for row in rows})
    started = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])[
        "rollout/started"
    ]
    missing = set(range(trained[-1])) - set(trained)
    assert len(trained) + len(missing) <= started
    assert (
        len(missing)
        <= exp.rollout.max_running_groups + (max_staleness + 1) * exp.rollout.groups_per_batch
    )
    assert len({row["task"] for row in rows}) == len(trained), (
        "within one epoch every task comes once"
    )
    metrics = [
        row for row in jsonl.read(tmp_path / "metrics.jsonl") if "trainer/num_updates" in row
    ]
    assert [row["version"] for row in metrics] == list(range(num_steps))
    assert metrics[-1]["trainer/num_compilations"] == metrics[0]["trainer/num_compilations"]
    assert all(row["rollout/compilations"] == 0 for row in metrics[1:])


@pytest.mark.parametrize(
    ("max_staleness", "ends_at"),
    [(2, 3), (0, 4)],
    ids=["while a step is trained", "as a batch is finished"],
)
@pytest.mark.slow
def test_stop_and_resume_lose_and_repeat_no_task(
    tiny_policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_staleness: int,
    ends_at: int,
) -> None:
    exp = experiment(tiny_policy, ONE, num_steps=6, max_staleness=max_staleness)
    size, plan = exp.rollout.groups_per_batch, planned(exp)

    async def stopped() -> int:
        async with build_run(plan, tmp_path, resume=False, make_trainer=rl_trainer) as run:
            run.grader = run.evaluation.grader = grade_by_parity
            train_step, event_loop = run.trainer.step, asyncio.get_running_loop()
            gate, buffer = controller.open_gate(exp.rollout, 0)
            put = buffer.put

            def step(groups: Sequence[Group]) -> StepResult:
                if run.trainer.version == 2 and max_staleness:
                    # The next batch is ready when the loop looks for it, and so is the request to
                    # stop.
                    until_s = time.monotonic() + 60
                    while len(buffer) < size and time.monotonic() < until_s:
                        time.sleep(0.01)
                    event_loop.call_soon_threadsafe(run.stop.set)
                return train_step(groups)

            def stopping_put(group: Group) -> None:
                put(group)
                # Synchronous, the loop waits for this batch: it has it in the turn in which it is
                # to stop.
                if run.trainer.version == 3 and len(buffer) == size and not max_staleness:
                    run.stop.set()

            monkeypatch.setattr(run.trainer, "step", step)
            monkeypatch.setattr(buffer, "put", stopping_put)
            with monkeypatch.context() as patch:
                patch.setattr(loop, "open_gate", lambda *_: (gate, buffer))
                with pytest.raises(Stopped):
                    await loop.train(run, exp)
            return run.trainer.version

    assert asyncio.run(stopped()) == ends_at
    run_loop(plan, tmp_path, resume=True)
    assert (
        broken_laws(tmp_path, num_steps=6, groups=4, samples=4, max_staleness=max_staleness) == []
    )


@pytest.mark.slow
def test_multi_turn_runs_train_and_resume(tiny_policy: Path, tmp_path: Path) -> None:
    exp = experiment(tiny_policy, ONE, num_steps=4, max_staleness=0)
    exp = chz.replace(
        exp,
        workflow=MultiTurn(max_turns=3, turn_discount=0.5, feedback="No."),
        engine=chz.replace(exp.engine, max_prompt_tokens=160),
    )
    whole = run_loop(planned(exp), tmp_path / "whole")
    run_loop(planned(chz.replace(exp, num_steps=2)), tmp_path / "parts")
    resumed = run_loop(planned(exp), tmp_path / "parts", resume=True)
    # Turns are prefilled together with other requests, which changes rounding.
    for name, leaf in whole.items():
        np.testing.assert_allclose(resumed[name], leaf, atol=1e-4, err_msg=name)
    rows = samples(tmp_path / "whole")
    kept = ("version", "group", "number", "tokens", "versions", "reward", "grade")
    assert [[row[name] for name in kept] for row in samples(tmp_path / "parts")] == [
        [row[name] for name in kept] for row in rows
    ]
    # A turn begins where a token that was sampled follows one that was not.
    turns = [
        int((np.diff(np.array(row["versions"]) >= 0) & (np.array(row["versions"])[1:] >= 0)).sum())
        for row in rows
    ]
    assert set(turns) == {1, 2, 3}
    # Right at once 5, then 0, then -2.5; all that are wrong have had three turns.
    worth = {(1, "correct"): 5.0, (2, "correct"): 0.0, (3, "correct"): -2.5, (3, "wrong"): -5.0}
    assert [row["reward"] for row in rows] == [
        worth[count, row["grade"]] for count, row in zip(turns, rows, strict=True)
    ]


IN_FORMAT = """
from openai import AsyncOpenAI

async def agent(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as policy:
        reply = await policy.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": task.prompt[0].content}],
            extra_body={"structured_outputs": {"regex": "[0-9]{2,4}!"}},
        )
    return reply.choices[0].message.content[0] in "02468"
"""


@pytest.mark.slow
def test_answers_in_a_format_train_with_the_policys_logprobs(
    tiny_policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "agents.py").write_text(IN_FORMAT)
    exp = chz.replace(
        experiment(tiny_policy, ONE, num_steps=2, max_staleness=0),
        workflow=Agent(function=f"{tmp_path}/agents.py:agent"),
    )
    plan = planned(exp)
    run_loop(plan, tmp_path / "run")
    rows, texts = samples(tmp_path / "run"), list[str]()
    for row in rows:
        is_sampled = np.array(row["versions"]) >= 0
        texts.append(plan.tokenizer.decode(np.array(row["tokens"], np.int32)[is_sampled]))
    assert len(rows) == 32 and len(set(texts)) > 8
    assert all(re.fullmatch("[0-9]{2,4}!", text) for text in texts), texts
    # Sampled among the tokens of the format; the trainer finds the log-probs that are recorded.
    for step in jsonl.read(tmp_path / "run" / "metrics.jsonl"):
        assert step["trainer/log_ratio_rms"] < 1e-5


@pytest.mark.parametrize("adapter", [None, LoRA(rank=2)], ids=["all parameters", "an adapter"])
@pytest.mark.slow
def test_resumed_run_keeps_its_initial_reference(tiny_policy: Path, adapter: LoRA | None) -> None:
    exp = experiment(tiny_policy, ONE, num_steps=4, max_staleness=0)
    exp = chz.replace(
        exp,
        trainer=chz.replace(exp.trainer, reference=Reference()),
        policy=chz.replace(exp.policy, lora=adapter),
    )
    plan = planned(exp)
    params, base = initial_weights(plan)
    trainer = rl_trainer(plan, params, base)
    later = jax.tree.map(lambda leaf: leaf + 1, jax.device_get(trainer.state))
    trainer.restore(later)
    reference = trainer._reference
    assert isinstance(reference, FrozenPolicy)
    jax.tree.map(np.testing.assert_array_equal, reference._params, base or params)
    assert not np.array_equal(jax.tree.leaves(trainer.params)[0], jax.tree.leaves(params)[0])
    # With an adapter it takes no additional memory.
    assert base is None or reference._params["embed"] is base["embed"]


@pytest.mark.parametrize(
    ("adapter", "falls_to"),
    [(None, 0.8), (LoRA(rank=4), 0.97)],
    ids=["all parameters", "an adapter"],
)
@pytest.mark.slow
def test_resumed_fine_tuning_is_bit_exact_and_evaluates(
    tiny_policy: Path, tmp_path: Path, adapter: LoRA | None, falls_to: float
) -> None:
    examples = tmp_path / "sums.jsonl"
    rows = [{"question": f"{i}+{j}?", "answer": f"{i + j}"} for i in range(5) for j in range(5)]
    examples.write_text("\n".join(map(json.dumps, [*rows, {"question": "Unanswered?"}])))
    exp = from_examples(SFTExperiment, tiny_policy, examples, num_steps=8)
    exp = chz.replace(exp, policy=chz.replace(exp.policy, lora=adapter))
    plan = make_plan(exp)
    assert "20 examples" in plan_text(
        plan
    ) and "1 no answer of the assistant (sums.jsonl:26)" in plan_text(plan)
    assert "5 examples from those held out" in plan_text(plan)
    start(plan, tmp_path / "whole", resume=False)
    # A constant schedule lets a shorter run be the beginning of a longer one. 20 examples are 5
    # steps: a second epoch begins.
    start(make_plan(chz.replace(exp, num_steps=3)), tmp_path / "parts", resume=False)
    start(plan, tmp_path / "parts", resume=True)

    rows = {
        folder: list(jsonl.read(tmp_path / folder / "metrics.jsonl"))
        for folder in ("whole", "parts")
    }
    kept = ("version", "trainer/loss", "trainer/grad_norm", names.EVAL_LOSS, names.PERPLEXITY)
    whole, parts = (
        [{name: row[name] for name in kept if name in row} for row in rows[folder]]
        for folder in ("whole", "parts")
    )
    # The shorter run also evaluated its result, version 3, in a row that the resumed run removed.
    assert parts == whole
    measured = {row["version"]: row[names.EVAL_LOSS] for row in whole if names.EVAL_LOSS in row}
    assert list(measured) == [0, 2, 4, 6, 8]
    assert measured[8] < falls_to * measured[0]
    # Nothing is decoded, and no metric of decoding exists.
    assert not [
        name
        for row in rows["whole"]
        for name in row
        if name.startswith(("rollout/", "weights/", "rewards/"))
    ]
    files = [
        "policy/model.safetensors",
        *(["adapter/adapter_model.safetensors"] if adapter else []),
    ]
    for file in files:
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


@pytest.mark.slow
def test_preference_training_resumes_bit_exact_with_its_reference(
    tiny_policy: Path, tmp_path: Path
) -> None:
    examples = tmp_path / "sums.jsonl"
    rows = [
        {"prompt": f"{i}+{j}?", "chosen": f"{i + j}", "rejected": f"{i + j + 1}"}
        for i in range(5)
        for j in range(5)
    ]
    examples.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "Alone?", "chosen": "1"}])))
    plan = make_plan(from_examples(PreferenceExperiment, tiny_policy, examples, num_steps=4))
    assert "20 pairs" in plan_text(plan) and "1 no rejected answer (sums.jsonl:26)" in plan_text(
        plan
    )
    start(plan, tmp_path / "whole", resume=False)
    start(
        make_plan(from_examples(PreferenceExperiment, tiny_policy, examples, num_steps=1)),
        tmp_path / "parts",
        resume=False,
    )
    start(plan, tmp_path / "parts", resume=True)
    rows = {
        folder: list(jsonl.read(tmp_path / folder / "metrics.jsonl"))
        for folder in ("whole", "parts")
    }
    kept = (
        "version",
        "trainer/loss",
        "trainer/margin",
        "trainer/grad_norm",
        names.EVAL_LOSS,
        names.ACCURACY,
    )
    whole, parts = (
        [{name: row[name] for name in kept if name in row} for row in rows[folder]]
        for folder in ("whole", "parts")
    )
    assert parts == whole
    measured = {row["version"]: row[names.EVAL_LOSS] for row in whole if names.EVAL_LOSS in row}
    # -log sigmoid(0): the reference is the policy itself.
    assert list(measured) == [0, 2, 4] and measured[0] == pytest.approx(0.693147, abs=1e-5)
    # No rule of sums is learnt in four updates; that the policy moves away from the reference is
    # enough here.
    assert len(set(measured.values())) == 3


@chz.chz
class Diverging(CustomLoss):
    """Infinite in the first update of a step, or in later ones, where theta/proximal is not 1."""

    at_first: bool = chz.field(default=False, doc="which of them")

    def gain(self, ratio: Any, advantages: Any, logp: Any) -> Any:
        return jnp.where((ratio == 1) == self.at_first, jnp.inf, ratio * advantages)


class OneStep(NamedTuple):
    """A run of one step."""

    exp: Experiment
    folder: Path
    params: dict[str, np.ndarray]
    trainer: Trainer
    """Of the same policy."""


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> OneStep:
    folder = tmp_path_factory.mktemp("one_step")
    exp = experiment(write_tiny_policy(folder / "tiny"), ONE, num_steps=1, max_staleness=0)
    exp = chz.replace(exp, checkpoint=CheckpointConfig(keep=1, export_hf=False))
    params = run_loop(planned(exp), folder / "run")
    plan = planned(exp)
    return OneStep(exp, folder / "run", params, rl_trainer(plan, *initial_weights(plan)))


@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.slow
def test_divergence_saves_no_checkpoint_of_half_a_step(
    one_step: OneStep, tmp_path: Path, at_first: bool
) -> None:
    exp, folder = one_step.exp, tmp_path / "run"
    shutil.copytree(one_step.folder, folder)
    diverging = chz.replace(
        exp, num_steps=3, trainer=chz.replace(exp.trainer, loss=Diverging(at_first=at_first))
    )
    expected, sentence = (
        (FloatingPointError, "last good version is 1")
        if at_first
        else (CorruptedState, "1 before it were")
    )
    with pytest.raises(expected, match=sentence) as divergence:
        run_loop(planned(diverging), folder, resume=True)
    assert type(divergence.value) is expected

    trainer, store = one_step.trainer, CheckpointStore(folder / CHECKPOINTS, keep=1)
    state, beside = store.restore(None, trainer.state)
    store.close()
    trainer.restore(state)
    assert trainer.version == 1
    for name, leaf in one_step.params.items():
        np.testing.assert_array_equal(host(trainer)[name], leaf, err_msg=name)
    # A batch that was not trained on is kept if another loss can train on it.
    assert len(decode(beside)[0].buffered) == (exp.rollout.groups_per_batch if at_first else 0)
    run_loop(planned(chz.replace(exp, num_steps=2)), folder, resume=True)
    assert len({row["task"] for row in samples(folder)}) == 2 * exp.rollout.groups_per_batch


@pytest.mark.parametrize(
    ("every_steps", "left"),
    [(0, r"no checkpoint was saved, so there is nothing .*\n$"), (1, r"--resume=.* version 1\n$")],
)
@pytest.mark.slow
def test_divergence_names_the_checkpoint_to_resume_from(
    tiny_policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    every_steps: int,
    left: str,
) -> None:
    examples = tmp_path / "sums.jsonl"
    examples.write_text(
        "\n".join(json.dumps({"question": f"{i}+1?", "answer": f"{i + 1}"}) for i in range(10))
    )
    exp = from_examples(SFTExperiment, tiny_policy, examples, num_steps=4)
    optimizer = OptimizerConfig(learning_rate=1e30, warmup_fraction=0.0)
    exp = chz.replace(
        exp,
        trainer=chz.replace(exp.trainer, optimizer=optimizer),
        checkpoint=CheckpointConfig(every_steps=every_steps),
    )
    run = tmp_path / "run"
    run.mkdir()
    write_config(exp, run / CONFIG_FILE)
    assert main([f"--resume={run}"]) == 1
    assert re.search(rf"training diverged: step 1: .*{left}", capsys.readouterr().err)


OF_EXPERTS = LoRA(
    rank=4, targets=("q_proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj")
)
ADAPTED = {
    "dense": [f"['attn']['{name}']" for name in "qkvo"]
    + [f"['mlp']['{name}']" for name in ("gate", "up", "down")],
    "experts": ["['attn']['q']"] + [f"['mlp']['expert_{name}']" for name in ("gate", "up", "down")],
}


def with_adapter(exp: Experiment, **changes: object) -> Experiment:
    return chz.replace(exp, policy=chz.replace(exp.policy, **({"lora": LoRA(rank=4)} | changes)))


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [("dense", LoRA(rank=4)), ("experts", OF_EXPERTS)],
    ids=["dense", "experts"],
)
@pytest.mark.slow
def test_adapter_run_resumes_bit_exact_and_exports_its_adapter(
    tmp_path: Path, kind: str, adapter: LoRA
) -> None:
    folder = tmp_path / "tiny"
    (write_tiny_experts if kind == "experts" else write_tiny_policy)(folder)
    policy = Policy(hf.read_config(folder), adapter)
    base = policy.init(jax.random.key(5))
    hf.save(folder, policy, base)
    exp = with_adapter(
        experiment(folder, FOUR_AND_FOUR, num_steps=3, max_staleness=0),
        random_init=False,
        lora=adapter,
    )
    whole = run_loop(planned(exp), tmp_path / "whole")
    run_loop(planned(chz.replace(exp, num_steps=2)), tmp_path / "parts")
    resumed = run_loop(planned(exp), tmp_path / "parts", resume=True)
    assert set(whole) == {
        f"['layers']{matrix}['{letter}']" for matrix in ADAPTED[kind] for letter in "ab"
    }
    for name, leaf in whole.items():
        np.testing.assert_array_equal(resumed[name], leaf, err_msg=name)
        assert leaf.any()
    # A weight update transfers the adapter only, in float32, to each of two engines.
    rows = [
        row
        for row in jsonl.read(tmp_path / "whole" / "metrics.jsonl")
        if "weights/transfer_bytes" in row
    ]
    assert rows[-1]["weights/transfer_bytes"] == 2 * sum(leaf.nbytes for leaf in whole.values())

    here = SingleDeviceSharding(jax.devices()[0])
    loaded = lora.load(
        tmp_path / "whole" / "adapter", policy, jax.tree.map(lambda _: here, lora.abstract(policy))
    )
    merged = hf.load(
        tmp_path / "whole" / "policy", policy, jax.tree.map(lambda _: here, policy.abstract())
    )
    # On four devices the sums over the rank may round otherwise than on one.
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
        merged,
        lora.merge(policy, base, loaded),
    )
    again = with_adapter(exp, lora=None, adapter=str(tmp_path / "whole" / "adapter"))
    params, frozen = initial_weights(planned(again))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        np.testing.assert_array_equal(leaf, whole[jax.tree_util.keystr(path)])
    jax.tree.map(np.testing.assert_array_equal, frozen, base)


@pytest.mark.slow
def test_critic_starts_from_the_policy_trunk_and_is_exported(
    tiny_policy: Path, tmp_path: Path
) -> None:
    exp = experiment(tiny_policy, ONE, num_steps=2, max_staleness=0)
    exp = chz.replace(exp, trainer=chz.replace(exp.trainer, loss=PPO(), advantages=GAE()))
    plan = planned(exp)
    # The policy's config names no padding token; a scalar head gets the tokenizer's.
    critic = Policy(replace(plan.policy.config, readout="TokenClassification", pad_token_id=0))
    assert plan.critic == critic
    assert (
        ", with a fresh head" in plan_text(plan)
        and plan.train_bytes()["critic"] > 3 * 4 * critic.config.num_params
    )
    weights = initial_critic(plan)
    assert weights is not None and not weights.params["value"].any()
    began = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights.params)
    }
    for name, leaf in host_initial(exp).items():
        # The same samples, which another program may round differently.
        np.testing.assert_allclose(began.get(name, leaf), leaf, rtol=1e-6, err_msg=name)
    run_loop(plan, tmp_path)
    rows = [row for row in jsonl.read(tmp_path / "metrics.jsonl") if "trainer/value_loss" in row]
    assert len(rows) == 2 and rows[0]["trainer/values"] == 0.0 and rows[1]["trainer/values"] != 0.0
    # Its output is a critic that can be trained further.
    gone_on = chz.replace(exp.trainer, critic=Critic(path=str(tmp_path / "critic")))
    again = planned(chz.replace(exp, trainer=gone_on))
    assert ", with a fresh head" not in plan_text(again)
    learnt = initial_critic(again)
    assert learnt is not None and learnt.params["value"].all() and learnt.params["value_bias"].all()


@pytest.mark.slow
def test_pinned_evaluation_has_one_version_during_training(
    tiny_policy: Path, tmp_path: Path
) -> None:
    exp = chz.replace(
        experiment(tiny_policy, ONE, num_steps=12, max_staleness=4),
        eval_tasks=Synthetic(split="heldout", num_tasks=48),
        evaluation=EvaluationConfig(every_steps=2, samples_per_task=2),
    )
    run_loop(planned(exp), tmp_path)
    rows = list(jsonl.read(tmp_path / "metrics.jsonl"))
    evaluations = [row for row in rows if "evaluation/newest_version" in row]
    assert [row["evaluation/newest_version"] for row in evaluations] == [
        row["version"] for row in evaluations
    ]
    assert evaluations[0]["version"] == 0 and evaluations[-1]["version"] == 12
    # Training went on: an evaluation was written after a step from a later version.
    at = [rows.index(row) for row in evaluations[1:-1]]
    assert any(
        row["version"] >= rows[place]["version"]
        for place in at
        for row in rows[:place]
        if row not in evaluations
    )


@pytest.mark.slow
def test_failed_last_evaluation_keeps_policy_and_report(tiny_policy: Path, tmp_path: Path) -> None:
    exp = chz.replace(
        experiment(tiny_policy, ONE, num_steps=2, max_staleness=0),
        eval_tasks=Synthetic(split="heldout", num_tasks=4),
        evaluation=EvaluationConfig(every_steps=100),
    )

    async def go() -> None:
        async with build_run(planned(exp), tmp_path, resume=False, make_trainer=rl_trainer) as run:

            async def grader(task: Task, answer: str) -> RewardResult:
                if run.trainer.version == exp.num_steps:
                    raise OSError("no grader is left")
                return await grade_by_parity(task, answer)

            run.grader = run.evaluation.grader = grader
            await loop.train(run, exp)

    with pytest.raises(RuntimeError, match="all 4 tasks failed, the last: no grader is left"):
        asyncio.run(go())
    assert (tmp_path / "policy" / "model.safetensors").is_file()
    assert (tmp_path / "report.html").is_file() and (tmp_path / "learning_curve.png").is_file()


TWO = PlacementConfig(train_devices=1, rollout_devices=1)


def stalling(experiment: Experiment) -> Experiment:
    """Return the experiment with short limits of its watchdog."""
    launch = chz.replace(experiment.launch, stall_warning_s=2.0, stall_timeout_s=6.0)
    return chz.replace(
        experiment, launch=launch, rewards=chz.replace(experiment.rewards, timeout_s=5.0)
    )


@pytest.mark.slow
def test_a_run_without_progress_ends_with_a_checkpoint(
    tiny_policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exp = stalling(experiment(tiny_policy, TWO, num_steps=4, max_staleness=1))
    take = Buffer.take

    async def take_and_stall(buffer: Buffer, n: int, version: int) -> list[Group]:
        if version == 2:
            # From now on no sequence is admitted, though the engine thread continues.
            monkeypatch.setattr(EngineLoop, "_admit", lambda _engine_loop: None)
        return await take(buffer, n + 1000 * (version == 2), version)

    monkeypatch.setattr(Buffer, "take", take_and_stall)
    with pytest.raises(
        Stalled, match=r"no progress for launch\.stall_timeout_s=.*waits for the batch of version 2"
    ):
        start(make_plan(exp), tmp_path, resume=False)
    assert CheckpointStore(tmp_path / CHECKPOINTS, keep=1).latest_version() == 2
    named = [message for message in caplog.messages if message.startswith("no progress for ")]
    assert (
        len(named) == 1 and "engine 0 has version 2" in named[0] and "gate at version 2" in named[0]
    )


@pytest.mark.slow
def test_hanging_step_ends_the_run_without_its_checkpoint(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = stalling(experiment(tiny_policy, TWO, num_steps=4, max_staleness=1))
    step, never = Trainer.step, threading.Event()

    def step_and_stall(trainer: Trainer, groups: Sequence[Group]) -> StepResult:
        if trainer.version == 1:
            never.wait()
            raise RuntimeError("the test is over")
        return step(trainer, groups)

    monkeypatch.setattr(Trainer, "step", step_and_stall)
    try:
        with pytest.raises(Stalled, match=r"under way: trainer \(step 1\)") as caught:
            start(make_plan(exp), tmp_path, resume=False)
        assert caught.value.during == (("trainer", "step 1"),)
        assert CheckpointStore(tmp_path / CHECKPOINTS, keep=1).latest_version() is None
    finally:
        never.set()
        for thread in threading.enumerate():
            if thread.name == "trainer":
                thread.join()
