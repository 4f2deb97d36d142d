"""Measure one GRPO step of Tunix on CPUs, with the workload of `workload.py`.

`GRPOLearner`, with rollout and training on one mesh. Environment (Python 3.11):

    python -m venv tunix-env
    tunix-env/bin/pip install google-tunix==0.1.7 jax==0.10.2

Run on two idle cores:

    taskset -c 0,1 tunix-env/bin/python benchmarks/peers/tunix_rl_step.py

Prints one JSON line. The rollout is `RLCluster.generate`; training is `RLCluster.update_actor`,
until the new weights are computed; reward and batch assembly count in `step_s` only.
"""

from __future__ import annotations

import time
from importlib.metadata import version

import jax
import numpy as np
import optax
import workload
from flax import nnx
from tunix.models.qwen2.model import ModelConfig, Qwen2
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig


class MeasuredCluster(RLCluster):
    """`RLCluster` that records the end of its rollout and of its update."""

    def __init__(self, *, clock: workload.StepClock, **kwargs) -> None:
        super().__init__(**kwargs)
        self.clock = clock

    def generate(self, *args, **kwargs):
        began_s = time.perf_counter()
        output = super().generate(*args, **kwargs)
        self.clock.end_rollout(
            time.perf_counter() - began_s, [len(tokens) for tokens in output.tokens]
        )
        return output

    def update_actor(self, *args, **kwargs) -> None:
        began_s = time.perf_counter()
        super().update_actor(*args, **kwargs)
        # JAX dispatches asynchronously: without this wait the update would count as part of the
        # next rollout.
        jax.block_until_ready(nnx.state(self.actor_trainer.model))
        self.clock.end_step(time.perf_counter() - began_s)


def make_policy() -> Qwen2:
    """Build the workload's Qwen2 with random weights."""
    config = ModelConfig(
        num_layers=workload.NUM_LAYERS,
        vocab_size=workload.VOCAB_SIZE,
        embed_dim=workload.HIDDEN_SIZE,
        hidden_dim=workload.MLP_SIZE,
        num_heads=workload.NUM_HEADS,
        head_dim=workload.HEAD_DIM,
        num_kv_heads=workload.NUM_KV_HEADS,
        rope_theta=workload.ROPE_THETA,
        norm_eps=workload.RMS_NORM_EPS,
        use_tied_embedding=False,
        dtype=jax.numpy.dtype(workload.COMPUTE_DTYPE),
    )
    return Qwen2(config, rngs=nnx.Rngs(params=0))


def main() -> None:
    """Train for the given number of steps and print the JSON line."""
    warmup_steps, steps = workload.parse_steps(__doc__ or "")
    num_updates = warmup_steps + steps
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("fsdp", "tp"))
    policy = make_policy()
    num_params = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(policy, nnx.Param)))
    cluster = MeasuredCluster(
        actor=policy,
        tokenizer=workload.make_tokenizer(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(workload.MAX_GRAD_NORM),
                    optax.adamw(workload.LEARNING_RATE),
                ),
                eval_every_n_steps=num_updates + 1,
                max_steps=num_updates,
                # One update for a batch; micro-batches of one prompt were fastest.
                mini_batch_size=workload.NUM_PROMPTS,
                train_micro_batch_size=1,
                rollout_micro_batch_size=workload.NUM_PROMPTS,
                compute_logps_micro_batch_size=workload.NUM_PROMPTS,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=workload.NEW_TOKENS,
                max_prompt_length=workload.PROMPT_TOKENS,
                kv_cache_size=workload.PROMPT_TOKENS + workload.NEW_TOKENS,
                temperature=1.0,
                top_p=1.0,
            ),
        ),
        clock=workload.StepClock(),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=workload.SAMPLES_PER_PROMPT, beta=0.0),
        reward_fns=workload.share_of_low_ids,
    )
    learner.train([{"prompts": np.array(batch)} for batch in workload.make_prompts(num_updates)])
    print(
        cluster.clock.report(
            peer="tunix",
            version=version("google-tunix"),
            num_params=num_params,
            warmup_steps=warmup_steps,
        )
    )


if __name__ == "__main__":
    main()
