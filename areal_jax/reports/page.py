"""HTML pages of reports: one file with its style, scripts and data, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

ASSETS = Path(__file__).parent / "assets"

CHARTS = ("uPlot.iife.min.js", "charts.js")
"""Scripts of every page."""


@cache
def read_asset(name: str) -> str:
    """Return the text of a file in the assets folder."""
    return (ASSETS / name).read_text(encoding="utf-8").strip()


def render_page(
    template: Path, scripts: tuple[str, ...], data: str, connect: str = "'none'", **values: object
) -> str:
    """Render a template that extends page.html.jinja.

    The browser runs only these scripts, whatever text the data contains.

    Args:
        template: the template.
        scripts: code of the page, after that of charts; the last starts it.
        data: JSON that the scripts read.
        connect: addresses that the page may fetch, as in a Content-Security-Policy.
        **values: the template's variables, such as headline.
    """
    code = [*map(read_asset, CHARTS), "\n".join(scripts)]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in code)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; frame-src 'self' file:; base-uri 'none'; form-action 'none'"
    )
    loader = FileSystemLoader([template.parent, ASSETS])
    page = Environment(loader=loader, autoescape=True).get_template(template.name)
    return page.render(
        policy=policy,
        style=Markup("\n".join(map(read_asset, ("uPlot.min.css", "page.css")))),
        scripts=[Markup(script) for script in code],
        # JSON contains `<` in texts only, where it may be written as an escape.
        data=Markup(data.replace("<", "\\u003c")),
        **values,
    )


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
