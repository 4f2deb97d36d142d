"""A model as a judge: its votes, its failures and its share of the reward."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import chz
import pytest
from aiohttp import web

from areal_jax.records import Message, RewardResult, Task
from areal_jax.rewards import http_client
from areal_jax.rewards.config import JudgeConfig, RewardConfig
from areal_jax.rewards.judge import read_score
from areal_jax.rewards.service import RewardService

TASK = Task("sum", (Message("user", "What is {answer} + 1?"),), "2", "math")
RIGHT = "\\boxed{2}"


class Server:
    """An OpenAI-compatible server that says what it is told to."""

    def __init__(self, *script: str | int) -> None:
        self.script = list(script)
        """Texts of answers, or statuses of errors; the last one is repeated."""
        self.bodies: list[dict[str, Any]] = []

    async def complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(said, int):
            return web.Response(status=said, text="busy")
        message = {"role": "assistant", "content": said}
        usage = {"total_tokens": 100}
        return web.json_response({"choices": [{"message": message}], "usage": usage})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the-judge"}]})

    @asynccontextmanager
    async def listening(self, **settings: Any) -> AsyncIterator[JudgeConfig]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            yield JudgeConfig(url=f"http://{host}:{port}/v1", **settings)
        finally:
            await runner.cleanup()


def judged(
    server: Server,
    act: Callable[[RewardService], Awaitable[None]],
    rewards: RewardConfig | None = None,
    **settings: Any,
) -> None:
    async def main() -> None:
        async with server.listening(**settings) as config:
            chosen = chz.replace(rewards or RewardConfig(), judge=config)
            async with RewardService(chosen) as service:
                await act(service)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7.0),
        ("score: 3, no: it is better.\n**Score:** 8.5", 8.5),
        ("Rating - 10", 10.0),
        (" 4 ", 4.0),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: 3\nfinal score is 12", None),
        ("7 of 10", None),
        ("", None),
        ("nan", None),
        ("Score: none", None),
    ],
)
def test_last_score_in_range_is_read(text: str, score: float | None) -> None:
    assert read_score(text, 10.0) == score


def test_judge_alone_gives_the_mean_of_its_votes() -> None:
    server = Server("Score: 6", "Score: 9", "It is good.\nScore: 3")

    async def act(service: RewardService) -> None:
        found = await service(TASK, "the {question} is 2")
        assert found.score == pytest.approx(0.6)
        assert found.kind == "wrong" and not found.failed
        assert found.components == {"judge": pytest.approx(0.6)}
        assert found.to_reward(5.0, -5.0) == pytest.approx(1.0)
        counters = service.counters()
        assert (counters["judge_votes"], counters["judge_tokens"]) == (3.0, 300.0)
        assert counters["judge_disagreement"] == pytest.approx((0.06) ** 0.5, abs=1e-6)

    judged(server, act, num_votes=3, temperature=0.5)
    assert [body["model"] for body in server.bodies] == ["the-judge"] * 3
    [prompt] = {body["messages"][0]["content"] for body in server.bodies}
    # Braces of task and answer are text.
    assert "What is {answer} + 1?" in prompt and "the {question} is 2" in prompt
    assert {body["temperature"] for body in server.bodies} == {0.5}


def test_judge_and_verifier_are_named_components() -> None:
    async def act(service: RewardService) -> None:
        right = await service(TASK, RIGHT)
        assert right.kind == "correct"
        assert right.components == {"verifier": 1.0, "judge": 0.4}
        assert right.score == pytest.approx(0.75 * 1.0 + 0.25 * 0.4)
        wrong = await service(TASK, "\\boxed{3}")
        assert wrong.kind == "wrong" and wrong.score == pytest.approx(0.25 * 0.4)
        # Without an answer there is nothing to judge.
        assert (await service(TASK, "no number")).kind == "no_answer"
        assert service.counters()["judge_votes"] == 2.0

    judged(Server("Score: 4"), act, weight=0.25)


def test_busy_judge_is_asked_again_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "RETRIES_S", (0.01,))
    server = Server(503, 429, 500, "Score: 5")

    async def act(service: RewardService) -> None:
        assert (await service(TASK, RIGHT)).score == 0.5

    judged(server, act, model="m")
    assert len(server.bodies) == 4 and server.bodies[-1]["model"] == "m"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (503, "no verdict of .* within rewards.judge.timeout_s=0.5 s: 503 busy"),
        (401, "401 busy"),
        ("I cannot say.", r"expected a line such as 'Score: 7' from 0 to 10.*I cannot say\."),
    ],
)
def test_missing_verdict_fails_the_answer(script: str | int, words: str) -> None:
    async def act(service: RewardService) -> None:
        found = await service(TASK, RIGHT)
        assert found.kind == "infrastructure" and found.failed
        assert service.counters()["failed"] == 1.0
        assert re.search(words, found.detail)

    judged(Server(script), act, timeout_s=0.5)


def test_server_that_comes_back_in_time_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "RETRIES_S", (0.05,))

    async def main() -> None:
        first, second = Server("Score: 2"), Server("Score: 8")
        async with first.listening() as config:
            pass
        async with RewardService(RewardConfig(judge=config)) as service:
            waiting = asyncio.create_task(service(TASK, RIGHT))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            app = web.Application()
            app.router.add_post("/v1/chat/completions", second.complete)
            app.router.add_get("/v1/models", second.models)
            runner = web.AppRunner(app)
            await runner.setup()
            port = int(config.url.rsplit(":", 1)[1].split("/")[0])
            await web.TCPSite(runner, "127.0.0.1", port).start()
            assert (await waiting).score == 0.8
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_judge_alone_grades_tasks_without_a_verifier() -> None:
    async def main() -> None:
        async with Server("Score: 10").listening() as config:
            poem = Task("poem", (Message("user", "A poem!"),), "", "poem")
            async with RewardService(RewardConfig(judge=config), ("poem",)) as service:
                found = await service(poem, "roses")
                assert found == RewardResult("correct", score=1.0, components={"judge": 1.0})

    asyncio.run(asyncio.wait_for(main(), 60))


def test_settings_of_a_judge_are_plain_json() -> None:
    config = RewardConfig(judge=JudgeConfig(url="http://x/v1"))
    assert json.loads(json.dumps(chz.asdict(config)))["judge"]["url"] == "http://x/v1"
