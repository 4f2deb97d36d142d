"""The laws of the decode engine, each held with a real tiny policy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from python_lines import num_lines
from tiny_decode import (
    CONFIG,
    POLICY,
    Shelf,
    answer,
    engine,
    laid_out,
    request,
    same_samples,
    trainer_distribution,
    trainer_logp,
    whole,
    with_engine_loop,
    with_setting,
)

from areal_jax.engine.batch import DecodeOutput, SamplingMode
from areal_jax.engine.config import MAX_TOP_K
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_programs import DecodePrograms
from areal_jax.engine.decode_shapes import DecodeShapes
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.sampling import uniforms
from areal_jax.engine.sequence import Sequence
from areal_jax.engine.slots import SlotTable
from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.models.attention import choose_kernel
from areal_jax.records import Completion, Request, Sampling, TopLogprobs

PROMPT = (5, 9, 33, 2, 17)


def uninterrupted(*requests: Request) -> list[list[Completion]]:
    return answer(engine(), Shelf(engine(), (0, 0, 0)), *requests)


# What is sampled, and its log-probs.


@pytest.mark.slow
def test_greedy_decoding_is_the_argmax_of_the_full_forward():
    [[completion]] = uninterrupted(request(temperature=0.0))
    assert len(completion.tokens) == 20
    assert (
        completion.tokens.tolist()
        == trainer_distribution(PROMPT, completion, 0).argmax(-1).tolist()
    )
    np.testing.assert_allclose(completion.logp, trainer_logp(PROMPT, completion, 0), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_stored_logp_is_the_trainers(temperature: float):
    [group] = uninterrupted(request(num_samples=5, temperature=temperature))
    assert len({tuple(completion.tokens) for completion in group}) == 5
    for completion in group:
        np.testing.assert_allclose(
            completion.logp, trainer_logp(PROMPT, completion, 0, temperature), atol=1e-4
        )


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.slow
def test_a_long_prompt_is_prefilled_with_blocked_attention(
    devices: int,
):
    config = CONFIG.__class__(
        num_slots=4, max_prompt_tokens=600, max_new_tokens=8, steps_per_dispatch=4
    )
    long = engine(config, devices=devices, tensor=min(devices, 2))
    prompt = [token % 64 for token in range(0, 600 * 7, 7)]
    [[completion]] = answer(long, Shelf(long, (0, 0, 0)), request(prompt=prompt, max_new_tokens=8))
    assert choose_kernel("cpu", 600) == "blocked"
    np.testing.assert_allclose(completion.logp, trainer_logp(prompt, completion, 0), atol=1e-4)


@pytest.mark.slow
def test_with_filters_logp_is_renormalised_over_what_was_kept():
    [plain, filtered, one] = uninterrupted(
        request("plain"), request("filtered", top_k=3), request("one", top_k=1, max_new_tokens=9)
    )
    # Among the 3 most likely tokens all probabilities grow by the same factor, and sum to 1.
    gain = filtered[0].logp - trainer_logp(PROMPT, filtered[0], 0)
    assert (gain > 0).all()
    assert one[0].logp.tolist() == pytest.approx([0.0] * 9)
    assert one[0].tokens.tolist() == trainer_distribution(PROMPT, one[0], 0).argmax(-1).tolist()
    same_samples(plain, uninterrupted(request("plain"))[0])


@pytest.mark.slow
def test_in_bfloat16_matrices_are_cast_and_logp_is_still_the_trainers():
    half = DecodeEngine(POLICY, engine().mesh, CONFIG, jnp.bfloat16)
    params = laid_out(half, 0)
    assert params["layers"][0]["mlp"]["up"].dtype == params["embed"].dtype == jnp.bfloat16
    # Training multiplies by these in float32, whatever it computes in.
    assert params["layers"][0]["mlp_norm"].dtype == params["norm"].dtype == jnp.float32
    [group] = answer(half, Shelf(half, (0, 0, 0)), request(num_samples=4))
    sampled = np.concatenate([each.logp for each in group])
    same, wide = (
        np.concatenate([trainer_logp(PROMPT, each, 0, compute_dtype=dtype) for each in group])
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    # What is left is the order of sums: 0.008 against 0.028 from training in float32.
    assert np.abs(sampled - same).mean() < 0.5 * np.abs(sampled - wide).mean()


@pytest.mark.slow
def test_a_stop_token_ends_a_sample_and_is_kept():
    [[whole_answer]] = uninterrupted(request())
    stop = int(whole_answer.tokens[6])
    first = whole_answer.tokens.tolist().index(stop)
    [[stopped]] = uninterrupted(request(stop=(63, stop)))
    assert stopped.stop_reason == "stop"
    assert stopped.tokens.tolist() == whole_answer.tokens[: first + 1].tolist()
    assert whole_answer.stop_reason == "length"


@pytest.mark.parametrize("max_new_tokens", [1, 4, 7])
def test_the_budget_ends_a_sample(max_new_tokens: int):
    [group] = uninterrupted(request(num_samples=2, max_new_tokens=max_new_tokens))
    assert [(len(each.tokens), each.stop_reason) for each in group] == [
        (max_new_tokens, "length")
    ] * 2


@pytest.mark.parametrize("prompt", [(7,), tuple(range(12))])
def test_the_shortest_and_the_longest_prompt_are_answered(prompt: tuple[int, ...]):
    [[completion]] = uninterrupted(request(prompt=prompt))
    np.testing.assert_allclose(completion.logp, trainer_logp(prompt, completion, 0), atol=1e-4)


# What a draw depends on.


@pytest.mark.slow
def test_sampling_depends_on_seed_sample_and_position_only():
    [group] = uninterrupted(request(num_samples=3, seed=7))
    positions = jnp.broadcast_to(jnp.arange(5, 25, dtype=jnp.int32), (3, 20))
    numbers = np.asarray(
        uniforms(jnp.array([[0, 7]] * 3, jnp.uint32), jnp.arange(3, dtype=jnp.int32), positions)
    )
    for completion, uniform in zip(group, numbers, strict=True):
        ends = np.exp(trainer_distribution(PROMPT, completion, 0)).cumsum(-1)
        places = np.arange(20)
        assert (ends[places, completion.tokens] > uniform - 1e-4).all()
        assert (ends[places, completion.tokens] - np.exp(completion.logp) < uniform + 1e-4).all()


@pytest.mark.slow
def test_samples_do_not_depend_on_slot_or_batch():
    alone = [uninterrupted(request(f"r{i}", range(i, i + 6), seed=i))[0] for i in range(3)]
    crowd = [
        request(f"crowd{i}", (i, 1), num_samples=3, max_new_tokens=3 + i, seed=9) for i in range(5)
    ]
    together = uninterrupted(
        *crowd, *(request(f"r{i}", range(i, i + 6), seed=i) for i in range(3))
    )[5:]
    for a, b in zip(alone, together, strict=True):
        same_samples(a, b)


@pytest.mark.slow
def test_samples_do_not_depend_on_dispatch_or_slot_count():
    other = engine(
        CONFIG.__class__(num_slots=2, max_prompt_tokens=12, max_new_tokens=20, steps_per_dispatch=3)
    )
    same_samples(
        answer(other, Shelf(other, (0, 0, 0)), request(num_samples=3))[0],
        uninterrupted(request(num_samples=3))[0],
    )


@pytest.mark.slow
def test_samples_depend_on_seed_and_index():
    [group] = uninterrupted(request(num_samples=2, seed=1))
    [[other]] = uninterrupted(request(seed=1 << 32 | 1))
    assert len({tuple(each.tokens) for each in (*group, other)}) == 3


@pytest.mark.parametrize(("tensor"), [1, 2])
@pytest.mark.slow
def test_four_devices_sample_the_tokens_of_one(tensor: int):
    four = engine(CONFIG, devices=4, tensor=tensor)
    requests = [
        request(f"r{i}", range(3 + 2 * i), num_samples=3, seed=i, max_new_tokens=12)
        for i in range(4)
    ]
    sharded = answer(four, Shelf(four, (0, 0, 0), (2, 1, 0), (3, 2, 1)), *requests)
    single = answer(engine(), Shelf(engine(), (0, 0, 0), (2, 1, 0), (3, 2, 1)), *requests)
    for a, b in zip(sharded, single, strict=True):
        same_samples(a, b, atol=1e-4)
        assert [each.versions.tolist() for each in a] == [each.versions.tolist() for each in b]


# New weights in mid-sentence.


def test_tokens_have_the_version_that_sampled_them():
    # Looks 0, 1, 2, ... precede dispatches of 4 tokens: version 3 draws 0-7, version 7 draws 8-11,
    # version 8 the rest.
    [[completion]] = answer(engine(), Shelf(engine(), (0, 3, 0), (2, 7, 1), (3, 8, 2)), request())
    assert completion.versions.tolist() == [3] * 8 + [7] * 4 + [8] * 8


def test_after_a_swap_every_logp_is_that_of_the_version_on_the_token():
    [group] = answer(
        engine(), Shelf(engine(), (0, 0, 0), (1, 1, 1), (3, 2, 2)), request(num_samples=6)
    )
    for completion in group:
        logp = np.stack([trainer_logp(PROMPT, completion, seed) for seed in range(3)])
        np.testing.assert_allclose(
            completion.logp, logp[completion.versions, np.arange(20)], atol=1e-4
        )


def test_kept_cache_differs_from_a_rebuilt_one():
    kept = with_setting(engine(), on_update="keep")
    [group] = answer(kept, Shelf(kept, (0, 0, 0), (1, 1, 1), (3, 2, 2)), request(num_samples=6))
    for completion in group:
        logp = np.stack([trainer_logp(PROMPT, completion, seed) for seed in range(3)])
        errors = np.abs(completion.logp - logp[completion.versions, np.arange(20)])
        assert errors[:4].max() < 1e-4
        assert errors[4:].max() > 1e-2


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
@pytest.mark.slow
def test_a_swap_of_equal_weights_changes_no_bit(on_update: str):
    chosen = with_setting(engine(), on_update=on_update)
    [plain] = uninterrupted(request(num_samples=6))
    [swapped] = answer(
        chosen, Shelf(chosen, *((look, look, 0) for look in range(5))), request(num_samples=6)
    )
    for a, b in zip(plain, swapped, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.logp.tobytes() == b.logp.tobytes()
        assert b.versions.tolist() == sorted([*range(5)] * 4)


@pytest.mark.slow
def test_rebuilt_cache_continues_with_equal_tokens(monkeypatch: pytest.MonkeyPatch):
    [plain] = uninterrupted(request(num_samples=6))
    chosen = with_setting(engine())
    monkeypatch.setattr(chosen, "same_weights", lambda old, new: False)
    [rebuilt] = answer(
        chosen, Shelf(chosen, *((look, look, 0) for look in range(5))), request(num_samples=6)
    )
    # A prefill sums in another order than single steps.
    same_samples(plain, rebuilt, atol=1e-4)


def test_weights_that_differ_in_one_bit_are_not_equal():
    params = laid_out(engine(), 0)
    other = jax.tree.map(jnp.copy, params)
    assert engine().same_weights(params, other)
    scale = np.array(other["norm"])
    scale[3] = np.nextafter(scale[3], 9)
    other["norm"] = jax.device_put(scale, engine().param_shardings["norm"])
    assert not engine().same_weights(params, other)


# Prefill.


async def metrics_of(engine_loop: EngineLoop, *requests: Request) -> dict[str, tuple[float, float]]:
    futures = [engine_loop.submit(each) for each in requests]
    engine_loop.start()
    await asyncio.gather(*futures)
    return engine_loop.metrics()


def test_group_prompt_is_prefilled_once_with_few_slots():
    # 20 samples in 8 slots: three waves, one prefill of all tokens but the last.
    measured = with_engine_loop(
        engine(), Shelf(engine(), (0, 0, 0)), lambda d: metrics_of(d, request(num_samples=20))
    )
    assert measured["prefill_tokens"] == (4.0, 1.0)
    assert measured["tokens"] == (400.0, 1.0)


def test_new_weights_prefill_a_waiting_groups_prompt_again():
    # Version 1 comes at look 1, when 4 tokens are sampled: 8 caches of 4 + 4 tokens are rebuilt.
    # Two more waves come after it.
    shelf = Shelf(engine(), (0, 0, 0), (1, 1, 1))
    measured = with_engine_loop(engine(), shelf, lambda d: metrics_of(d, request(num_samples=20)))
    assert measured["prefill_tokens"] == (8.0, 1.0)
    assert measured["recompute_tokens"] == (64.0, 1.0)
    assert measured["swaps"] == (2.0, 1.0)


def test_samples_after_a_swap_use_the_new_weights():
    shelf = Shelf(engine(), (0, 0, 0), (1, 1, 1))
    [group] = answer(engine(), shelf, request(num_samples=10))
    for completion in group[8:]:
        assert set(completion.versions) == {1}
        np.testing.assert_allclose(completion.logp, trainer_logp(PROMPT, completion, 1), atol=1e-4)


@pytest.mark.slow
def test_the_view_grows_and_shrinks_with_the_longest_sequence():
    config = CONFIG.__class__(
        num_slots=2, max_prompt_tokens=20, max_new_tokens=200, steps_per_dispatch=8
    )
    long = engine(config)
    shelf = Shelf(long, (0, 0, 0), (20, 1, 1))
    # 20 + 200 tokens: the cache has 128 columns, then 224; the prompt of the second comes when it
    # is at its longest.
    requests = [
        request("long", range(20), max_new_tokens=200),
        request("short", range(20), 3, max_new_tokens=90, seed=3),
    ]
    [[one], three] = answer(long, shelf, *requests)
    for completion in (one, *three):
        logp = np.stack([trainer_logp(range(20), completion, seed) for seed in range(2)])
        expected = logp[completion.versions, np.arange(len(completion.tokens))]
        np.testing.assert_allclose(completion.logp, expected, atol=1e-4)
    assert {key[1:] for key in long.programs.compiled if key[0] == "resize"} == {
        (128, 224),
        (224, 128),
    }


# Interruption: snapshots, suspension, cancellation.


def stopped_after(dispatches: int) -> Shelf:
    """Weights of version 0 that pause the engine loop after so many dispatches.

    Commands given then are executed one dispatch later.
    """
    shelf = Shelf(engine(), (0, 0, 0))
    shelf.pause_at(dispatches)
    return shelf


def test_a_snapshot_holds_every_unfinished_request_once():
    shelf = stopped_after(2)
    requests = [
        request("short", num_samples=2, max_new_tokens=3),
        request("mixed", num_samples=3, stop=(40, 41, 42, 43, 44, 45, 46, 47), seed=5),
        request("queued", num_samples=6),
    ]

    async def act(engine_loop: EngineLoop):
        order: list[str] = []
        futures = [engine_loop.submit(each) for each in requests]
        for future, each in zip(futures, requests, strict=True):
            future.add_done_callback(lambda _, name=each.id: order.append(name))
        engine_loop.start()
        await shelf.paused()
        snapshot = engine_loop.snapshot()
        snapshot.add_done_callback(lambda _: order.append("snapshot"))
        shelf.go_on()
        return await snapshot, order, await asyncio.gather(*futures)

    taken, order, final = with_engine_loop(engine(), shelf, act)
    # Delivered before, or in the snapshot: never both, never neither.
    delivered = set(order[: order.index("snapshot")])
    assert "short" in delivered
    assert set(taken) == {"short", "mixed", "queued"} - delivered
    for each, completions in zip(requests, final, strict=True):
        for at_snapshot, at_end in zip(taken.get(each.id, ()), completions, strict=False):
            so_far = len(at_snapshot.tokens)
            assert at_snapshot.tokens.tolist() == at_end.tokens[:so_far].tolist()
            assert at_snapshot.logp.tolist() == at_end.logp[:so_far].tolist()
            assert at_snapshot.versions.tolist() == at_end.versions[:so_far].tolist()
            assert at_snapshot.stop_reason in ("suspended", at_end.stop_reason)
    # 8 slots, 2 of them used twice: three samples of the last request had sampled for all 3
    # dispatches.
    assert [len(each.tokens) for each in taken["queued"]][:3] == [12, 12, 12]


def test_a_sample_that_was_not_started_is_empty_in_a_snapshot():
    shelf = stopped_after(0)

    async def act(engine_loop: EngineLoop):
        future = engine_loop.submit(request(num_samples=10))
        engine_loop.start()
        await shelf.paused()
        snapshot = engine_loop.snapshot()
        shelf.go_on()
        taken = await snapshot
        await future
        return taken

    taken = with_engine_loop(engine(), shelf, act)["a"]
    assert [(len(each.tokens), each.stop_reason) for each in taken] == [(4, "suspended")] * 8 + [
        (0, "suspended")
    ] * 2


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.slow
def test_suspended_and_resumed_is_uninterrupted(elsewhere: bool):
    original = request(num_samples=10, stop=(11, 12), seed=4)
    shelf = stopped_after(1)

    async def act(engine_loop: EngineLoop):
        future = engine_loop.submit(original)
        engine_loop.start()
        await shelf.paused()
        suspended = engine_loop.suspend("a")
        shelf.go_on()
        record = await suspended
        assert [each.tokens.tolist() for each in await future] == [
            each.tokens.tolist() for each in record
        ]
        again = request(num_samples=10, stop=(11, 12), seed=4, resume=record)
        return record, None if elsewhere else await engine_loop.submit(again)

    record, resumed = with_engine_loop(engine(), shelf, act)
    assert {each.stop_reason for each in record} == {"suspended", "stop"}
    if resumed is None:
        other = engine(
            CONFIG.__class__(
                num_slots=2, max_prompt_tokens=12, max_new_tokens=20, steps_per_dispatch=3
            )
        )
        [resumed] = answer(
            other,
            Shelf(other, (0, 9, 0)),
            request(num_samples=10, stop=(11, 12), seed=4, resume=record),
        )
    [expected] = uninterrupted(original)
    same_samples(expected, resumed)
    for before, after in zip(record, resumed, strict=True):
        # What was sampled before is kept as it was, log-probs and versions included.
        assert after.logp[: len(before.logp)].tolist() == before.logp.tolist()
        assert after.versions[: len(before.tokens)].tolist() == before.versions.tolist()
        assert set(after.versions[len(before.tokens) :]) <= {9 if elsewhere else 0}


def test_finished_resumed_request_returns_immediately():
    [finished] = uninterrupted(request(num_samples=2))
    [again] = uninterrupted(request(num_samples=2, resume=tuple(finished)))
    assert [each is before for each, before in zip(again, finished, strict=True)] == [True, True]


def test_a_cancelled_request_frees_its_slots():
    shelf = stopped_after(1)

    async def act(engine_loop: EngineLoop):
        first, second = (
            engine_loop.submit(request("first", num_samples=8)),
            engine_loop.submit(request("second", num_samples=8)),
        )
        third = engine_loop.submit(request("third", num_samples=2))
        engine_loop.start()
        await shelf.paused()
        first.cancel()
        second.cancel()
        # A cancelled future says so in the loop's next turn.
        await asyncio.sleep(0)
        shelf.go_on()
        return await third, engine_loop.metrics()

    answered, measured = with_engine_loop(engine(), shelf, act)
    same_samples(uninterrupted(request("third", num_samples=2))[0], answered)
    # Dispatches 0 and 1 drew 4 tokens in 8 slots; then 2 samples of 20 were left alone.
    assert measured["tokens"] == (2 * 4 * 8 + 2 * 20, 1.0)


def test_cancelled_request_samples_no_more_tokens():
    shelf = stopped_after(1)

    async def act(engine_loop: EngineLoop):
        futures = [engine_loop.submit(request(name, num_samples=4)) for name in ("first", "second")]
        engine_loop.start()
        await shelf.paused()
        futures[0].cancel()
        # A cancelled future says so in the loop's next turn.
        await asyncio.sleep(0)
        shelf.go_on()
        await futures[1]
        return engine_loop.metrics()

    # Dispatches 0 and 1 drew 4 tokens for 8 samples; then 12 were left for each of the other's.
    assert with_engine_loop(engine(), shelf, act)["tokens"] == (2 * 4 * 8 + 4 * 12, 1.0)


# Which version may start a request.


def test_a_request_does_not_start_before_its_version():
    shelf = Shelf(engine(), (0, 0, 0), (3, 4, 1), (6, 5, 2))
    [[free], [gated]] = answer(engine(), shelf, request("free"), request("gated", min_version=5))
    assert free.versions.tolist() == [0] * 12 + [4] * 8
    assert set(gated.versions) == {5}
    np.testing.assert_allclose(gated.logp, trainer_logp(PROMPT, gated, 2), atol=1e-4)


def test_a_timeout_names_the_request_and_the_version_it_needs():
    hasty = with_setting(engine(), request_timeout_s=0.3)

    async def act(engine_loop: EngineLoop):
        engine_loop.start()
        with pytest.raises(
            TimeoutError,
            match=r"request 'a' .*engine.request_timeout_s=0.3.*version 5.*has version 0",
        ):
            await engine_loop.submit(request(min_version=5))
        return await engine_loop.submit(request("b", max_new_tokens=1))

    assert len(with_engine_loop(hasty, Shelf(engine(), (0, 0, 0)), act)) == 1


def test_deadline_is_kept_while_dispatches_run_ahead():
    hasty = with_setting(engine(), request_timeout_s=0.3)
    shelf = Shelf(engine(), (0, 0, 0))
    shelf.pause_at(2)

    async def act(engine_loop: EngineLoop):
        engine_loop.start()
        future = engine_loop.submit(request())
        await shelf.paused()
        await asyncio.sleep(0.4)
        shelf.go_on()
        with pytest.raises(
            TimeoutError,
            match=r"request 'a' .*engine.request_timeout_s=0.3.*0 of 1 samples are finished",
        ):
            await future

    with_engine_loop(hasty, shelf, act)


# What is refused, and how it ends.


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (request(prompt=range(13)), r"prompt has 13 tokens.*engine.max_prompt_tokens=12"),
        (request(prompt=()), r"prompt has 0 tokens"),
        (request(prompt=(1, 64)), r"prompt tokens 1 to 64, expected 0 to 63"),
        (request(max_new_tokens=21), r"max_new_tokens=21.*engine.max_new_tokens=20"),
        (request(top_p=0.0), r"top_p=0.0"),
        (request(stop=tuple(range(9))), r"9 stop_token_ids, expected at most 8"),
        (request(num_samples=0), r"num_samples=0"),
    ],
)
def test_request_above_limits_names_the_setting(refused: Request, words: str):
    async def act(engine_loop: EngineLoop):
        with pytest.raises(InvalidRequest, match=words):
            engine_loop.submit(refused)

    with_engine_loop(engine(), Shelf(engine(), (0, 0, 0)), act)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("top_k", value) for value in (-1, 2**31, 10**30)),
        *(("temperature", value) for value in (-1.0, 1e-40, 1e300, np.inf, np.nan)),
        *(("top_p", value) for value in (1e-60, 1.1, np.nan)),
        *(("min_p", value) for value in (-0.1, 1.1, np.nan)),
        *(
            (name, value)
            for name in ("presence_penalty", "frequency_penalty")
            for value in (1e300, -np.inf, np.nan)
        ),
        *(("repetition_penalty", value) for value in (0.0, 1e-300, 1e300, np.nan)),
        *(("min_new_tokens", value) for value in (-1, 21, 2**31)),
        *(("num_top_logprobs", value) for value in (-1, 21, 2**31)),
        *(("max_new_tokens", value) for value in (0, 2**31)),
        *(("stop_token_ids", value) for value in ((2**31,), (-1,))),
    ],
)
def test_unrepresentable_parameters_are_refused_at_submit(field: str, value: Any):
    bad = request()
    bad = replace(bad, sampling=replace(bad.sampling, **{field: value}))

    async def act(engine_loop: EngineLoop):
        with pytest.raises(InvalidRequest, match=field):
            engine_loop.submit(bad)

    with_engine_loop(engine(), Shelf(engine(), (0, 0, 0)), act)


@pytest.mark.slow
def test_extreme_sampling_parameters_are_accepted():
    extremes: list[dict[str, Any]] = [
        {"top_k": MAX_TOP_K},
        *({"temperature": value} for value in (1e-6, 1e6)),
        {"top_p": 1e-6},
        {"presence_penalty": 1e6, "frequency_penalty": -1e6},
        *({"repetition_penalty": value} for value in (1e-6, 1e6)),
        {"stop_token_ids": (2**31 - 1,), "min_new_tokens": 20},
    ]
    asked = [
        replace(request(str(i)), sampling=Sampling(20, **each)) for i, each in enumerate(extremes)
    ]
    asked.append(request("seed", seed=10**30))
    for [completion] in uninterrupted(*asked):
        assert len(completion.tokens) == 20 and np.isfinite(completion.logp).all()


@pytest.mark.slow
def test_request_id_in_use_is_refused():
    async def act(engine_loop: EngineLoop):
        first, second = engine_loop.submit(request()), engine_loop.submit(request())
        engine_loop.start()
        with pytest.raises(ValueError, match="'a' is in use"):
            await second
        return await first

    same_samples(
        with_engine_loop(engine(), Shelf(engine(), (0, 0, 0)), act), uninterrupted(request())[0]
    )


def test_slots_must_divide_over_the_devices():
    with pytest.raises(ValueError, match=r"engine.num_slots=6 .*4 rollout devices.*multiple of 4"):
        engine(CONFIG.__class__(num_slots=6), devices=4)


def test_engine_failure_fails_waiting_and_later_requests():
    shelf = Shelf(engine(), (0, 0, 0))
    shelf.fails_at = 2

    async def act(engine_loop: EngineLoop):
        first, queued = (
            engine_loop.submit(request(num_samples=8)),
            engine_loop.submit(request("queued", num_samples=2)),
        )
        engine_loop.start()
        for future in (first, queued):
            with pytest.raises(EngineStopped, match="OSError: the transport broke") as caught:
                await future
            assert isinstance(caught.value.__cause__, OSError)
        for future in (
            engine_loop.submit(request("late")),
            engine_loop.snapshot(),
            engine_loop.suspend("first"),
        ):
            with pytest.raises(EngineStopped, match="the transport broke"):
                await future

    with_engine_loop(engine(), shelf, act)


def test_engine_failure_fails_the_request_that_caused_it(monkeypatch: pytest.MonkeyPatch):
    def burst(pending: Any) -> None:
        raise MemoryError("not enough resources for the request")

    async def act(engine_loop: EngineLoop):
        monkeypatch.setattr(engine_loop._requests, "add", burst)
        engine_loop.start()
        with pytest.raises(
            EngineStopped, match="MemoryError: not enough resources for the request"
        ):
            await engine_loop.submit(request())

    with_engine_loop(engine(), Shelf(engine(), (0, 0, 0)), act)


async def closed_while_paused(
    engine_loop: EngineLoop, shelf: Shelf, each: Request
) -> asyncio.Future[list[Completion]]:
    """Submit a request, and close the engine loop while it is paused."""
    future = engine_loop.submit(each)
    engine_loop.start()
    await shelf.paused()
    put = engine_loop._commands.put

    def put_and_go_on(closing: Callable[[], None]) -> None:
        put(closing)
        shelf.go_on()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_loop._commands, "put", put_and_go_on)
        await asyncio.to_thread(engine_loop.close)
    return future


def test_closing_fails_unfinished_requests():
    shelf = stopped_after(1)

    async def act(engine_loop: EngineLoop):
        future = await closed_while_paused(engine_loop, shelf, request())
        with pytest.raises(EngineStopped, match="closed"):
            await future

    with_engine_loop(engine(), shelf, act)


def test_closing_waits_for_no_other_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("areal_jax.engine.engine_loop._COMMANDS_WAIT_S", 60.0)
    monkeypatch.setattr("areal_jax.engine.engine_loop._CLOSE_TIMEOUT_S", 20.0)
    shelf = stopped_after(0)

    async def act(engine_loop: EngineLoop):
        # The command is read when all else is done: one dispatch is the whole answer.
        future = await closed_while_paused(engine_loop, shelf, request(max_new_tokens=4))
        [completion] = await future
        assert len(completion.tokens) == 4

    with_engine_loop(engine(), shelf, act)


# Cost.


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up():
    warm = engine()
    assert warm.warm_up() >= 0
    before = warm.num_programs
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    rng = np.random.default_rng(0)
    requests = [
        request(str(i), rng.integers(0, 64, length), samples, max_new_tokens=budget)
        for i, (length, samples, budget) in enumerate(
            rng.integers(1, (13, 6, 21), (12, 3)).tolist()
        )
    ]
    shelf = Shelf(warm, *((look, look, look % 3) for look in range(0, 40, 3)))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        answer(warm, shelf, *requests)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert warm.num_programs == before


def test_shaped_sampling_programs_run_only_when_needed():
    table = SlotTable(num_slots=3, max_new_tokens=20, tokens_per_dispatch=4)
    table.assign_slot(Sequence(request(), 0, slot=0))
    table.assign_slot(Sequence(request(temperature=0.0, top_k=3, top_p=0.5), 0, slot=1))
    assert table.mode() == SamplingMode.PLAIN
    table.assign_slot(Sequence(request(top_p=0.5), 0, slot=2))
    assert table.mode() == SamplingMode.FILTERED
    table.free_slot(2)
    penalized = replace(request(), sampling=Sampling(20, presence_penalty=0.1))
    table.assign_slot(Sequence(penalized, 0, slot=2))
    assert table.mode() == SamplingMode.SHAPED
    table.free_slot(2)
    assert table.mode() == SamplingMode.PLAIN


@pytest.mark.parametrize("draft_tokens", [0, 1])
def test_bookkeeping_runs_no_python_per_token_or_slot(draft_tokens: int):
    def work(num_slots: int, num_steps: int) -> int:
        table = SlotTable(num_slots, 2000, num_steps, has_drafts=draft_tokens > 0)
        for slot in range(num_slots):
            table.assign_slot(
                Sequence(request(max_new_tokens=2000, num_samples=num_slots), slot, slot=slot)
            )
        everyone, nobody, counts = (
            np.ones(num_slots, bool),
            np.zeros(num_slots, bool),
            np.full(num_slots, num_steps, np.int32),
        )
        tokens, logp = (
            np.ones((num_steps, num_slots), np.int32),
            np.zeros((num_steps, num_slots), np.float32),
        )
        sampled = DecodeOutput(tokens, logp, counts, everyone, nobody, tokens[-1])
        return num_lines(
            lambda: (table.process_outputs(sampled, version=1), table.num_columns(), table.mode())
        )

    few = work(2, 2)
    assert work(64, 8) == work(256, 32) == few


@pytest.mark.parametrize("num_before", [0, 3])
def test_only_the_end_of_an_answer_is_read(num_before: int):
    table = SlotTable(num_slots=2, max_new_tokens=20, tokens_per_dispatch=4)
    before = np.arange(num_before, dtype=np.int32)
    reported = TopLogprobs(np.tile(before[:, None], 2), np.zeros((num_before, 2), np.float32))
    asked = replace(request(), sampling=Sampling(20, num_top_logprobs=2))
    resumed = Completion(before, -before.astype(np.float32), before, "suspended", reported)
    sequence = Sequence(asked, 0, resumed, slot=1)
    table.assign_slot(sequence)
    for version in range(3):
        tokens = np.arange(8, dtype=np.int32).reshape(4, 2) + 100 * (version + 1)
        likely = np.arange(4 * 20 * 2, dtype=np.int32).reshape(4, 20, 2)
        counts, active = np.full(2, 4, np.int32), np.array([False, True])
        sampled = DecodeOutput(
            tokens,
            -tokens.astype(np.float32),
            counts,
            active,
            ~active,
            tokens[-1],
            (likely, -likely.astype(np.float32)),
        )
        table.process_outputs(sampled, version)
    whole_answer = sequence.completion()
    assert len(whole_answer.tokens) == num_before + 12
    for start in range(num_before + 13):
        end, expected = sequence.completion(start), whole_answer.slice(start)
        for name in ("tokens", "logp", "versions"):
            np.testing.assert_array_equal(getattr(end, name), getattr(expected, name))
        assert end.top_logprobs is not None and expected.top_logprobs is not None
        for mine, theirs in zip(end.top_logprobs, expected.top_logprobs, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_metrics_are_reset_after_each_read():
    shelf = Shelf(engine(), (0, 0, 0), (2, 1, 1))

    async def act(engine_loop: EngineLoop):
        first = await metrics_of(
            engine_loop, request(num_samples=4), request("b", max_new_tokens=6)
        )
        return first, engine_loop.metrics()

    start = time.perf_counter()
    first, second = with_engine_loop(engine(), shelf, act)
    assert first["tokens"] == (86.0, 1.0)
    assert first["requests"] == (2.0, 1.0)
    # 20 tokens take 5 dispatches of 4 steps in 8 slots.
    assert first["dispatches"] == (5.0, 1.0)
    assert first["occupancy"] == (86.0, 160.0)
    assert first["tokens_per_s"][0] == 86.0
    assert 0 < first["tokens_per_s"][1] < time.perf_counter() - start
    assert first["swaps"] == (2.0, 1.0)
    assert first["swap_stall_s"][1] == 2
    assert second["tokens"] == (0.0, 1.0)
    assert "occupancy" not in second


def events_of(shelf: Shelf, one: Request) -> list[tuple[str, float, float]]:
    """Name, start and end of what the engine loop's thread does to answer one request."""
    events: list[tuple[str, float, float]] = []

    async def main():
        engine_loop = EngineLoop(
            engine(),
            shelf,
            on_event=lambda name, start_s, end_s, args: events.append((name, start_s, end_s)),
        )
        future = engine_loop.submit(one)
        engine_loop.start()
        await future
        engine_loop.close()

    asyncio.run(main())
    return events


def overlaps(events: list[tuple[str, float, float]]) -> list[bool]:
    """Of every dispatch but the first, whether it was enqueued before the tokens of the one before
    it were read."""
    dispatches = [(start, end) for name, start, end in events if name == "dispatch"]
    return [start < end for (_, end), (start, _) in pairwise(dispatches)]


def test_dispatches_run_ahead_if_nothing_waits():
    # 8 samples of 20 tokens in 8 slots: 5 dispatches of 4 tokens, none of which has to wait for the
    # host.
    events = events_of(Shelf(engine(), (0, 0, 0)), request(num_samples=8))
    assert overlaps(events) == [True] * 4


def test_a_waiting_sample_gets_a_free_slot_at_once():
    # 9 samples in 8 slots. The 5th dispatch ends 8 of them for want of budget: the 6th, of the 9th
    # sample, comes after it.
    events = events_of(Shelf(engine(), (0, 0, 0)), request(num_samples=9))
    assert overlaps(events) == [True] * 4 + [False] + [True] * 4


def test_arriving_weights_prevent_running_ahead():
    events = events_of(Shelf(engine(), (0, 0, 0), (2, 1, 1)), request())
    assert [name for name, _, _ in events] == [
        "swap",
        "prefill",
        "dispatch",
        "dispatch",
        "swap",
        "dispatch",
        "dispatch",
        "dispatch",
    ]
    assert overlaps(events) == [True, False, True, True]


def test_dispatch_with_finished_slots_samples_no_tokens():
    warm = engine()
    table = SlotTable(num_slots=8, max_new_tokens=20, tokens_per_dispatch=4)
    table.assign_slot(Sequence(request(max_new_tokens=4), 0, slot=0))
    state = warm.assign_slot(warm.init_state(), table.records())
    state, packed = warm.generate(laid_out(warm, 0), state)
    assert warm.fetch(packed).counts.tolist() == [4] + [0] * 7
    fed = np.array(state.view[0][0])
    state, packed = warm.generate(laid_out(warm, 0), state)
    assert warm.fetch(packed).counts.tolist() == [0] * 8
    # Nor is any token fed: the columns that every step writes are as they were.
    np.testing.assert_array_equal(np.asarray(state.view[0][0])[..., :4], fed[..., :4])


@pytest.mark.slow
def test_events_record_dispatches_and_swaps():
    events = events_of(Shelf(engine(), (0, 0, 0), (1, 1, 1)), request(max_new_tokens=8))
    assert [name for name, _, _ in events] == ["swap", "prefill", "dispatch", "swap", "dispatch"]
    assert all(start <= end for _, start, end in events)
    assert len(whole(PROMPT, uninterrupted(request())[0][0])) == 25


class SlowPrograms(DecodePrograms):
    """Programs that compile filtered sampling only once `let` is set."""

    def __init__(self, shapes: DecodeShapes) -> None:
        super().__init__(shapes)
        self.asked, self.let = threading.Event(), threading.Event()

    def lower(self, verb: str, *shape: int) -> jax.stages.Lowered:
        if verb == "generate" and shape[1] == SamplingMode.FILTERED:
            self.asked.set()
            assert self.let.wait(60)
        return super().lower(verb, *shape)


class Slow(DecodeEngine):
    """An engine with `SlowPrograms`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.programs = slow = SlowPrograms(self.shapes)
        self.asked, self.let = slow.asked, slow.let


def slow_engine() -> Slow:
    model = engine()
    found = Slow(model.policy, model.mesh, model.config, model.compute_dtype)
    found.warm_up()
    return found


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_requests_continue_during_compilation():
    slow = slow_engine()
    shelf = Shelf(slow, (0, 0, 0))

    async def main(engine_loop: EngineLoop) -> None:
        engine_loop.start()
        filtered = engine_loop.submit(request("filtered", num_samples=2, top_k=3))
        while not slow.asked.is_set():
            await asyncio.sleep(0.01)
        given_up = engine_loop.submit(request("given up", top_k=3))
        given_up.cancel()
        assert len(await engine_loop.submit(request("plain"))) == 1
        assert not filtered.done()
        slow.let.set()
        assert len(await filtered) == 2
        assert slow.warm == SamplingMode.FILTERED

    with_engine_loop(slow, shelf, main)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_closing_ends_requests_that_wait_for_programs():
    slow = slow_engine()

    async def main(engine_loop: EngineLoop) -> None:
        engine_loop.start()
        filtered = engine_loop.submit(request("filtered", top_k=3))
        while not slow.asked.is_set():
            await asyncio.sleep(0.01)
        slow.let.set()
        await asyncio.to_thread(engine_loop.close)
        with contextlib.suppress(EngineStopped):
            await filtered

    with_engine_loop(slow, Shelf(slow, (0, 0, 0)), main)
