"""What runs in the sandbox that grades the files of a repository: `lay_out`, `run_tests`, `check`,
each as a program in a process of its own, with its arguments as JSON on standard input.

Standard library only, and pytest, because the package is not visible inside. Of the policy's files
those count that are not protected; tests and what configures them are the repository's, with the
test patch. The tests run in one process with the policy's code, which is untrusted: neither exit
codes nor output count, but one line that starts with a number that only this process knows, and
tests that must fail are among them.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pytest

FOLDER = "/tmp/work"

TEST_FOLDERS = {"test", "tests", "testing", "e2e"}
"""Folders that are tests as a whole. SWE-bench counts them to the test patch as well."""

CONFIGURATION = {
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"),
    *("setup.cfg", "pyproject.toml", "noxfile.py", "Makefile"),
    *("sitecustomize.py", "usercustomize.py"),
}
"""Files that decide what runs, or run by themselves."""

MODULES = {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"}
"""What pytest consists of."""

CONTROL = """
import unittest
import pytest
def test_assertion():
    assert 1 == 2
def test_error():
    raise RuntimeError
def test_raises():
    with pytest.raises(ValueError):
        pass
class TestControl(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(1, 2)
    def test_true(self):
        self.assertTrue(False)
    def test_raises(self):
        with self.assertRaises(ValueError):
            pass
"""
"""Tests that must fail: where they pass, the code under test has changed what tests are."""


def is_protected(path: str) -> bool:
    """Whether a path is a test, or decides how tests run: the policy's version does not count."""
    parts = path.split("/")
    name = parts[-1]
    return (
        name in CONFIGURATION
        or name.endswith((".pth", ".pyc", ".pyo"))
        or not {*TEST_FOLDERS, "__pycache__"}.isdisjoint(parts)
        or any(part.endswith((".dist-info", ".egg-info", ".egg-link")) for part in parts)
        or is_test_file(name)
    )


def is_test_file(name: str) -> bool:
    """Whether pytest takes a file for tests, by its name."""
    return bool(re.fullmatch(r"test_.*\.py|.*_test\.py|tests?\.py", name))


def lay_out(files: str, trusted: str, removed: list[str], modules: list[str], needs: str) -> None:
    """Write the files to test, before any code of the policy runs.

    Args:
        files: Archive of the policy's files.
        trusted: Archive of files that replace them.
        removed: Paths that the policy's files do not have.
        modules: Top-level names that may be those of Python's own modules or pytest's.
        needs: Package that must be installed.
    """
    if needs and importlib.util.find_spec(needs) is None:
        sys.exit(f"expected the package {needs}, found none; install it beside areal_jax")
    os.makedirs(FOLDER, exist_ok=True)
    with _open(trusted) as archive:
        replacing = archive.getmembers()
    folders = {each.name[:place] for each in replacing for place, letter in enumerate(each.name)
               if letter == "/"}  # fmt: skip
    names = {each.name for each in replacing} | set(removed)
    shadowed = {*sys.stdlib_module_names, *MODULES} - set(modules)

    def is_kept(member: tarfile.TarInfo) -> bool:
        path = member.name.removeprefix("./")
        top = path.removeprefix("src/").partition("/")[0].partition(".")[0]
        if path in ("", ".") or is_protected(path) or path in names or top in shadowed:
            return False
        return path not in folders or member.isdir()

    with _open(files) as archive:
        kept = [member for member in archive if is_kept(member)]
        for member in kept:
            member.mode |= 0o700 if member.isdir() else 0o600
        # An attribute, and not an argument, which Python has only from 3.11.4 on.
        archive.extraction_filter = lambda member, _: member
        archive.extractall(FOLDER, members=kept)
    with _open(trusted) as archive:
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)
        archive.extractall(FOLDER)


def check(trusted: str) -> None:
    """Exit with a message if a trusted file has changed."""
    with _open(trusted) as archive:
        for member in archive:
            path = os.path.join(FOLDER, member.name)
            if member.isreg():
                content, found = archive.extractfile(member), b""
                if is_same := os.path.realpath(path) == path and os.path.isfile(path):
                    with open(path, "rb") as file:
                        found = file.read()
                if not is_same or content is None or content.read() != found:
                    sys.exit(f"{member.name} was changed while tests ran")


def _open(archive: str) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive)))


def run_tests(secret: str, names: list[str], paths: list[str], command: str) -> None:
    """Run tests, and write the secret, which of them passed by name, and a note."""
    results = os.dup(1)
    for file in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    os.chdir(FOLDER)
    if not command:
        import pytest  # noqa: F401  # before any file of the repository can take its place
    sources = [path for path in (FOLDER, f"{FOLDER}/src") if os.path.isdir(path)]
    sys.path[:0] = sources
    os.environ["PYTHONPATH"] = os.pathsep.join([*sources, *(path for path in sys.path if path.endswith("-packages"))])  # fmt: skip  # noqa: E501
    os.environ["PATH"] = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    passed, note = _run_command(command, names) if command else _run_pytest(names, paths)
    os.write(results, f"\n{secret} {json.dumps([passed, note[:300]])}\n".encode())
    # Not at the pleasure of exit handlers and threads.
    os._exit(0)


class Recorder:
    """Plugin of pytest that selects tests and records their outcomes."""

    def __init__(self, names: list[str], controls: list[str]) -> None:
        self._names, self._controls = set(names), controls
        self.found = dict[str, list[str]]()
        """Tests by each name that they may be listed under."""
        self.passed = dict[str, bool]()
        self.controls, self.note = set[str](), ""
        self._expects_failure = set[str]()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept: list[pytest.Item] = []
        for item in items:
            test = item.nodeid
            if test.partition("::")[0] in self._controls:
                self.controls.add(test)
                kept.append(item)
                continue
            # SWE-bench cuts names at spaces, and of some repositories has the function alone.
            listed = self._names & {test, test.partition(" ")[0], test.rpartition("::")[2]}
            for name in listed:
                self.found.setdefault(name, []).append(test)
            if listed:
                kept.append(item)
            if item.get_closest_marker("xfail") is not None:
                self._expects_failure.add(test)
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An exception of `pytest.xfail` in the code under test is no expected failure.
        is_expected = hasattr(report, "wasxfail") and report.nodeid in self._expects_failure
        passed = report.outcome == "passed" or is_expected
        self.passed[report.nodeid] = passed and self.passed.get(report.nodeid, True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.note:
            self.note = f"{report.nodeid}: {str(report.longrepr).strip().rpartition(chr(10))[2]}"


def _run_pytest(names: list[str], paths: list[str]) -> tuple[dict[str, bool], str]:
    import pytest

    controls = [f"test_{os.urandom(8).hex()}.py" for _ in range(2)]
    for control in controls:
        with open(control, "x", encoding="utf-8") as file:
            file.write(CONTROL)
    recorder = Recorder(names, controls)
    arguments = ["-p", "no:cacheprovider", "--rootdir", FOLDER, "--continue-on-collection-errors"]
    arguments += ["--maxfail=0", controls[0], *filter(os.path.isfile, paths), controls[1]]
    code = pytest.main(arguments, [recorder])
    controlled = [recorder.passed.get(test) for test in recorder.controls]
    if len({test.partition("::")[0] for test in recorder.controls}) < 2 or any(
        each is not False for each in controlled
    ):
        note = recorder.note or f"pytest ended with {int(code)} and tests that must fail did not"
        return dict.fromkeys(names, False), note
    passed = {
        name: bool(tests := recorder.found.get(name)) and all(map(recorder.passed.get, tests))
        for name in names
    }
    return passed, recorder.note


_STATES = r"PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_REPORTED = (
    re.compile(rf"^(?P<state>{_STATES}) (?P<name>\S.*?)(?: - .*)?$", re.MULTILINE),  # pytest -rA
    re.compile(rf"^(?P<name>\S*::.*?) (?P<state>{_STATES})\b", re.MULTILINE),  # pytest -v
    # unittest -v, with or without the first line of the test's docstring
    re.compile(r"^(?P<name>\w+ \([\w.]+\))(?:\n.*?)? \.\.\. (?P<state>\w+)", re.MULTILINE),
)


def _run_command(command: str, names: list[str]) -> tuple[dict[str, bool], str]:
    done = subprocess.run(
        ["/bin/bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    states = dict[str, set[str]]()
    for pattern in _REPORTED:
        for match in pattern.finditer(output):
            states.setdefault(match["name"], set()).add(match["state"])
    fine = {"PASSED", "XFAIL", "ok", "expected"}
    passed = {name: bool(states.get(name)) and states[name] <= fine for name in names}
    last = output.strip().rpartition("\n")[2]
    return passed, "" if all(passed.values()) else f"exit code {done.returncode}: {last}"


def _main() -> None:
    given = json.load(sys.stdin)
    # No later code reads the secret here.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    {"lay_out": lay_out, "check": check, "run_tests": run_tests}[given.pop("job")](**given)


if __name__ == "__main__":
    _main()
