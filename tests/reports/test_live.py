"""The live server, over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from report_runs import RunFolder

from areal_jax.reports import live
from areal_jax.reports.live import live_report


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(live, "UPDATE_S", 0.05)
    run = RunFolder(tmp_path / "run")
    run.step(12)
    return run


@asynccontextmanager
async def served(run: RunFolder) -> AsyncIterator[tuple[str, str, aiohttp.ClientSession]]:
    """Serve a run: the address without the token, the token, a client."""
    async with (
        live_report([run.path], lambda folder: "running") as address,
        aiohttp.ClientSession() as client,
    ):
        base, _, token = address.partition("?token=")
        yield base, token, client
    run.close()


def test_every_address_needs_the_token(run: RunFolder) -> None:
    async def go() -> None:
        async with served(run) as (base, token, client):
            assert base.startswith("http://127.0.0.1:")
            for path in ("", "events", "samples", "nothing"):
                for wrong in ("", "?token=", f"?token={token}x", "?token=%C3%A9"):
                    async with client.get(f"{base}{path}{wrong}") as answer:
                        assert answer.status == 403
                        assert token not in await answer.text()
            async with client.get(f"{base}?token={token}") as answer:
                assert answer.status == 200
                assert answer.headers["Referrer-Policy"] == "no-referrer"
                assert '"live":true' in await answer.text()

    asyncio.run(go())


def test_all_samples_are_served_by_filter(run: RunFolder) -> None:
    async def go() -> None:
        async with served(run) as (base, token, client):

            async def find(**filters: str | int) -> dict:
                query = {"token": token, **filters}
                async with client.get(f"{base}samples", params=query) as answer:
                    assert answer.status == 200
                    return await answer.json()

            assert (await find())["found"] == 24
            assert (await find())["group"]["group"] == 23
            assert (await find(offset=23))["group"]["group"] == 0
            assert (await find(offset=24)) == {"found": 24, "offset": 24, "group": None}
            # The third newest of the groups with a wrong sample.
            kept = await find(grade="wrong", group=18, offset=1)
            assert (kept["offset"], kept["group"]["group"]) == (2, 18)
            lost = await find(grade="wrong", group=19, offset=1)
            assert (lost["offset"], lost["group"]["group"]) == (1, 20)
            assert (await find(first=3, last=5))["found"] == 6
            assert (await find(grade="mixed"))["found"] == 12
            found = await find(grade="wrong", task="EVEN-7")
            assert found["found"] == 1
            assert found["group"]["expected"] == "seven"
            assert [each["reward"] for each in found["group"]["samples"]] == [0.0, 1.0, 1.0]
            for wrong in ({"run": 1}, {"run": "x"}, {"first": "x"}):
                query = {"token": token, **wrong}
                async with client.get(f"{base}samples", params=query) as answer:
                    assert answer.status == 400

    asyncio.run(go())


def test_readers_get_each_new_step(run: RunFolder) -> None:
    async def go() -> None:
        async with served(run) as (base, token, client):

            async def read(steps: int) -> None:
                async with client.get(f"{base}events?token={token}") as stream:
                    assert stream.headers["Content-Type"] == "text/event-stream"
                    async for line in stream.content:
                        if line.startswith(b"data: "):
                            (found,) = json.loads(line[6:])["runs"]
                            if found["steps_done"] == steps:
                                return

            async with asyncio.timeout(60):
                readers = [asyncio.create_task(read(13)) for _ in range(2)]
                await asyncio.sleep(0.2)
                run.step()
                await asyncio.gather(*readers)
                # One that comes later, or again, gets the newest state at once.
                await read(13)

    asyncio.run(go())


def test_port_in_use_is_an_error(run: RunFolder) -> None:
    async def go() -> None:
        async with served(run) as (base, _, _):
            port = int(base.rsplit(":", 1)[1].rstrip("/"))
            with pytest.raises(OSError):
                async with live_report([run.path], lambda folder: "running", port):
                    raise AssertionError("it listens twice")

    asyncio.run(go())
