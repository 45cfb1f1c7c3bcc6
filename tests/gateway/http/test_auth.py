from __future__ import annotations

import asyncio
import socket
import uuid
from http import HTTPStatus

import pytest
from pydantic import SecretStr

from meshgate_gateway.http.auth import (
    Denied,
    GatewaysAuthenticator,
    Identity,
    TokenAuthenticator,
    bearer_token,
    credentials_for,
    origin_of,
    prover_of,
)
from meshgate_gateway.http.messages import HeadParser, MalformedRequest, Request
from meshgate_wire.proof import Prover, new_nonce
from tests.gateway import server_process
from tests.gateway.server_process import ServerProcess

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


def asking(**headers: str) -> Request:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    parsed = HeadParser().feed("\r\n".join(["GET / HTTP/1.1", *lines, "", ""]).encode("latin-1"))
    assert parsed is not None
    return parsed


def test_a_provisioning_gateway_names_the_end_user_and_proves_by_what_that_user_knows() -> None:
    nonce = new_nonce()
    asked = asking(Authorization="Bearer of-alice", Meshgate_Nonce=nonce, Meshgate_Caller="bob")
    forwarded = asking(**credentials_for(asked, "kubernetes:Zoë @x", SecretStr(TOKEN)), Meshgate_Nonce=nonce)
    identity = asyncio.run(TokenAuthenticator(SecretStr(TOKEN)).authenticate(forwarded))
    assert identity == Identity("job", "kubernetes:Zoë @x")
    assert identity.caller == "kubernetes:Zoë @x"
    assert prover_of(forwarded) == Prover.of_request(nonce, "of-alice")
    assert prover_of(forwarded) != prover_of(asking(Authorization=f"Bearer {TOKEN}", Meshgate_Nonce=nonce))


def test_the_name_of_a_caller_counts_with_the_token_alone() -> None:
    asked = asking(Authorization="Bearer guessed", Meshgate_Caller="alice")
    assert isinstance(asyncio.run(TokenAuthenticator(SecretStr(TOKEN)).authenticate(asked)), Denied)
    assert Identity("job").caller == "job"


def test_what_a_client_says_about_a_caller_is_not_forwarded() -> None:
    asked = asking(Meshgate_Caller="bob", Meshgate_Proof_Key="0" * 64, Host="x")
    assert asked.head == b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("key", ["", "0" * 63, "g" * 64])
def test_an_invalid_key_for_proofs_is_ignored(key: str) -> None:
    assert prover_of(asking(Meshgate_Proof_Key=key)) is None


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


def test_a_session_is_recorded_with_its_caller_and_address() -> None:
    session = uuid.uuid4().hex
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a") as server, server.dial(session) as connection:
        assert connection.head()[0] == 101
        event = server.wait_logged("audit", action="session", outcome="allowed")
    assert (event["session"], event["caller"], event["address"]) == (session, "job", "127.0.0.1")
    assert "forwarded_for" not in event


def test_a_refusal_is_recorded_with_its_reason_and_without_the_token() -> None:
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a") as server:
        forwarded = {"X-Forwarded-For": "203.0.113.7" + " " * 300}
        assert server.ask("/v1/job", token="guessed", **forwarded).status == 401
        event = server.wait_logged("audit", action="describe job", outcome="refused")
        assert "guessed" not in server.log
    assert event["caller"] is None
    assert event["forwarded_for"].strip() == "203.0.113.7"
    assert "is not the token of this gateway" in event["reason"]


def test_a_peer_on_a_unix_socket_is_this_machine() -> None:
    parsed = HeadParser().feed(server_process.request("/v1/job", token=server_process.TOKEN))
    assert parsed is not None
    one, other = socket.socketpair()
    with one, other:
        assert origin_of(parsed, one).address == "this machine"


def behind_gateways(**headers: str) -> Identity | Denied:
    return asyncio.run(GatewaysAuthenticator(SecretStr(TOKEN)).authenticate(asking(**headers)))


@pytest.mark.parametrize("identity", [Identity("job", "alice"), Identity("kubernetes:Zoë @x")])
def test_a_gateway_in_front_of_the_engines_passes_on_who_the_caller_is(identity: Identity) -> None:
    asked = asking(Authorization="Bearer theirs", Meshgate_Identity="kubernetes:bob")
    given = credentials_for(asked, identity.end_user, SecretStr(TOKEN), identity=identity.name)
    assert behind_gateways(**given) == identity
    assert asked.head == b"GET / HTTP/1.1\r\n\r\n"


def test_no_caller_gets_to_the_engines_without_the_key_and_an_identity() -> None:
    for headers in ({"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer x", "Meshgate_Identity": "job"}):
        denied = behind_gateways(**headers)
        assert isinstance(denied, Denied)
        assert denied.status is HTTPStatus.UNAUTHORIZED
    job_token = {"Authorization": f"Bearer {TOKEN}", "Meshgate_Identity": "kubernetes:bob"}
    found = asyncio.run(TokenAuthenticator(SecretStr(TOKEN)).authenticate(asking(**job_token)))
    assert found == Identity("job")
