from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import re
import signal
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.http11 import Response

from meshgate.errors import (
    AuthenticationError,
    ConnectionFailedError,
    EngineDiedError,
    GatewayError,
    GatewayFault,
    GatewayLostError,
    MeshgateError,
    SessionExpiredError,
    VersionMismatchError,
)
from meshgate.proxies.client import Client
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from meshgate.session.transport import connection_thread
from meshgate.session.transport.connection_thread import Outage, cancel_all_tasks, new_event_loop
from meshgate.testing import NetworkProxy
from meshgate.testing.wire_server import ServerSession, WireServer
from meshgate_wire import PROTOCOL_VERSION
from meshgate_wire.message_codec import Encoded, load_header
from meshgate_wire.messages import Call, Initialized, Release, Stop
from tests.client.counting import one_counter
from tests.client.scripted_gateway import TOKEN, ScriptedGateway
from tests.gateway.virtual_time import run_in_virtual_time
from tests.ports import closed_port
from tests.programs import forked_child
from tests.waiting import Printed, wait_for

QUICK = ClientSettings(connect_timeout=0.3, attempt_timeout=10, lost_after=0, retry_most=0.05, close_timeout=5)


def test_the_handshake_carries_token_and_versions(gateway: ScriptedGateway, client: Client) -> None:
    (headers,) = gateway.requests
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert headers["Meshgate-Protocol"] == str(PROTOCOL_VERSION)
    assert headers["Meshgate-Version"] == "0.1.0"
    assert "Meshgate-Resume" not in headers
    assert len(client.session_id) == 32
    assert list(gateway.sessions) == [client.session_id]


def test_a_wrong_token_names_the_variable_to_set(gateway: ScriptedGateway) -> None:
    with pytest.raises(AuthenticationError, match="MESHGATE_TOKEN"):
        Client.connect(UrlDialer(gateway.url, "wrong"), settings=QUICK)


@pytest.mark.parametrize(
    ("status", "body", "expected", "message"),
    [
        (426, {"error": "protocol 1 here, 2 there: upgrade the client"}, VersionMismatchError, "upgrade the client"),
        (404, {"error": "no such path"}, ConnectionFailedError, "HTTP 404: no such path"),
        (400, {"error": "no Upgrade header"}, ConnectionFailedError, "HTTP 400: no Upgrade header"),
        (101, {}, ConnectionFailedError, "responded with HTTP 101 and is not a meshgate gateway"),
        (404, {}, ConnectionFailedError, "responded with HTTP 404 and is not a meshgate gateway"),
        (403, {"message": "Forbidden"}, ConnectionFailedError, "responded with HTTP 403 and is not a meshgate gateway"),
        (403, {"message": "no", "error": "RBAC"}, ConnectionFailedError, r"HTTP 403 \(RBAC\) and is not a meshgate g"),
        (503, {"error": "draining"}, ConnectionFailedError, "within 0.3 s: HTTP 503"),
        (410, {"error": "gone", "reason": "killed by signal 9", "output": "Bus error"}, EngineDiedError, "Bus error"),
    ],
)
def test_each_refusal_raises_its_error(
    gateway: ScriptedGateway, status: int, body: dict[str, Any], expected: type[Exception], message: str
) -> None:
    gateway.refuse = lambda request: None if status == 101 else (status, body)
    gateway.proves = lambda response: "error" in body and "message" not in body
    with pytest.raises(expected, match=message):
        Client.connect(UrlDialer(gateway.url, TOKEN), settings=QUICK)


def test_an_unreachable_gateway_raises_after_the_timeout() -> None:
    message = r"could not connect to the gateway at ws://127.0.0.1:\d+ within 0.3 s"
    with closed_port() as port, pytest.raises(ConnectionFailedError, match=message):
        Client.connect(UrlDialer(f"ws://127.0.0.1:{port}", TOKEN), settings=QUICK)


def test_a_gateway_that_never_answers_raises_after_the_timeout() -> None:
    settings = QUICK.model_copy(update={"attempt_timeout": 0.2})
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConnectionFailedError, match=r"no answer within 0\.[24] s"),
    ):
        Client.connect(UrlDialer(f"ws://127.0.0.1:{listener.getsockname()[1]}", TOKEN), settings=settings)


def test_a_name_that_does_not_resolve_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(UrlDialer, "dial", unknown)
    with pytest.raises(ConnectionFailedError, match=r"cannot connect to the gateway at wss://no-such-host\.invalid"):
        Client.connect(UrlDialer("wss://no-such-host.invalid", TOKEN), settings=ClientSettings())


def test_connecting_waits_for_a_starting_gateway(gateway: ScriptedGateway) -> None:
    responses = iter([(503, {"error": "starting"})] * 3)
    gateway.refuse = lambda request: next(responses, None)
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=ClientSettings(retry_most=0.01)):
        assert len(gateway.requests) == 4


def test_a_failed_connection_leaves_no_thread(gateway: ScriptedGateway) -> None:
    before = threading.enumerate()
    with pytest.raises(AuthenticationError):
        Client.connect(UrlDialer(gateway.url, "wrong"), settings=QUICK)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_the_session_resumes_after_a_cut(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    for i in range(10):
        gateway.cut()
        assert one.add.call_one(i).get(timeout=30) == i
    assert all(headers["Meshgate-Resume"] == "1" for headers in gateway.requests[1:])
    assert client.statistics().connections == 11


def test_calls_made_during_an_outage_complete_after_it(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    with (
        NetworkProxy("127.0.0.1", gateway.port) as proxy,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{proxy.port}", TOKEN), settings=settings) as client,
    ):
        one = one_counter(client)
        one.add.call_one(0).get(timeout=20)
        proxy.refuse()
        futures = [one.add.call_one(i) for i in range(100)]
        with pytest.raises(TimeoutError):
            futures[0].get(timeout=0.05)
        proxy.accept()
        assert [future.get(timeout=30) for future in futures] == list(range(100))


def test_a_path_slower_than_an_attempt_may_take_reconnects(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    with (
        NetworkProxy("127.0.0.1", gateway.port) as proxy,
        Client.connect(
            UrlDialer(f"ws://127.0.0.1:{proxy.port}", TOKEN), settings=settings.model_copy(update={"lease": 60.0})
        ) as client,
    ):
        one = one_counter(client)
        one.add.call_one(0).get(timeout=20)
        reconnector = client._connection._reconnector
        impatient = settings.model_copy(update={"attempt_timeout": 0.05, "lease": 60.0})
        reconnector._settings, reconnector.attempt_timeout = impatient, 0.05
        proxy.delay = 0.1
        proxy.cut()
        assert one.add.call_one(1).get(timeout=30) == 1


@pytest.mark.parametrize("seed", range(5))
def test_cuts_at_any_byte_lose_and_repeat_nothing(
    gateway: ScriptedGateway, settings: ClientSettings, seed: int
) -> None:
    chance = random.Random(seed)
    gateway.functions["echo"] = lambda rank, value: value
    with (
        NetworkProxy("127.0.0.1", gateway.port) as proxy,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{proxy.port}", TOKEN), settings=settings) as client,
    ):
        one = one_counter(client)
        futures = []
        for i in range(200):
            if i % 10 == 0:
                proxy.cut_after(chance.randrange(1, 30_000), chance.choice(["up", "down"]))
            futures.append((i, one.echo.call_one([i, b"x" * chance.randrange(8_000)])))
        for i, future in futures:
            assert future.get(timeout=60)[0] == i
        assert [header.call for header in gateway.got(Call)] == sorted(header.call for header in gateway.got(Call))
        assert len(gateway.got(Call)) == 200


def test_a_network_that_freezes_and_thaws_loses_nothing(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    with (
        NetworkProxy("127.0.0.1", gateway.port) as proxy,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{proxy.port}", TOKEN), settings=settings) as client,
    ):
        one = one_counter(client)
        one.add.call_one(0).get(timeout=20)
        proxy.freeze()
        future = one.add.call_one(1)
        with pytest.raises(TimeoutError):
            future.get(timeout=0.05)
        proxy.thaw()
        assert future.get(timeout=30) == 1
        assert client.statistics().connections == 1


def test_a_short_cut_is_not_logged(gateway: ScriptedGateway, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = one_counter(client)
    gateway.cut()
    assert one.add.call_one(1).get(timeout=30) == 1
    assert [record for record in caplog.records if record.name.startswith("meshgate")] == []


def test_an_outage_is_shown_and_logged_and_so_is_its_end_before_any_result(
    gateway: ScriptedGateway,
    settings: ClientSettings,
    printed: Printed,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "meshgate")
    patient = settings.model_copy(update={"quiet": 60.0, "retry_most": 0.01})
    refusing = threading.Event()
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=patient) as client:
        one = one_counter(client)
        one.add.call_one(0).get(timeout=20)
        assert client._connection.describe_outage() == ""
        client._connection._outage._quiet = 0.01  # from now on: the first connection may take long
        gateway.refuse = lambda request: refusing.set() or (403, {"message": "default backend"})  # type: ignore[func-returns-value]
        gateway.proves = lambda response: response.status_code == 101
        gateway.cut()
        refusing.wait(20)
        future = one.add.call_one(1)
        wait_for(lambda: "HTTP 403" in client._connection.describe_outage(), "the reason")
        said = r"no connection to the gateway at ws://.* for \d+ s, since \d\d:\d\d:\d\d: HTTP 403 from another server"
        waits = "counters.add was called .* and waits"
        with pytest.raises(TimeoutError, match=rf"no result within 0.01 s; {said}.*; {waits}; the operation continues"):
            future.get(timeout=0.01)
        wait_for(lambda: "calls wait, and nothing is lost\n" in printed.err, "the line")
        gateway.refuse = lambda request: None
        assert future.get(timeout=30) == 1
        assert "again after" in caplog.records[-1].getMessage()
        wait_for(lambda: "nothing was lost\n" in printed.err, "the line of the end")
    lines = printed.err.splitlines()
    assert len(lines) == 2  # a file keeps every line, so the first is not updated
    assert re.fullmatch(r"\[meshgate\] no connection to the gateway at .*; calls wait, and nothing is lost", lines[0])
    assert re.fullmatch(r"\[meshgate\] connected to the gateway at .* again after \d+ s; nothing was lost", lines[1])


def test_connections_that_are_cut_before_anything_passes_are_an_outage(
    gateway: ScriptedGateway, settings: ClientSettings, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.functions["echo"] = lambda rank, value: len(value)
    receive, limit = ServerSession.data_received, 65_536

    def refuse_large(session: ServerSession, link: Any, data: bytes) -> None:
        if len(data) > limit:
            link.transport.abort()
        else:
            receive(session, link, data)

    monkeypatch.setattr(ServerSession, "data_received", refuse_large)
    patient = settings.model_copy(update={"retry_most": 0.01})
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=patient) as client:
        one = one_counter(client)
        assert one.echo.call_one(b"small").get(timeout=20) == 5
        client._connection._outage._quiet = 0.01
        future = one.echo.call_one(b"x" * 1_000_000)
        wait_for(lambda: "were cut" in client._connection.describe_outage(), "the cuts")
        cut = r"since \d\d:\d\d:\d\d: the last \d+ connections were cut at once; .*; counters.echo was called"
        with pytest.raises(TimeoutError, match=rf"nothing has passed to or from the gateway at .* for \d+ s, {cut}"):
            future.get(timeout=0.01)
        wait_for(lambda: "calls wait, and nothing is lost\n" in printed.err, "the line")
        limit = 1 << 30
        assert future.get(timeout=30) == 1_000_000
        wait_for(lambda: "nothing was lost\n" in printed.err, "the line of the end")
        assert client._connection.describe_outage() == ""


@pytest.mark.parametrize("status", [101, 302, 400, 401, 403, 404, 410, 426])
@pytest.mark.parametrize("body", [{"message": "default backend"}, {"error": "gone", "kind": "expired", "reason": "?"}])
def test_an_ingress_response_ends_no_session(
    gateway: ScriptedGateway, settings: ClientSettings, status: int, body: dict[str, str]
) -> None:
    patient = settings.model_copy(update={"retry_most": 0.01})
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=patient) as client:
        one = one_counter(client)
        one.add.call_one(0).get(timeout=20)
        responses = iter([None if status == 101 else (status, body)] * 5)
        gateway.refuse = lambda request: next(responses, None)
        genuine = iter([False] * 5)
        gateway.proves = lambda response: next(genuine, True)
        gateway.cut()
        assert one.add.call_one(1).get(timeout=30) == 1
        assert client.statistics().connections == 2


def test_a_redirect_is_not_followed(gateway: ScriptedGateway) -> None:
    def redirect(response: Response) -> bool:
        response.headers["Location"] = f"{other.url}/v1/sessions/{'0' * 32}"
        return False

    gateway.refuse = lambda request: (302, {})
    gateway.proves = redirect
    with WireServer() as other:
        with pytest.raises(ConnectionFailedError, match="responded with HTTP 302 and is not a meshgate gateway"):
            Client.connect(UrlDialer(gateway.url, TOKEN), settings=QUICK)
        assert other.requests == []


def pending_call(gateway: ScriptedGateway, client: Client) -> Any:
    """The future of a call that the gateway does not reply to."""
    gateway.on[Call] = lambda *_: None
    one = one_counter(client)
    one.initialized.get(timeout=20)
    return one.add.call_one(1)


def assert_session_ends(
    gateway: ScriptedGateway, client: Client, expected: type[MeshgateError], message: str, event: Callable[[], object]
) -> None:
    """Asserts that ``event`` ends the session with this error, for pending calls and for later ones."""
    future = pending_call(gateway, client)
    event()
    with pytest.raises(expected, match=message):
        future.get(timeout=30)
    with pytest.raises(expected, match=message):
        client.attach_hosts("workers", 2)
    assert client.closed


def test_a_dead_engine_ends_the_session_with_its_last_output(gateway: ScriptedGateway, client: Client) -> None:
    def die() -> None:
        body = {"error": "gone", "reason": "killed by signal 11", "output": "Segmentation fault"}
        gateway.refuse = lambda request: (410, body)
        gateway.cut()

    assert_session_ends(gateway, client, EngineDiedError, "killed by signal 11(.|\n)*Segmentation fault", die)


def test_a_gateway_whose_process_exited_is_lost(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    alive = True
    dialer = UrlDialer(gateway.url, TOKEN, alive=lambda: alive)

    def die() -> None:
        nonlocal alive
        alive = False
        gateway.refuse = lambda request: (503, {})
        gateway.cut()

    with Client.connect(dialer, settings=settings) as client:
        assert_session_ends(gateway, client, GatewayLostError, "is gone: its process has exited", die)


def test_a_session_unknown_to_the_gateway_is_lost(gateway: ScriptedGateway, client: Client) -> None:
    def forget() -> None:
        gateway.do(gateway.sessions.clear)
        gateway.cut_links()

    assert_session_ends(gateway, client, GatewayLostError, "has lost this session", forget)


def test_an_outage_longer_than_the_lease_ends_the_session(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    short = settings.model_copy(update={"lease": 0.2})

    def leave() -> None:
        gateway.refuse = lambda request: (503, {"error": "away"})
        gateway.cut()

    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=short) as client:
        reason = "longer than the session's lease of 0.2 s: HTTP 503"
        assert_session_ends(gateway, client, SessionExpiredError, reason, leave)


def test_a_protocol_violation_ends_the_session(gateway: ScriptedGateway, client: Client) -> None:
    def send_invalid_frame() -> None:
        link = gateway.session().link
        assert link is not None
        # A frame of a type that no version knows, numbered as the next one.
        counts = gateway.session().wire.statistics()
        acknowledgement, number = counts.frames_received, counts.frames_sent + 1
        bad = struct.pack("!BQQBqI", 2, acknowledgement, number, 64, 0, 0)
        gateway.do(lambda: link.write([bad]))

    assert_session_ends(gateway, client, GatewayFault, "violated the protocol", send_invalid_frame)


@contextmanager
def behind_a_frozen_proxy(gateway: ScriptedGateway, settings: ClientSettings) -> Iterator[tuple[NetworkProxy, Any]]:
    """A frozen proxy, and an actor behind it. The client's send queue is limited to 1 MiB."""
    gateway.functions["echo"] = lambda rank, value: len(value)
    small = settings.model_copy(update={"queue_limit": 1 << 20})
    with (
        NetworkProxy("127.0.0.1", gateway.port) as proxy,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{proxy.port}", TOKEN), settings=small) as client,
    ):
        one = one_counter(client)
        one.initialized.get(timeout=20)
        proxy.freeze()
        yield proxy, one
        client.validate_state()


def test_a_call_blocks_while_the_send_queue_is_over_its_limit(
    gateway: ScriptedGateway, settings: ClientSettings
) -> None:
    with behind_a_frozen_proxy(gateway, settings) as (proxy, one):
        sent: list[Any] = []
        finished = threading.Event()

        def send_100_calls() -> None:
            sent.extend(one.echo.call_one(b"x" * 1_000_000) for _ in range(100))
            finished.set()

        thread = threading.Thread(target=send_100_calls)
        thread.start()
        assert not finished.wait(0.3)
        proxy.thaw()
        assert finished.wait(60)
        thread.join()
        assert [future.get(timeout=60) for future in sent] == [1_000_000] * 100


def test_a_small_call_does_not_wait_for_a_large_one(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    with behind_a_frozen_proxy(gateway, settings) as (proxy, one):
        large = one.echo.call_one(b"x" * 100_000_000)
        quick = [one.echo.call_one(b"x") for _ in range(3)]  # does not block
        proxy.thaw()
        assert [future.get(timeout=60) for future in quick] == [1, 1, 1]
        assert large.get(timeout=60) == 100_000_000


def test_a_blocked_call_raises_when_the_session_ends(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    small = settings.model_copy(update={"queue_limit": 1 << 20})
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=small)
    one = one_counter(client)
    one.initialized.get(timeout=20)
    gateway.refuse = lambda request: (503, {})
    gateway.cut()
    errors: list[MeshgateError] = []

    def send_100_calls() -> None:
        try:
            for _ in range(100):
                one.echo.call_one(b"x" * 1_000_000)
        except MeshgateError as error:
            errors.append(error)

    thread = threading.Thread(target=send_100_calls)
    thread.start()
    client.abandon()
    thread.join(30)
    assert [type(error) for error in errors] == [GatewayError]


def errors_in_child(*calls: Callable[[], object]) -> list[str]:
    """Forks, makes ``calls`` in the child, and returns the errors that they raise there."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(30)  # ends a child that blocks
            errors = []
            for call in calls:
                try:
                    call()
                except GatewayError as error:
                    errors.append(str(error))
            sender.send(errors)
        finally:
            os._exit(0)
    sender.close()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the child was killed because it blocked"
    errors: list[str] = receiver.recv()
    receiver.close()
    return errors


def test_calls_raise_in_a_forked_child(gateway: ScriptedGateway, client: Client) -> None:
    future = pending_call(gateway, client)
    one = one_counter(client)
    errors = errors_in_child(lambda: future.get(timeout=20), lambda: one.add.call(1))
    assert ["forked" in error for error in errors] == [True, True]
    one.initialized.get(timeout=20)
    assert gateway.got(Initialized) != []


@pytest.mark.parametrize("create_loop", [new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_a_forked_child_does_not_keep_the_connection_open(
    gateway: ScriptedGateway,
    settings: ClientSettings,
    monkeypatch: pytest.MonkeyPatch,
    create_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    monkeypatch.setattr(connection_thread, "new_event_loop", create_loop)
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        one = one_counter(client)
        one.add.call_one(0).get(timeout=20)
        with forked_child():
            assert one.add.call_one(1).get(timeout=20) == 1
            assert client.statistics().connections == 1  # the parent has not noticed
            connection = client._connection._connection
            assert connection is not None
            gateway.refuse = lambda request: (503, {})
            client._connection.call_soon(connection.abort)
            wait_for(lambda: gateway.session().link is None, "the end of the connection")
            gateway.refuse = lambda request: None
            assert one.add.call_one(2).get(timeout=20) == 2


def test_no_call_blocks_in_a_child_forked_while_the_send_queue_is_over_its_limit(
    gateway: ScriptedGateway, settings: ClientSettings
) -> None:
    with behind_a_frozen_proxy(gateway, settings) as (proxy, one):
        future = one.echo.call_one(b"x" * 10_000_000)
        errors = errors_in_child(lambda: one.echo.call_one(b"x" * 1_000_000), lambda: one.echo.call_one(b"x"))
        assert ["forked" in error for error in errors] == [True, True]
        proxy.thaw()
        assert future.get(timeout=60) == 10_000_000


class InterruptedLoop:
    """An event loop whose next wake-up by this thread is interrupted by a Ctrl-C."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread: threading.Thread | None = threading.current_thread()

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object:
        if threading.current_thread() is self._thread:
            self._thread = None
            raise KeyboardInterrupt
        return self._loop.call_soon_threadsafe(callback, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def test_a_ctrl_c_while_the_loop_is_woken_leaves_no_message_behind(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = one_counter(client)
    one.add.call_one(0).get(timeout=20)
    client.validate_state()  # returns after the wake-ups under way
    connection = client._connection
    with monkeypatch.context() as patch:
        patch.setattr(connection, "_loop", InterruptedLoop(connection._loop))
        with pytest.raises(KeyboardInterrupt):
            one.add.call_one(1)
    assert one.add.call_one(2).get(timeout=20) == 2
    assert len(gateway.got(Call)) == 3


class EndingLoop(InterruptedLoop):
    """An event loop that is about to close: it accepts callbacks and does not run them."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None: ...


def test_validation_does_not_wait_for_a_loop_that_is_about_to_close(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client._connection
    loop = connection._loop
    monkeypatch.setattr(connection, "_loop", EndingLoop(loop))
    validating = threading.Thread(target=connection.validate_state)
    validating.start()
    loop.call_soon_threadsafe(connection._cancel)
    validating.join(60)
    assert not validating.is_alive()
    client.abandon()


def test_validation_finds_a_message_that_nothing_will_send(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = one_counter(client)
    one.initialized.get(timeout=20)
    client.validate_state()  # returns after the wake-ups under way
    with monkeypatch.context() as patch:
        patch.setattr(connection_thread, "_WAKE_UP_WITHIN", 0.1)
        patch.setattr(client._connection, "_wake", lambda: None)
        one.add.broadcast(1)
        with pytest.raises(AssertionError, match="the consumer does not know"):
            client.validate_state()
    client._connection._wake()


def test_validation_finds_a_release_that_nothing_will_send(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = client._connection
    client.validate_state()  # returns after the wake-ups under way
    with monkeypatch.context() as patch:
        patch.setattr(connection_thread, "_WAKE_UP_WITHIN", 0.1)
        patch.setattr(connection, "_wake", lambda: None)
        connection.release(4711)
        with pytest.raises(AssertionError, match="nothing will send"):
            client.validate_state()
    connection._wake()


def test_validation_waits_for_a_thread_that_has_released_an_object_and_is_about_to_wake_the_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client._connection
    client.validate_state()  # returns after the wake-ups under way
    wake, validate = connection._wake, connection._validate_wake_up
    found: list[AssertionError] = []

    def validate_and_wake() -> None:
        try:
            validate()
        except AssertionError as error:
            found.append(error)
            wake()
            raise

    monkeypatch.setattr(connection, "_wake", lambda: None)
    monkeypatch.setattr(connection, "_validate_wake_up", validate_and_wake)
    connection.release(4711)
    client.validate_state()
    assert len(found) == 1
    monkeypatch.undo()


def test_a_release_is_sent_after_the_last_message_about_the_object(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may post its last message and release the object while the connection takes other messages."""
    procs = client.attach_hosts("workers", 2).spawn_procs()
    procs.initialized.get(timeout=20)
    session = client._connection._session
    send = session.send
    meanwhile: list[Callable[[], object]] = [procs.stop, lambda: client.release(procs._object)]

    def interrupted(message: Any, *, stream: int) -> None:
        send(message, stream=stream)
        if isinstance(message, Encoded) and isinstance(load_header(message.pieces[1]), Initialized):
            client._connection.release(4711)  # another object, released earlier
            while meanwhile:
                meanwhile.pop(0)()

    monkeypatch.setattr(session, "send", interrupted)
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    wait_for(lambda: gateway.got(Stop) and len(gateway.got(Release)) == 2, "the releases")
    client.close()
    sent = [header for header in gateway.received if isinstance(header, (Stop, Release))]
    assert [type(header) for header in sent if header != Release(objects=(4711,))] == [Stop, Release]


def test_the_other_tasks_of_the_loop_are_cancelled_and_awaited() -> None:
    ended: list[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waiter")

    async def main() -> None:
        task = asyncio.ensure_future(wait_for_ever())
        await asyncio.sleep(0)
        await cancel_all_tasks()
        assert task.cancelled()

    loop = new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert ended == ["waiter"]


Shown = list[tuple[str, bool]]


def shown_during(scenario: Callable[[Outage], Coroutine[Any, Any, None]], gone: str | None = None) -> Shown:
    """What is shown, without the time of day, and whether it is final."""
    shown: Shown = []

    def show(text: str, final: bool) -> None:
        shown.append((re.sub(r", since \d\d:\d\d:\d\d", "", text), final))

    run_in_virtual_time(scenario(Outage("the gateway", 5.0, lambda: "refused", lambda: gone, show)))
    return shown


def test_a_short_outage_is_not_shown() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(4.9)
        assert "no connection to the gateway for 5 s" in outage.describe()
        outage.end()
        assert outage.describe() == ""
        await asyncio.sleep(10)

    assert shown_during(scenario) == []


def test_an_outage_is_updated_in_place_logged_once_and_its_end_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "meshgate")

    async def scenario(outage: Outage) -> None:
        outage.begin()
        outage.end()  # the first connection
        outage.begin()
        await asyncio.sleep(4)
        outage.begin()  # a connection that was cut before the session was established
        await asyncio.sleep(2.5)
        outage.end()

    waiting = "no connection to the gateway for {} s: refused; calls wait, and nothing is lost"
    end = "connected to the gateway again after 6 s; nothing was lost"
    assert shown_during(scenario) == [(waiting.format(5), False), (waiting.format(6), False), (end, True)]
    lines = [re.sub(r", since \d\d:\d\d:\d\d", "", record.getMessage()) for record in caplog.records]
    assert lines == [waiting.format(5), end]


def test_connections_on_which_nothing_passes_are_no_end_of_an_outage() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        outage.end()  # the first connection
        outage.begin()
        for _ in range(4):
            await asyncio.sleep(1.6)
            outage.connected()
            outage.begin()
        outage.connected()
        assert "the last 4 connections" in outage.describe()
        outage.end()
        assert outage.describe() == ""

    cut = "nothing has passed to or from the gateway for {} s: the last 3 connections were cut at once; refused"
    waiting = f"{cut}; calls wait, and nothing is lost"
    end = "connected to the gateway again after 6 s; nothing was lost"
    assert shown_during(scenario) == [(waiting.format(5), False), (waiting.format(6), False), (end, True)]


def test_a_connection_on_which_nothing_has_passed_yet_is_no_outage() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(4.9)
        outage.connected()
        assert outage.describe() == ""
        await asyncio.sleep(0.9)
        outage.begin()  # one such cut may be chance
        await asyncio.sleep(0.1)
        outage.connected()
        outage.close()

    waiting = "no connection to the gateway for 6 s: refused; calls wait, and nothing is lost"
    assert shown_during(scenario) == [(waiting, False), ("connected to the gateway after 6 s", True)]


def test_a_first_connection_that_takes_long_is_shown() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(5.5)
        outage.end()

    waiting = "no connection to the gateway for 5 s: refused; calls wait for the first connection"
    assert shown_during(scenario) == [(waiting, False), ("connected to the gateway after 6 s", True)]


def test_the_line_of_a_session_that_ends_without_a_connection_is_final() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(5.5)
        outage.close()
        await asyncio.sleep(5)

    assert [final for _, final in shown_during(scenario)] == [False, True]


def test_the_line_about_a_gateway_that_is_gone_does_not_say_that_calls_wait() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(5.5)
        outage.close()

    (first, _), _ = shown_during(scenario, gone="Slurm ended job 7: CANCELLED")
    assert first == "no connection to the gateway for 5 s: refused; it is gone: Slurm ended job 7: CANCELLED"


@pytest.mark.parametrize("before", [True, False])
def test_a_session_that_is_being_closed_shows_no_outage(before: bool) -> None:
    async def scenario(outage: Outage) -> None:
        if before:
            outage.mute()
        outage.begin()
        outage.mute()
        await asyncio.sleep(60)
        outage.close()

    assert shown_during(scenario) == []


def test_an_outage_that_was_shown_before_the_session_is_closed_has_a_last_line() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(5.5)
        outage.mute()
        await asyncio.sleep(60)
        outage.close()

    assert [final for _, final in shown_during(scenario)] == [False, True]
