"""Training and sampling by Tinker's own client."""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import tinker
from tinker import types
from tiny_server import call, datum, logprobs, ready

from areal_jax.api.training_server import ListeningServer
from areal_jax.data.sft import SupervisedExample
from areal_jax.metrics.meters import Mean
from areal_jax.models import hf, lora
from areal_jax.models.config import LoRA, PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.run.models import find_policy
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.step import TrainableModel

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

TOKENS = [[5, 9, 300, 7, 41, 8], [17, 4, 4, 90], [30, 31, 32, 33, 34, 35, 36, 37, 38]]
ADAM = types.AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8)
RNG = np.random.default_rng(1)


def new_client(client: tinker.ServiceClient, server: ListeningServer, seed: int = 7):
    return ready(client.create_lora_training_client(base_model=server.model, rank=4, seed=seed))


@pytest.fixture(scope="module")
def training(client: tinker.ServiceClient, server: ListeningServer):
    return new_client(client, server)


def test_the_server_says_what_it_has(
    client: tinker.ServiceClient, server: ListeningServer, training
) -> None:
    (model,) = client.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length) == (server.model, 64)
    info = training.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 4, server.model)


def test_updates_equal_those_of_the_projects_own_trainer(
    client: tinker.ServiceClient, server: ListeningServer, policy: Path
) -> None:
    mesh = make_train_mesh(PlacementConfig(), jax.devices()[:1])
    plain = find_policy(PolicyConfig(path=str(policy)), policy)
    adapted = Policy(plain.config, LoRA(rank=4, alpha=32.0))
    trainer = SupervisedTrainer(
        TrainerConfig(
            optimizer=OptimizerConfig(
                learning_rate=3e-3,
                warmup_fraction=0.0,
                eps=1e-8,
                weight_decay=0.1,
                max_grad_norm=0.5,
            ),
            remat="none",
        ),
        TrainableModel(
            policy=adapted,
            params=lora.init(adapted, jax.random.key(7)),
            base=hf.load(
                policy, plain, shardings(mesh, plain.axes(), plain.abstract(), TRAIN_RULES)
            ),
            mesh=mesh,
            compute_dtype=np.float32,
            row_tokens=64,
        ),
        num_updates=3,
    )
    examples = [SupervisedExample(np.array(t, np.int32), np.arange(len(t)) > 0, ()) for t in TOKENS]
    training, count = new_client(client, server), sum(len(t) - 1 for t in TOKENS)
    # The project's loss is the mean over the tokens.
    data = [datum(t, weights=np.full(len(t) - 1, 1.0 / count)) for t in TOKENS]
    adam = types.AdamParams(
        learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5
    )
    for _ in range(3):
        metrics = trainer.step(examples).metrics
        outputs, step = training.forward_backward(data, "cross_entropy"), training.optim_step(adam)
        loss, norm = (Mean(*metrics[name]).value for name in ("loss", "grad_norm"))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        assert outputs.result().metrics["loss:sum"] == pytest.approx(loss, abs=1e-5)
        assert step.result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    total, weight = trainer._learner.measure(trainer.pack(examples).batches)["loss"]
    after = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
    assert after == pytest.approx(total / weight, abs=1e-5)


def test_a_custom_loss_has_the_gradients_of_the_same_loss(training) -> None:
    # As forward_backward_custom: forward, the gradient of a loss by log-prob on the client, and
    # cross_entropy with minus that gradient as weights. Of PPO without clip it is -ratio * A.
    (now,) = logprobs(training.forward([datum(TOKENS[0])], "cross_entropy").result())
    behave, advantages = now - 0.1 * RNG.random(5, np.float32), RNG.normal(size=5)
    rl = datum(TOKENS[0], logprobs=behave, advantages=advantages)
    weights = np.exp(now - behave) * advantages
    losses, norms = [], []
    for name, each in (
        ("importance_sampling", rl),
        ("cross_entropy", datum(TOKENS[0], weights=weights)),
    ):
        future = training.forward_backward([each], name)
        losses.append(future.result().metrics["loss:sum"])
        step = training.optim_step(types.AdamParams(learning_rate=0.0))
        norms.append(step.result().metrics["grad_norm"])
    assert losses[0] == pytest.approx(-weights.sum(), rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("loss", ["ppo", "dro"])
def test_losses_are_sums_over_tokens(training, loss: str) -> None:
    (now,) = logprobs(training.forward([datum(TOKENS[0])], "cross_entropy").result())
    behave, advantages = now - 0.3, np.array([1.0, -1.0, 0.5, 2.0, -0.5])
    result = training.forward_backward(
        [datum(TOKENS[0], logprobs=behave, advantages=advantages)],
        loss,
        {"clip_high_threshold": 1.1} if loss == "ppo" else {"beta": 0.2},
    ).result()
    ratio = np.exp(0.3)
    expected = {
        "ppo": -np.minimum(ratio * advantages, 1.1 * advantages).sum(),
        "dro": -(now * advantages - 0.1 * 0.3**2).sum(),
    }
    assert result.metrics["loss:sum"] == pytest.approx(expected[loss], rel=1e-4)
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()


def test_batches_in_chunks_add_up(training) -> None:
    # limits.max_datums=4: the client sends three chunks, of which the first comes last.
    data = [datum(TOKENS[i % 3]) for i in range(10)]
    whole = training.forward_backward(data, "cross_entropy").result()
    together = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    singles = [training.forward_backward([each], "cross_entropy").result() for each in data]
    apart = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    np.testing.assert_allclose(
        np.concatenate(logprobs(whole)),
        np.concatenate([logprobs(each)[0] for each in singles]),
        atol=1e-5,
    )
    total = sum(each.metrics["loss:sum"] for each in singles)
    assert whole.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert together["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-4)


def test_samples_have_the_logprobs_of_training(training) -> None:
    training.forward_backward([datum(t) for t in TOKENS], "cross_entropy")
    training.optim_step(ADAM).result()
    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([5, 9, 300])
    params = types.SamplingParams(max_tokens=12, seed=3, stop=[])
    first, second = (
        sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result() for _ in range(2)
    )
    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    assert first.sequences[0].tokens != first.sequences[1].tokens
    for sequence in first.sequences:
        assert (len(sequence.tokens), sequence.stop_reason) == (12, "length")
        (scored,) = logprobs(
            training.forward([datum([5, 9, 300, *sequence.tokens])], "cross_entropy").result()
        )
        np.testing.assert_allclose(scored[2:], sequence.logprobs, atol=1e-4)
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        np.testing.assert_allclose(scored[:2], first.prompt_logprobs[1:], atol=1e-5)


def test_samples_end_at_stop_tokens_and_strings(training, client, server) -> None:
    sampler = client.create_sampling_client(base_model=server.model)
    prompt, free = types.ModelInput.from_ints([5, 9]), {"max_tokens": 30, "seed": 5}
    tokens = (
        sampler.sample(prompt, 1, types.SamplingParams(**free, stop=[]))
        .result()
        .sequences[0]
        .tokens
    )
    at = tokens[10]
    stopped = (
        sampler.sample(prompt, 1, types.SamplingParams(**free, stop=[at])).result().sequences[0]
    )
    assert stopped.tokens == tokens[: tokens.index(at) + 1]
    assert stopped.stop_reason == "stop"
    # A string may end within the text of a token; the token that completes it is the last one.
    tokenizer = training.get_tokenizer()
    words = [tokenizer.decode([token]) for token in tokens[4:]]
    text = next(word for word in words if len(word) > 1 and word.isascii())
    stopped = (
        sampler.sample(prompt, 1, types.SamplingParams(**free, stop=[text])).result().sequences[0]
    )
    assert text in tokenizer.decode(stopped.tokens)
    assert text not in tokenizer.decode(stopped.tokens[:-1])
    assert stopped.stop_reason == "stop"


def test_the_clients_errors_are_theirs_and_end_nothing(training) -> None:
    for data, loss, message in (
        ([datum(TOKENS[0])], "stable_reinforce", "set loss_fn to one of"),
        ([datum(TOKENS[0])], "ppo", "expected loss_fn_inputs with logprobs"),
        ([datum([1, 2, 999_999])], "cross_entropy", "expected token ids"),
        ([datum(list(range(70)))], "cross_entropy", "max_tokens=64"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message) as found:
            training.forward_backward(data, loss).result()
        assert found.value.category == types.RequestErrorCategory.User
    assert training.forward([datum(TOKENS[0])], "cross_entropy").result().metrics["loss:sum"] > 0


def test_training_goes_on_from_a_checkpoint_bit_for_bit(training, client) -> None:
    data = [datum(t) for t in TOKENS]

    def two_steps(of) -> np.ndarray:
        for _ in range(2):
            of.forward_backward(data, "cross_entropy")
            of.optim_step(ADAM).result()
        return np.concatenate(logprobs(of.forward(data, "cross_entropy").result()))

    path = training.save_state("half").result().path
    expected = two_steps(training)
    restored = ready(client.create_training_client_from_state_with_optimizer(path))
    assert np.array_equal(two_steps(restored), expected)
    fresh = ready(client.create_training_client_from_state(path))
    assert not np.array_equal(two_steps(fresh), expected)
    training.load_state_with_optimizer(path).result()
    assert np.array_equal(two_steps(training), expected)


def test_checkpoints_and_runs_are_listed(training, client, server) -> None:
    name = training.save_weights_for_sampler("named").result().path
    rest = client.create_rest_client()
    found = rest.list_checkpoints(training.model_id).result().checkpoints
    assert name in {each.tinker_path for each in found}
    assert {each.checkpoint_type for each in found} == {"training", "sampler"}
    runs = rest.list_training_runs().result()
    assert training.model_id in {run.training_run_id for run in runs.training_runs}
    info = rest.get_weights_info_by_tinker_path(name).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (server.model, True, 4)
    session = rest.get_session(training.model_id.partition(":")[0]).result()
    assert training.model_id in session.training_run_ids
    rest.delete_checkpoint_from_tinker_path(name).result()
    found = rest.list_checkpoints(training.model_id).result().checkpoints
    assert name not in {each.tinker_path for each in found}


def test_an_overwritten_checkpoint_is_sampled_from_as_it_is_now(training, client, server) -> None:
    prompt, params = (
        types.ModelInput.from_ints([5, 6, 7]),
        types.SamplingParams(max_tokens=4, seed=1),
    )
    base = ready(client.create_sampling_client(base_model=server.model))

    def logprobs_of(sampler) -> list[float]:
        return sampler.sample(prompt, 1, params).result().sequences[0].logprobs

    of_base = logprobs_of(base)
    path = training.save_state("again").result().path
    sampler = ready(client.create_sampling_client(model_path=path))
    before = logprobs_of(sampler)
    training.forward_backward([datum(t) for t in TOKENS], "cross_entropy")
    training.optim_step(ADAM).result()
    body = {
        "model_id": training.model_id,
        "seq_id": training._get_request_id() + 1,
        "path": "again",
    }
    training._turn_counter += 1
    future = call(server.base_url, "save_weights", body | {"overwrite": True})[1]
    assert call(server.base_url, "retrieve_future", future)[1]["path"] == path
    # The engine that had the old weights serves the base again, and then the new ones.
    assert logprobs_of(base) == of_base
    assert logprobs_of(sampler) != before


def test_an_unloaded_model_is_gone(client, server) -> None:
    model = new_client(client, server).model_id
    assert call(server.base_url, "unload_model", {"model_id": model})[0] == 200
    assert call(server.base_url, "get_info", {"model_id": model})[0] == 404
