"""Sessions of agents: the tokens that are kept are the tokens that were sampled, whatever text the
agent sends back."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import openai
import pytest
from jaxtyping import Int32
from scripted_engine import TOKENIZER, completion

from areal_jax.data.grammars import choice_grammar, json_grammar
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.protocols import Generate
from areal_jax.records import Completion, OnProgress, Progress, RewardResult, StopReason
from areal_jax.serve.sessions import AgentServer, Session
from areal_jax.workflows.conversation import Call, make_samples

if TYPE_CHECKING:
    # It takes 1.4 s to import: only where a test runs.
    import anthropic

T = TypeVar("T")

STOP = TOKENIZER.stop_token_ids[0]


class Odd:
    """Draws odd tokens: such as no tokenizer makes of any text, cut characters and special ones
    among them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sampled = list[tuple[list[int], list[int]]]()
        self.budgets = list[int | None]()
        self.grammars = list[str]()

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        grammar: str = "",
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        self.budgets.append(max_new_tokens)
        self.grammars.append(grammar)
        answers = list[Completion]()
        for sample in range(num_samples):
            tokens = self.rng.integers(3, TOKENIZER.vocab_size, self.rng.integers(1, 12)).tolist()
            reason: StopReason = "length" if self.rng.random() < 0.3 else "stop"
            answers.append(completion([*tokens, STOP] if reason == "stop" else tokens, reason))
            self.sampled.append((prompt_tokens.tolist(), answers[-1].tokens.tolist()))
            if on_progress is not None:
                on_progress([Progress(sample, answers[-1].slice(0, 2))])
        return answers


def in_session(
    generate: Generate,
    act: Callable[[Session, openai.AsyncOpenAI], Awaitable[T]],
    tokenizer: HFTokenizer = TOKENIZER,
) -> T:
    async def main() -> T:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(AgentServer(tokenizer, 50, 100.0).listening())
            session = await stack.enter_async_context(server.open(generate))
            client = openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, max_retries=0
            )
            return await act(session, await stack.enter_async_context(client))

    return asyncio.run(asyncio.wait_for(main(), 120))


async def say(
    client: openai.AsyncOpenAI | anthropic.AsyncAnthropic,
    messages: Sequence[Any],
    *,
    stream: bool = False,
    **how: Any,
) -> str:
    """What the policy says, as text."""
    if not isinstance(client, openai.AsyncOpenAI):
        asked: Any = {"model": "claude", "messages": list(messages), "max_tokens": 50, **how}
        if not stream:
            message = await client.messages.create(**asked)
            return "".join(block.text for block in message.content if block.type == "text")
        async with client.messages.stream(**asked) as events:
            return "".join([text async for text in events.text_stream])
    asked = {"model": "gpt-4o", "messages": list(messages), **how}
    if not stream:
        answer = await client.chat.completions.create(**asked)
        return answer.choices[0].message.content or ""
    parts = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    return "".join(part.choices[0].delta.content or "" for part in parts)


async def respond(
    client: openai.AsyncOpenAI, messages: Sequence[Any], *, stream: bool = False
) -> str:
    """What the policy says, as text, by the Responses API."""
    asked: Any = {"model": "gpt-4o", "input": list(messages)}
    if not stream:
        return (await client.responses.create(**asked)).output_text
    async with client.responses.stream(**asked) as events:
        return "".join(
            [each.delta async for each in events if each.type == "response.output_text.delta"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_sessions_train_on_sampled_tokens_in_100_odd_conversations(protocol: str):
    import anthropic

    rng = np.random.default_rng(0)

    async def converse(session: Session, client: openai.AsyncOpenAI) -> None:
        root = session.base_url.removesuffix("/v1")
        messages_client = anthropic.AsyncAnthropic(
            base_url=root, api_key=session.api_key, max_retries=0
        )
        async with messages_client:
            say_it = {
                "chat": partial(say, client),
                "responses": partial(respond, client),
                "messages": partial(say, messages_client),
            }[protocol]
            await converse_by(session, say_it)

    async def converse_by(session: Session, say: Callable[..., Awaitable[str]]) -> None:
        for number in range(100):
            # Every conversation is another one, in one session: they share no more than an agent's
            # calls do.
            messages = [{"role": "user", "content": f"question {number}"}]
            for turn in range(int(rng.integers(1, 5))):
                said = await say(messages, stream=bool(rng.random() < 0.3))
                # Clients trim, or do not.
                messages.append(
                    {"role": "assistant", "content": said.strip() if rng.random() < 0.5 else said}
                )
                messages.append({"role": "user", "content": f"and {turn}, é€?"})

        calls = [Call(prompt, sampled) for prompt, sampled in session.calls()]
        assert [
            (call.prompt.tolist(), call.completion.tokens.tolist()) for call in calls
        ] == odd.sampled
        samples = make_samples(calls, [1.0] * len(calls), RewardResult("correct"))
        # A conversation is one sample, for each of its calls resumes from the tokens of the last.
        assert len(samples) == 100
        trained = [
            token for sample in samples for token in sample.tokens[sample.loss_mask].tolist()
        ]
        assert trained == [token for _, sampled in odd.sampled for token in sampled]
        logp = [
            each for sample in samples for each in sample.behave_logp[sample.loss_mask].tolist()
        ]
        assert logp == [-0.5] * len(trained)
        alone = make_samples(calls, [1.0] * len(calls), RewardResult("correct"), export="per_call")
        assert [
            token for sample in alone for token in sample.tokens[sample.loss_mask].tolist()
        ] == trained

    odd = Odd(1)
    in_session(odd, converse)
    reported_again = [
        TOKENIZER.encode(TOKENIZER.decode(np.array(sampled[:-1], np.int32))).tolist()
        for _, sampled in odd.sampled
    ]
    # Were the text encoded again, other tokens would come of most answers.
    assert (
        sum(
            again == sampled[:-1]
            for again, (_, sampled) in zip(reported_again, odd.sampled, strict=True)
        )
        < len(reported_again) / 2
    )


def test_changed_history_is_rendered_again():
    async def converse(session: Session, client: openai.AsyncOpenAI) -> None:
        asked = {"role": "user", "content": "q"}
        await say(client, [asked])
        changed = [
            asked,
            {"role": "assistant", "content": "my own words"},
            {"role": "user", "content": "go on"},
        ]
        await say(client, changed)
        [(_, _), (prompt, _)] = session.calls()
        assert prompt.tolist() == TOKENIZER.render(changed).tolist()

    in_session(Odd(2), converse)


@pytest.mark.parametrize("repeats_tools", [True, False])
def test_conversation_keeps_its_tools(repeats_tools: bool, tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    default = settings["chat_template"]
    marked = default.replace("message['role']", "'with tools ' + message['role']")
    templates = {"default": default, "tool_use": marked}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    file.write_text(json.dumps(settings | {"chat_template": named}))
    tool = {"type": "function", "function": {"name": "search", "parameters": {}}}

    async def converse(session: Session, client: openai.AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "q"}]
        for turn in range(3):
            how: dict[str, Any] = {"tools": [tool]} if repeats_tools or turn == 0 else {}
            said = await say(client, messages, **how)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "so?"}]
        prompts = [tokenizer.decode(prompt) for prompt, _ in session.calls()]
        assert [prompt.count("with tools user\n") for prompt in prompts] == [1, 2, 3]

    tokenizer = HFTokenizer.from_folder(tmp_path)
    in_session(Odd(4), converse, tokenizer)


def test_continued_choice_is_found_among_several():
    async def converse(session: Session, client: openai.AsyncOpenAI) -> None:
        asked: Any = [{"role": "user", "content": "q"}]
        answer = await client.chat.completions.create(model="policy", messages=asked, n=3)
        said = answer.choices[2].message.content
        await say(
            client,
            [*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}],
        )
        calls = [Call(prompt, sampled) for prompt, sampled in session.calls()]
        assert len(calls) == 4
        assert calls[3].follows(calls[2]) and not calls[3].follows(calls[1])
        assert len(make_samples(calls, [0.0] * 4, RewardResult("wrong"))) == 3

    in_session(Odd(3), converse)


def test_tokens_after_a_stop_string_are_not_trained_on():
    text = "one two END three"

    async def generate(prompt_tokens: Any, num_samples: int, **how: Any) -> list[Completion]:
        return [completion([*TOKENIZER.encode(text).tolist(), STOP])]

    async def converse(session: Session, client: openai.AsyncOpenAI) -> None:
        assert await say(client, [{"role": "user", "content": "q"}], stop=["END"]) == "one two "
        [(_, sampled)] = session.calls()
        assert TOKENIZER.decode(sampled.tokens).startswith("one two END")
        assert "three" not in TOKENIZER.decode(sampled.tokens)
        assert sampled.stop_reason == "stop"

    in_session(generate, converse)


def test_agents_may_lower_max_tokens_and_unsupported_params_are_refused():
    odd = Odd(4)

    async def converse(session: Session, client: openai.AsyncOpenAI) -> None:
        asked = [{"role": "user", "content": "q"}]
        await say(client, asked, max_tokens=7, temperature=0.3)
        await say(client, asked, max_tokens=500)
        await say(client, asked)
        generation_params: list[dict[str, Any]] = [
            {"logprobs": True, "top_logprobs": 2},
            {"extra_body": {"stop_token_ids": [5]}},
        ]
        for wish in generation_params:
            with pytest.raises(openai.BadRequestError, match="not supported in training"):
                await say(client, asked, **wish)
        assert len(session.calls()) == 3

    in_session(odd, converse)
    assert odd.budgets == [7, 50, 50]


def test_formats_of_an_agents_answers_reach_the_engine(tmp_path: Path):
    odd, schema = Odd(4), {"type": "object", "properties": {"a": {"type": "integer"}}}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}{{ messages }}")
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}

    async def converse(session: Session, client: openai.AsyncOpenAI) -> None:
        asked: Any = [{"role": "user", "content": "q"}]
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        answer: Any = await client.chat.completions.create(
            model="policy", messages=asked, response_format=form, logprobs=True
        )
        # Log-probs of a session are those among all tokens.
        assert "constrained" not in answer.choices[0].model_extra
        await say(client, asked, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
        await say(client, asked, tools=[tool], tool_choice="required")
        await say(client, asked)
        with pytest.raises(openai.BadRequestError, match="regex parse error"):
            await say(client, asked, extra_body={"structured_outputs": {"regex": "("}})

    in_session(odd, converse, HFTokenizer.from_folder(tmp_path))
    by_schema, by_choice, by_tool, plain = odd.grammars
    assert by_schema == json_grammar(schema) and by_choice == choice_grammar(["yes", "no"])
    assert "look" in by_tool and plain == ""


def test_session_accepts_only_its_token_while_open():
    async def main() -> None:
        async with AgentServer(TOKENIZER, 50, 100.0).listening() as server:
            async with server.open(Odd(5)) as one, server.open(Odd(6)) as two:
                assert one.base_url != two.base_url and one.api_key != two.api_key
                async with openai.AsyncOpenAI(
                    base_url=one.base_url, api_key=two.api_key, max_retries=0
                ) as untrusted:
                    with pytest.raises(openai.AuthenticationError):
                        await say(untrusted, [{"role": "user", "content": "q"}])
                client = openai.AsyncOpenAI(
                    base_url=one.base_url, api_key=one.api_key, max_retries=0
                )
                await say(client, [{"role": "user", "content": "q"}])
                assert (len(one.calls()), len(two.calls())) == (1, 0)
            async with client:
                with pytest.raises(openai.NotFoundError, match="no such session"):
                    await say(client, [{"role": "user", "content": "q"}])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_a_session_cancels_its_calls():
    cancelled = asyncio.Event()

    async def generate(prompt_tokens: Any, num_samples: int, **how: Any) -> list[Completion]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return []

    async def main() -> None:
        async with AgentServer(TOKENIZER, 50, 100.0).listening() as server:
            async with server.open(generate) as session:
                client = openai.AsyncOpenAI(
                    base_url=session.base_url, api_key=session.api_key, max_retries=0
                )
                calling = asyncio.create_task(say(client, [{"role": "user", "content": "q"}]))
                await asyncio.sleep(0.3)
            async with client:
                with pytest.raises(openai.APIError):
                    await calling
            await cancelled.wait()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_call_timeout_is_the_agents_timeout():
    async def generate(prompt_tokens: Any, num_samples: int, **how: Any) -> list[Completion]:
        await asyncio.sleep(60)
        return []

    async def main() -> None:
        async with (
            AgentServer(TOKENIZER, 50, 0.2).listening() as server,
            server.open(generate) as session,
        ):
            client = openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, max_retries=0
            )
            with pytest.raises(openai.InternalServerError, match=r"not answered within .*=0\.2 s"):
                await say(client, [{"role": "user", "content": "q"}])
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 30))
