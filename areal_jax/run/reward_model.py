"""A reward model on one device: finds and loads it, and scores conversations in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int32

from areal_jax.config.experiment import AnyExperiment
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import InvalidRequest, config_errors
from areal_jax.json_files import read_json
from areal_jax.models import hf
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.compilation import Program
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import compute_dtype, make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES, abstract, shardings
from areal_jax.records import Message
from areal_jax.rewards.config import RewardModelConfig
from areal_jax.threads import run_in_thread
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import Forward, ModelInputs
from areal_jax.trainer.frozen import FrozenPolicy

ROW_MULTIPLE = 16
"""Rows are a multiple of so many tokens long."""

ROW_FRACTIONS = (4, 2, 1)
"""Rows are as long as the longest conversation, or a fraction of it: few programs are compiled, and
short conversations cost little."""


class _Waiting(NamedTuple):
    """A conversation that waits for its score."""

    tokens: Int32[np.ndarray, "_"]
    score: asyncio.Future[float]


class RewardModel:
    """A `Scorer` with a model on one device. It holds no weights until it starts.

    Conversations that arrive while a batch is scored are the next batch.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        folder: Path,
        policy: Policy,
        tokenizer: HFTokenizer,
        device: jax.Device,
        limit: str,
    ) -> None:
        """
        Args:
            config: settings.
            folder: folder of the weights.
            policy: architecture, with a scalar head for sequences.
            tokenizer: tokenizer of the folder.
            device: device of the weights.
            limit: setting of the longest conversation, for messages.
        """
        self.config, self.folder, self.device, self._limit = config, folder, device, limit
        self.policy, self.tokenizer = policy, tokenizer
        self.max_tokens = min(config.max_tokens, policy.config.max_positions)
        lengths = (-(-self.max_tokens // share // ROW_MULTIPLE) for share in ROW_FRACTIONS)
        self._row_tokens = sorted({max(1, length) * ROW_MULTIPLE for length in lengths})
        self._by_row_tokens: dict[int, FrozenPolicy] = {}
        self._starting = asyncio.Lock()
        # Conversations in the order of their arrival; `score` appends, and `_score_all` takes.
        self._waiting: list[_Waiting] = []
        # Runs while there are conversations; cancelled by `close`.
        self._scoring: asyncio.Task[None] | None = None
        self._num_batches = self._num_tokens = 0

    @property
    def mesh(self) -> Mesh:
        """Its device."""
        return make_train_mesh(PlacementConfig(), [self.device])

    async def start(self) -> None:
        """Load the weights, and compile the program of each length of rows.

        Raises:
            ConfigError: the weights do not fit the architecture.
        """
        async with self._starting:
            if not self._by_row_tokens:
                self._by_row_tokens = await run_in_thread(self._load, "reward model")

    async def score(self, prompt: Sequence[Message], answer: str) -> float:
        return await self.score_tokens(self.encode(prompt, answer))

    def encode(self, prompt: Sequence[Message], answer: str) -> Int32[np.ndarray, "_"]:
        """Return the tokens of a conversation up to the one whose output is the score.

        Raises:
            InvalidRequest: the chat template refuses the conversation.
        """
        try:
            if self.config.scored_token == "template":
                return self.tokenizer.render_finished([*prompt, Message("assistant", answer)])
            rendered = self.tokenizer.render(prompt, max_tokens=self.max_tokens)
            return np.concatenate([rendered, self.tokenizer.render_answer(prompt, answer)])
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    async def score_tokens(self, tokens: Int32[np.ndarray, "_"]) -> float:
        """Return the output at the last token.

        Raises:
            InvalidRequest: there are too many tokens.
        """
        if len(tokens) > self.max_tokens:
            raise InvalidRequest(
                f"expected a conversation of at most {self.max_tokens} tokens, found "
                f"{len(tokens)}; raise {self._limit} (the reward model was made for "
                f"{self.policy.config.max_positions} positions)"
            )
        await self.start()
        waiting = _Waiting(tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.create_task(self._score_all(), name="reward model")
        return await waiting.score

    def describe_failure(self) -> str:
        return f"{len(self._waiting)} conversations wait for their scores"

    def counters(self) -> Mapping[str, float]:
        return {
            "model_tokens": float(self._num_tokens),
            "model_batches": float(self._num_batches),
        }

    @property
    def num_compilations(self) -> int:
        """Number of programs compiled so far."""
        return sum(each.num_compilations for each in self._by_row_tokens.values())

    async def close(self) -> None:
        """Free the weights; conversations without a score are abandoned."""
        if self._scoring is not None:
            self._scoring.cancel()
        for each in self._waiting:
            each.score.cancel()
        self._waiting, self._by_row_tokens = [], {}

    async def _score_all(self) -> None:
        """Score the waiting conversations, batch by batch.

        As a task it begins in the next turn of the event loop: those of one turn are in one batch.
        """
        while self._waiting:
            batch = self._waiting[: self.config.batch_size]
            del self._waiting[: len(batch)]
            try:
                scores = await run_in_thread(
                    lambda batch=batch: self._forward([each.tokens for each in batch]),
                    "reward model",
                )
                self._num_batches += 1
                self._num_tokens += sum(len(each.tokens) for each in batch)
                for each, score in zip(batch, scores.tolist(), strict=True):
                    if not each.score.done():
                        each.score.set_result(score)
            except Exception as error:  # handed on to those who wait
                for each in batch:
                    if not each.score.done():
                        each.score.set_exception(error)
            finally:
                # Those of a batch that `close` interrupts.
                for each in batch:
                    each.score.cancel()

    def _forward(self, sequences: Sequence[Int32[np.ndarray, "_"]]) -> Float32[np.ndarray, "B"]:
        """Return the output at the last token of each sequence."""
        lengths = np.array([len(tokens) for tokens in sequences])
        row_tokens = next(size for size in self._row_tokens if size >= lengths.max())
        frozen = self._by_row_tokens[row_tokens]
        tokens, segment_ids = np.zeros((2, frozen.forward.rows, row_tokens), np.int32)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = sequence
            segment_ids[row, : len(sequence)] = 1
        positions = np.broadcast_to(np.arange(row_tokens, dtype=np.int32), tokens.shape)
        inputs = jax.device_put((tokens, segment_ids, positions), frozen.forward.placed)
        [values] = frozen.logprobs([ModelInputs(*inputs)])
        return np.asarray(values, np.float32)[np.arange(len(sequences)), lengths - 1]

    def _load(self) -> dict[int, FrozenPolicy]:
        mesh = self.mesh
        dtype = compute_dtype("auto", mesh)
        placed = shardings(mesh, self.policy.axes(), self.policy.abstract(dtype), TRAIN_RULES)
        with config_errors():
            params = hf.load(self.folder, self.policy, placed, dtype=dtype)
        found = self._with_weights(params, mesh)
        for frozen in found.values():
            frozen.compile()
        return found

    def _with_weights(self, params: Params, mesh: Mesh) -> dict[int, FrozenPolicy]:
        """Return the model for each length of rows."""
        config = TrainerConfig(rows_per_micro_batch=self.config.batch_size, remat="none")
        return {
            size: FrozenPolicy(
                Forward(
                    config,
                    self.policy,
                    mesh,
                    compute_dtype("auto", mesh),
                    temperature=1.0,
                    row_tokens=size,
                ),
                params,
            )
            for size in self._row_tokens
        }

    def list_programs(self, mesh: Mesh) -> list[Program]:
        """Return the programs of all lengths of rows, for a mesh of one device; no weights are
        loaded.
        """
        shapes = self.policy.abstract(compute_dtype("auto", mesh))
        placed = shardings(mesh, self.policy.axes(), shapes, TRAIN_RULES)
        models = self._with_weights(abstract(shapes, placed), mesh)
        return [(f"score {size}", frozen.compile) for size, frozen in models.items()]


def is_reward_model(folder: Path) -> bool:
    """Whether the config.json of a folder is that of a sequence classifier."""
    names = read_json(folder / "config.json").get("architectures") or [""]
    return str(names[0]).endswith("ForSequenceClassification")


def find_reward_model(
    config: RewardModelConfig,
    device: jax.Device,
    ignored_keys: Sequence[str] = (),
    *,
    setting: str = "rewards.model.path",
    limit: str = "rewards.model.max_tokens",
) -> RewardModel:
    """Find the reward model of a folder.

    Args:
        config: settings, with a path.
        device: device of the weights.
        ignored_keys: unsupported keys of config.json to ignore.
        setting: that names the folder, for messages.
        limit: setting of the longest conversation, for messages.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is no reward model, or its files are not supported.
    """
    path = str(config.path)
    folder = resolve_policy_folder(path, setting)
    model = hf.read_config(folder, ignored_keys)
    if model.readout != "SequenceClassification":
        raise ValueError(
            f"{setting}={path} is read out as {model.readout}; expected a reward model, "
            "...ForSequenceClassification with one label, such as RUN_FOLDER/policy of "
            "--exp=reward_model"
        )
    tokenizer = HFTokenizer.from_folder(folder, ignored_keys)
    return RewardModel(config, folder, Policy(model), tokenizer, device, limit)


def reward_model_of(
    experiment: AnyExperiment, device: jax.Device | None = None
) -> RewardModel | None:
    """Find the reward model that an experiment scores in this process; None where there is none.

    Args:
        device: device of the weights; None: the last one.

    Raises:
        ConfigError: it is missing, or no reward model.
    """
    config = experiment.rewards.model
    if config is None or config.path is None:
        return None
    with config_errors():
        device = device or jax.devices()[-1]
        return find_reward_model(config, device, experiment.policy.ignore_config_keys)
