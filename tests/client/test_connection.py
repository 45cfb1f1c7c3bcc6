from __future__ import annotations

import logging
import multiprocessing
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshgate.client import Client
from meshgate.dialing import UrlDialer
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
from meshgate.settings import ClientSettings
from meshgate_wire import Header
from meshgate_wire.messages import Call, Initialized, Release, Stop
from tests.client.counting import Counter
from tests.client.fake_gateway import TOKEN, FakeGateway
from tests.relay import Relay

QUICK = ClientSettings(connect_timeout=0.3, attempt_timeout=10, lost_after=0, retry_most=0.05, close_timeout=5)


def counter(client: Client) -> Any:
    return client.attach_hosts("workers", 2).spawn_procs().spawn("counters", Counter).slice(hosts=0)


# --- connecting -------------------------------------------------------------------------------------------


def test_the_handshake_carries_token_and_versions(gateway: FakeGateway, client: Client) -> None:
    (headers,) = gateway.requests
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert headers["Meshgate-Protocol"] == "1"
    assert headers["Meshgate-Version"] == "0.1.0"
    assert "Meshgate-Resume" not in headers
    assert len(client.session_id) == 32
    assert list(gateway.sessions) == [client.session_id]


def test_a_wrong_token_names_the_variable_to_set(gateway: FakeGateway) -> None:
    with pytest.raises(AuthenticationError, match="MESHGATE_TOKEN"):
        Client.connect(UrlDialer(gateway.url, "wrong"), settings=QUICK)


@pytest.mark.parametrize(
    ("status", "body", "expected", "said"),
    [
        (426, {"error": "protocol 1 here, 2 there: upgrade the client"}, VersionMismatchError, "upgrade the client"),
        (404, {"error": "no such path"}, ConnectionFailedError, "HTTP 404: no such path"),
        (400, {"error": "no Upgrade header"}, ConnectionFailedError, "HTTP 400: no Upgrade header"),
        (404, {}, ConnectionFailedError, "with HTTP 404, is not a meshgate gateway"),
        (403, {"message": "Forbidden"}, ConnectionFailedError, "with HTTP 403, is not a meshgate gateway"),
        (503, {"error": "draining"}, ConnectionFailedError, "within 0.3 s: HTTP 503"),
        (410, {"error": "gone", "reason": "killed by signal 9", "output": "Bus error"}, EngineDiedError, "Bus error"),
    ],
)
def test_refusals_become_the_right_error(
    gateway: FakeGateway, status: int, body: dict[str, Any], expected: type[Exception], said: str
) -> None:
    gateway.refuse = lambda request: (status, body)
    with pytest.raises(expected, match=said):
        Client.connect(UrlDialer(gateway.url, TOKEN), settings=QUICK)


def test_a_gateway_that_is_not_there_is_told_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionFailedError, match=r"gateway at ws://127.0.0.1:\d+ could not be reached within 0.3 s"):
        Client.connect(UrlDialer(f"ws://127.0.0.1:{port}", TOKEN), settings=QUICK)


def test_a_gateway_that_never_answers_is_told_after_the_timeout() -> None:
    settings = QUICK.model_copy(update={"attempt_timeout": 0.2})
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConnectionFailedError, match=r"no answer within 0\.2 s"),
    ):
        Client.connect(UrlDialer(f"ws://127.0.0.1:{listener.getsockname()[1]}", TOKEN), settings=settings)


def test_a_name_that_does_not_resolve_is_told_at_once() -> None:
    with pytest.raises(ConnectionFailedError, match="cannot be reached"):
        Client.connect(UrlDialer("ws://no-such-host.invalid", TOKEN), settings=ClientSettings())


def test_connecting_waits_for_a_gateway_that_comes_up(gateway: FakeGateway) -> None:
    answers = iter([(503, {"error": "starting"})] * 3)
    gateway.refuse = lambda request: next(answers, None)
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=ClientSettings(retry_most=0.01)):
        assert len(gateway.requests) == 4


def test_a_failed_connection_leaves_no_thread(gateway: FakeGateway) -> None:
    before = threading.enumerate()
    with pytest.raises(AuthenticationError):
        Client.connect(UrlDialer(gateway.url, "wrong"), settings=QUICK)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


# --- cuts -------------------------------------------------------------------------------------------------


def test_a_cut_is_mended_and_the_session_resumed(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = counter(client)
    for i in range(10):
        gateway.cut()
        assert one.add.call_one(i).get(timeout=30) == i
    assert all(headers["Meshgate-Resume"] == "1" for headers in gateway.requests[1:])
    assert client.statistics().connections == 11


def test_calls_made_while_cut_off_are_answered_after_the_redial(gateway: FakeGateway, settings: ClientSettings) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    with (
        Relay("127.0.0.1", gateway.port) as relay,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{relay.port}", TOKEN), settings=settings) as client,
    ):
        one = counter(client)
        one.add.call_one(0).get(timeout=20)
        relay.refuse()
        futures = [one.add.call_one(i) for i in range(100)]
        with pytest.raises(TimeoutError):
            futures[0].get(timeout=0.05)
        relay.accept()
        assert [future.get(timeout=30) for future in futures] == list(range(100))


@pytest.mark.parametrize("seed", range(5))
def test_cuts_at_any_byte_lose_nothing_and_repeat_nothing(
    gateway: FakeGateway, settings: ClientSettings, seed: int
) -> None:
    chance = random.Random(seed)
    gateway.functions["echo"] = lambda rank, value: value
    with (
        Relay("127.0.0.1", gateway.port) as relay,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{relay.port}", TOKEN), settings=settings) as client,
    ):
        one = counter(client)
        futures = []
        for i in range(200):
            if i % 10 == 0:
                relay.cut_after(chance.randrange(1, 30_000), chance.choice(["up", "down"]))
            futures.append((i, one.echo.call_one([i, b"x" * chance.randrange(8_000)])))
        for i, future in futures:
            assert future.get(timeout=60)[0] == i
        assert [header.call for header in gateway.got(Call)] == sorted(header.call for header in gateway.got(Call))
        assert len(gateway.got(Call)) == 200


def test_a_frozen_network_that_thaws_loses_nothing(gateway: FakeGateway, settings: ClientSettings) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    with (
        Relay("127.0.0.1", gateway.port) as relay,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{relay.port}", TOKEN), settings=settings) as client,
    ):
        one = counter(client)
        one.add.call_one(0).get(timeout=20)
        relay.freeze()
        future = one.add.call_one(1)
        with pytest.raises(TimeoutError):
            future.get(timeout=0.05)
        relay.thaw()
        assert future.get(timeout=30) == 1
        assert client.statistics().connections == 1


def test_a_cut_is_not_worth_a_line_in_the_log(
    gateway: FakeGateway, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gateway.functions["add"] = lambda rank, amount: amount
    one = counter(client)
    gateway.cut()
    assert one.add.call_one(1).get(timeout=30) == 1
    assert [record for record in caplog.records if record.name.startswith("meshgate")] == []


def test_a_long_absence_is_one_line_and_one_more_when_it_is_over(
    gateway: FakeGateway, settings: ClientSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "meshgate")
    gateway.functions["add"] = lambda rank, amount: amount
    impatient = settings.model_copy(update={"quiet": 0.0, "retry_most": 0.01})
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=impatient) as client:
        one = counter(client)
        one.add.call_one(0).get(timeout=20)
        answers = iter([(503, {"error": "restarting"})] * 5)
        gateway.refuse = lambda request: next(answers, None)
        gateway.cut()
        assert one.add.call_one(1).get(timeout=30) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "redialling: HTTP 503" in lines[0]
    assert "nothing was lost" in lines[1]


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_what_an_ingress_says_while_it_restarts_ends_no_session(
    gateway: FakeGateway, settings: ClientSettings, status: int
) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    patient = settings.model_copy(update={"retry_most": 0.01})
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=patient) as client:
        one = counter(client)
        one.add.call_one(0).get(timeout=20)
        answers = iter([(status, {"message": "default backend"})] * 5)
        gateway.refuse = lambda request: next(answers, None)
        gateway.cut()
        assert one.add.call_one(1).get(timeout=30) == 1


# --- ends -------------------------------------------------------------------------------------------------


def waiting_call(gateway: FakeGateway, client: Client) -> Any:
    """A future that the gateway will not answer."""
    gateway.on[Call] = lambda *_: None
    one = counter(client)
    one.initialized.get(timeout=20)
    return one.add.call_one(1)


def ends(
    gateway: FakeGateway, client: Client, expected: type[MeshgateError], said: str, event: Callable[[], object]
) -> None:
    """Checks that ``event`` ends the session with this error, for who waits and for who asks later."""
    future = waiting_call(gateway, client)
    event()
    with pytest.raises(expected, match=said):
        future.get(timeout=30)
    with pytest.raises(expected, match=said):
        client.attach_hosts("workers", 2)
    assert client.closed


def test_a_dead_engine_is_told_with_its_last_output(gateway: FakeGateway, client: Client) -> None:
    def die() -> None:
        said = {"error": "gone", "reason": "killed by signal 11", "output": "Segmentation fault"}
        gateway.refuse = lambda request: (410, said)
        gateway.cut()

    ends(gateway, client, EngineDiedError, "killed by signal 11(.|\n)*Segmentation fault", die)


def test_a_gateway_whose_process_is_gone_is_lost(gateway: FakeGateway, settings: ClientSettings) -> None:
    alive = True
    dialer = UrlDialer(gateway.url, TOKEN, alive=lambda: alive)

    def die() -> None:
        nonlocal alive
        alive = False
        gateway.refuse = lambda request: (503, {})
        gateway.cut()

    with Client.connect(dialer, settings=settings) as client:
        ends(gateway, client, GatewayLostError, "is gone: its process has ended", die)


def test_a_session_that_nobody_remembers_is_lost(gateway: FakeGateway, client: Client) -> None:
    def forget() -> None:
        gateway.do(gateway.sessions.clear)
        gateway.cut_links()

    ends(gateway, client, GatewayLostError, "has lost this session", forget)


def test_the_lease_bounds_an_absence(gateway: FakeGateway, settings: ClientSettings) -> None:
    short = settings.model_copy(update={"lease": 0.2})

    def go() -> None:
        gateway.refuse = lambda request: (503, {"error": "away"})
        gateway.cut()

    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=short) as client:
        ends(gateway, client, SessionExpiredError, "longer than the session's lease of 0.2 s: HTTP 503", go)


def test_a_broken_protocol_ends_the_session_not_the_program(gateway: FakeGateway, client: Client) -> None:
    def babble() -> None:
        link = gateway.session().link
        assert link is not None
        # A frame of a type that no version knows, numbered as the next one.
        counts = gateway.session().wire.statistics()
        acknowledgement, number = counts.frames_received, counts.frames_sent + 1
        bad = struct.pack("!BQQBqI", 2, acknowledgement, number, 64, 0, 0)
        gateway.do(lambda: link.write([bad]))

    ends(gateway, client, GatewayFault, "broke the protocol", babble)


def test_nonsense_on_the_websocket_costs_the_connection_only(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = counter(client)
    one.add.call_one(0).get(timeout=20)
    link = gateway.session().link
    assert link is not None
    gateway.do(lambda: link.write([b"\xff nonsense"]))
    assert one.add.call_one(1).get(timeout=30) == 1
    assert client.statistics().connections == 2


def test_a_text_message_costs_the_connection_only(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = counter(client)
    one.add.call_one(0).get(timeout=20)
    link = gateway.session().link
    assert link is not None
    gateway.run(link.send("hello"))
    assert one.add.call_one(1).get(timeout=30) == 1
    assert client.statistics().connections == 2


def test_messages_that_a_proxy_cut_up_are_put_together(gateway: FakeGateway, client: Client) -> None:
    one = counter(client)
    one.initialized.get(timeout=20)
    session = gateway.session()
    link = session.link
    assert link is not None
    gateway.on[Call] = lambda *_: None
    future = one.add.call_one(1)
    one.initialized.get(timeout=20)

    def write_in_fragments(pieces: Any) -> None:
        data = b"".join(pieces)
        link.protocol.send_binary(data[:3], fin=False)
        link.protocol.send_continuation(data[3:9], fin=False)
        link.protocol.send_continuation(data[9:], fin=True)
        link.send_data()

    link.write = write_in_fragments  # type: ignore[method-assign]
    call = gateway.got(Call)[0]
    import pickle

    from meshgate_wire.messages import Values, stream_of

    values = Values(call=call.call)
    gateway.do(lambda: session.send(values, pickle.dumps(5), stream=stream_of(call.target.object)))
    assert future.get(timeout=20) == 5
    assert client.statistics().connections == 1


# --- pressure ---------------------------------------------------------------------------------------------


@contextmanager
def behind_a_frozen_relay(gateway: FakeGateway, settings: ClientSettings) -> Iterator[tuple[Relay, Any]]:
    """A relay that passes nothing on, and an actor beyond it, of a client that queues 1 MiB at most."""
    gateway.functions["echo"] = lambda rank, value: len(value)
    small = settings.model_copy(update={"queue_limit": 1 << 20})
    with (
        Relay("127.0.0.1", gateway.port) as relay,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{relay.port}", TOKEN), settings=small) as client,
    ):
        one = counter(client)
        one.initialized.get(timeout=20)
        relay.freeze()
        yield relay, one


def test_a_call_blocks_while_too_much_waits_to_be_sent(gateway: FakeGateway, settings: ClientSettings) -> None:
    with behind_a_frozen_relay(gateway, settings) as (relay, one):
        sent: list[Any] = []
        finished = threading.Event()

        def send_much() -> None:
            sent.extend(one.echo.call_one(b"x" * 1_000_000) for _ in range(100))
            finished.set()

        thread = threading.Thread(target=send_much)
        thread.start()
        assert not finished.wait(0.3)
        relay.thaw()
        assert finished.wait(60)
        thread.join()
        assert [future.get(timeout=60) for future in sent] == [1_000_000] * 100


def test_a_small_call_is_not_blocked_by_what_waits_of_a_large_one(
    gateway: FakeGateway, settings: ClientSettings
) -> None:
    with behind_a_frozen_relay(gateway, settings) as (relay, one):
        large = one.echo.call_one(b"x" * 100_000_000)
        quick = [one.echo.call_one(b"x") for _ in range(3)]  # does not block
        relay.thaw()
        assert [future.get(timeout=60) for future in quick] == [1, 1, 1]
        assert large.get(timeout=60) == 100_000_000


def test_who_is_blocked_hears_of_the_end(gateway: FakeGateway, settings: ClientSettings) -> None:
    small = settings.model_copy(update={"queue_limit": 1 << 20})
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=small)
    one = counter(client)
    one.initialized.get(timeout=20)
    gateway.refuse = lambda request: (503, {})
    gateway.cut()
    errors: list[MeshgateError] = []

    def send_much() -> None:
        try:
            for _ in range(100):
                one.echo.call_one(b"x" * 1_000_000)
        except MeshgateError as error:
            errors.append(error)

    thread = threading.Thread(target=send_much)
    thread.start()
    client.abandon()
    thread.join(30)
    assert [type(error) for error in errors] == [GatewayError]


# --- fork -------------------------------------------------------------------------------------------------


def _in_child(one: Any, future: Any, results: Any) -> None:
    told = []
    for use in (lambda: future.get(timeout=30), lambda: one.add.call(1)):
        try:
            use()
        except GatewayError as error:
            told.append(str(error))
    results.send(told)
    results.close()


def test_a_forked_child_is_told_that_the_connection_is_not_its_own(gateway: FakeGateway, client: Client) -> None:
    future = waiting_call(gateway, client)
    one = client.attach_hosts("workers", 2).spawn("counters", Counter)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            _in_child(one, future, sender)
        finally:
            os._exit(0)
    sender.close()
    os.waitpid(pid, 0)
    told = receiver.recv()
    assert len(told) == 2
    assert all("forked" in text for text in told)
    one.initialized.get(timeout=20)
    assert gateway.got(Initialized) != []


# --- letting go -------------------------------------------------------------------------------------------


def test_what_is_let_go_amid_a_batch_of_messages_is_told_after_the_last_that_names_it(
    gateway: FakeGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may post its last message and let go while the connection takes what others have posted."""
    procs = client.attach_hosts("workers", 2).spawn_procs()
    procs.initialized.get(timeout=20)
    session = client._connection._session
    send = session.send
    meanwhile: list[Callable[[], object]] = [procs.stop, lambda: client.release(procs._object)]

    def interrupted(header: Header, buffers: Any = (), *, stream: int) -> None:
        send(header, buffers, stream=stream)
        if isinstance(header, Initialized):
            client._connection.release(4711)  # one more, let go before
            while meanwhile:
                meanwhile.pop(0)()

    monkeypatch.setattr(session, "send", interrupted)
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    client.close()
    told = [header for header in gateway.received if isinstance(header, (Stop, Release))]
    assert [type(header) for header in told if header != Release(objects=(4711,))] == [Stop, Release]
