from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from meshgate.ui.access import SUBPROTOCOL, Access, Decision, Refused

HOST = "127.0.0.1:5000"


@pytest.fixture
def access() -> Access:
    return Access(5000)


def ask(access: Access, path: str, secret: str | None = None, **headers: Any) -> Decision:
    offered = None if secret is None else f"{SUBPROTOCOL}, {secret}"
    return access.decide(path, **{"host": HOST, "origin": f"http://{HOST}", "offered": offered, **headers})


def link_secret(access: Access) -> str:
    return access.url.partition("#")[2]


def test_the_page_has_no_secret_and_its_websocket_needs_one(access: Access) -> None:
    assert ask(access, "/", origin=None) == "page"
    assert ask(access, "/live", link_secret(access)) == "live"


def test_the_link_works_once_and_its_page_continues_with_another_secret(access: Access) -> None:
    assert ask(access, "/live", link_secret(access)) == "live"
    refused = ask(access, "/live", link_secret(access))
    assert isinstance(refused, Refused)
    assert "run meshgate ui again" in refused.reason
    assert [ask(access, "/live", access.secret) for _ in range(2)] == ["live", "live"]
    assert access.secret != link_secret(access)


@pytest.mark.parametrize("secret", [None, "", "wrong", "\udcff", "é"])
@pytest.mark.parametrize("path", ["/live", "/live?x"])
def test_others_are_refused(access: Access, path: str, secret: str | None) -> None:
    for _ in range(2):
        decision = ask(access, path, secret)
        assert isinstance(decision, Refused)
        assert decision.status is HTTPStatus.FORBIDDEN
    assert ask(access, path, link_secret(access)) == "live"


def test_a_secret_in_the_address_is_not_accepted(access: Access) -> None:
    assert isinstance(ask(access, f"/live?{access.secret}"), Refused)


@pytest.mark.parametrize("host", [None, "evil.example", "evil.example:5000", "127.0.0.1:5001", "127.0.0.1"])
def test_other_host_names_are_refused_even_with_the_link(access: Access, host: str | None) -> None:
    assert isinstance(ask(access, "/", host=host), Refused)
    assert isinstance(ask(access, "/live", link_secret(access), host=host), Refused)


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:5001", "http://["])
def test_websockets_of_other_pages_are_refused(access: Access, origin: str | None) -> None:
    assert isinstance(ask(access, "/live", access.secret, origin=origin), Refused)


@pytest.mark.parametrize("path", ["/favicon.ico", "//["])
def test_there_is_one_page(access: Access, path: str) -> None:
    decision = ask(access, path, access.secret)
    assert isinstance(decision, Refused)
    assert decision.status is HTTPStatus.NOT_FOUND
