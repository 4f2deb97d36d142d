"""Weight transfer through Ray's object store: time from trainer to engine, and cost for training.

    # 1 GiB on a CPU; needs the extra `ray` and about 6 GiB of memory
    python benchmarks/object_store.py
    # smoke test
    python benchmarks/object_store.py --megabytes=64

Transfer of a version: a copy on the train mesh (so that the trainer may overwrite its own), a copy
into the store with hashing, hashing by the reader, and a transfer to the engine's device, which on
a CPU reads the store's memory in place. Measured from `publish` until the engine's `wait` returns,
in turns with plain copies of the same size by one core, into touched memory and into new memory,
after warm-up rounds in which the store's memory is touched for the first time. The share is the
time of a copy over that of a transfer.

The floor is the minimum work, at the speed of all cores: two copies, because the trainer overwrites
its weights and the store has its own memory, and two hashes. No program that copies and hashes
twice is faster on that machine.

Training steps are supervised steps on a random policy. A version is published after every second
step, so that steps with and without a concurrent transfer alternate. Appends one line to
benchmarks/results/object_store.jsonl, with the machine's load, which slows all parts.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

# Read when ray is imported. Ray runs the code of every client that has this token.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}

import jax
import jax.numpy as jnp
import numpy as np
import ray
import xxhash
from jax.sharding import NamedSharding, PartitionSpec
from results import append

from areal_jax.data.sft import SupervisedExample
from areal_jax.engine.decode_state import lay_out_params
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.step import TrainableModel
from areal_jax.weights.object_store import ShardPublisher, ShardReader

TIMEOUT_S = 120.0
NUM_LAYERS = 32
WARM_ROUNDS = 8
ROW_TOKENS = 512

TRAINED = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": ROW_TOKENS,
    "tie_word_embeddings": False,
}


def measure_transfers(megabytes: int, rounds: int) -> dict[str, object]:
    """Measure transfers of versions, and plain copies of the same size, in turns.

    More than 60 lines: publisher, readers and copies share their arrays.
    """
    meshes = make_meshes(PlacementConfig(), jax.devices())
    rows = megabytes * 2**20 // NUM_LAYERS // 4096 // 4
    params = {"layers": jnp.ones((NUM_LAYERS, rows, 4096), jnp.float32)}
    source, target = np.ones(megabytes * 2**18, np.float32), np.ones(megabytes * 2**18, np.float32)
    whole = NamedSharding(meshes.rollout, PartitionSpec())
    abstract = {"layers": (jax.ShapeDtypeStruct((rows, 4096), jnp.float32),) * NUM_LAYERS}
    publisher = ShardPublisher(lambda params: {"layers": tuple(params["layers"])})
    reader = ShardReader(jax.tree.map(lambda _: whole, abstract), abstract)
    arrived_s: list[float] = []
    copied_s: list[float] = []
    copied_anew_s: list[float] = []
    floor_s: list[float] = []
    cores = len(os.sched_getaffinity(0))
    from_parts, to_parts = np.array_split(source, cores), np.array_split(target, cores)
    pool = ThreadPoolExecutor(cores)
    stages: list[dict[str, float]] = []
    for version in range(WARM_ROUNDS + rounds):
        start = time.perf_counter()
        np.copyto(target, source)
        copied = time.perf_counter()
        anew = source.copy()
        copied_anew = time.perf_counter()
        del anew
        freed = time.perf_counter()
        for _ in range(2):
            list(pool.map(np.copyto, to_parts, from_parts))
            list(pool.map(lambda part: xxhash.xxh3_64(part.view(np.uint8)).intdigest(), to_parts))
        floor = time.perf_counter()
        publisher.publish(version, params)
        contribution = publisher.next_contribution(version - 1, TIMEOUT_S)
        assert contribution is not None
        reader.pull(version, [contribution])
        del contribution
        assert reader.wait(version, TIMEOUT_S).version == version
        arrived_s.append(time.perf_counter() - floor)
        floor_s.append(floor - freed)
        copied_s.append(copied - start)
        copied_anew_s.append(copied_anew - copied)
        measured = reader.metrics() | publisher.metrics()
        stages.append(
            {name: measured[name][0] for name in ("publish_s", "copy_s", "put_s", "transfer_s")}
        )
    publisher.close()
    reader.close()
    pool.shutdown()
    timed = (copied_s, copied_anew_s, floor_s, arrived_s)
    copied, copied_anew, floor, arrived = (median(of[WARM_ROUNDS:]) for of in timed)
    return {
        "megabytes": megabytes,
        "rounds": rounds,
        "copy_gb_per_s": megabytes * 2**20 / copied / 1e9,
        "copy_into_new_memory_gb_per_s": megabytes * 2**20 / copied_anew / 1e9,
        "version_gb_per_s": megabytes * 2**20 / arrived / 1e9,
        "share_of_copy_rate": copied / arrived,
        "share_of_copy_rate_into_new_memory": copied_anew / arrived,
        "floors_share_of_copy_rate": copied / floor,
        "share_of_floor": floor / arrived,
        "share_in_each_round": [a / b for a, b in zip(copied_s, arrived_s, strict=True)][
            WARM_ROUNDS:
        ],
        "seconds_by_stage": {
            name: median(stage[name] for stage in stages[WARM_ROUNDS:]) for name in stages[0]
        },
    }


def measure_training(steps: int) -> dict[str, object]:
    """Measure training steps with and without a concurrent transfer, in turns."""
    policy = Policy(ModelConfig.from_hf(TRAINED, source="this benchmark"))
    mesh = make_meshes(PlacementConfig(), jax.devices()).train
    params = jax.jit(policy.init)(jax.random.key(0))
    config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-4), rows_per_micro_batch=2)
    model = TrainableModel(
        policy=policy, params=params, mesh=mesh, compute_dtype=jnp.float32, row_tokens=ROW_TOKENS
    )
    trainer = SupervisedTrainer(config, model, num_updates=10**6)
    trainer.warm_up()
    publisher = ShardPublisher(lambda params: lay_out_params(policy, params, jnp.float32))
    rng = np.random.default_rng(0)
    examples = [
        SupervisedExample(
            rng.integers(0, 2048, ROW_TOKENS).astype(np.int32), np.arange(ROW_TOKENS) > 0
        )
        for _ in range(4)
    ]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * (steps + 1)):
        publishes = step % 2 == 0
        start = time.perf_counter()
        if publishes:
            publisher.publish(step, trainer.params)
        trainer.step(examples)
        seconds[publishes].append(time.perf_counter() - start)
        if publishes:
            assert publisher.next_contribution(step - 1, TIMEOUT_S) is not None
    publisher.close()
    with_version, without = (median(seconds[publishes][1:]) for publishes in (True, False))
    return {
        "policy_megabytes": 4 * policy.config.num_params / 2**20,
        "steps_each": steps,
        "step_s": without,
        "step_with_version_s": with_version,
        "change": with_version / without - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the policy")
    parser.add_argument("--rounds", type=int, default=9, help="number of timed transfers")
    parser.add_argument(
        "--steps", type=int, default=15, help="number of timed trainer steps of each kind"
    )
    args = parser.parse_args()
    load = os.getloadavg()
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=4 * args.megabytes * 2**20 + 2**29,
    )
    row = {"load_1_5_15_min": load, "versions": measure_transfers(args.megabytes, args.rounds)}
    append("object_store", row | {"training": measure_training(args.steps)})
    ray.shutdown()


if __name__ == "__main__":
    main()
