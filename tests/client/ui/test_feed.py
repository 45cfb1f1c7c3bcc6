from __future__ import annotations

import json
from typing import Any

import pytest

from meshgate.errors import ConnectionFailedError
from meshgate.ui import feed as module
from meshgate.ui.feed import Feed
from tests.client.ui.sources import FakeSource


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def feed(source: FakeSource) -> Feed:
    return Feed(source, "the job")


def read(feed: Feed, seen: int = 0) -> tuple[dict[str, Any], int]:
    message, seen = feed.message(seen)
    return json.loads(message), seen


def texts(message: dict[str, Any]) -> list[str]:
    return [line["text"] for line in message["lines"]]


def test_a_page_gets_the_status_and_each_line_once(source: FakeSource, feed: Feed) -> None:
    source.print("a", "b", "c", "d")
    feed.poll()
    message, seen = read(feed)
    assert message["title"] == "the job"
    assert message["status"]["sessions"][0]["owner"] == "alice"
    assert texts(message) == ["a", "b", "c", "d"]
    source.print("e")
    feed.poll()
    message, seen = read(feed, seen)
    assert texts(message) == ["e"]
    assert texts(read(feed, seen)[0]) == []
    assert texts(read(feed)[0]) == ["a", "b", "c", "d", "e"]  # a page that opens later


def test_a_slow_page_skips_what_is_no_longer_kept(
    source: FakeSource, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 2)
    feed = Feed(source, "the job")
    source.print("a", "b", "c", "d")
    feed.poll()
    message, seen = read(feed, 1)
    assert texts(message) == ["c", "d"]
    assert seen == 4


def test_a_problem_is_shown_until_a_poll_succeeds(source: FakeSource, feed: Feed) -> None:
    feed.poll()
    source.error = ConnectionFailedError("cannot reach the gateway")
    feed.poll()
    message, _ = read(feed)
    assert message["problem"] == "ConnectionFailedError: cannot reach the gateway"
    assert message["status"] is not None
    source.error = None
    feed.poll()
    assert read(feed)[0]["problem"] == ""


def test_the_output_of_a_run_is_read_line_by_line(source: FakeSource, feed: Feed) -> None:
    source.run("running", "épochs 1\n50%\r100%\n".encode() + b"las")
    feed.poll()
    feed.poll()
    message, seen = read(feed)
    assert [(line["mesh"], line["text"], line["end"]) for line in message["lines"]] == [
        ("run night", "épochs 1", "\n"),
        ("run night", "50%", "\r"),
        ("run night", "100%", "\n"),
    ]
    asked = source.asked
    source.run("failed", source.printed + b"t", exit_code=1, reason="exited with code 1", news=True)
    feed.poll()
    feed.poll()
    message, seen = read(feed, seen)
    assert texts(message) == ["last"]
    assert source.asked == asked + 1  # only for what is new
    assert message["status"]["runs"][0]["news"]
    source.run("running", b"again\n", age=1.0)  # another run of this name
    feed.poll()
    assert texts(read(feed, seen)[0]) == ["again"]


def test_what_a_run_printed_long_ago_is_not_read(
    source: FakeSource, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RUN_OUTPUT", 4)
    source.run("succeeded", b"old\nnew\n")
    feed.poll()
    assert texts(read(feed)[0]) == ["new"]


def test_events_are_read_now_and_then(source: FakeSource) -> None:
    reads: list[int] = []

    def events() -> list[dict[str, Any]]:
        reads.append(1)
        return [{"object": "Pod/a", "reason": "OOMKilling", "message": "m", "count": 1}]

    feed = Feed(source, "the job", events)
    feed.poll()
    feed.poll()
    assert len(reads) == 1
    assert read(feed)[0]["events"][0]["object"] == "Pod/a"
