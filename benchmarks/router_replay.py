"""Router replay (R3, arXiv:2510.11370): what it changes, what it costs, and which experts a token
should keep when its KV cache is rebuilt with newer weights.

    python benchmarks/router_replay.py FOLDER [--parts costs gaps training]

A mixture of experts of 0.4 M parameters (3 layers, 16 experts, 2 per token) with the embedded
tokenizer learns two families of problems in 300 steps of `tiny_sft`, and then by `aime` in float32
with replay off, and with `engine.replayed_experts=first` and `rebuilt`, for 40 steps and two seeds
each. Runs are kept in FOLDER, and finished ones are not repeated.

The gaps isolate the question. The weights of the fine-tuned policy decode; in the middle of the
answers those of a later policy arrive, and the caches are rebuilt. The log-probs that the engine
reported are compared with forward passes of the same weights, with the router's own choice and with
the recorded experts of both kinds:

- before: tokens sampled before the update, with the weights that sampled them.
- after: tokens sampled after the update, with the weights that sampled them.
- all: all tokens with the new weights, as a training step computes proximal log-probs.

Each is the root mean square of log(forward/engine). `moved` is the share of tokens before the
update that the new weights send to other experts in some layer, `differs` the share that the
forward pass in bfloat16 sends to others than the engine did, with equal weights.

Costs: tokens per second of the engine, with and without recording in turns, and bytes per token.

Appends to results/router_replay.jsonl. About half an hour on two idle CPU cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import chz
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped
from results import append
from runs import run_all, steps

from areal_jax.data.config import PromptConfig, Synthetic
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.sources import load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import hf
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_rollout_mesh
from areal_jax.records import Completion, Request, Sampling, Weights, native_expert

NAME = "router_replay"
FAMILIES = ("remainder", "digit_sum")
NUM_STEPS, SEEDS = 40, (0, 1)
MODES: Mapping[str, Sequence[str]] = {
    "off": ("engine.router_replay=false",),
    "first": ("engine.router_replay=true", "engine.replayed_experts=first"),
    "rebuilt": ("engine.router_replay=true", "engine.replayed_experts=rebuilt"),
}
NUM_PROMPTS, NUM_SLOTS, NEW_TOKENS, UPDATE_AT = 32, 32, 64, 4
"""The update arrives after this number of dispatches, of 8 tokens each."""
ROUNDS = 5
SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


class Answer(NamedTuple):
    """A prompt, and an answer during which the weights were updated."""

    prompt: Int[np.ndarray, "T"]
    completion: Completion


def make_policy(folder: Path) -> Path:
    """Fine-tune the mixture of experts, and return its folder."""
    start = folder / "start"
    if not start.exists():
        shutil.copytree(
            EMBEDDED, start, ignore=shutil.ignore_patterns("model.safetensors", "README.md")
        )
        config = json.loads((EMBEDDED / "config.json").read_text())
        del config["attention_bias"]
        (start / "config.json").write_text(json.dumps(config | SHAPE))
    settings = (
        "--exp=tiny_sft",
        f"policy.path={start}",
        f"examples.families={','.join(FAMILIES)}",
        f"eval_tasks.families={','.join(FAMILIES)}",
        "examples.num_tasks=20000",
        "examples_per_batch=32",
        "heldout_every_steps=0",
        "evaluation.every_steps=0",
        "checkpoint.every_steps=300",
    )
    run_all({"sft": settings}, folder, 300)
    return folder / "sft" / "policy"


def rl_settings(policy: Path, seed: int) -> tuple[str, ...]:
    return (
        "--exp=aime",
        f"policy.path={policy}",
        f"seed={seed}",
        f"tasks.families={','.join(FAMILIES)}",
        f"eval_tasks.families={','.join(FAMILIES)}",
        "rollout.groups_per_batch=4",
        "rollout.samples_per_group=8",
        "rollout.max_staleness=4",
        "engine.num_slots=48",
        "evaluation.every_steps=0",
    )


def train(folder: Path, policy: Path) -> None:
    """Store the training curves of all modes and seeds."""
    runs = {
        f"{mode}-{seed}": (*rl_settings(policy, seed), *settings)
        for seed in SEEDS
        for mode, settings in MODES.items()
    }
    found = run_all(runs, folder, NUM_STEPS)
    for name, rows in found.items():
        mode, seed = name.split("-")
        taken = steps(rows)
        later = taken[NUM_STEPS // 4 :]
        append(
            NAME,
            {
                "what": "training",
                "mode": mode,
                "seed": int(seed),
                "num_steps": NUM_STEPS,
                "reward_first_10": fmean(row["trainer/reward"] for row in taken[:10]),
                "reward_last_10": fmean(row["trainer/reward"] for row in taken[-10:]),
                "log_ratio_rms_step_0": taken[0]["trainer/log_ratio_rms"],
                "log_ratio_rms": fmean(row["trainer/log_ratio_rms"] for row in later),
                "behave_weight_p99": fmean(row["trainer/behave_weight_p99"] for row in later),
                "sequence_ess": fmean(row["trainer/sequence_ess"] for row in later),
                "staleness": fmean(row["trainer/staleness"] for row in later),
                "rewards": [round(row["trainer/reward"], 3) for row in taken],
            },
        )


def load(folder: Path) -> tuple[Policy, Params]:
    policy = Policy(hf.read_config(folder))
    shardings = jax.tree.map(
        lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), policy.abstract()
    )
    return policy, hf.load(folder, policy, shardings)


class Updates:
    """A weight source whose second version arrives before a dispatch, by its number."""

    def __init__(self, engine: DecodeEngine, versions: Sequence[tuple[int, Params]]):
        self._looks, self._arrivals = 0, [look for look, _ in versions]
        self._weights = [
            jax.device_put(engine.layout(params), engine.param_shardings) for _, params in versions
        ]

    def newest(self, after: int) -> Weights | None:
        look, self._looks = self._looks, self._looks + 1
        version = sum(at <= look for at in self._arrivals) - 1
        return Weights(version, self._weights[version]) if version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        raise TimeoutError


def make_engine(policy: Policy, config: EngineConfig, dtype: Any) -> DecodeEngine:
    mesh = make_rollout_mesh(PlacementConfig(), jax.devices()[:1])
    return DecodeEngine(policy, mesh, config, dtype)


ENGINE = EngineConfig(
    num_slots=NUM_SLOTS,
    max_prompt_tokens=64,
    max_new_tokens=NEW_TOKENS,
    steps_per_dispatch=8,
    router_replay=True,
)


def decode(
    engine: DecodeEngine, prompts: Sequence[np.ndarray], versions: Sequence[tuple[int, Params]]
) -> list[Answer]:
    """Answer every prompt once, without a stop token."""

    async def run() -> list[Answer]:
        loop = EngineLoop(engine, Updates(engine, versions))
        try:
            requests = [
                Request(str(i), prompt, 1, Sampling(NEW_TOKENS), seed=i)
                for i, prompt in enumerate(prompts)
            ]
            futures = [loop.submit(each) for each in requests]
            loop.start()
            found = await asyncio.wait_for(asyncio.gather(*futures), 600)
            return [Answer(*pair) for pair in zip(prompts, (e[0] for e in found), strict=True)]
        finally:
            loop.close()

    return asyncio.run(run())


@partial(jax.jit, static_argnums=(0, 4))
def forward(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B T"],
    replay: Shaped[Array, "B T L k"] | None,
    dtype: Any,
) -> tuple[Float[Array, "B T V"], Shaped[Array, "B T L k"]]:
    """Logits, and the experts of every token."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, routing = policy.hidden(
        params,
        tokens,
        positions,
        packed_attention(jnp.ones_like(tokens)),
        compute_dtype=dtype,
        replay=replay,
        records_experts=True,
    )
    assert routing is not None and routing.ids is not None
    logits = hidden.astype(jnp.float32) @ policy.head(params).astype(jnp.float32)
    return jax.nn.log_softmax(logits), jnp.moveaxis(routing.ids, 0, 2)


def padded(answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and recorded experts of all answers, as rows of one length."""
    length = max(len(each.prompt) for each in answers) + NEW_TOKENS
    experts = answers[0].completion.experts
    assert experts is not None
    tokens = np.zeros((len(answers), length), np.int32)
    ids = np.full((len(answers), length, *experts.shape[1:]), native_expert(experts.dtype))
    ids = ids.astype(experts.dtype)
    for row, (prompt, completion) in enumerate(answers):
        assert completion.experts is not None
        tokens[row, : len(prompt) + len(completion.tokens)] = [*prompt, *completion.tokens]
        ids[row, : len(completion.experts)] = completion.experts
    return tokens, ids


def measure_gap(folder: Path, policy_folder: Path, later: str, dtype: Any) -> dict[str, Any]:
    """Compare log-probs of the engine with forward passes, by kind of replay."""
    policy, old = load(policy_folder)
    _, new = load(folder / later / "policy")
    tasks = load_tasks(Synthetic(num_tasks=NUM_PROMPTS, families=FAMILIES), PromptConfig()).tasks
    tokenizer = HFTokenizer.from_folder(policy_folder)
    prompts = [tokenizer.render(task.prompt) for task in tasks]
    recorded = {}
    for kind in ("first", "rebuilt"):
        engine = make_engine(policy, chz.replace(ENGINE, replayed_experts=kind), dtype)
        recorded[kind] = decode(engine, prompts, [(0, old), (UPDATE_AT, new)])
    answers = recorded["first"]
    for one, other in zip(answers, recorded["rebuilt"], strict=True):
        np.testing.assert_array_equal(one.completion.tokens, other.completion.tokens)
    tokens, first = padded(answers)
    _, rebuilt = padded(recorded["rebuilt"])
    replays = {"off": None, "first": jnp.asarray(first), "rebuilt": jnp.asarray(rebuilt)}
    run = partial(forward, policy, dtype=dtype)
    # By weights and kind of replay.
    logp = {
        (name, kind): np.asarray(run(params, jnp.asarray(tokens), replay)[0])
        for name, params in (("old", old), ("new", new))
        for kind, replay in replays.items()
    }
    native = {
        name: np.asarray(run(params, jnp.asarray(tokens), None)[1])
        for name, params in (("old", old), ("new", new))
    }
    gaps: dict[str, dict[str, list[float]]] = {
        part: {kind: [] for kind in replays} for part in ("before", "after", "all")
    }
    moved, differs = [], []
    for row, (prompt, completion) in enumerate(answers):
        places = len(prompt) + np.arange(len(completion.tokens))
        is_new = completion.versions == 1
        num_old = len(prompt) + int((~is_new).sum()) - 1
        fed = slice(0, num_old)
        moved += (native["new"][row, fed] != first[row, fed]).any(axis=(1, 2)).tolist()
        differs += (native["old"][row, fed] != first[row, fed]).any(axis=(1, 2)).tolist()
        for kind in replays:
            ratio = {
                name: logp[name, kind][row, places - 1, completion.tokens] - completion.logp
                for name in ("old", "new")
            }
            gaps["before"][kind] += ratio["old"][~is_new].tolist()
            gaps["after"][kind] += ratio["new"][is_new].tolist()
            gaps["all"][kind] += ratio["new"].tolist()
    return {
        "what": "gap",
        "dtype": jnp.dtype(dtype).name,
        "later": later,
        "moved": fmean(moved),
        "differs": fmean(differs),
        **{
            f"{part}_{kind}": float(np.sqrt(np.mean(np.square(values))))
            for part, by_kind in gaps.items()
            for kind, values in by_kind.items()
        },
        **{
            f"p99_{part}_{kind}": float(np.percentile(np.abs(values), 99))
            for part, by_kind in gaps.items()
            for kind, values in by_kind.items()
        },
    }


def measure_costs(policy_folder: Path) -> dict[str, Any]:
    """Tokens per second of the engine with and without recording, and bytes per token."""
    policy, params = load(policy_folder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 700, 24).astype(np.int32) for _ in range(4 * NUM_SLOTS)]
    engines = {
        name: make_engine(policy, chz.replace(ENGINE, router_replay=name == "on"), jnp.float32)
        for name in ("off", "on")
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(ROUNDS + 1):
        for name, engine in engines.items():
            start_s = time.process_time()
            decode(engine, prompts, [(0, params)])
            if turn:
                seconds[name].append(time.process_time() - start_s)
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    config = policy.config
    assert config.moe is not None
    return {
        "what": "costs",
        "cpu_s_off": median(seconds["off"]),
        "cpu_s_on": median(seconds["on"]),
        "ratio": median(ratios),
        "ratios": [round(each, 3) for each in ratios],
        "bytes_per_token": config.num_moe_layers * config.moe.num_experts_per_tok,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parts = ("costs", "gaps", "training")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    given = parser.parse_args()
    folder = given.folder.resolve()
    policy = make_policy(folder)
    if "costs" in given.parts:
        append(NAME, measure_costs(policy))
    if "gaps" in given.parts:
        run_all({"four_steps": (*rl_settings(policy, 0), *MODES["off"])}, folder, 4)
        for dtype in (jnp.float32, jnp.bfloat16):
            append(NAME, measure_gap(folder, policy, "four_steps", dtype))
    if "training" in given.parts:
        train(folder, policy)


if __name__ == "__main__":
    main()
