"""A workspace: a sandbox that lives as long as a conversation, with files, processes and a working
directory that its commands share.

All that a policy does happens inside the sandbox, within the limits of judged programs. Between two
calls its processes are stopped. A call that is too slow or too large ends with all processes; the
files stay. If the sandbox itself is lost, the files of the last call are restored in a new one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Literal, TypeVar

from areal_jax.records import ToolOutcome, ToolResult
from areal_jax.rewards.config import SandboxConfig, ToolsConfig
from areal_jax.rewards.sandbox import Ended, Sandbox, SandboxUnavailable, find_sandbox_command

T = TypeVar("T")

FOLDER = "/tmp/work"

MAX_SNAPSHOT_BYTES = 8 << 20
"""Largest archive of the files of a workspace, compressed. Larger ones are not kept."""

# Of bash. The state of the shell is in files of the sandbox, which commands may change: only later
# commands read them. Without bytecode, which would be stale of a file edited twice in a second.
_SHELL = r"""
export HOME=/tmp PATH={path}:$PATH PYTHONDONTWRITEBYTECODE=1
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
sys.stdout.write(base64.b64encode(found.getvalue()).decode())
"""

_RESTORE = """
import base64, io, os, sys, tarfile
os.makedirs({folder!r}, exist_ok=True)
with tarfile.open(fileobj=io.BytesIO(base64.b64decode(sys.stdin.read()))) as archive:
    archive.extractall({folder!r}, filter="tar")
"""

_WRITE = """
import json, os, sys
for name, text in json.load(sys.stdin).items():
    path = os.path.join({folder!r}, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write(text)
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
        self._sandbox = self._open()

    def use(self, tool: str, argument: str) -> tuple[ToolOutcome, str]:
        """Execute a tool call; return a ToolOutcome, and the text for the policy.

        `shell` runs a command of bash, `python` a program in the working directory of the shell.
        `edit` takes a path on the first line, and the new text of the file, or blocks of
        SEARCH and REPLACE, each of which replaces a text that occurs once.
        """
        program = _EDIT.format(folder=FOLDER)
        if tool != "edit":
            script = _SHELL.format(path=f"{sys.base_prefix}/bin", folder=FOLDER)
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

    def write(self, files: Mapping[str, str]) -> None:
        """Write files, by their paths in the folder.

        Raises:
            SandboxUnavailable: They could not be written.
        """
        self._require(_WRITE.format(folder=FOLDER), json.dumps(files))
        self.snapshot()

    def read(self, path: str) -> str:
        """Return the text of a file in the folder; empty if there is none."""
        program = _READ.format(folder=FOLDER, most=self._config.max_file_bytes)
        ended, output, _ = self._run(program, path)
        return output if ended == Ended("exit", 0) else ""

    def snapshot(self) -> bytes:
        """Return an archive of the files, for `start` of another workspace; the one before, if they
        are too large or cannot be read.
        """
        ended, output, _ = self._run(_SAVE.format(folder=FOLDER), "")
        if ended == Ended("exit", 0) and len(output) <= MAX_SNAPSHOT_BYTES * 4 // 3:
            self._snapshot = base64.b64decode(output)
        return self._snapshot

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
                self._sandbox = self._open()
                return ended, output, ""
            return ended, running.output(), running.last_error()


class Conversation:
    """The workspace of one conversation: the `Tools` of its calls, in the order in which they are
    made.
    """

    def __init__(self, make: Callable[[], Workspace], files: Mapping[str, str], max_chars: int):
        """
        Args:
            make: Opens the workspace, at the first call.
            files: Its first files, by path.
            max_chars: What a call puts out is cut after so many characters.
        """
        self._make, self._files, self._max_chars = make, files, max_chars
        self._workspace: Workspace | None = None
        # One thread, in which calls wait for one another. It ends with the conversation.
        self._thread = ThreadPoolExecutor(1, "workspace")

    async def __call__(self, tool: str, argument: str) -> ToolResult:
        """Execute a tool call."""
        kind, text = await self._in_thread(lambda: self._use(tool, argument))
        cut = text if len(text) <= self._max_chars else text[: self._max_chars] + " ..."
        return ToolResult(kind, cut)

    async def read(self, path: str) -> str:
        """Return the text of a file; empty if there is none.

        Raises:
            SandboxUnavailable: The workspace cannot be opened again.
        """
        if self._workspace is None:
            return self._files.get(path, "")
        return await self._in_thread(self._workspace.read, path)

    def close(self) -> None:
        """Kill everything in the workspace; a call in progress ends with it."""
        if self._workspace is not None:
            self._workspace.kill()
            self._thread.submit(self._workspace.close)
        self._thread.shutdown(wait=False)

    def _use(self, tool: str, argument: str) -> tuple[ToolOutcome, str]:
        if self._workspace is None:
            try:
                self._workspace = self._make()
                self._workspace.write(self._files)
            except (SandboxUnavailable, OSError) as failure:
                return "infrastructure", f"workspace: {failure}"
        return self._workspace.use(tool, argument)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


class Workspaces:
    """Opens a workspace for each conversation."""

    def __init__(self, sandbox: SandboxConfig, tools: ToolsConfig):
        self._sandbox, self._tools = sandbox, tools
        self._bwrap: str | None = None
        self._numbers = count()

    @asynccontextmanager
    async def open(self, files: Mapping[str, str]) -> AsyncIterator[Conversation]:
        """Yield the workspace of a conversation; everything in it is killed at the end."""
        conversation = Conversation(self._make, files, self._tools.max_output_chars)
        try:
            yield conversation
        finally:
            conversation.close()

    def _make(self) -> Workspace:
        if self._bwrap is None:
            self._bwrap = find_sandbox_command(self._sandbox)
            if self._bwrap is None:
                raise SandboxUnavailable("expected rewards.sandbox.isolation=bubblewrap")
        # One user for each of 64 concurrent workspaces, whose processes are counted by user.
        user = 20_000 + (os.getpid() * 64 + next(self._numbers) % 64) % 40_000
        return Workspace(self._bwrap, self._sandbox, user, self._tools.timeout_s)
