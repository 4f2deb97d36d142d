"""Environments with reset and step: episodes, their rewards, and what fails in them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
from tiny_runs import tiny_experiment, write_tiny_policy

import areal_jax
from areal_jax.checkpoint.recovery import decode, deserialize, encode, serialize
from areal_jax.config.load import load_experiment
from areal_jax.data.config import PromptConfig, Seeds
from areal_jax.data.sources import load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import ConfigError, first_error
from areal_jax.records import Completion, Group, Message, RolloutState, Sample, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rl.config import GAE, GroupNormalized
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.pipeline import SampleLimits, _trajectories, select_tokens
from areal_jax.workflows.config import Environment
from areal_jax.workflows.environment import EnvironmentFailed, EnvironmentHost, Opponent
from areal_jax.workflows.from_config import make_workflow

TOKENIZER = HFTokenizer.from_folder(Path(areal_jax.__file__).parent / "models" / "embedded")
RAW = RewardConfig(scale="raw")

ENVIRONMENTS = '''
import asyncio
import os
import time


class Count:
    """The policy is to name the numbers from the seed on; each right one earns 0.25."""

    def __init__(self, last=4):
        self.last = last

    def reset(self, seed):
        self.next, self.left = seed, self.last
        return f"First is {seed}.", {}

    def step(self, text):
        earned = 0.25 * (text == str(self.next))
        self.next, self.left = self.next + 1, self.left - 1
        return f"Next is {self.next}.", earned, self.left == 0, False, {}


class Parity(Count):
    def step(self, text):
        messages, _, terminated, truncated, info = super().step(text)
        return messages, 0.25 * (len(text) % 2), terminated, truncated, info


class Async(Count):
    async def reset(self, seed, options=None):
        await asyncio.sleep(0)
        super().reset(seed)
        return [{"role": "system", "content": options["task"].id}, {"role": "user", "content": "Go."}]

    async def step(self, text):
        return super().step(text)


class Faulty(Count):
    def step(self, text):
        if text == "hang":
            time.sleep(60)
        if text == "die":
            os._exit(3)
        if text == "raise":
            raise KeyError("a door")
        if text == "four":
            return "x", 0.0, True, {}
        if text == "array":
            return [1, 2], 0.0, True, False, {}
        if text == "nan":
            return "x", float("nan"), True, False, {}
        return super().step(text)


class Random(Count):
    def reset(self, seed):
        return str(os.urandom(4)), {}


class Race:
    """Players add 1 or 2 in turn; who reaches 4 wins."""

    players = ("x", "o")

    def reset(self, seed):
        self.total, self.turn = seed % 2, 0
        return {"x": f"x sees {self.total}."}, {}

    def step(self, actions):
        ((player, text),) = actions.items()
        self.total, self.turn = self.total + int(text), 1 - self.turn
        if self.total >= 4:
            return {}, {each: float(each == player) for each in self.players}, True, False, {}
        following = self.players[self.turn]
        return {following: f"{following} sees {self.total}."}, {}, False, False, {}


class Together:
    """Both act at once, twice, and earn their own numbers."""

    players = ("a", "b")

    def reset(self, seed):
        self.turn = 0
        return {"a": "Say.", "b": "Say too."}, {}

    def step(self, actions):
        self.turn += 1
        rewards = {player: float(text) for player, text in actions.items()}
        views = {player: f"{player} has {reward}." for player, reward in rewards.items()}
        return views, rewards, dict.fromkeys(self.players, self.turn == 2), False, {}


class Confused(Race):
    def step(self, actions):
        ((_, text),) = actions.items()
        if text == "unknown":
            return {"y": "Who?"}, {}, False, False, {}
        if text == "nobody":
            return {}, {}, False, False, {}
        if text == "number":
            return {"o": "x"}, 1.0, False, False, {}
        return {"o": "o" * (17 << 20)}, {}, False, False, {}


class Broken:
    def __init__(self):
        raise OSError("no display")

    def reset(self, seed): ...
    def step(self, text): ...
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("environment") / "own.py"
    path.write_text(ENVIRONMENTS)
    yield path


def seed(number: int) -> Task:
    (task,) = load_tasks(Seeds(num_tasks=1, first=number), PromptConfig()).tasks
    return task


def completion(text: str) -> Completion:
    tokens = np.append(TOKENIZER.encode(text), np.int32(TOKENIZER.stop_token_ids[0]))
    logp, versions = np.full(len(tokens), -1.0), np.zeros(len(tokens))
    return Completion(tokens, logp.astype(np.float32), versions.astype(np.int32), "stop")


def play(
    config: Environment,
    *texts: str,
    task: Task | None = None,
    num_samples: int = 1,
    rewards: RewardConfig = RAW,
    max_prompt_tokens: int = 1000,
    opponents: Mapping[str, Opponent] | None = None,
) -> tuple[tuple[Sample, ...], list[str]]:
    """Samples of scripted turns, taken in order, and the prompts."""
    turns, prompts = iter(texts), list[str]()

    async def generate(
        prompt: np.ndarray, num_samples: int, **how: object
    ) -> tuple[Completion, ...]:
        prompts.append(TOKENIZER._tokenizer.decode(prompt.tolist(), skip_special_tokens=False))
        return tuple(completion(next(turns)) for _ in range(num_samples))

    async def main() -> tuple[Sample, ...]:
        host = EnvironmentHost(config, opponents)
        try:
            await host.start()
            workflow = make_workflow(
                config,
                TOKENIZER,
                num_samples,
                rewards,
                max_prompt_tokens=max_prompt_tokens,
                tools=None,  # type: ignore[arg-type] # it has none
                host=host,
            )
            return await workflow(task or seed(7), generate, None)  # type: ignore[arg-type]
        finally:
            await host.close()

    return asyncio.run(main()), prompts


def test_an_episode_is_one_sample_with_a_reward_of_each_turn(file: Path) -> None:
    config = Environment(environment=f"{file}:Count", arguments='{"last": 3}')
    (sample,), prompts = play(config, "7", "no", "9")
    assert [prompt.count("Next is") for prompt in prompts] == [0, 1, 2]
    assert "First is 7." in prompts[0] and "Next is 9." in prompts[2]
    assert sample.reward == 0.5 and sample.grade == "scored"
    assert sample.token_rewards is not None
    ends = np.flatnonzero(sample.loss_mask & ~np.append(sample.loss_mask[1:], False))
    np.testing.assert_array_equal(sample.token_rewards[ends], [0.25, 0.0, 0.25])
    assert sample.token_rewards.sum() == 0.5


def test_unit_rewards_are_mapped_to_wrong_and_correct(file: Path) -> None:
    config = Environment(environment=f"{file}:Count")
    rewards = RewardConfig(correct=5.0, wrong=-5.0)
    (sample,), _ = play(config, "7", "8", "9", "10", rewards=rewards)
    assert (sample.reward, sample.grade) == (5.0, "correct")
    (sample,), _ = play(config, "7", "8", "9", "0", rewards=rewards)
    assert (sample.reward, sample.grade) == (2.5, "wrong")
    assert sample.token_rewards is not None and sample.token_rewards.sum() == 7.5


def test_samples_of_a_task_start_from_one_observation(file: Path) -> None:
    config = Environment(environment=f"{file}:Count", arguments='{"last": 1}')
    samples, prompts = play(config, "7", "8", "7", num_samples=3)
    assert len(prompts) == 1
    assert [sample.reward for sample in samples] == [0.25, 0.0, 0.25]


def test_async_environments_get_the_task_and_return_messages(file: Path) -> None:
    config = Environment(environment=f"{file}:Async", arguments='{"last": 1}')
    task = Task("one", (Message("user", "Rules."),), "")
    (sample,), (prompt,) = play(config, "x", task=task)
    assert prompt.index("Rules.") < prompt.index("one") < prompt.index("Go.")
    assert sample.reward == 0.0


def test_episodes_end_by_turns_and_by_length(file: Path) -> None:
    config = Environment(environment=f"{file}:Count", max_turns=2)
    (sample,), prompts = play(config, "7", "8")
    assert (len(prompts), sample.stop_reason, sample.reward) == (2, "stop", 0.5)
    first = len(TOKENIZER.encode(prompts[0]))
    (sample,), prompts = play(config, "7", max_prompt_tokens=first + 4)
    assert (len(prompts), sample.stop_reason, sample.reward) == (1, "length", 0.25)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hang", r"step did not return within workflow\.step_timeout_s=0\.5 s"),
        ("die", r"step: .*exit code 3"),
        ("raise", r"(?s)step raised KeyError: 'a door'.*own\.py"),
        ("four", "observation, reward, terminated, truncated and info, found"),
        ("array", r"text, or messages with role and content, found \[1, 2\]"),
        ("nan", "finite number, found nan"),
    ],
)
def test_faults_of_a_step_are_named_and_leave_no_process(
    file: Path, text: str, expected: str
) -> None:
    config = Environment(environment=f"{file}:Faulty", step_timeout_s=0.5)
    started_s = time.monotonic()
    with pytest.raises(Exception) as raised:
        play(config, text)
    error = first_error(raised.value)
    assert isinstance(error, EnvironmentFailed)
    assert re.search(expected, str(error))
    assert time.monotonic() - started_s < 30.0


def test_a_reset_that_is_not_reproducible_is_refused(file: Path) -> None:
    config = Environment(environment=f"{file}:Random")
    with pytest.raises(EnvironmentFailed, match="two different observations"):
        play(config, "x")


def text_of(sample: Sample) -> str:
    return TOKENIZER._tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=False)


def test_each_player_has_its_own_view_and_reward(file: Path) -> None:
    config = Environment(environment=f"{file}:Race")
    (x, o), prompts = play(config, "1", "2", "1", task=seed(6))
    # 0 + 1, + 2, + 1: x reaches 4.
    assert [prompt.count("sees") for prompt in prompts] == [1, 1, 2]
    assert (x.reward, o.reward) == (1.0, 0.0)
    assert "o sees" not in text_of(x) and "x sees" not in text_of(o)
    assert "x sees 0." in text_of(x) and "x sees 3." in text_of(x) and "o sees 1." in text_of(o)
    for sample, num_turns in ((x, 2), (o, 1)):
        ends = np.flatnonzero(sample.loss_mask & ~np.append(sample.loss_mask[1:], False))
        assert len(ends) == num_turns and sample.token_rewards is not None
        assert sample.token_rewards[ends[-1]] == sample.reward


def test_players_that_act_at_once_earn_their_own_rewards(file: Path) -> None:
    config = Environment(environment=f"{file}:Together")
    samples, prompts = play(config, "1", "2", "3", "4", "10", "20", "30", "40", num_samples=2)
    # Both games share the first prompt of a player: a says 1 and 2, b 3 and 4.
    assert [prompt.count("Say") for prompt in prompts] == [1] * 6
    assert sum(sample.reward for sample in samples) == 110.0
    assert [sample.reward % 10 for sample in samples] == [1.0, 3.0, 2.0, 4.0]


def test_opponents_play_from_drawn_seats_and_are_not_trained(file: Path) -> None:
    asked = list[tuple[str, str]]()

    async def opponent(prompt_tokens: np.ndarray, key: str) -> Completion:
        asked.append((TOKENIZER.decode(prompt_tokens), key))
        return completion("2")

    config = Environment(environment=f"{file}:Race", opponents=("old", "older"))
    both = {"old": opponent, "older": opponent}
    samples, _ = play(
        config, *("1" * 20), task=seed(6), num_samples=4, rewards=RewardConfig(), opponents=both
    )
    # As x: 1, 2 of the opponent, 1 wins. As o: 2 of the opponent, 1, 2 of the opponent wins.
    assert [sample.grade for sample in samples] in (
        ["correct", "wrong"] * 2,
        ["wrong", "correct"] * 2,
    )
    assert len({key for _, key in asked}) == len(asked) == 6
    for sample in samples:
        is_x = sample.grade == "correct"
        assert ("x sees" in text_of(sample)) == is_x and ("o sees" in text_of(sample)) != is_x
    # A game of one player has no seat for an opponent.
    config = Environment(environment=f"{file}:Count", opponents=("old",))
    with pytest.raises(ConfigError, match=r"workflow\.opponents=old .* has one player"):
        play(config, "7", opponents=both)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unknown", "observations of some of the players x, o, found"),
        ("nobody", "observations of the players that act next, found none"),
        ("number", "rewards of some of the players x, o, found 1.0"),
        ("flood", "step returned more than 16 MiB"),
    ],
)
def test_faults_of_a_game_are_named(file: Path, text: str, expected: str) -> None:
    with pytest.raises(Exception) as raised:
        play(Environment(environment=f"{file}:Confused"), text)
    error = first_error(raised.value)
    assert isinstance(error, EnvironmentFailed)
    assert expected in str(error)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Broken", "{}", "no display"),
        ("Missing", "{}", "Missing"),
        ("Count", '{"size": 2}', "unexpected keyword argument 'size'"),
        ("Count", "[1]", r"workflow\.arguments: expected a JSON object"),
    ],
)
def test_environments_that_cannot_be_made_are_refused_at_the_start(
    file: Path, name: str, arguments: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        play(Environment(environment=f"{file}:{name}", arguments=arguments))


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks=Seeds .* workflow=Environment"):
        load_experiment("aime", "tasks=Seeds")
    with pytest.raises(ConfigError, match=r"rewards\.function with workflow=Environment"):
        load_experiment(
            "aime",
            "workflow=Environment",
            "workflow.environment=own.py:Maze",
            "rewards.function=own.py:reward",
        )

    class Local:
        """A class that no other process can import."""

    experiment = load_experiment("aime")
    with pytest.raises(ConfigError, match="which must import it"):
        experiment.replace(workflow=Environment(environment=Local))  # type: ignore[arg-type]


def test_turn_rewards_reach_the_advantages_of_gae(file: Path) -> None:
    config = Environment(environment=f"{file}:Count", arguments='{"last": 2}')
    (sample,), _ = play(config, "7", "no")
    state = RolloutState({}, 0, {}, (Group(0, seed(7), (sample, sample)),), ())
    (group,) = decode(deserialize(serialize(encode(state))))[0].buffered
    limits = SampleLimits(max_staleness=None, max_new_tokens=8)
    batch = select_tokens([group], 0, limits)
    ends = np.flatnonzero(sample.loss_mask & ~np.append(sample.loss_mask[1:], False))

    def trajectory(advantages: Any) -> Any:
        trainer = TrainerConfig(advantages=advantages)
        return _trajectories(batch, trainer, limits, [])[0][0]

    by_turn, by_sample = trajectory(GAE()), trajectory(GroupNormalized())
    assert by_turn.reward == 0.0 and by_turn.token_rewards[ends].tolist() == [0.25, 0.0]
    assert (by_sample.reward, by_sample.token_rewards) == (0.25, None)


@pytest.mark.slow
def test_a_run_trains_on_episodes_and_evaluates(file: Path, tmp_path: Path) -> None:
    policy = write_tiny_policy(tmp_path / "policy")
    experiment = chz.replace(
        tiny_experiment(policy),
        tasks=Seeds(num_tasks=64),
        eval_tasks=Seeds(num_tasks=4, first=1000),
        workflow=Environment(environment=f"{file}:Parity", max_turns=3, observation_tokens=32),
    )
    experiment = experiment.replace("evaluation.every_steps=2", "engine.max_prompt_tokens=0")
    result = areal_jax.train(experiment, tmp_path / "run")
    assert result.version == 2
    assert len(result.evaluations) == 2
    rows = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert len(rows) == 2 * 2 * 4


@pytest.mark.slow
def test_a_run_plays_against_the_policy_that_it_started_from(file: Path, tmp_path: Path) -> None:
    policy = write_tiny_policy(tmp_path / "policy")
    text = file.read_text().replace("int(text)", "1 + len(text) % 2")
    (tmp_path / "race.py").write_text(text)
    experiment = chz.replace(
        tiny_experiment(policy),
        tasks=Seeds(num_tasks=64),
        eval_tasks=Seeds(num_tasks=4, first=1000),
        workflow=Environment(
            environment=f"{tmp_path / 'race.py'}:Race",
            opponents=("initial",),
            max_turns=8,
            observation_tokens=32,
        ),
    )
    experiment = experiment.replace("evaluation.every_steps=2", "engine.max_prompt_tokens=0")
    result = areal_jax.train(experiment, tmp_path / "run")
    assert result.version == 2
    # One sample of each game: the opponent's turns are not trained on.
    rows = [
        json.loads(row) for row in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 2 * 2 * 4
    assert {row["reward"] for row in rows} <= {-5.0, 5.0}
    # Against an earlier version of another run, and by the evaluation of a run.
    checkpoint = tmp_path / "run" / "checkpoints" / "2"
    later = areal_jax.evaluate(
        experiment.replace(f"workflow.opponents={checkpoint},initial"),
        checkpoint=tmp_path / "run",
        folder=tmp_path / "evaluation",
    )
    assert later.results.num_tasks == 4
