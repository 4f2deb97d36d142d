"""Compilation of decode programs in a thread beside the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from areal_jax.engine.batch import SamplingMode
from areal_jax.engine.decode import DecodeEngine


class BackgroundCompiler:
    """Compiles the programs of a sampling mode while the engine thread runs others.

    Used by the engine thread, but for `stop` and `join`. The compile thread ends after the program
    that it compiles when `stop` is called.
    """

    def __init__(self, engine: DecodeEngine, on_done: Callable[[Exception | None], None]):
        """
        Args:
            engine: whose programs are compiled.
            on_done: called in the compile thread with the error, if any; it must lead to a call of
                `finish` in the engine thread.
        """
        self._engine, self._on_done = engine, on_done
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def has(self, mode: SamplingMode, *, masked: bool = False) -> bool:
        """Return whether no program of the mode, and with `masked` for grammars, must be compiled
        here.
        """
        return self._engine.is_warm(mode, masked=masked)

    def start(self, mode: SamplingMode, *, masked: bool = False) -> None:
        """Compile what a mode needs, unless a compilation is under way."""
        is_needed = not self.has(mode, masked=masked)
        if self._thread is None and is_needed and not self._stopping.is_set():
            self._thread = threading.Thread(
                target=self._compile, args=(mode, masked), name="compile", daemon=True
            )
            self._thread.start()

    def finish(self) -> None:
        """End a compilation, so that the next one can start."""
        self._thread = None

    def stop(self) -> None:
        """Stop after the program that is being compiled."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)

    def _compile(self, mode: SamplingMode, masked: bool) -> None:
        failed = None
        try:
            self._engine.warm_up_mode(mode, self._stopping.is_set, masked=masked)
        except Exception as error:  # passed to the requests that wait for the programs
            failed = error
        self._on_done(failed)
