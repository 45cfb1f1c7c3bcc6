from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import pytest

from meshgate.ui.access import Access, Decision, Refused, SignedIn

HOST = "127.0.0.1:5000"


@pytest.fixture
def access() -> Access:
    return Access(5000)


def ask(access: Access, path: str, cookie: str | None = None, **headers: Any) -> Decision:
    return access.decide(path, **{"host": HOST, "origin": None, "cookie": cookie, **headers})


def sign_in(access: Access) -> str:
    """Uses the link; returns the cookie that the browser then sends."""
    parts = urlsplit(access.url)
    decision = ask(access, f"{parts.path}?{parts.query}")
    assert isinstance(decision, SignedIn)
    assert "HttpOnly" in decision.cookie
    return decision.cookie.partition(";")[0]


def test_the_link_lets_one_browser_in(access: Access) -> None:
    cookie = sign_in(access)
    assert ask(access, "/", cookie) == "page"
    assert ask(access, "/live", f"other=1; {cookie}", origin=f"http://{HOST}") == "live"


def test_the_link_works_once(access: Access) -> None:
    sign_in(access)
    parts = urlsplit(access.url)
    decision = ask(access, f"/?{parts.query}")
    assert isinstance(decision, Refused)
    assert "run meshgate ui again" in decision.reason


@pytest.mark.parametrize("cookie", [None, "", "meshgate-ui-5000=", "meshgate-ui-5000=wrong", "\x00=;=", "a=é"])
@pytest.mark.parametrize("path", ["/", "/live", "/?token=", "/?token=wrong", "/other"])
def test_others_are_refused(access: Access, path: str, cookie: str | None) -> None:
    for _ in range(2):
        decision = ask(access, path, cookie, origin=f"http://{HOST}")
        assert isinstance(decision, Refused)
        assert decision.status is HTTPStatus.FORBIDDEN


@pytest.mark.parametrize("host", [None, "evil.example", "evil.example:5000", "127.0.0.1:5001", "127.0.0.1"])
def test_other_host_names_are_refused_even_with_the_link(access: Access, host: str | None) -> None:
    decision = ask(access, f"/?{urlsplit(access.url).query}", host=host)
    assert isinstance(decision, Refused)
    assert isinstance(ask(access, "/", sign_in(access), host=host), Refused)


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:5001"])
def test_websockets_of_other_pages_are_refused(access: Access, origin: str | None) -> None:
    assert isinstance(ask(access, "/live", sign_in(access), origin=origin), Refused)


def test_there_is_one_page(access: Access) -> None:
    decision = ask(access, "/favicon.ico", sign_in(access))
    assert isinstance(decision, Refused)
    assert decision.status is HTTPStatus.NOT_FOUND
