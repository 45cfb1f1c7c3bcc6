"""The page in Chromium. Left out where Chromium is not installed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshgate.errors import ConnectionFailedError
from meshgate.ui.feed import Feed
from tests.client.ui.conftest import serving
from tests.client.ui.sources import FakeSource, printed

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a job; the test fails if the page reports an error."""
    problems: list[str] = []
    contexts: list[Any] = []
    with contextlib.ExitStack() as stack:

        def open_it(source: FakeSource, **options: Any) -> Any:
            link = stack.enter_context(serving(Feed(source, "the job")))
            context = browser.new_context(**options)
            contexts.append(context)
            page = context.new_page()
            page.set_default_timeout(60_000)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda message: message.type == "error" and problems.append(message.text))
            page.goto(link)
            page.wait_for_selector("#meshes .rank")
            return page

        yield open_it
        for context in contexts:
            context.close()
    assert problems == []


def states(page: Any, grid: int) -> list[str]:
    found: list[str] = (
        page.locator("#meshes .grid")
        .nth(grid)
        .locator(".rank")
        .evaluate_all("buttons => buttons.map(button => button.dataset.state)")
    )
    return found


def test_ranks_have_states_reasons_and_hosts(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource(hosts=3, gpus=4))
    assert states(page, 0) == ["up", "up", "missing"]
    assert states(page, 1) == ["busy", "busy", "up", "lost", *["up"] * 4, *["missing"] * 4]
    page.get_by_role("button", name="rank 3, lost, workers-0: <b>fault</b>").click()
    assert "rank 3: lost, workers-0: <b>fault</b>" in page.locator("#detail").inner_text()


def test_calls_hosts_and_sessions_are_listed(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource(hosts=3, gpus=4))
    call = page.locator("#calls tbody tr").inner_text()
    assert "trainers.step" in call
    assert "1m 32s" in call
    assert "10 of 12" in call
    assert "rank 0 on workers-0, rank 1 on workers-0" in call
    hosts = page.locator("#hosts tbody tr").all_inner_texts()
    assert "workers-2" in hosts[0]
    assert "missing: OOMKilled" in hosts[0]
    assert "workers-1" in hosts[1]
    assert "not yet cafecafecafe" in hosts[1]
    assert "alice" in page.locator("#sessions tbody").inner_text()


def test_a_thousand_ranks_fit(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource(hosts=128, gpus=8), viewport={"width": 1280, "height": 900}, color_scheme="dark")
    box = page.locator("#meshes .grid").nth(1).bounding_box()
    assert len(states(page, 1)) == 1024
    assert box["height"] < 400
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(13, 17, 23)"


def test_a_phone_needs_no_sideways_scrolling(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource(hosts=3, gpus=4), viewport={"width": 390, "height": 800}, color_scheme="light")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 248, 250)"


def test_ranks_can_be_reached_with_the_keyboard(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource(hosts=3, gpus=4))
    page.locator("#meshes .grid").nth(1).locator(".rank").first.focus()
    for key in ("ArrowRight", "ArrowDown", "End", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert page.locator("#detail").inner_text().startswith("procs, rank 10: missing")


def test_output_is_filtered_by_text_rank_and_stream(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.lines = [
        printed(1, "loss <i>1</i>", 0),
        printed(2, "loss 2", 1, stream="stderr"),
        printed(3, "other", 1),
        printed(4, "10%", 2, end="\r"),
        printed(5, "20%", 2, end="\r"),
    ]
    page = open_page(source)
    rows = page.locator("#lines > div")
    playwright.expect(rows).to_have_count(4)
    assert rows.all_inner_texts()[0] == "[workers-0 trainers rank 0] loss <i>1</i>"
    assert rows.all_inner_texts()[3].endswith("20%")
    page.fill("#search", "LOSS")
    assert rows.count() == 2
    page.fill("#rank", "1")
    assert rows.all_inner_texts() == ["[workers-0 trainers rank 1] loss 2"]
    page.fill("#search", "")
    page.check("#errors")
    assert rows.all_inner_texts() == ["[workers-0 trainers rank 1] loss 2"]


def test_the_page_is_live_and_shows_problems(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    source.print("just now")
    page.wait_for_selector("text=just now")
    source.error = ConnectionFailedError("cannot reach <it>")
    page.wait_for_selector("#problem:has-text('cannot reach <it>')")
    assert page.locator("#connection").inner_text() == "live"
