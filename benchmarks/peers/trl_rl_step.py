"""Measure one GRPO step of TRL on CPUs, with the workload of `workload.py`.

`GRPOTrainer` generates with transformers. Environment (Python 3.11; torch first, so that its CPU
build is installed):

    python -m venv trl-env
    trl-env/bin/pip install torch==2.13.0
    trl-env/bin/pip install trl==1.16.0

Run on two idle cores:

    taskset -c 0,1 trl-env/bin/python benchmarks/peers/trl_rl_step.py

Prints one JSON line. The rollout is `_generate_single_turn`; training is measured from the prepared
batch to the end of the optimizer step; reward and batch assembly count in `step_s` only. One
micro-batch for the whole batch was fastest: with 8 and 4 sequences, 5 and 13 % fewer steps/s. An
idle step costs 0.8 CPU seconds: with several times that, OpenMP's threads were spinning while other
processes had the cores, and the run is invalid.
"""

from __future__ import annotations

import tempfile
import time

import torch
import trl
import workload
from datasets import Dataset
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class MeasuredTrainer(GRPOTrainer):
    """`GRPOTrainer` that records the end of its rollout and the start of training."""

    def __init__(self, *args, clock: workload.StepClock, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.clock = clock
        self.train_began_s = 0.0

    def _generate_single_turn(self, *args, **kwargs):
        began_s = time.perf_counter()
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.clock.end_rollout(time.perf_counter() - began_s, [len(ids) for ids in completion_ids])
        return completion_ids, logprobs

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self.train_began_s = time.perf_counter()
        return inputs


class EndOfStep(TrainerCallback):
    """Records the end of a step after the optimizer update."""

    def __init__(self, trainer: MeasuredTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.trainer.clock.end_step(time.perf_counter() - self.trainer.train_began_s)


def make_policy() -> Qwen2ForCausalLM:
    """Build the workload's Qwen2 with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=workload.VOCAB_SIZE,
        hidden_size=workload.HIDDEN_SIZE,
        intermediate_size=workload.MLP_SIZE,
        num_hidden_layers=workload.NUM_LAYERS,
        num_attention_heads=workload.NUM_HEADS,
        num_key_value_heads=workload.NUM_KV_HEADS,
        rms_norm_eps=workload.RMS_NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": float(workload.ROPE_THETA)},
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    return Qwen2ForCausalLM(config)


def main() -> None:
    """Train for the given number of steps and print the JSON line."""
    warmup_steps, steps = workload.parse_steps(__doc__ or "")
    torch.set_num_threads(workload.num_threads())
    num_updates = warmup_steps + steps
    prompts = [prompt for batch in workload.make_prompts(num_updates) for prompt in batch]
    policy = make_policy()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = MeasuredTrainer(
            model=policy,
            reward_funcs=workload.share_of_low_ids,
            args=GRPOConfig(
                output_dir=output_dir,
                use_cpu=True,
                bf16=workload.COMPUTE_DTYPE == "bfloat16",
                gradient_checkpointing=False,
                per_device_train_batch_size=workload.NUM_SEQUENCES,
                num_generations=workload.SAMPLES_PER_PROMPT,
                max_completion_length=workload.NEW_TOKENS,
                temperature=1.0,
                beta=0.0,
                max_steps=num_updates,
                learning_rate=workload.LEARNING_RATE,
                lr_scheduler_type="constant",
                max_grad_norm=workload.MAX_GRAD_NORM,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=workload.make_tokenizer(),
            clock=workload.StepClock(),
        )
        trainer.remove_callback(PrinterCallback)  # standard output has the JSON line only
        trainer.add_callback(EndOfStep(trainer))
        trainer.train()
    num_params = sum(p.numel() for p in policy.parameters())
    print(
        trainer.clock.report(
            peer="trl", version=trl.__version__, num_params=num_params, warmup_steps=warmup_steps
        )
    )


if __name__ == "__main__":
    main()
