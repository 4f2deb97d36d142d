"""The package as it is released: metadata, container, and the steps of the release workflow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_jax import __version__
from areal_jax.serve.config import ServeConfig

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def read_yaml(*path: str) -> dict[Any, Any]:
    return yaml.safe_load(ROOT.joinpath(*path).read_text())


WORKFLOW = read_yaml(".github", "workflows", "release.yml")


def test_metadata_names_versions_and_addresses() -> None:
    floor = PROJECT["requires-python"].removeprefix(">=")
    named = {
        each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: Python :: 3." in each
    }
    assert floor in named and named == {"3.11", "3.12"}
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(PROJECT["urls"])
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["keywords"]
    # With an SPDX expression, a classifier of the license is refused by package indexes.
    assert not any(each.startswith("License ::") for each in PROJECT["classifiers"])
    assert ("Typing :: Typed" in PROJECT["classifiers"]) == (ROOT / "areal_jax/py.typed").is_file()


def test_citation_is_of_this_version_and_of_the_paper() -> None:
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == REPOSITORY
    (paper,) = citation["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:2505.24298"
    assert paper["url"] == PROJECT["urls"]["Paper"]
    assert len(paper["authors"]) == 13


def test_security_policy_states_the_defaults() -> None:
    policy = (ROOT / "SECURITY.md").read_text()
    assert f"listens on {ServeConfig().host} and requires a bearer token" in policy
    assert f"{REPOSITORY}/security/advisories/new" in policy


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_ask_for_what_a_reader_needs(name: str) -> None:
    form = read_yaml(".github", "ISSUE_TEMPLATE", f"{name}.yml")
    assert form["name"] and form["description"]
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    required = {
        field["id"] for field in form["body"] if field.get("validations", {}).get("required")
    }
    expected = {"bug": {"command", "expected", "output", "version", "hardware"}}
    assert required == expected.get(name, {"goal", "today"})


def test_container_runs_the_documented_commands() -> None:
    documented = (ROOT / "README.md").read_text()
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM source AS (\w+)\nRUN (.+)\nCMD", dockerfile, re.MULTILINE)
    # The last stage is what `docker build` makes by default.
    assert [stage for stage, _ in stages] == ["cuda", "cpu"]
    for _, command in stages:
        assert re.search(rf"^    {re.escape(command)}( |$)", documented, re.MULTILINE), command
    assert dockerfile.count("\nRUN ") == len(stages)
    python = re.search(r"^FROM python:([\d.]+)", dockerfile, re.MULTILINE)
    assert python and f"Programming Language :: Python :: {python[1]}" in PROJECT["classifiers"]


def test_release_is_published_by_a_tag_after_the_build() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}
    publish = WORKFLOW["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}


def copy_of_the_tree(to: Path) -> Path:
    """A copy of the files that git knows or does not ignore, as a checkout has them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_steps_of_the_release_pass_here(tmp_path: Path) -> None:
    checkout = copy_of_the_tree(tmp_path / "checkout")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "python"], check=True)
    inherited = ("PYTHONPATH", "XLA_FLAGS", "NPROC", "JAX_COMPILATION_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in inherited} | {
        "PATH": f"{tmp_path / 'python' / 'bin'}:{os.environ['PATH']}",
        "GITHUB_REF_NAME": f"v{__version__}",
        "RUNNER_TEMP": str(tmp_path),
    }
    steps = [step["run"] for step in WORKFLOW["jobs"]["build"]["steps"] if "run" in step]
    outputs = []
    for step in steps:
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", step],
            cwd=checkout,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{step}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        outputs.append(done.stdout)
    tag, built, installed = outputs
    assert tag == ""
    assert built.count("PASSED") == 2  # of twine: the wheel and the source distribution
    assert f"areal_jax {__version__} (jax " in installed
    assert "run folder: runs/aime-" in installed
    names = {path.name for path in (checkout / "dist").iterdir()}
    assert names == {
        f"areal_jax-{__version__}-py3-none-any.whl",
        f"areal_jax-{__version__}.tar.gz",
    }
