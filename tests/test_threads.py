"""Tasks that nothing awaits."""

from __future__ import annotations

import asyncio
import logging

import pytest

from areal_jax.threads import log_failure


def test_only_tasks_that_fail_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def end(error: Exception | None = None) -> None:
        await asyncio.sleep(0)
        if error is not None:
            raise error

    async def run() -> None:
        tasks = [
            asyncio.create_task(end(), name="one"),
            asyncio.create_task(end(ValueError("lost")), name="two"),
            asyncio.create_task(asyncio.sleep(60), name="three"),
        ]
        for task in tasks:
            task.add_done_callback(log_failure)
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.wait(tasks)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    (record,) = caplog.records
    assert record.getMessage() == "two failed: lost" and record.exc_info is not None
