from __future__ import annotations

import asyncio
from http import HTTPStatus

import pytest
from pydantic import SecretStr

from meshgate_gateway.http.auth import Denied, Identity, TokenAuthenticator, bearer_token
from meshgate_gateway.http.messages import HeadParser, MalformedRequest, Request

TOKEN = "correct-horse-battery-staple"


def request(*authorization: str) -> Request:
    lines = [f"Authorization: {value}" for value in authorization]
    parsed = HeadParser().feed("\r\n".join(["GET / HTTP/1.1", *lines, "", ""]).encode("latin-1"))
    assert parsed is not None
    return parsed


def authenticate(*authorization: str) -> Identity | Denied:
    return asyncio.run(TokenAuthenticator(SecretStr(TOKEN)).authenticate(request(*authorization)))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_token_is_accepted(scheme: str) -> None:
    assert authenticate(f"{scheme} {TOKEN}") == Identity("job")


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[1:]}", "Bearer \xfc"],
)
def test_any_other_value_is_denied(value: str) -> None:
    denied = authenticate(value)
    assert isinstance(denied, Denied)
    assert "MESHGATE_TOKEN" in denied.reason
    assert denied.status is HTTPStatus.UNAUTHORIZED


def test_missing_credentials_are_denied() -> None:
    assert isinstance(authenticate(), Denied)


def test_repeated_credentials_are_malformed() -> None:
    with pytest.raises(MalformedRequest):
        authenticate(f"Bearer {TOKEN}", "Bearer other")


def test_the_authenticator_does_not_keep_the_token() -> None:
    authenticator = TokenAuthenticator(SecretStr(TOKEN))
    assert TOKEN not in repr(vars(authenticator))


def test_a_bearer_token_is_stripped() -> None:
    assert bearer_token(request("Bearer   abc  ")) == "abc"
