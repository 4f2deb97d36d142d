"""Test role that replies, fails, sleeps and hangs on demand."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from areal_jax.checkpoint.checksums import CheckpointError
from areal_jax.cluster.worker import Emit
from areal_jax.errors import ClaimLost, ConfigError, CorruptedState, InvalidRequest


class Echo:
    def __init__(self, emit: Emit, fault: str = "") -> None:
        if fault == "settings":
            raise ConfigError("no.such.setting=1 is nothing")
        if fault == "library":
            raise ImportError("libcudart.so.12: cannot open shared object file")
        if fault == "death":
            os._exit(3)
        if fault == "slow":
            time.sleep(60)
        self._emit, self._end_into, self.cancelled = emit, "", list[str]()

    async def begin(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "devices": os.environ.get("XLA_FLAGS", "")}

    def say(self, what: Any) -> Any:
        return what

    def report_and_say(self, number: int) -> int:
        self._emit("reported", number)
        return number

    async def say_late(self, what: str, after_s: float) -> str:
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            self.cancelled.append(what)
            raise
        return what

    def fail(self, kind: str) -> None:
        raise {
            error.__name__: error
            for error in (
                InvalidRequest,
                CheckpointError,
                ClaimLost,
                ConfigError,
                CorruptedState,
                ValueError,
                KeyError,
            )
        }[kind]("so")

    def were_cancelled(self) -> list[str]:
        return self.cancelled

    def variable(self, name: str) -> str:
        return os.environ.get(name, "")

    def fall_silent(self) -> None:
        time.sleep(60)

    def die(self) -> None:
        os._exit(9)

    def end_into(self, path: str) -> None:
        self._end_into = path

    async def end(self) -> None:
        if self._end_into:
            await asyncio.sleep(0.5)
            Path(self._end_into).write_text("ended", encoding="utf-8")
