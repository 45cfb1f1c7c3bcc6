"""The server, over real sockets."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from meshgate.ui.feed import Feed
from tests.client.ui.conftest import serving
from tests.client.ui.sources import FakeSource


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def link(source: FakeSource) -> Iterator[str]:
    with serving(Feed(source, "the job")) as link:
        yield link


def get(link: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(urlsplit(link).netloc, timeout=60)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def cookie_of(link: str) -> str:
    parts = urlsplit(link)
    response, _ = get(link, f"/?{parts.query}")
    assert (response.status, response.headers["Location"]) == (303, "/")
    return str(response.headers["Set-Cookie"]).partition(";")[0]


def test_the_link_leads_to_the_page(link: str) -> None:
    refused, reason = get(link, "/")
    assert (refused.status, "run meshgate ui again" in reason) == (403, True)
    page, text = get(link, "/", Cookie=cookie_of(link))
    assert page.status == 200
    nonce = text.partition('<script nonce="')[2].partition('"')[0]
    assert len(nonce) > 16
    assert f"script-src 'nonce-{nonce}'" in page.headers["Content-Security-Policy"]
    assert "{{" not in text.partition("<script")[0]
    assert "http" not in text.replace("http-equiv", "")  # loads nothing from elsewhere


def test_repeated_headers_are_refused(link: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(link).netloc, timeout=60)
    connection.putrequest("GET", "/")
    connection.putheader("Cookie", "a=1")
    connection.putheader("Cookie", "b=1")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


def test_the_websocket_sends_what_is_new(source: FakeSource, link: str) -> None:
    headers = {"Cookie": cookie_of(link)}
    netloc = urlsplit(link).netloc
    source.print("first")
    with connect(f"ws://{netloc}/live", origin=f"http://{netloc}", additional_headers=headers) as socket:  # type: ignore[arg-type]
        message = json.loads(socket.recv(timeout=60))
        assert message["status"]["python"] == "3.11"
        assert [line["text"] for line in message["lines"]] == ["first"]
        source.print("second")
        lines: list[str] = []
        while not lines:
            lines = [line["text"] for line in json.loads(socket.recv(timeout=60))["lines"]]
        assert lines == ["second"]


def test_a_websocket_without_the_cookie_is_refused(link: str) -> None:
    netloc = urlsplit(link).netloc
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://{netloc}/live", origin=f"http://{netloc}")  # type: ignore[arg-type]
