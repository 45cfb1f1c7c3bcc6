"""The page in Chromium. Left out where Chromium is not installed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshgate.errors import ConnectionFailedError
from meshgate.ranks import OWN_MESHES
from meshgate.ui.server import Feed
from meshgate_wire.status import EndedRanks, RankReply, Straggler
from tests.chromium import CHROMIUM, started_chromium
from tests.client.ui.conftest import serving
from tests.client.ui.sources import FakeSource, printed, timeline

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a job; the test fails if the page reports an error."""
    problems: list[str] = []
    contexts: list[Any] = []
    with contextlib.ExitStack() as stack:

        def open_it(source: FakeSource, **options: Any) -> Any:
            link = stack.enter_context(serving(Feed(source, "the job", source.stack, source.meter)))
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


def test_lost_ranks_have_a_short_reason_and_an_age_and_stopped_ones_need_no_attention(
    open_page: Callable[..., Any],
) -> None:
    source = FakeSource(hosts=2, gpus=64)
    source.make_sound()
    killed = EndedRanks(ranks=((3, 3), (70, 99)), reason="killed by <b>", exit_code=-9, age=200.0, last_age=12.0)
    stopped = EndedRanks(ranks=((5, 6),), reason="stopped by the program", age=9.0, last_age=9.0, stopped=True)
    failed = EndedRanks(ranks=((3, 3), (8, 8)), reason="KeyError: 1", age=9.0, last_age=9.0)
    again = stopped.model_copy(update={"ranks": ((9, 9),)})
    source.end_ranks(0, killed, stopped)
    source.end_ranks(1, failed, again, dead={8: "The actor failed:\n  KeyError: 1"})
    page = open_page(source)
    found = states(page, 1)
    assert [rank for rank, state in enumerate(found) if state == "lost"] == [3, 8, *range(70, 100)]
    assert [rank for rank, state in enumerate(found) if state == "stopped"] == [5, 6]  # 9 has other actors perhaps
    assert page.locator("#attention span").all_inner_texts() == [
        "procs, rank 8: lost: KeyError: 1, less than a minute ago",  # the last loss comes first
        "procs, ranks 3, 70\u201399: lost: killed by <b>, first 3m ago, last less than a minute ago",
    ]
    page.get_by_role("button", name="rank 8, lost, workers-0: KeyError: 1, less than a minute ago").click()
    assert "· The actor failed: KeyError: 1" in page.locator("#detail").inner_text()
    page.get_by_role("button", name="Show procs, ranks 3").focus()
    source.end_ranks(0, killed.model_copy(update={"age": 250.0}), stopped)
    playwright.expect(page.locator("#attention time").nth(1)).to_have_text(
        ", first 4m ago, last less than a minute ago"
    )
    assert page.evaluate("document.activeElement.textContent") == "Show"  # the list is still the same
    page.get_by_role("button", name="rank 5, stopped, workers-0: stopped by the program").click()
    assert not page.locator("#show-stack").is_visible()


def test_what_processes_keep_is_beside_their_mesh(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource(hosts=3, gpus=4))
    assert ", keeps 4.2 MB, session 01234567" in page.locator("#meshes").inner_text()
    page.get_by_role("button", name="rank 2, up, workers-0, keeps 4.2 MB").click()
    assert "rank 2: up, workers-0, keeps 4.2 MB" in page.locator("#detail").inner_text()


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
    assert "ends in 24 s: drained" in hosts[1]
    parents = page.locator("#hosts tbody td:nth-child(6)").all_text_contents()
    assert parents == ["\u2013", "workers-0", "gateway"]
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


def test_submitted_programs_are_listed_and_lead_to_their_output(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.print("from an actor")
    page = open_page(source)
    assert page.locator("#runs-section").is_hidden()
    source.run("failed", b"<b>Traceback</b>\n", age=92.0, exit_code=3, reason="exited with code 3", news=True)
    page.wait_for_selector("#runs tbody tr")
    cells = page.locator("#runs tbody td").all_inner_texts()
    assert cells[:5] == ["night *", "failed", "3", "1m 32s", "exited with code 3"]
    page.get_by_role("button", name="Show the output of night").click()
    page.wait_for_selector("#lines div:only-child")
    assert page.locator("#lines").inner_text() == "[run night] <b>Traceback</b>"
    page.get_by_role("button", name="Show the output of night").focus()
    source.run("succeeded", b"<b>Traceback</b>\n", age=93.0)
    page.wait_for_selector("#runs td:text-is('night')")
    assert page.evaluate("document.activeElement.dataset.key") == "night"


def test_asking_for_the_output_of_something_shows_all_of_it(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.lines = [printed(1, "of a rank", 1), printed(2, "elsewhere", 2).model_copy(update={"host": "workers-1"})]
    source.run("succeeded", b"of the program\n")
    page = open_page(source)
    rows, output = page.locator("#lines > div"), page.get_by_role("button", name="Show its output")
    playwright.expect(rows).to_have_count(3)
    page.fill("#search", "something else")
    page.check("#errors")
    page.get_by_role("button", name="rank 1, busy").click()
    output.click()
    assert rows.all_inner_texts() == ["[workers-0 trainers rank 1] of a rank"]
    page.get_by_role("button", name="Show the output of night").click()
    assert rows.all_inner_texts() == ["[run night] of the program"]
    page.get_by_role("button", name="rank 1, missing, workers-1").first.click()  # a host
    playwright.expect(output).to_be_hidden()


def test_the_hosts_of_a_scaled_mesh_are_shown_whatever_its_first_session_knows(open_page: Callable[..., Any]) -> None:
    source = FakeSource(hosts=3)
    source.make_sound()
    before = source.reported.hosts
    (session,) = source.reported.sessions
    missing = before[1].model_copy(update={"state": "missing", "reason": "OOMKilled"})
    first = session.model_copy(update={"hosts": before[:1], "meshes": ()})
    second = session.model_copy(update={"session": "b" * 32, "hosts": (before[0], missing)})
    grown = source.reported.model_copy(update={"sessions": (first, second), "hosts": (before[0], before[2])})
    source.reported = grown
    page = open_page(source)
    assert states(page, 0) == ["up", "missing", "up"]
    source.reported = grown.model_copy(update={"meshes": {"workers": 1}, "hosts": before[:1]})
    playwright.expect(page.locator("#meshes .grid").first.locator(".rank")).to_have_count(1)
    assert states(page, 0) == ["up"]


def test_what_needs_attention_comes_first_and_leads_to_the_rank(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource(hosts=3, gpus=4))
    items = page.locator("#attention li")
    assert [text.split("\n")[0] for text in items.locator("span").all_inner_texts()] == [
        "workers, rank 2: workers-2 is missing: OOMKilled",
        "procs, rank 3: lost: <b>fault</b>",
        "procs, ranks 8\u201311: workers-2 is missing: OOMKilled",
    ]
    page.get_by_role("button", name="Show procs, rank 3").press("Enter")
    assert page.evaluate("document.activeElement.title") == "rank 3, lost, workers-0: <b>fault</b>"
    assert page.locator("#detail").inner_text().startswith("procs, rank 3: lost")


def test_the_tab_keeps_its_secret_out_of_its_address_and_others_have_none(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource())
    assert page.evaluate("location.href").endswith(":" + page.evaluate("location.port") + "/")
    assert page.evaluate("document.cookie") == ""
    assert page.context.cookies() == []
    page.reload()
    page.wait_for_selector("#meshes .rank")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("#connection:has-text('open the link that meshgate ui prints')")


def test_nothing_needs_attention_in_a_sound_job(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.make_sound()
    assert not open_page(source).locator("#attention-section").is_visible()


def test_what_ranks_use_is_measured_on_request_and_kept_with_its_history(open_page: Callable[..., Any]) -> None:
    source = FakeSource(gpus=4)
    page = open_page(source)
    rows = page.locator("#use tbody tr")
    playwright.expect(rows).to_have_count(1)  # the only rank that keeps values
    assert rows.locator("td").nth(4).inner_text() == "4.2 MB"
    source.used = [("procs", 0, 12.0, 10**8, None, None), ("procs", 1, 93.4, 2 * 10**9, 71.0, 5 * 10**9)]
    page.get_by_role("button", name="Measure CPU, memory and GPUs").click()
    playwright.expect(rows.nth(1).locator("td").nth(1)).to_have_text("93%")
    cells = rows.nth(1).locator("td").all_inner_texts()
    assert cells == ["procs 1 on workers-0", "93%", "2.0 GB", "71%, 5.0 GB", "\N{EN DASH}"]
    assert rows.nth(0).locator("td").nth(3).inner_text() == "\N{EN DASH}"
    page.select_option("#use-order", label="most memory")
    playwright.expect(rows.nth(0)).to_contain_text("procs 1 on workers-0")
    page.get_by_role("button", name="rank 2, up").click()
    playwright.expect(rows.nth(0)).to_contain_text("procs 2 on workers-0 (chosen)")
    source.used[1] = ("procs", 1, 3.0, 10**9, 71.0, 5 * 10**9)
    page.get_by_role("img", name="Memory, the last minute: from 1.0 GB to 2.0 GB").wait_for()
    source.unmeasured = {"workers-1": "it is lost"}
    playwright.expect(page.locator("#use-note")).to_have_text("Not measured: workers-1: it is lost")
    page.get_by_role("button", name="Stop measuring").click()
    playwright.expect(rows.nth(1).locator("td").nth(1)).to_have_text("\N{EN DASH}")
    assert source.measured.wait(300)


def test_a_measurement_is_shown_while_the_gateway_cannot_be_reached(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    page.get_by_role("button", name="Measure CPU, memory and GPUs").click()
    playwright.expect(page.get_by_role("button", name="Stop measuring")).to_be_visible()
    source.error = ConnectionFailedError("cannot reach it")
    playwright.expect(page.locator("#problem")).to_contain_text("cannot reach it")
    source.used = [("procs", 1, 93.4, 2 * 10**9, None, None)]
    row = page.locator("#use tbody tr", has_text="procs 1 on workers-0")
    playwright.expect(row.locator("td").nth(1)).to_have_text("93%")
    source.used = [("procs", 1, 12.0, 10**9, None, None)]
    playwright.expect(row.locator("td").nth(1)).to_have_text("12%")


def test_the_history_of_ranks_is_bounded_and_keeps_the_highest_values(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource())
    kept = page.evaluate("""() => {
        past.at.length = 0; past.of.clear();
        for (let at = 0; at < 5000; at++) remember(at, new Map([["a", [at === 4500 ? 7 : 1, 1, NaN, 1]]]));
        const [cpu, , gpu] = past.of.get("a");
        const known = { at: past.at.slice(), cpu: cpu.slice(), gpu: gpu.filter((each) => !Number.isNaN(each)) };
        past.at.length = 0; past.of.clear();
        return known;
    }""")
    assert kept["at"][-61:] == list(range(4939, 5000))
    assert len(kept["at"]) == len(kept["cpu"]) == 117
    assert kept["at"][0] >= 4999 - 900
    assert (kept["cpu"].count(7), kept["cpu"].count(1), kept["gpu"]) == (1, 116, [])


def test_calls_have_a_rate_and_a_latency_by_endpoint(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    row = page.locator("#rates tbody tr", has_text="trainers.step")
    source.call("step", ended=10, seconds=5.0)
    playwright.expect(row.locator("td").nth(2)).to_have_text("500.0 ms")
    assert float(row.locator("td").nth(1).inner_text().replace(",", "")) > 0
    source.call("evaluate", ended=1, seconds=2.0)
    playwright.expect(page.locator("#rates tbody tr", has_text="trainers.evaluate")).to_contain_text("2.0 s")
    assert row.get_by_role("img").count() == 1


def test_calls_have_a_rate_since_their_engine_last_answered(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource())
    shown = page.evaluate("""() => {
        const others = { failed: 0, casts: 0, in_flight: 0, compared: 0, stragglers: [] };
        const counts = (ended) => ({ ended, seconds: ended, ...others });
        const status = (ended) => ({ sessions: [ended
            ? { session: "s", problem: "", meshes: [{ number: 1, name: "m", endpoints: { step: counts(ended) } }] }
            : { session: "s", problem: "silent", meshes: [] }] });
        samples.length = 0;
        const shown = [[0, 0], [1000, 10], [0, 11], [1010, 16], [1020, 17]].map(([ended, at]) => {
            showRates(status(ended), at);
            return byId("rates").querySelector("tbody td:nth-child(2)")?.innerText;
        });
        samples.length = 0;
        return shown;
    }""")
    unknown = "\N{HORIZONTAL ELLIPSIS}"
    assert shown == [None, unknown, unknown, "1.7", "10"]


def test_the_rank_that_others_have_waited_for_is_shown_by_endpoint(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    row = page.locator("#rates tbody tr", has_text="trainers.step")
    playwright.expect(row.locator("td").nth(6)).to_have_text("\N{EN DASH}")
    worst = Straggler(rank=5, host="workers-1", calls=43, seconds=43 * 0.812)
    source.call("step", compared=50, stragglers=(worst, Straggler(rank=2, calls=1, seconds=1.0)))
    playwright.expect(row.locator("td").nth(6)).to_have_text("rank 5 on workers-1: 86% of 50, +812.0 ms")


def ranks_of_the_timeline(page: Any) -> list[list[str]]:
    """Of each row: the rank, what is beside its bar, and which part of the space the bar takes."""
    found: list[list[str]] = page.locator("#timeline-ranks li").evaluate_all(
        "rows => rows.map(row => "
        "[row.firstChild.innerText, row.lastChild.innerText, row.querySelector('i').style.width])"
    )
    return found


def test_a_call_shows_when_each_rank_replied_and_marks_the_straggler(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.show_timelines()
    page = open_page(source)
    playwright.expect(page.locator("#timelines")).to_have_text("no recent call went to several ranks")
    slow, even = timeline(7, 1.0, 0.8, 1.2, 1.0, 4.0, straggler=4), timeline(8, 0.5, 0.5, age=0.6)
    own = timeline(9, 1.0, 1.0, mesh=sorted(OWN_MESHES)[0])
    source.show_timelines(even, own, slow)
    rows = page.locator("#timelines tbody tr")
    playwright.expect(rows).to_have_count(2)
    cells = rows.nth(1).locator("td").all_inner_texts()
    assert cells[0] == "trainers.step"
    assert re.fullmatch(r"\d\d:\d\d:\d\d", cells[2])
    assert cells[3:] == ["4.0 s", "5 of 5", "rank 4 on workers-1, +3.0 s", "01234567"]
    assert rows.nth(0).locator("td").nth(5).inner_text() == "\N{EN DASH}"
    assert not page.locator("#timeline").is_visible()
    rows.nth(1).get_by_role("button").press("Enter")
    assert ranks_of_the_timeline(page) == [
        ["rank 4 on workers-1", "4.0 s \N{BLACK DIAMOND} straggler", "100%"],
        ["rank 2 on workers-0", "1.2 s", "30%"],
        ["rank 0 on workers-0", "1.0 s", "25%"],
        ["rank 3 on workers-0", "1.0 s", "25%"],
        ["rank 1 on workers-0", "800.0 ms", "20%"],
    ]
    assert page.locator("#timeline-title").inner_text() == f"trainers.step, sent at {cells[2]}: 4.0 s"
    facts = page.locator("#timeline-facts").inner_text()
    assert facts.startswith("5 of 5 ranks replied, the first after 800.0 ms, half of all after 1.0 s (the line).")
    bars = page.locator("#timeline-ranks .bar")
    full, quarter = (bars.nth(at).locator("i").bounding_box()["width"] for at in (0, 2))
    assert quarter == pytest.approx(full / 4, abs=1)
    assert page.locator("#timeline-ranks").evaluate("ranks => ranks.style.getPropertyValue('--half')") == "25%"
    source.show_timelines(even)
    playwright.expect(rows).to_have_count(1)
    assert len(ranks_of_the_timeline(page)) == 5  # it stays when the gateway no longer reports it
    source.show_timelines(even, slow)
    pressed = page.locator("#timelines button[aria-pressed=true]")
    playwright.expect(pressed).to_have_count(1)
    pressed.click()
    assert not page.locator("#timeline").is_visible()


def test_a_call_in_flight_names_the_ranks_that_are_missing_until_they_reply(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    missing = {3: "workers-0", 4: "workers-1"}
    running = timeline(7, 1.0, 2.0, total=4, age=8.0, seconds=None, missing=missing)
    source.show_timelines(running, timeline(6, 1.0, 1.0, age=4.0))
    row = page.locator("#timelines tbody tr").first
    playwright.expect(row).to_contain_text("2 of 4")
    assert row.locator("td").nth(3).inner_text() == "runs"
    row.get_by_role("button").click()
    assert ranks_of_the_timeline(page) == [
        ["rank 3 on workers-0", "no reply yet", "100%"],
        ["rank 4 on workers-1", "no reply yet", "100%"],
        ["rank 1 on workers-0", "2.0 s", "25%"],
        ["rank 0 on workers-0", "1.0 s", "12.5%"],
    ]
    times = {"age": 17.0, "seconds": 16.0, "missing": {3: "workers-0"}, "failed": True}
    source.show_timelines(timeline(7, 1.0, 2.0, total=4, **times))
    playwright.expect(row).to_contain_text("16.0 s, failed")
    assert ranks_of_the_timeline(page)[0] == ["rank 3 on workers-0", "no reply before it failed", "100%"]
    assert ranks_of_the_timeline(page)[1] == ["rank 1 on workers-0", "2.0 s", "12.5%"]
    assert page.locator("#timeline-more").inner_text() == "and 1 more without a reply"
    late, short = timeline(8, 1.0, 599.0, age=600.0), timeline(9, 0.5, age=2.0)
    source.show_timelines(short, late, running)
    calls = page.locator("#timelines tbody td:nth-child(4)")
    playwright.expect(calls).to_have_text(["runs", "599.0 s", "500.0 ms"])  # the last that ended comes first


def test_a_call_that_is_no_longer_reported_does_not_seem_to_run(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    none = "no recent call went to several ranks"
    playwright.expect(page.locator("#timelines")).to_have_text(none)
    source.show_timelines(timeline(7, 1.0, total=2, age=8.0, seconds=None, missing={1: ""}))
    page.locator("#timelines button").click()
    playwright.expect(page.locator("#timeline-title")).to_contain_text(": runs")
    source.show_timelines()
    playwright.expect(page.locator("#timeline-title")).to_contain_text(": no longer reported")


def test_the_errors_of_ranks_are_marked_in_a_timeline(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    replies = [RankReply(rank=1, seconds=2.0), RankReply(rank=0, host="workers-0", seconds=1.0, raised=True)]
    source.show_timelines(
        timeline(7, 1.0, 2.0, replies=replies, failed=True),
        timeline(6, 1.0, 2.0, cancelled=True, age=20.0),
        timeline(5, 1.0, total=2, seconds=None, cancelled=True),
    )
    took = page.locator("#timelines tbody td:nth-child(4)")
    playwright.expect(took).to_have_text(["cancelled, runs", "2.0 s, failed", "2.0 s, cancelled"])
    page.locator("#timelines button").nth(1).click()
    assert [text for _, text, _ in ranks_of_the_timeline(page)] == ["2.0 s", "1.0 s ✕ raised"]


def test_a_timeline_of_a_thousand_ranks_fits_on_a_phone(open_page: Callable[..., Any]) -> None:
    source = FakeSource(hosts=3, gpus=4)
    page = open_page(source, viewport={"width": 390, "height": 800})
    seconds = [1.0 + rank / 1024 for rank in range(1000)]
    missing = dict.fromkeys(range(1000, 1016), "a-host-with-a-long-name-in-a-cluster-0123456789")
    source.show_timelines(timeline(7, *seconds, total=1024, missing=missing, age=60.0, seconds=None))
    page.locator("#timelines button").click()
    assert len(ranks_of_the_timeline(page)) == 32
    assert (
        page.locator("#timeline-more").inner_text() == "and 8 more without a reply, and 984 more that replied earlier"
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    bar = page.locator("#timeline-ranks .bar").first.bounding_box()
    assert bar["width"] > 300
    assert bar["x"] + bar["width"] < 390
    assert page.locator("#timelines button").bounding_box()["x"] < 300  # without scrolling


def test_what_a_busy_rank_runs_is_shown_on_request(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    page.get_by_role("button", name="rank 3, lost").click()
    assert not page.locator("#show-stack").is_visible()
    page.get_by_role("button", name="rank 1, busy").click()
    page.locator("#show-stack").click()
    playwright.expect(page.locator("#stack")).to_have_text(
        f"procs, rank 1:\n  runs <code> as procs 1 of session {source.reported.sessions[0].session} on workers-0"
    )
    source.stack_known.clear()
    page.locator("#show-stack").click()
    playwright.expect(page.locator("#stack")).to_contain_text("asking")
    playwright.expect(page.locator("#show-stack")).to_be_disabled()
    page.get_by_role("button", name="rank 0, busy").click()
    assert not page.locator("#stack").is_visible()
    source.stack_known.set()
    playwright.expect(page.locator("#show-stack")).to_be_enabled()
    assert not page.locator("#stack").is_visible()  # the answer was for another rank
    source.error = ConnectionFailedError("cannot reach it")
    page.locator("#show-stack").click()
    playwright.expect(page.locator("#stack")).to_contain_text("ConnectionFailedError: cannot reach it")
    page.get_by_role("button", name="rank 0, up, workers-0").first.click()  # a host
    assert not page.locator("#show-stack").is_visible()


def test_a_session_is_ended_after_a_question(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    questions: list[str] = []
    agree = False

    def answer(dialog: Any) -> None:
        questions.append(dialog.message)
        dialog.accept() if agree else dialog.dismiss()

    page.on("dialog", answer)
    page.get_by_role("button", name="End session 01234567").click()
    assert questions == [
        "End session 01234567 of alice and its processes? A program is connected to it: its calls fail. "
        "This cannot be undone."
    ]
    agree = True
    source.error = ConnectionFailedError("cannot reach it")
    page.get_by_role("button", name="End session 01234567").click()
    playwright.expect(page.locator("#ended")).to_have_text("ConnectionFailedError: cannot reach it")
    assert source.ended == []
    source.error = None
    page.get_by_role("button", name="End session 01234567").click()
    playwright.expect(page.locator("#ended")).to_have_text("Session 01234567 has ended.")
    playwright.expect(page.locator("#sessions")).to_have_text("the job has no sessions")
    assert source.ended == ["0123456789abcdef" * 2]


def test_a_detached_session_is_called_by_its_name(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    session = source.reported.sessions[0].model_copy(update={"name": "train"})
    source.reported = source.reported.model_copy(update={"sessions": (session,)})
    page = open_page(source)
    playwright.expect(page.locator("#sessions tbody td").first).to_have_text("train (01234567)")
    playwright.expect(page.get_by_role("button", name="End session train (01234567)")).to_be_visible()


def test_the_job_is_ended_after_a_question_that_says_what_ends(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.run("running", b"")
    page = open_page(source)
    questions: list[str] = []
    page.on("dialog", lambda dialog: (questions.append(dialog.message), dialog.accept()))
    source.error = ConnectionFailedError("cannot reach it")
    page.get_by_role("button", name="End the job").click()
    playwright.expect(page.locator("#ended")).to_have_text("ConnectionFailedError: cannot reach it")
    source.error = None
    page.get_by_role("button", name="End the job").press("Enter")
    playwright.expect(page.locator("#ended")).to_have_text("The job has ended.")
    assert source.killed
    assert questions[1] == (
        "End the job and all that it has (2 hosts, 1 session of alice, 1 submitted program)? "
        "Programs are connected to 1 session: their calls fail. This cannot be undone."
    )
    playwright.expect(page.locator("#problem")).to_have_text("the job has ended")
    playwright.expect(page.get_by_role("button", name="End the job")).to_be_hidden()


def test_a_link_to_a_line_leads_to_it_after_a_reload(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.lines = [printed(number, f"step {number}", number % 2) for number in range(1, 1201)]
    source.page_size = 1200
    page = open_page(source)
    row = page.locator("#lines > div")
    playwright.expect(row).to_have_count(500)
    page.fill("#rank", "1")
    playwright.expect(row.first).to_have_text("[workers-0 trainers rank 1] step 201")
    assert page.evaluate("location.hash") == "#rank=1"
    page.evaluate("location.hash = 'rank=1&line=s.51'")
    current = page.locator("#lines [aria-current=true]")
    playwright.expect(current).to_have_text("[workers-0 trainers rank 1] step 51")
    page.reload()
    playwright.expect(current).to_have_text("[workers-0 trainers rank 1] step 51")
    playwright.expect(current).to_be_in_viewport()
    assert page.input_value("#rank") == "1"
    page.get_by_role("link", name="rank 1").nth(1).press("Enter")
    playwright.expect(current).to_have_text("[workers-0 trainers rank 1] step 3")
    assert page.evaluate("location.hash") == "#rank=1&line=s.3"
    page.get_by_role("button", name="Show the newest").click()
    playwright.expect(page.get_by_text("step 1199")).to_be_in_viewport()
    assert page.evaluate("location.hash") == "#rank=1"
    page.evaluate("location.hash = 'line=s.1201'")
    playwright.expect(page.locator("#shown")).to_contain_text("without the one of the link: it is no longer kept")


def test_the_focus_stays_on_a_line_while_others_come(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.print("first")
    page = open_page(source)
    page.get_by_role("link").first.focus()
    source.print("second")
    playwright.expect(page.locator("#lines > div")).to_have_count(2)
    assert page.evaluate("document.activeElement.parentElement.innerText").endswith("first")


def test_the_lines_that_the_filters_leave_can_be_downloaded(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    source.lines = [printed(1, "loss 1", 0), printed(2, "warning: loss", 1, stream="stderr"), printed(3, "done", 1)]
    page = open_page(source)
    page.wait_for_selector("#lines :text('done')")
    page.locator("#search").fill("loss")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "output.txt"
    assert (
        download.value.path().read_text()
        == "[workers-0 trainers rank 0] loss 1\n[workers-0 trainers rank 1] warning: loss\n"
    )


@pytest.mark.parametrize(
    ("hosts", "gpus", "width", "scheme"),
    [(2, 4, 1280, "dark"), (2, 4, 1280, "light"), (128, 8, 1280, "dark"), (2, 4, 390, "light")],
)
def test_axe_finds_nothing_that_keeps_people_out(
    open_page: Callable[..., Any], scheme: str, hosts: int, gpus: int, width: int
) -> None:
    source = FakeSource(hosts, gpus)
    source.end_ranks(0, EndedRanks(ranks=((2, 2),), reason="stopped by the program", stopped=True))
    source.lines = [printed(1, "loss 1", 0), printed(2, "warning", 1, stream="stderr")]
    page = open_page(source, viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    replies = [RankReply(rank=1, seconds=2.0, raised=True), RankReply(rank=0, seconds=1.0)]
    late = timeline(7, 1.0, 1.0, 3.0, straggler=2)
    source.show_timelines(timeline(8, 1.0, 2.0, total=3, seconds=None, missing={2: "workers-0"}, replies=replies), late)
    page.locator("#timelines button").nth(int(width == 390)).click()
    source.used = [("procs", rank, 99.0, 10**9, None, None) for rank in range(8)]
    page.get_by_role("button", name="Measure").click()
    page.wait_for_selector("#use :text('99%')")
    page.wait_for_selector("#rates svg")
    page.get_by_role("button", name="rank 1, busy").click()
    page.locator("#show-stack").click()
    page.wait_for_selector("#stack:has-text('runs')")
    page.get_by_role("button", name="rank 3, lost").click()
    source.error = ConnectionFailedError("cannot reach it")
    page.wait_for_selector("#problem:has-text('cannot reach it')")
    found = axe.Axe().run(page).response
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
    assert len(found["passes"]) > 20


def test_a_slow_browser_shows_the_latest_state_and_every_line(open_page: Callable[..., Any]) -> None:
    page = open_page(FakeSource())
    shown, title, lines = page.evaluate("""() => {
        const receive = socket.onmessage, show = showLatest;
        let shown = 0;
        socket.onmessage = null;
        showLatest = () => { shown++; show(); };
        for (let number = 0; number < 100; number++) {
            const line = { session: "s", mesh: "", host: "", ranks: [], count: 1, number, text: "", end: "\\n" };
            receive({ data: JSON.stringify({ title: `job ${number}`, problem: "", events: [], lines: [line] }) });
        }
        return new Promise((resolve) => setTimeout(() => resolve([shown, document.title, lines.length])));
    }""")
    assert shown <= 1
    assert (title, lines) == ("job 99", 100)


def test_the_page_is_live_and_shows_problems(open_page: Callable[..., Any]) -> None:
    source = FakeSource()
    page = open_page(source)
    source.print("just now")
    page.wait_for_selector("text=just now")
    source.error = ConnectionFailedError("cannot reach <it>")
    page.wait_for_selector("#problem:has-text('cannot reach <it>')")
    assert page.locator("#connection").inner_text() == "live"
