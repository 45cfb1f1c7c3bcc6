"""Connections that are forwarded: bytes both ways, who is admitted, and gateways that take each other's place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from http import HTTPStatus
from typing import Any, TypeAlias

import pytest
import uvloop
from pydantic import SecretStr

from meshgate_gateway.http import forwarding
from meshgate_gateway.http.auth import JOB_IDENTITY, TokenAuthenticator
from meshgate_gateway.http.forwarding import EnginesUnavailable, Forwarder, forward_bytes, proxy_bytes
from meshgate_gateway.http.messages import HeadParser, Request
from meshgate_gateway.http.server import listen
from meshgate_wire.proof import PROOF_HEADER, Prover, engines_key, gateway_name, new_nonce
from tests.gateway import server_process
from tests.gateway.server_process import TOKEN, ServerProcess
from tests.ports import closed_port

DEADLINE = 60.0
CREDENTIALS = {"Authorization": "Bearer of-the-job", "Meshgate-Caller": "alice"}
HEAD = (
    b"GET /v1/jobs/team/trainer/v1/job?one=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n"
    b"Meshgate-caller: bob\r\nMeshgate-Proof-Key: 00\r\n\r\n"
)
KEY = engines_key(TOKEN)

Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Provisioning gateways run on asyncio, those of jobs on uvloop."""
    found: Run = request.param
    return found


def parsed(head: bytes) -> Request:
    request = HeadParser().feed(head)
    assert request is not None
    return request


def with_proxy(
    run: Run,
    test: Callable[[socket.socket, socket.socket], Awaitable[None]],
    head: bytes = HEAD,
    sent_before: bytes = b"",
) -> None:
    """Runs ``test`` with the client's and the upstream server's socket. ``sent_before``: by the client, in any case
    before anything is forwarded."""

    async def forward() -> None:
        loop = asyncio.get_running_loop()
        client, connection = socket.socketpair()
        client.sendall(sent_before)
        client.setblocking(False)
        with listen("127.0.0.1", 0) as listener, client:
            port = listener.getsockname()[1]
            proxying = asyncio.create_task(
                proxy_bytes(connection, parsed(head), "/v1/job", "127.0.0.1", port, CREDENTIALS)
            )
            upstream, _ = await loop.sock_accept(listener)
            with upstream:
                await test(client, upstream)
            await proxying

    run(asyncio.wait_for(forward(), DEADLINE))


async def read(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := await asyncio.get_running_loop().sock_recv(source, size - len(data))):
        data += more
    return data


FORWARDED = (
    b"GET /v1/job?one=1 HTTP/1.1\r\nAuthorization: Bearer of-the-job\r\nMeshgate-Caller: alice\r\nHost: x\r\n\r\n"
)


def test_the_upstream_server_receives_the_head_with_the_new_path_and_other_credentials(run: Run) -> None:
    """What the client says about the caller does not get there."""

    async def test(client: socket.socket, upstream: socket.socket) -> None:
        assert await read(upstream, len(FORWARDED)) == FORWARDED

    with_proxy(run, test)


def test_the_upstream_server_receives_query_and_body(run: Run) -> None:
    head = b"POST /v1/jobs/team/trainer/v1/job?after=3&wait=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
    credentials = b"Authorization: Bearer of-the-job\r\nMeshgate-Caller: alice\r\n"
    rest = b"Host: x\r\nContent-Length: 4\r\n\r\nbody"
    expected = b"POST /v1/job?after=3&wait=1 HTTP/1.1\r\n" + credentials + rest

    async def test(client: socket.socket, upstream: socket.socket) -> None:
        assert await read(upstream, len(expected)) == expected

    with_proxy(run, test, head)


def test_bytes_are_copied_in_both_directions_until_one_side_ends(run: Run) -> None:
    async def test(client: socket.socket, upstream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await read(upstream, len(FORWARDED))
        await loop.sock_sendall(client, b"question")
        assert await read(upstream, 8) == b"question"
        await loop.sock_sendall(upstream, b"answer")
        assert await read(client, 6) == b"answer"
        client.shutdown(socket.SHUT_WR)
        assert await read(upstream, 1) == b""
        await loop.sock_sendall(upstream, b"rest")
        upstream.shutdown(socket.SHUT_WR)
        assert await read(client, 5) == b"rest"

    with_proxy(run, test)


def test_the_connection_is_closed_if_the_upstream_server_does_not_listen(run: Run) -> None:
    async def forward() -> None:
        client, connection = socket.socketpair()
        client.setblocking(False)
        with client, closed_port() as port:
            await proxy_bytes(connection, parsed(HEAD), "/v1/job", "127.0.0.1", port, CREDENTIALS)
            assert await read(client, 1) == b""

    run(asyncio.wait_for(forward(), DEADLINE))


def test_nothing_that_a_client_sends_gets_in_front_of_the_head(run: Run) -> None:
    """Otherwise it could begin a request of its own, which the credentials then complete."""

    async def test(client: socket.socket, upstream: socket.socket) -> None:
        assert await read(upstream, len(FORWARDED) + 9) == FORWARDED + b"too early"

    with_proxy(run, test, sent_before=b"too early")


def test_a_side_that_does_not_read_makes_the_other_one_wait(run: Run) -> None:
    size = 64_000_000  # far more than the buffers between them

    async def test(client: socket.socket, upstream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await read(upstream, len(FORWARDED))
        sending = asyncio.create_task(loop.sock_sendall(upstream, bytes(size)))
        await asyncio.wait({sending}, timeout=0.5)
        assert not sending.done()
        received = 0
        while received < size:
            received += len(await loop.sock_recv(client, 1 << 20))
        await sending

    with_proxy(run, test)


@pytest.mark.parametrize("replies", [True, False], ids=["a server that replies", "a server that does not"])
def test_a_connection_that_is_cancelled_brings_the_client_the_last_words_of_the_server(run: Run, replies: bool) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        client, connection = socket.socketpair()
        near, upstream = socket.socketpair()
        for each in (client, near, upstream):
            each.setblocking(False)
        with client, upstream:
            timeout = DEADLINE if replies else 0.01
            forwarding = forward_bytes(connection, parsed(HEAD), "/v1/job", near, CREDENTIALS, farewell_timeout=timeout)
            task = asyncio.create_task(forwarding)
            assert await read(upstream, len(FORWARDED)) == FORWARDED
            task.cancel()
            assert await read(upstream, 1) == b""
            if replies:
                await loop.sock_sendall(client, b"too late")
                await loop.sock_sendall(upstream, b"last word")
                upstream.close()
            assert await read(client, 10) == (b"last word" if replies else b"")
            with pytest.raises(asyncio.CancelledError):
                await task

    run(asyncio.wait_for(test(), DEADLINE))


def test_a_connection_is_cancelled_at_once_before_it_reaches_the_server(run: Run) -> None:
    async def test() -> None:
        client, connection = socket.socketpair()
        near, upstream = socket.socketpair()
        with client, upstream:
            forwarding = forward_bytes(
                connection, parsed(HEAD), "/v1/job", near, CREDENTIALS, farewell_timeout=DEADLINE
            )
            task = asyncio.create_task(forwarding)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(asyncio.wait_for(test(), DEADLINE))


# --- gateways in front of the engines


@pytest.fixture(scope="module")
def engines() -> Iterator[ServerProcess]:
    """A gateway with stub engines that accepts only other gateways."""
    arguments = ("--mesh", "workers=ipc:///nowhere/a", "--behind-gateways")
    with ServerProcess(*arguments, environment={"MESHGATE_TOKEN": KEY}) as server:
        yield server


def in_front_of(engines: ServerProcess) -> ServerProcess:
    return ServerProcess("--forward-to", f"127.0.0.1:{engines.port}")


def test_a_session_continues_through_another_gateway_when_its_own_is_killed(engines: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with in_front_of(engines) as one, in_front_of(engines) as other:
        with one.join(session) as connection:
            pid = connection.command("describe")["pid"]
            os.kill(one.process.pid, signal.SIGKILL)  # its server ends with it
            assert connection.closed_by_peer()
        with other.join(session, resume=True) as connection:
            assert connection.command("describe")["pid"] == pid


def test_a_gateway_that_is_asked_to_end_closes_its_connections_at_once(engines: ServerProcess) -> None:
    with in_front_of(engines) as server, server.join() as connection:
        server.process.send_signal(signal.SIGTERM)
        assert connection.closed_by_peer()
        assert server.wait() == 0


def test_a_gateway_that_is_asked_to_end_passes_on_the_last_words_of_the_engines() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)
        gateway = ServerProcess("--forward-to", f"127.0.0.1:{listener.getsockname()[1]}")
        with gateway, gateway.dial() as connection, listener.accept()[0] as upstream:
            upstream.settimeout(DEADLINE)
            upstream.recv(1)
            gateway.process.send_signal(signal.SIGTERM)
            while upstream.recv(65_536):
                pass
            upstream.sendall(b"last word")
            upstream.shutdown(socket.SHUT_WR)
            assert connection.rest() == b"last word"
            assert gateway.wait() == 0


def test_a_gateway_ends_with_the_process_that_started_it(engines: ServerProcess) -> None:
    with in_front_of(engines) as server:
        os.close(server.lifetime)
        server.lifetime = -1
        assert server.wait() == 0


def test_only_a_gateway_gets_into_the_server_beside_the_engines(engines: ServerProcess) -> None:
    """Not even with the key, if no identity is named."""
    for token in (TOKEN, KEY):
        refused = engines.ask("/v1/job", token=token)
        assert (refused.status, "connect to the gateway" in refused.error) == (401, True)


def test_the_engines_know_the_caller_as_the_gateway_does(engines: ServerProcess) -> None:
    """A holder of the token may say for whom it forwards, but not which identity the session belongs to."""
    session = uuid.uuid4().hex
    claims = {"Meshgate_Identity": "kubernetes:bob", "Meshgate_Caller": "bob"}
    with in_front_of(engines) as gateway, gateway.dial(session, **claims) as connection:
        assert connection.head()[0] == 101
        event = engines.wait_logged("audit", action="session", session=session)
        forwarded = gateway.wait_logged("audit", action="forward", verb="session")
        assert KEY not in connection.command("describe")["head"]
        own = uuid.uuid4().hex
        with gateway.join(own):
            assert engines.wait_logged("audit", action="session", session=own)["caller"] == JOB_IDENTITY
    assert (event["caller"], forwarded["caller"]) == ("bob", "bob")
    other = engines.failed(session, resume=True, token=KEY, Meshgate_Identity="kubernetes:bob")
    assert other.status == 403


def test_a_caller_without_the_token_does_not_get_to_the_engines(engines: ServerProcess) -> None:
    with in_front_of(engines) as gateway:
        assert gateway.ask("/v1/job", token=KEY).status == 401
        refused = gateway.wait_logged("audit", action="forward", outcome="refused")
    assert (refused["caller"], refused["verb"]) == (None, "describe job")


def test_responses_are_proven_by_what_the_client_presented(engines: ServerProcess) -> None:
    """Those of the gateway itself and those of the engines, under one name."""
    names = set()
    for token in (TOKEN, "guessed"):
        nonce = new_nonce()
        with in_front_of(engines) as gateway:
            response = gateway.ask("/v1/no-such-path", token=token, Meshgate_Nonce=nonce)
        prover = Prover.of_request(nonce, token)
        assert prover is not None
        body = json.dumps(response.body).encode() + b"\n"
        names.add(prover.prover_of(response.headers[PROOF_HEADER], response.status, body))
        assert response.status in (401, 404)
    assert names == {gateway_name(KEY)}


def test_a_gateway_is_ready_once_it_has_found_the_engines_and_says_what_keeps_it_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[forwarding.Address] = []

    async def find() -> forwarding.Address:
        if not found:
            raise EnginesUnavailable("the pod is not ready")
        return found[0]

    async def test() -> None:
        forwarder = Forwarder(TokenAuthenticator(SecretStr(TOKEN)), SecretStr(KEY), find, {})
        one, other = socket.socketpair()

        async def ask(path: str) -> tuple[HTTPStatus, str]:
            response = await forwarder.respond(parsed(server_process.request(path, token=TOKEN)), one)
            assert response is not None
            return response.status, str(response.body.get("error", ""))

        with one, other:
            assert await ask("/healthz") == (HTTPStatus.OK, "")
            for path in ("/readyz", "/v1/job"):
                assert await ask(path) == (HTTPStatus.SERVICE_UNAVAILABLE, "the pod is not ready")
            with closed_port() as port:
                found.append(("127.0.0.1", port))
                status, error = await ask("/v1/job")
            assert (status, f"at 127.0.0.1:{port}, cannot be reached" in error) == (
                HTTPStatus.SERVICE_UNAVAILABLE,
                True,
            )
            assert await ask("/readyz") == (HTTPStatus.OK, "")
            found.clear()
            assert await ask("/readyz") == (HTTPStatus.OK, "")
            monkeypatch.setattr(forwarding, "MAX_CONNECTIONS", 0)
            assert "which is its limit" in (await ask("/v1/job"))[1]

    asyncio.run(asyncio.wait_for(test(), DEADLINE))
