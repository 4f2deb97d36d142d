"""The pages in a real browser: charts are drawn, filters work, updates arrive, nothing leaves."""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from collections.abc import Coroutine, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from chromium import Tab, open_tab
from report_runs import RunFolder

from areal_jax.evaluation.answers import Answer
from areal_jax.evaluation.report import write_report as write_evaluation
from areal_jax.evaluation.results import compute_results
from areal_jax.metrics.description import write_description
from areal_jax.records import Message, Task
from areal_jax.reports import live
from areal_jax.reports.live import live_report
from areal_jax.reports.report import write_comparison, write_report

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PIXELS = """(() => [...document.querySelectorAll(".chart")].map((chart) => {
  const canvas = chart.querySelector("canvas"), pixels = canvas.getContext("2d")
    .getImageData(0, 0, canvas.width, canvas.height).data;
  const colors = new Set();
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) {
    const [red, green, blue] = pixels.slice(i, i + 3);
    if (Math.max(red, green, blue) - Math.min(red, green, blue) > 60) colors.add(`${red} ${green} ${blue}`);
  }
  return [chart.querySelector("h3").textContent, colors.size];
}))()"""
"""By chart, the number of its saturated colours: of lines, not of axes."""

FOUND = 'document.getElementById("samples-found").textContent'


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    run = RunFolder(tmp_path / "run", num_steps=100)
    run.evaluate(0.2)
    run.step(30)
    run.evaluate(0.6)
    yield run
    run.close()


def in_browser(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 200))


async def set_value(tab: Tab, id: str, value: str) -> None:
    await tab.evaluate(
        f'(() => {{ const input = document.getElementById("{id}"); input.value = "{value}";'
        'input.dispatchEvent(new Event("input", {bubbles: true})); })()'
    )


def assert_nothing_left(tab: Tab, allowed: str) -> None:
    others = [url for url in tab.requests if not url.startswith((allowed, "data:", "about:"))]
    assert others == [] and tab.errors == []


def test_every_chart_is_drawn_and_nothing_leaves_the_page(run: RunFolder) -> None:
    async def go() -> None:
        page = write_report(run.path, "stopped").as_uri()
        async with open_tab(page) as tab:
            drawn = dict(await tab.evaluate(PIXELS))
            assert {
                "Reward",
                "Score on the evaluation set",
                "Score by family of tasks",
                "Entropy",
                "Gradient norm",
                "Where a step's time goes",
                "Tokens by staleness",
            } <= drawn.keys()
            assert {title for title, colors in drawn.items() if colors == 0} == set()
            # Two lines have more colours than one.
            assert await tab.evaluate("window.alert !== undefined && document.images.length") == 0
            assert "no_signal" in await tab.evaluate(
                'document.querySelector("#health tr.finding").textContent'
            )
            assert_nothing_left(tab, page)

    in_browser(go())


def test_page_fits_a_phone_and_follows_the_dark_theme(run: RunFolder) -> None:
    async def go() -> None:
        async with open_tab() as tab:
            await tab.resize(390, 844, dark=True)
            await tab.open(write_report(run.path, "stopped").as_uri())
            assert await tab.evaluate("document.documentElement.scrollWidth") == 390
            widest = (
                "Math.max(...[...document.querySelectorAll('canvas')].map((c) => c.clientWidth))"
            )
            assert 200 < await tab.evaluate(widest) <= 390
            back = "getComputedStyle(document.body).backgroundColor"
            red, green, blue = map(int, re.findall(r"\d+", await tab.evaluate(back)))
            assert max(red, green, blue) < 40
            await tab.evaluate(
                '(() => { const theme = document.getElementById("theme"); theme.value = "light";'
                'theme.dispatchEvent(new Event("change")); })()'
            )
            assert min(map(int, re.findall(r"\d+", await tab.evaluate(back)))) > 220

    in_browser(go())


def test_zoom_is_shared_by_all_charts_and_reset_by_a_key(run: RunFolder) -> None:
    ranges = (
        "JSON.stringify([...new Set([...charts.all.values()].map((chart) =>"
        "`${chart.plot.scales.x.min.toFixed(2)} ${chart.plot.scales.x.max.toFixed(2)}`))])"
    )

    async def go() -> None:
        async with open_tab() as tab:
            await tab.resize(1200, 900)
            await tab.open(write_report(run.path, "stopped").as_uri())
            assert "0.00 29.00" in await tab.evaluate(ranges)
            # Over the middle half of the entropy's plot, which shows steps 0 to 29.
            await tab.evaluate('document.getElementById("policy").scrollIntoView()')
            over = "document.querySelector('#policy .u-over').getBoundingClientRect()"
            left, top, width = [
                await tab.evaluate(f"{over}.{side}") for side in ("left", "top", "width")
            ]
            await tab.drag(left + width / 4, top + 50, left + 3 * width / 4)
            await tab.until("charts.zoom !== null")
            (found,) = await tab.evaluate(f"JSON.parse({ranges})")
            first, last = map(float, found.split())
            assert abs(first - 29 / 4) < 0.3 and abs(last - 3 * 29 / 4) < 0.3
            await tab.press("0")
            assert "0.00 29.00" in await tab.evaluate(ranges)
            # Keys of a focused chart: twice as near, then a quarter of that to the right.
            await tab.evaluate('document.querySelector("#policy .canvas").focus()')
            await tab.press("+")
            low, high = await tab.evaluate("charts.zoom")
            assert high - low == pytest.approx(30 / 2)  # evaluations reach to step 30
            await tab.press("ArrowRight")
            assert await tab.evaluate("charts.zoom[0]") == pytest.approx(low + 15 / 4)

    in_browser(go())


def test_samples_are_filtered_and_browsed_by_keys(run: RunFolder) -> None:
    async def go() -> None:
        async with open_tab(write_report(run.path, "stopped").as_uri()) as tab:
            assert (await tab.evaluate(FOUND)).startswith("group 1 of 60 that match")
            cards = 'document.querySelectorAll("#samples .sample").length'
            body = 'document.getElementById("samples-body").textContent'
            assert await tab.evaluate(cards) == 3
            assert "odd-29" in await tab.evaluate(body)
            assert "seven" in await tab.evaluate(body)
            assert "<script>alert(" in await tab.evaluate(body)  # text, not code
            await tab.press("n")
            assert "even-29" in await tab.evaluate(body)
            await set_value(tab, "filter-grade", "wrong")
            assert (await tab.evaluate(FOUND)).startswith("group 1 of 30 that match")
            await set_value(tab, "filter-first", "10")
            await set_value(tab, "filter-last", "11")
            assert (await tab.evaluate(FOUND)).startswith("group 1 of 2 that match")
            assert "even-11" in await tab.evaluate(body)
            await set_value(tab, "filter-task", "odd")
            assert (await tab.evaluate(FOUND)).startswith("no group matches")
            await set_value(tab, "filter-task", "even-10")
            backgrounds = (
                '[...new Set([...document.querySelectorAll("#samples .token")].map((token) =>'
                "token.style.background))].length"
            )
            assert await tab.evaluate(backgrounds) == 2  # versions 9 and 10
            await set_value(tab, "filter-color", "logp")
            assert await tab.evaluate(backgrounds) == 1  # all of log-prob -1
            await tab.evaluate('document.getElementById("samples-clear").click()')
            assert (await tab.evaluate(FOUND)).startswith("group 1 of 60 that match")
            assert tab.errors == []

    in_browser(go())


def test_file_shows_new_steps_without_losing_its_state(run: RunFolder) -> None:
    async def go() -> None:
        page = write_report(run.path, "running").as_uri()
        async with open_tab(page) as tab:
            await set_value(tab, "filter-grade", "wrong")
            await tab.evaluate("setZoom([5, 10]); window.scrollTo(0, 700)")
            top = 'document.getElementById("learning").getBoundingClientRect().top'
            before = await tab.evaluate(top)
            assert "30 of 100" in await tab.evaluate(
                'document.getElementById("run-body").textContent'
            )
            run.step(4)
            write_report(run.path, "running")
            await tab.until('document.getElementById("run-body").textContent.includes("34 of 100")')
            assert await tab.evaluate("charts.zoom") == [5, 10]
            # What is above may change its height; what the reader looks at stays.
            assert await tab.evaluate(top) == pytest.approx(before, abs=2)
            # Four groups are newer than the one that is being read.
            assert (await tab.evaluate(FOUND)).startswith("group 5 of 34 that match")
            assert "even-29" in await tab.evaluate(
                'document.getElementById("samples-body").textContent'
            )
            assert (
                await tab.evaluate("lineOf(page.data.runs[0], 'trainer/entropy').y.length")
            ) == 34
            # A reload keeps the state too.
            scroll = await tab.evaluate("window.scrollY")
            await tab.open("about:blank")
            await tab.open(page)
            assert await tab.evaluate("charts.zoom") == [5, 10]
            await tab.until(f"window.scrollY === {scroll}")
            assert_nothing_left(tab, page)

    in_browser(go())


def test_copy_on_a_web_server_refreshes_without_other_requests(run: RunFolder) -> None:
    outside = """new Promise((done) => { window.addEventListener("message", () => done("sent"));
      const frame = document.createElement("iframe"); frame.src = "%s?part=data";
      frame.onload = () => setTimeout(() => done("silent"), 500); document.body.append(frame); })"""

    async def go() -> None:
        write_report(run.path, "running")
        app = web.Application()
        app.router.add_static("/", run.path)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        page = f"http://127.0.0.1:{port}/report.html"
        async with open_tab(page) as tab:
            run.step(4)
            write_report(run.path, "running")
            await tab.until('document.getElementById("run-body").textContent.includes("34 of 100")')
            assert_nothing_left(tab, page)
            # The same server under another name is another site.
            (run.path / "other.html").write_text("<!DOCTYPE html><body></body>")
            await tab.open(f"http://localhost:{port}/other.html")
            assert await tab.evaluate(outside % page) == "silent"
            await tab.open(f"http://127.0.0.1:{port}/other.html")
            assert await tab.evaluate(outside % page) == "sent"
        await runner.cleanup()

    in_browser(go())


def test_live_page_shows_new_steps_and_all_samples(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "UPDATE_S", 0.1)

    async def go() -> None:
        async with (
            live_report([run.path], lambda folder: "running") as address,
            open_tab(address) as tab,
        ):
            await tab.until(f'{FOUND}.startsWith("group 1 of 60 that match, of the run")')
            await tab.until('document.getElementById("connection").textContent === "live"')
            await asyncio.to_thread(run.step, 2)
            await tab.until('document.getElementById("run-body").textContent.includes("32 of 100")')
            await tab.until(f'{FOUND}.startsWith("group 5 of 64 that match")')
            await set_value(tab, "filter-task", "even-31")
            await tab.until(f'{FOUND}.startsWith("group 1 of 1 that match")')
            host = urllib.parse.urlsplit(address)._replace(query="").geturl()
            assert_nothing_left(tab, host)

    in_browser(go())


def test_runs_are_overlaid_by_name(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "another")
    other.step(20)
    other.close()
    page = write_comparison(
        tmp_path / "both.html", [(run.path, "stopped"), (other.path, "stopped")]
    )

    async def go() -> None:
        async with open_tab(page.as_uri()) as tab:
            legend = '[...document.querySelectorAll("#policy .chart:first-child .line")]'
            labels = await tab.evaluate(f"{legend}.map((line) => line.textContent.split(' ')[0])")
            assert labels == ["run", "another"]
            drawn = dict(await tab.evaluate(PIXELS))
            assert {title for title, colors in drawn.items() if colors == 0} == set()
            # A hidden line is drawn no more.
            await tab.evaluate(f"{legend}[0].click()")
            assert dict(await tab.evaluate(PIXELS))["Entropy"] < drawn["Entropy"]
            await set_value(tab, "filter-run", "1")
            assert "of the 40 groups" in await tab.evaluate(FOUND)
            assert tab.errors == []

    in_browser(go())


def test_evaluation_report_draws_its_charts(tmp_path: Path) -> None:
    tasks = [Task(f"t{n}", (Message("user", "<b>?"),), "7", family=f"f{n % 2}") for n in range(8)]
    answers = {
        n: tuple(
            Answer("correct" if k <= n % 4 else "wrong", "stop", 10 * n + k, str(7 + k), "text")
            for k in range(4)
        )
        for n in range(8)
    }
    write_description(tmp_path, "headline", {}, "1 cpu")
    results = compute_results(tasks, answers, {})
    page = write_evaluation(tmp_path, "headline", {}, results, tasks, answers).as_uri()

    async def go() -> None:
        async with open_tab(page) as tab:
            drawn = dict(await tab.evaluate(PIXELS))
            assert drawn.keys() == {
                "Score of k samples",
                "Tokens of an answer",
                "Problems by share of correct answers",
            }
            assert all(drawn.values())
            assert_nothing_left(tab, page)

    in_browser(go())
