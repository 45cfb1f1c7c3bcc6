"""The server, over real sockets."""

from __future__ import annotations

import http.client
import json
import math
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin, Subprotocol

from meshgate.errors import ConnectionFailedError, JobError
from meshgate.ui import server as module
from meshgate.ui.server import SUBPROTOCOL, Decision, EndRequest, Feed, PageAccess, Refused
from meshgate_wire.status import LIVE_STATES, JobStatus, OutputPage
from tests.client.ui.conftest import serving
from tests.client.ui.sources import FakeSource

HOST = "127.0.0.1:5000"


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def link(source: FakeSource) -> Iterator[str]:
    with serving(Feed(source, "the job", source.stack, source.meter)) as link:
        yield link


def get(link: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(urlsplit(link).netloc, timeout=60)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def open_live(link: str, secret: str) -> ClientConnection:
    """The websocket of a page that has ``secret``."""
    netloc = urlsplit(link).netloc
    protocols = [Subprotocol(SUBPROTOCOL), Subprotocol(secret)]
    return connect(f"ws://{netloc}/live", origin=Origin(f"http://{netloc}"), subprotocols=protocols)


def test_the_page_is_the_same_for_everyone_and_sets_no_cookie(link: str) -> None:
    page, text = get(link, "/")
    assert page.status == 200
    assert page.headers["Set-Cookie"] is None
    nonce = text.partition('<script nonce="')[2].partition('"')[0]
    assert len(nonce) > 16
    assert f"script-src 'nonce-{nonce}'" in page.headers["Content-Security-Policy"]
    assert "{{" not in text.partition("<script")[0]
    (states,) = re.findall('data-live-states="([a-z ]+)"', text)
    assert set(states.split()) == LIVE_STATES
    assert "http" not in text.replace("http-equiv", "")  # loads nothing from elsewhere
    assert urlsplit(link).fragment not in text


def test_repeated_headers_are_refused(link: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(link).netloc, timeout=60)
    connection.putrequest("GET", "/")
    connection.putheader("Origin", "a")
    connection.putheader("Origin", "b")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


def test_the_websocket_sends_a_new_secret_and_then_what_is_new(source: FakeSource, link: str) -> None:
    source.print("first")
    with open_live(link, urlsplit(link).fragment) as socket:
        assert socket.subprotocol == SUBPROTOCOL
        secret = json.loads(socket.recv(timeout=60))["secret"]
        message = json.loads(socket.recv(timeout=60))
        assert message["status"]["python"] == "3.11"
        assert [line["text"] for line in message["lines"]] == ["first"]
        source.print("second")
        lines: list[str] = []
        while not lines:
            lines = [line["text"] for line in json.loads(socket.recv(timeout=60))["lines"]]
        assert lines == ["second"]
    with open_live(link, secret) as again:
        assert json.loads(again.recv(timeout=60)) == {"secret": secret}
    with pytest.raises(InvalidStatus, match="403"):
        open_live(link, urlsplit(link).fragment)


def test_the_websocket_answers_what_a_process_runs(source: FakeSource, link: str) -> None:
    def ask(socket: ClientConnection, question: dict[str, Any]) -> str:
        socket.send(json.dumps(question))
        while "stack" not in (message := json.loads(socket.recv(timeout=60))):
            continue  # the state of the job
        return str(message["stack"])

    with open_live(link, urlsplit(link).fragment) as socket:
        question = {"session": "s", "host": "workers-0", "mesh": "procs", "rank": 1}
        assert ask(socket, question) == "  runs <code> as procs 1 of session s on workers-0"
        source.error = ConnectionFailedError("cannot reach it")
        assert ask(socket, question) == "ConnectionFailedError: cannot reach it"


def test_a_stack_that_is_waited_for_holds_up_neither_the_state_nor_the_end(source: FakeSource) -> None:
    source.stack_known.clear()
    feed = Feed(source, "the job", source.stack, source.meter)
    with serving(feed) as link, open_live(link, urlsplit(link).fragment) as socket:
        socket.send(json.dumps({"session": "s", "host": "workers-0", "mesh": "procs", "rank": 1}))
        assert source.stack_asked.wait(60)
        source.print("meanwhile")
        while not any(line["text"] == "meanwhile" for line in json.loads(socket.recv(timeout=60)).get("lines", ())):
            continue
    source.stack_known.set()  # the server has ended without it


@pytest.mark.parametrize(
    "question", ["", "{}", '{"session": "s", "host": "h", "mesh": "procs", "rank": 1, "kill": true}']
)
def test_a_page_that_asks_anything_else_is_disconnected(link: str, question: str) -> None:
    with open_live(link, urlsplit(link).fragment) as socket:
        socket.send(question)
        with pytest.raises(ConnectionClosedError) as closed:
            list(socket)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "not a request of this page")


def test_a_job_that_a_page_has_ended_is_not_looked_at_again(
    source: FakeSource, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed.poll()
    assert read(feed)[0]["may_end"]
    answer = json.loads(feed.answer(EndRequest(end="job")))
    assert answer == {"ended": "The job has ended.", "what": "job"}
    monkeypatch.setattr(source, "status", lambda: pytest.fail("it may be another job of this name"))
    feed.poll()
    message, _ = read(feed)
    assert (message["problem"], message["may_end"]) == ("the job has ended", False)


def test_a_job_that_could_not_be_ended_stays_on_the_page(source: FakeSource, feed: Feed) -> None:
    source.error = ConnectionFailedError("cannot reach it")
    answer = json.loads(feed.answer(EndRequest(end="job")))
    assert answer == {"ended": "ConnectionFailedError: cannot reach it", "what": "job"}
    source.error = None
    feed.poll()
    message, _ = read(feed)
    assert (message["problem"], message["may_end"]) == ("", True)


def test_measuring_ends_with_the_last_page(source: FakeSource, link: str) -> None:
    source.used = [("procs", 0, 1.0, 2, None, None)]
    with open_live(link, urlsplit(link).fragment) as socket:
        socket.send(json.dumps({"measure": True}))
        while not (message := json.loads(socket.recv(timeout=60))).get("usage"):
            continue
        assert message["measuring"]
        assert message["usage"] == {"ranks": [["procs", 0, 1.0, 2, None, None]], "problems": {}}
        assert not source.measured.is_set()
    assert source.measured.wait(300)


def test_what_cannot_be_measured_says_why_and_can_be_tried_again(source: FakeSource, link: str) -> None:
    source.error = ConnectionFailedError("cannot reach it")
    with open_live(link, urlsplit(link).fragment) as socket:
        for _ in range(2):
            socket.send(json.dumps({"measure": True}))
            while not (message := json.loads(socket.recv(timeout=60))).get("usage"):
                continue
            assert message["usage"] == {"problems": {"": "ConnectionFailedError: cannot reach it"}}
            socket.send(json.dumps({"measure": False}))
            while json.loads(socket.recv(timeout=60))["usage"]:
                continue


def test_a_websocket_without_a_secret_is_refused(link: str) -> None:
    netloc = urlsplit(link).netloc
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://{netloc}/live", origin=Origin(f"http://{netloc}"))


def test_requests_of_other_users_are_refused(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate.ui.server.may_connect", lambda connection: False)
    assert get(link, "/")[0].status == 403
    with pytest.raises(InvalidStatus, match="403"):
        open_live(link, urlsplit(link).fragment)


@pytest.fixture
def access() -> PageAccess:
    return PageAccess(5000)


def ask(access: PageAccess, path: str, secret: str | None = None, **headers: Any) -> Decision:
    offered = None if secret is None else f"{SUBPROTOCOL}, {secret}"
    return access.decide(path, **{"host": HOST, "origin": f"http://{HOST}", "offered": offered, **headers})


def link_secret(access: PageAccess) -> str:
    return access.url.partition("#")[2]


def test_the_page_has_no_secret_and_its_websocket_needs_one(access: PageAccess) -> None:
    assert ask(access, "/", origin=None) == "page"
    assert ask(access, "/live", link_secret(access)) == "live"


def test_the_link_works_once_and_its_page_continues_with_another_secret(access: PageAccess) -> None:
    assert ask(access, "/live", link_secret(access)) == "live"
    refused = ask(access, "/live", link_secret(access))
    assert isinstance(refused, Refused)
    assert "run meshgate ui again" in refused.reason
    assert [ask(access, "/live", access.secret) for _ in range(2)] == ["live", "live"]
    assert access.secret != link_secret(access)


@pytest.mark.parametrize("secret", [None, "", "wrong", "\udcff", "é"])
@pytest.mark.parametrize("path", ["/live", "/live?x"])
def test_others_are_refused(access: PageAccess, path: str, secret: str | None) -> None:
    for _ in range(2):
        decision = ask(access, path, secret)
        assert isinstance(decision, Refused)
        assert decision.status is HTTPStatus.FORBIDDEN
    assert ask(access, path, link_secret(access)) == "live"


def test_a_secret_in_the_address_is_not_accepted(access: PageAccess) -> None:
    assert isinstance(ask(access, f"/live?{access.secret}"), Refused)


@pytest.mark.parametrize("host", [None, "evil.example", "evil.example:5000", "127.0.0.1:5001", "127.0.0.1"])
def test_other_host_names_are_refused_even_with_the_link(access: PageAccess, host: str | None) -> None:
    assert isinstance(ask(access, "/", host=host), Refused)
    assert isinstance(ask(access, "/live", link_secret(access), host=host), Refused)


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:5001", "http://["])
def test_websockets_of_other_pages_are_refused(access: PageAccess, origin: str | None) -> None:
    assert isinstance(ask(access, "/live", access.secret, origin=origin), Refused)


@pytest.mark.parametrize("path", ["/favicon.ico", "//["])
def test_there_is_one_page(access: PageAccess, path: str) -> None:
    decision = ask(access, path, access.secret)
    assert isinstance(decision, Refused)
    assert decision.status is HTTPStatus.NOT_FOUND


@pytest.fixture
def feed(source: FakeSource) -> Feed:
    return Feed(source, "the job", source.stack, source.meter)


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
    feed = Feed(source, "the job", source.stack, source.meter)
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


def test_a_status_that_cannot_be_read_is_a_problem(
    source: FakeSource, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "status", lambda: JobStatus.model_validate({}))  # of another version
    feed.poll()
    assert read(feed)[0]["problem"].startswith("ValidationError: ")


def test_events_that_cannot_be_read_are_a_problem_until_they_can(
    source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVENTS_INTERVAL", math.inf)
    answers = Mock(side_effect=[JobError("the API server is silent"), [{"object": "Pod/a"}]])
    feed = Feed(source, "the job", source.stack, source.meter, answers)
    source.print("a")
    feed.poll()
    feed.poll()  # reads no events
    message, _ = read(feed)
    assert message["problem"] == "JobError: the API server is silent"
    assert (message["status"]["python"], texts(message)) == ("3.11", ["a"])
    source.error = ConnectionFailedError("cannot reach the gateway")
    feed._next_events = 0.0
    feed.poll()
    message, _ = read(feed)
    assert (message["problem"], message["events"]) == (f"ConnectionFailedError: {source.error}", [{"object": "Pod/a"}])
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


def test_a_later_run_with_the_same_name_is_read_from_its_beginning(
    source: FakeSource, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.run("failed", b"one\n", id="first")
    feed.poll()
    stale = source.reported.model_copy(update={"runs": (source.reported.runs[0].model_copy(update={"printed": 8}),)})
    source.run("running", b"two\nthree\n", age=20.0, id="second")
    with monkeypatch.context() as patched:  # it begins between the status and the output
        patched.setattr(source, "status", lambda: stale)
        feed.poll()
    assert texts(read(feed)[0]) == ["one"]
    feed.poll()
    assert texts(read(feed)[0]) == ["one", "two", "three"]


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

    feed = Feed(source, "the job", source.stack, source.meter, events)
    feed.poll()
    feed.poll()
    assert len(reads) == 1
    assert read(feed)[0]["events"][0]["object"] == "Pod/a"


def test_lines_that_are_missing_are_reported_among_the_output() -> None:
    class Hurried(FakeSource):
        def _output(self, after: dict[str, int]) -> OutputPage:
            (session,) = super()._output(after).sessions
            return OutputPage(sessions=(session.model_copy(update={"dropped": 3 if after else 0}),))

    source = Hurried()
    source.print("first")
    feed = Feed(source, "the job", source.stack, source.meter)
    feed.poll()
    lines = json.loads(feed.message(0)[0])["lines"]
    assert [(line["mesh"], line["text"]) for line in lines] == [
        ("trainers", "first"),
        (
            "meshgate",
            "session s: 3 lines are missing here, because the gateway no longer kept them when they were read",
        ),
    ]


def test_sessions_that_the_job_forgets_are_not_asked_for_again() -> None:
    class Forgetful(FakeSource):
        def _output(self, after: dict[str, int]) -> OutputPage:
            asked.append(dict(after))
            after.clear()
            return super()._output({"s": 1})

    asked: list[dict[str, int]] = []
    source = Forgetful()
    source.print("first")
    feed = Feed(source, "the job", source.stack, source.meter)
    feed._output._seen["s"] = 1
    feed.poll()
    feed.poll()
    assert asked == [{"s": 1}, {}]
