from __future__ import annotations

import asyncio
from http import HTTPStatus

import pytest
from pydantic import SecretStr

from meshgate_gateway.auth import Identity, Refusal, TokenAuthenticator, bearer_token
from meshgate_gateway.http import HeadParser, MalformedRequest, Request

TOKEN = "correct-horse-battery-staple"


def request(*authorization: str) -> Request:
    lines = [f"Authorization: {value}" for value in authorization]
    parsed = HeadParser().feed("\r\n".join(["GET / HTTP/1.1", *lines, "", ""]).encode("latin-1"))
    assert parsed is not None
    return parsed


def check(*authorization: str) -> Identity | Refusal:
    return asyncio.run(TokenAuthenticator(SecretStr(TOKEN)).check(request(*authorization)))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_token_opens(scheme: str) -> None:
    assert check(f"{scheme} {TOKEN}") == Identity("job")


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[1:]}", "Bearer \xfc"],
)
def test_nothing_else_does(value: str) -> None:
    refused = check(value)
    assert isinstance(refused, Refusal)
    assert "MESHGATE_TOKEN" in refused.reason
    assert refused.status is HTTPStatus.UNAUTHORIZED


def test_no_credentials_are_refused() -> None:
    assert isinstance(check(), Refusal)


def test_two_are_malformed() -> None:
    with pytest.raises(MalformedRequest):
        check(f"Bearer {TOKEN}", "Bearer other")


def test_the_authenticator_does_not_hold_the_token() -> None:
    authenticator = TokenAuthenticator(SecretStr(TOKEN))
    assert TOKEN not in repr(vars(authenticator))


def test_a_bearer_token_is_stripped() -> None:
    assert bearer_token(request("Bearer   abc  ")) == "abc"
