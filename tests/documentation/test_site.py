"""The built site: its pages, and that nothing is loaded from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import areal_jax
from areal_jax.config.experiment import Experiment
from areal_jax.config.overrides import reachable, settings
from areal_jax.metrics.table import TABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_asset_is_loaded_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    remote = re.compile(
        r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>"""
        r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon))"""
        r"""[^>]*\bhref=["']?(?:https?:)?//[^>]*>"""
    )
    for page in pages:
        assert not remote.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style


def test_reference_lists_every_setting_metric_and_public_name(site: Path) -> None:
    pages = {
        name: (site / "reference" / f"{name}.html").read_text()
        for name in ("settings", "metrics", "api")
    }
    for setting, _ in reachable(settings(Experiment)):
        assert f"<code>{setting.key}</code>" in pages["settings"]
    for entry in TABLE:
        assert f"<code>{entry.name}</code>" in pages["metrics"]
    for name in areal_jax.__all__:
        assert re.search(rf'id="areal_jax[\w.]*\.{name}"', pages["api"]), name
