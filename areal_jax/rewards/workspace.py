"""A workspace: a sandbox that lives as long as a conversation, with files, processes and a working
directory that its commands share.

All that a policy does happens inside the sandbox, within the limits of judged programs. Between two
calls its processes are stopped. A call that is too slow or too large ends with all processes; the
files stay. If the sandbox itself is lost, the files of the last call are restored in a new one.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeVar

from areal_jax.data.repository_files import BadRepository
from areal_jax.records import ToolOutcome, ToolResult
from areal_jax.rewards.config import SandboxConfig, ToolsConfig
from areal_jax.rewards.sandbox import (
    NEEDS_BUBBLEWRAP,
    Ended,
    Sandbox,
    SandboxUnavailable,
    find_sandbox_command,
    package_folders,
)

T = TypeVar("T")

FOLDER = "/tmp/work"

# Of bash. The state of the shell is in files of the sandbox, which commands may change: only later
# commands read them. Without bytecode, which would be stale of a file edited twice in a second.
_SHELL = r"""
export HOME=/tmp PATH={path}:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={packages}
cd "$(cat /tmp/.directory 2>/dev/null || echo {folder})" 2>/dev/null || cd {folder}
[ -f /tmp/.exports ] && . /tmp/.exports 2>/dev/null
trap 'pwd > /tmp/.directory; export -p > /tmp/.exports' EXIT
. /tmp/.command
"""

# Jobs, as programs of the harness. Their argument is on standard input.
_RUN = """
import os, sys
open("/tmp/.command", "w").write(sys.stdin.read())
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
os.dup2(1, 2)
os.execv({command[0]!r}, {command!r})
"""

_EDIT = """
import os, sys
head, _, rest = sys.stdin.read().partition("\\n")
path = os.path.join({folder!r}, head.strip())
start, middle, end = "<<<<<<< SEARCH\\n", "=======\\n", ">>>>>>> REPLACE"
if not rest.startswith(start):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    open(path, "w").write(rest)
    print("wrote", head.strip())
    sys.exit()
if not os.path.isfile(path):
    sys.exit("no file " + head.strip())
text, changed = open(path).read(), 0
for block in rest.split(start)[1:]:
    old, found, new = block.partition(middle)
    new, ended, _ = new.partition(end)
    if not found or not ended:
        sys.exit("expected <<<<<<< SEARCH, =======, >>>>>>> REPLACE, each on a line of its own")
    if text.count(old) != 1 or not old:
        sys.exit("expected the old text once in the file, found it %d times" % text.count(old))
    text, changed = text.replace(old, new), changed + 1
open(path, "w").write(text)
print("edited", head.strip(), "in", changed, "places")
"""

# Links are kept as links, and nothing outside the folder is read.
_SAVE = """
import base64, io, sys, tarfile
found = io.BytesIO()
with tarfile.open(fileobj=found, mode="w:gz", compresslevel=1) as archive:
    kept = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE
    archive.add({folder!r}, ".", filter=lambda each: each if each.type in kept else None)
if found.tell() * 4 // 3 + 4 > {most}:
    sys.exit("the files are too large to keep")
sys.stdout.write(base64.b64encode(found.getvalue()).decode())
"""

_RESTORE = """
import base64, io, os, sys, tarfile
os.makedirs({folder!r}, exist_ok=True)
with tarfile.open(fileobj=io.BytesIO(base64.b64decode(sys.stdin.read()))) as archive:
    # An attribute, and not an argument, which Python has only from 3.11.4 on.
    archive.extraction_filter = getattr(tarfile, "tar_filter", None)
    archive.extractall({folder!r})
"""

_READ = """
import os, sys
path = os.path.join({folder!r}, sys.stdin.read())
# A link may lead to another file, and a pipe has no end.
if os.path.realpath(path) == path and os.path.isfile(path):
    sys.stdout.write(open(path, errors="replace").read({most}))
"""


class Workspace:
    """One workspace. Its calls block, one at a time."""

    def __init__(
        self, bwrap: str, config: SandboxConfig, user_id: int, timeout_s: float, start: bytes = b""
    ):
        """
        Args:
            bwrap: Command of bubblewrap.
            config: Limits.
            user_id: User of the programs, if this process is root.
            timeout_s: Time limit of a call.
            start: Snapshot of the first files; empty: none.
        """
        self._bwrap, self._config, self._user_id = bwrap, config, user_id
        self._timeout_s, self._snapshot, self._is_closed = timeout_s, start, False
        self.num_lost = 0
        """Sandboxes that were replaced."""
        self._sandbox = self._open()

    def use(self, tool: str, argument: str) -> tuple[ToolOutcome, str]:
        """Execute a tool call; return a ToolOutcome, and the text for the policy.

        `shell` runs a command of bash, `python` a program in the working directory of the shell.
        `edit` takes a path on the first line, and the new text of the file, or blocks of
        SEARCH and REPLACE, each of which replaces a text that occurs once.
        """
        program = _EDIT.format(folder=FOLDER)
        if tool != "edit":
            packages = os.pathsep.join(package_folders())
            script = _SHELL.format(path=f"{sys.base_prefix}/bin", packages=packages, folder=FOLDER)
            if tool == "python":
                script = script.replace(". /tmp/.command", "python3 /tmp/.command")
            program = _RUN.format(command=["/bin/bash", "-c", script])
        try:
            ended, output, error = self._run(program, argument, "running")
            # What a later loss of the sandbox restores.
            self.snapshot()
        except (SandboxUnavailable, OSError) as failure:
            return "infrastructure", f"workspace: {failure}"
        match ended:
            case Ended("exit", 0):
                return "done", output
            case Ended("exit", code) if tool == "edit":
                return "error", f"Error: {error or code}"
            case Ended("exit", code):
                return "done", f"{output}\n[exit code {code}]"
            case Ended("timeout"):
                return "timeout", f"{output}\nError: no end within {self._timeout_s:g} s; killed"
            case Ended("gone"):
                return "crashed", "Error: the workspace was lost; its files are as before this call"
            case Ended(what):
                return "crashed", f"{output}\nError: too much {what}; all processes were killed"

    def read(self, path: str) -> str:
        """Return the text of a file in the folder; empty if there is none."""
        program = _READ.format(folder=FOLDER, most=self._config.max_file_bytes)
        ended, output, _ = self._run(program, path)
        return output if ended == Ended("exit", 0) else ""

    def snapshot(self) -> bytes:
        """Return an archive of the files, for `start` of another workspace; the one before, if they
        are too large or cannot be read.
        """
        self.archive()
        return self._snapshot

    def archive(self) -> bytes | None:
        """Return an archive of the files; None if it is larger than `max_file_bytes` as base64, or
        they cannot be read.
        """
        program = _SAVE.format(folder=FOLDER, most=self._config.max_file_bytes)
        ended, output, _ = self._run(program, "")
        if ended != Ended("exit", 0):
            return None
        self._snapshot = base64.b64decode(output)
        return self._snapshot

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of the last snapshot."""
        return len(self._snapshot)

    def kill(self) -> None:
        """Kill everything inside, from any thread; calls end, and later ones fail."""
        self._is_closed = True
        self._sandbox.kill()

    def close(self) -> None:
        """Kill everything inside."""
        self._is_closed = True
        self._sandbox.close()

    def _open(self) -> Sandbox:
        sandbox = Sandbox(self._bwrap, self._config, self._user_id)
        self._sandbox = sandbox
        if self._snapshot:
            self._require(_RESTORE.format(folder=FOLDER), base64.b64encode(self._snapshot).decode())
        else:
            self._require(f"import os\nos.makedirs({FOLDER!r})", "")
        return sandbox

    def _require(self, program: str, input: str) -> None:
        ended, _, error = self._run(program, input)
        if ended != Ended("exit", 0):
            raise SandboxUnavailable(f"the workspace failed with {ended}: {error}")

    def _run(
        self, program: str, input: str, keeps: Literal["running", "stopped"] = "stopped"
    ) -> tuple[Ended, str, str]:
        """Run a program in the sandbox; return its end, output and last error.

        Args:
            keeps: Whether processes of earlier calls run meanwhile.
        """
        if self._is_closed:
            raise SandboxUnavailable("the workspace is closed")
        sandbox = self._sandbox
        job = {"kind": "run", "program": program}
        with sandbox.start(job, input, cpu_s=self._timeout_s, keeps=keeps) as running:
            ended = sandbox.wait(self._timeout_s)
            if ended.how != "exit" and (ended.how == "gone" or not sandbox.end_job()):
                output = running.output()
                sandbox.close()
                if self._is_closed:
                    raise SandboxUnavailable("the workspace is closed")
                self.num_lost += 1
                self._sandbox = self._open()
                return ended, output, ""
            return ended, running.output(), running.last_error()


class Conversation:
    """The workspace of one conversation: the `Tools` of its calls, in the order in which they are
    made.
    """

    def __init__(self, make: Callable[[], Workspace], counts: Counts, max_chars: int):
        """
        Args:
            make: Opens the workspace, at the first call.
            counts: Is counted up.
            max_chars: What a call puts out is cut after so many characters.
        """
        self._make, self._counts, self._max_chars = make, counts, max_chars
        self._workspace: Workspace | None = None
        # One thread, in which calls wait for one another. It ends with the conversation.
        self._thread = ThreadPoolExecutor(1, "workspace")

    @property
    def is_open(self) -> bool:
        """Whether a call has opened the workspace."""
        return self._workspace is not None

    async def __call__(self, tool: str, argument: str) -> ToolResult:
        """Execute a tool call."""
        kind, text = await self._in_thread(lambda: self._use(tool, argument))
        self._counts.tools[f"{tool}/{kind}"] += 1
        cut = text if len(text) <= self._max_chars else text[: self._max_chars] + " ..."
        return ToolResult(kind, cut)

    async def read(self, path: str) -> str:
        """Return the text of a file of the open workspace; empty if there is none.

        Raises:
            SandboxUnavailable: The workspace cannot be opened again.
        """
        assert self._workspace is not None
        return await self._in_thread(self._workspace.read, path)

    async def archive(self) -> bytes | None:
        """Return an archive of the files of the open workspace; None if they are too large.

        Raises:
            SandboxUnavailable: The workspace cannot be opened again.
        """
        assert self._workspace is not None
        return await self._in_thread(self._workspace.archive)

    def close(self) -> None:
        """Kill everything in the workspace; a call in progress ends with it."""
        if self._workspace is not None:
            self._counts.workspaces += 1
            self._counts.lost += self._workspace.num_lost
            self._counts.kept_bytes += self._workspace.num_kept_bytes
            self._workspace.kill()
            self._thread.submit(self._workspace.close)
        self._thread.shutdown(wait=False)

    def _use(self, tool: str, argument: str) -> tuple[ToolOutcome, str]:
        if self._workspace is None:
            try:
                self._workspace = self._make()
            except (SandboxUnavailable, BadRepository, OSError) as failure:
                return "infrastructure", f"workspace: {failure}"
        return self._workspace.use(tool, argument)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


@dataclass
class Counts:
    """Counts since the start, kept by the thread of the event loop."""

    tools: Counter[str] = field(default_factory=Counter)
    """Calls by tool and outcome, TOOL/OUTCOME."""
    workspaces: int = 0
    """Workspaces of ended conversations."""
    lost: int = 0
    """Sandboxes that were replaced."""
    kept_bytes: int = 0
    """Bytes of the last snapshots of ended conversations."""


class Workspaces:
    """Opens a workspace for each conversation."""

    def __init__(self, sandbox: SandboxConfig, tools: ToolsConfig):
        self._sandbox, self._tools = sandbox, tools
        self._bwrap: str | None = None
        self._numbers = count()
        self._counts = Counts()

    @asynccontextmanager
    async def open(self, start: Callable[[], bytes]) -> AsyncIterator[Conversation]:
        """Yield the workspace of a conversation; everything in it is killed at the end.

        Args:
            start: Makes the archive of its first files, at the first call; empty: none.
        """
        conversation = Conversation(
            lambda: self._make(start()), self._counts, self._tools.max_output_chars
        )
        try:
            yield conversation
        finally:
            conversation.close()

    def apart(self) -> Workspaces:
        """Return the same with counts of their own."""
        other = copy(self)
        other._counts = Counts()
        return other

    @property
    def calls(self) -> Counter[str]:
        """Number of calls by tool."""
        calls = Counter[str]()
        for name, number in self._counts.tools.items():
            calls[name.partition("/")[0]] += number
        return calls

    def evaluating(self, *, holds: bool) -> AbstractContextManager[Workspaces]:
        """Enter an evaluation, whose conversations are like all others."""
        return nullcontext(self)

    def counters(self) -> dict[str, float]:
        """Return counts and means since the start."""
        counts, num = self._counts, self._counts.workspaces
        ends = Counter(name.rpartition("/")[2] for name in counts.tools.elements())
        return {
            **{f"tool/{name}": float(number) for name, number in sorted(counts.tools.items())},
            "workspace_conversations": float(num),
            "workspace_calls": counts.tools.total() / max(1, num),
            "workspace_kept_bytes": counts.kept_bytes / max(1, num),
            "workspace_timeouts": float(ends["timeout"]),
            "workspace_kills": float(ends["timeout"] + ends["crashed"]),
            "workspace_lost": float(counts.lost),
        }

    def _make(self, start: bytes) -> Workspace:
        if self._bwrap is None:
            self._bwrap = find_sandbox_command(self._sandbox)
            if self._bwrap is None:
                raise SandboxUnavailable(NEEDS_BUBBLEWRAP)
        # One user for each of 64 concurrent workspaces, whose processes are counted by user.
        user = 20_000 + (os.getpid() * 64 + next(self._numbers) % 64) % 40_000
        return Workspace(self._bwrap, self._sandbox, user, self._tools.timeout_s, start)
