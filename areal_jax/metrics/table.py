"""Reference of the metrics in metrics.jsonl: name, meaning, unit and healthy range of each.

A `*` in a name stands for one segment that depends on the run, such as a family of tasks. The entry
`time_s` (wall-clock time in seconds since 1970) and `version` of each row are no metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from areal_jax.metrics import health


class Entry(NamedTuple):
    """Documentation of one metric."""

    name: str
    meaning: str
    unit: str = ""
    """Unit; empty: a pure number."""
    healthy: str = ""
    """Healthy range; empty: depends on the run."""


_ROLLOUT = (
    Entry("started", "groups started since the start of the run", "groups"),
    Entry("running", "groups in progress", "groups", "up to rollout.max_running_groups"),
    Entry("accepted", "groups finished and not rejected since the start of the run", "groups"),
    Entry("buffered", "finished groups that wait for the trainer", "groups"),
    Entry("rejected", "groups rejected since the start of the run", "groups"),
    Entry("rejected/*", "groups rejected for this reason, a class of error", "groups", "near 0"),
    Entry("staleness_limit", "limit on staleness, adapted to sequence_ess", "versions"),
    Entry("gate_wait_s", "wait of tasks for the staleness gate since the process started", "s"),
    Entry("batch_wait_s", "wait of the trainer for batches since the process started", "s"),
    Entry("tokens", "tokens sampled in the step", "tokens"),
    Entry("tokens_per_s", "sampling throughput", "tokens/s"),
    Entry("dispatches", "dispatched decode programs", "dispatches"),
    Entry("requests", "finished requests", "requests"),
    Entry("prefill_tokens", "prompt tokens prefilled, without prefix-cache hits", "tokens"),
    Entry("recompute_tokens", "tokens prefilled again after weight updates", "tokens"),
    Entry("preemptions", "requests preempted because KV-cache pages ran out", "requests", "near 0"),
    Entry("draft_tokens", "verified drafts of speculative decoding", "tokens"),
    Entry("accepted_draft_tokens", "accepted drafts of speculative decoding", "tokens"),
    Entry(
        "draft_acceptance",
        "share of verified drafts that were accepted; those of engine.draft_policy fall as the "
        "trained policy moves away from it",
        "share",
    ),
    Entry("kv_used", "share of KV-cache pages in use, mean over dispatches", "share", "below 0.95"),
    Entry("occupancy", "share of slot-steps that sampled a token", "share", "above 0.5"),
    Entry("host_gap_us", "device idle time between two dispatches", "us", "below 1000"),
    Entry("swaps", "weight updates applied by engines", "updates"),
    Entry("swap_stall_s", "generation stall per weight update", "s"),
    Entry("wait_s", "time without a request to work on", "s"),
    Entry("compilations", "compiled engine programs", "programs", "0 after the first steps"),
    Entry("engines", "engines, with launch=ray or placement.adaptive", "", "the configured number"),
    Entry("engines_lost", "engine workers that died since the start of the run", "workers", "0"),
    Entry("requests_moved", "requests moved from engines that died or left", "requests", "0"),
    Entry("split_moves", "moves of devices between training and decoding", "moves", "few"),
    Entry("split_stall_s", "training time that moves of devices took", "s", "near 0"),
)

_OBJECTIVE = (
    Entry("loss", "mean loss of the trained tokens or pairs"),
    Entry("entropy", "entropy of the policy, mean over loss tokens", "nats", "above 0.01"),
    Entry("accuracy", "share of pairs with the chosen answer's reward above the other's", "share"),
    Entry("margin", "chosen minus rejected reward of pairs", "reward", "above 0"),
    Entry("chosen_reward", "implicit or modelled reward of chosen answers", "reward"),
    Entry("rejected_reward", "implicit or modelled reward of rejected answers", "reward"),
    Entry("chosen_logp", "log-prob per token of chosen answers", "nats"),
    Entry("rejected_logp", "log-prob per token of rejected answers", "nats"),
    Entry("router_balance_loss", "load-balancing loss of expert routers"),
    Entry("router_busiest_expert", "load of the busiest expert, relative to the mean"),
    Entry("router_idle_experts", "share of experts without a token", "share", "near 0"),
)

_TRAINER = (
    *_OBJECTIVE,
    Entry("grad_norm", "gradient norm before clipping", healthy="finite and above 0"),
    Entry("learning_rate", "learning rate of the update"),
    Entry("clip_fraction", "share of tokens whose clip is active", "share", "below 0.3"),
    Entry("dual_clip_fraction", "share of tokens whose dual clip is active", "share", "near 0"),
    Entry("ratio", "importance ratio theta/proximal", "ratio", "0.5 to 2"),
    Entry("behave_weight", "importance weight proximal/behave", "ratio", "0.5 to 2"),
    Entry("behave_weight_squared", "mean square of the importance weight", "ratio", "near 1"),
    Entry("behave_weight_capped_fraction", "share of capped importance weights", "share"),
    Entry("rejected_fraction", "share of tokens that a rejection removes", "share", "below 0.1"),
    Entry("behave_weight_p5", "5th percentile of the importance weight", "ratio", "above 0.5"),
    Entry("behave_weight_p50", "median importance weight", "ratio", "near 1"),
    Entry("behave_weight_p95", "95th percentile of the importance weight", "ratio", "below 2"),
    Entry("behave_weight_p99", "99th percentile of the importance weight", "ratio", "below 5"),
    Entry("behave_weight_p99/*", "the same by age of the tokens, in versions", "ratio", "below 5"),
    Entry("log_ratio_rms", "root mean square of log(proximal/behave)", "nats", "below 0.2"),
    Entry("log_ratio_rms/*", "the same by age of the tokens, in versions", "nats", "below 0.2"),
    Entry("sequence_ess", "effective share of sequences by their weights", "share", "above 0.5"),
    Entry("kl_behave_theta", "KL of the behaviour policy to the trained policy", "nats"),
    Entry("kl_proximal_theta", "KL of the proximal policy to the trained policy", "nats"),
    Entry("kl_reference", "KL of the policy to the reference policy", "nats"),
    Entry("kl_teacher", "KL of the policy to the teacher", "nats", "decreasing"),
    Entry("teacher_divergence", "divergence of the policy and the teacher", "nats", "decreasing"),
    Entry("teacher_read_fraction", "share of loss tokens that the teacher reads", "share", "1"),
    Entry("distillation_kept_fraction", "share of tokens that are distilled", "share", "above 0.9"),
    Entry("positive_nll", "negative log-likelihood per token of correct answers", "nats"),
    Entry("m2po_kept_fraction", "share of tokens that M2PO keeps", "share", "above 0.9"),
    Entry("sample_gradient_norm", "gradient norm of a sample's log-prob (VCPO)", "", "finite"),
    Entry("success_rate_baseline", "tracked success rate of the prompts (SPO)", "reward"),
    Entry("success_rate_decay", "weight of the past in the tracked rates", "share"),
    Entry("value_loss", "loss of the critic", "reward²"),
    Entry("value_clip_fraction", "share of clipped values", "share"),
    Entry("value_grad_norm", "gradient norm of the critic", healthy="finite and above 0"),
    Entry("value_learning_rate", "learning rate of the critic"),
    Entry("value_router_balance_loss", "load-balancing loss of the critic's expert routers"),
    Entry("value_router_busiest_expert", "load of the critic's busiest expert over the mean"),
    Entry("value_router_idle_experts", "share of the critic's experts without a token", "share"),
    Entry("values", "mean value of sampled tokens", "reward"),
    Entry("returns", "mean return of sampled tokens", "reward"),
    Entry("explained_variance", "share of the returns' variance that values explain", "", "0 to 1"),
    Entry("reward", "mean reward of the step's samples", "reward", "increasing"),
    Entry("reward/*", "mean of a named component of the reward", "reward", "increasing"),
    Entry("reward_min", "smallest reward of the step", "reward"),
    Entry("reward_max", "largest reward of the step", "reward"),
    Entry("reward_std", "standard deviation of rewards", "reward", "above 0"),
    Entry("advantage", "mean advantage of the loss tokens", healthy="near 0 if centred"),
    Entry("advantage_squared", "mean square of advantages", healthy="near 1 if normalised"),
    Entry("groups_without_signal", "share of groups with equal rewards", "share", "below 0.9"),
    Entry("correct_fraction", "share of correct answers", "share", "increasing"),
    Entry("no_answer_fraction", "share of samples without a readable answer", "share", "below 0.9"),
    Entry("truncated_fraction", "share of truncated samples", "share", "below 0.5"),
    Entry("turns", "turns per sample", "turns"),
    Entry("answer_tokens", "sampled tokens per sample", "tokens"),
    Entry("staleness", "mean staleness of sampled tokens", "versions", "up to max_staleness"),
    Entry("staleness_max", "largest staleness of a sampled token", "versions"),
    Entry("tokens_stale", "sampled tokens too stale to train on", "tokens", "near 0"),
    Entry("tokens_trained", "tokens in the loss", "tokens"),
    Entry("samples", "trained samples", "samples"),
    Entry("num_updates", "optimizer updates of the step", "updates"),
    Entry("num_compilations", "compiled trainer programs since the process started", "programs"),
    Entry("params_digest", "checksum of the trained parameters after the step, for replays"),
    Entry("packing_efficiency", "share of row positions that hold tokens", "share", "above 0.8"),
    Entry(
        "shared_token_fraction",
        "tokens of samples that are packed with another sample, which begins alike",
        "share",
    ),
    Entry("tokens_per_second", "training throughput, prompts included", "tokens/s"),
    Entry("seconds_step", "duration of the step", "s"),
    Entry("seconds_packing", "duration of packing and advantages", "s"),
    Entry("seconds_values", "duration of what advantages read: values, gradient norms", "s"),
    Entry("seconds_frozen", "duration of the forward passes of reference and teacher", "s"),
    Entry("seconds_proximal", "duration of the forward pass for proximal log-probs", "s"),
    Entry("seconds_update", "duration of the updates", "s"),
    Entry("resident_gib", "resident memory of the main process", "GiB", "constant"),
)

_WEIGHTS = (
    Entry("published", "versions published by the trainer", "versions"),
    Entry("delivered", "versions delivered to all engines", "versions"),
    Entry("dropped", "versions replaced by a newer one before delivery", "versions"),
    Entry("offered", "versions offered to remote engines", "versions"),
    Entry("failed", "versions that did not fit into the object store", "versions", "0"),
    Entry("skipped", "versions that remote engines could not read", "versions", "0"),
    Entry("publish_s", "time of the trainer thread per version", "s"),
    Entry("copy_s", "time of the copy on the train mesh per version", "s"),
    Entry("transfer_s", "time of the transfer to all engines per version", "s"),
    Entry("transfer_bytes", "transferred bytes per version", "bytes"),
    Entry("put_s", "time of the write to the object store per version", "s"),
    Entry("put_bytes", "bytes written to the object store per version", "bytes"),
    Entry("delay_s", "time from publishing to the last delivery", "s", "below seconds_step"),
)

_REWARDS = (
    Entry("calls", "reward calls since the process started", "calls"),
    Entry("failed", "failed reward calls", "calls", "0"),
    Entry("failed_fraction", "share of failed reward calls", "share", "below 0.5"),
    Entry("grade/*", "results of this kind", "calls"),
    Entry("tool/*/*", "tool calls with this tool and outcome", "calls"),
    Entry("workspace_conversations", "ended conversations that used a workspace", "conversations"),
    Entry("workspace_calls", "tool calls in a workspace, per conversation that used one", "calls"),
    Entry("workspace_timeouts", "calls in workspaces that ended at the time limit", "calls"),
    Entry("workspace_kills", "calls after which everything in a workspace was killed", "calls"),
    Entry("workspace_lost", "sandboxes of workspaces that were replaced", "sandboxes", "near 0"),
    Entry("workspace_kept_bytes", "last snapshot of a workspace, mean, compressed", "bytes"),
    Entry("graded_s", "time of grading processes since the process started", "s"),
    Entry("set_aside", "slow answers graded apart from the others", "answers", "near 0"),
    Entry("worker_starts", "started grading processes", "processes"),
    Entry("judge_votes", "votes of rewards.judge", "votes"),
    Entry("judge_unscored", "votes without a score, asked for again", "votes", "near 0"),
    Entry("judge_tokens", "tokens that votes took, prompts too", "tokens"),
    Entry("judge_disagreement", "mean standard deviation of the votes on one answer", "share"),
    Entry("model_answers", "answers that rewards.model scored", "answers"),
    Entry("model_s", "time of these answers until their scores, waits for a batch too", "s"),
    Entry("model_tokens", "tokens of the scored conversations", "tokens"),
    Entry("model_batches", "batches that rewards.model.path scored", "batches"),
    Entry("workers", "connected reward workers", "workers", "the configured number"),
    Entry("workers_lost", "reward workers that died since the start of the run", "workers", "0"),
)

_EVALUATION = (
    *_OBJECTIVE,
    Entry("pass@1", "share of correct answers, mean over tasks", "share", "increasing"),
    Entry("pass@1_stderr", "standard error of pass@1", "share"),
    Entry("reward", "mean reward, if rewards are raw", "reward", "increasing"),
    Entry("reward_stderr", "standard error of the mean reward", "reward"),
    Entry("perplexity", "exp of the mean loss of held-out examples", "", "decreasing"),
    Entry("loss_tokens", "tokens of held-out examples in the loss", "tokens"),
    Entry("answer_tokens", "sampled tokens per answer", "tokens"),
    Entry("truncated_fraction", "share of truncated answers", "share", "below 0.5"),
    Entry("num_tasks", "evaluated tasks", "tasks"),
    Entry("num_failed", "tasks without samples because of an error", "tasks", "0"),
    Entry("newest_version", "newest version that sampled a token", "version", "the row's version"),
    Entry("seconds", "duration of the evaluation", "s"),
    Entry("grade/*", "answers with this grade", "answers"),
    Entry("family/*", "pass@1 (raw rewards: mean reward) of this family of tasks", "share"),
)

TABLE: tuple[Entry, ...] = tuple(
    entry._replace(name=f"{room}/{entry.name}")
    for room, entries in (
        ("rollout", _ROLLOUT),
        ("trainer", _TRAINER),
        ("weights", _WEIGHTS),
        ("rewards", _REWARDS),
        ("evaluation", _EVALUATION),
        ("trackers", (Entry("failed", "rows that did not reach a tracker", "rows", "0"),)),
    )
    for entry in entries
) + tuple(
    Entry(health.PREFIX + check.name, f"1 while the check finds: {check.meaning}", "", "0")
    for check in health.CHECKS
)
"""All metrics that runs write."""

_PATTERNS = tuple(
    (entry, re.compile(re.escape(entry.name).replace(r"\*", "[^/]+"))) for entry in TABLE
)


def find_undocumented(names: Iterable[str]) -> set[str]:
    """Return the names that the table does not contain."""
    names = set(names)
    return names - describe(names).keys()


def describe(names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Return meaning, unit and healthy range by name, for the names that the table contains."""
    found: dict[str, tuple[str, str, str]] = {}
    for name in names:
        for entry, pattern in _PATTERNS:
            if pattern.fullmatch(name):
                found[name] = (entry.meaning, entry.unit, entry.healthy)
                break
    return found
