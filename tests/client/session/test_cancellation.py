"""An interrupted wait leaves nothing behind, and the session still works."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest

from meshgate.errors import CallCancelledError
from meshgate.proxies.client import Channel, Client, ProxyFactory
from meshgate.serialization.unpickling import MeshHandle
from meshgate.session.dialing import UrlDialer
from meshgate.session.futures import FutureProxy
from meshgate.session.pending_calls import PendingStream, PendingValue
from meshgate.session.settings import ClientSettings
from meshgate.session.transport.connection_thread import ConnectionThread
from meshgate.shapes.shape import Extent
from meshgate.testing import NetworkProxy
from meshgate_wire.messages import (
    Adopt,
    Call,
    CancelCall,
    Configure,
    Detach,
    Done,
    Failed,
    Failure,
    Fetch,
    OpenChannel,
    Release,
    Stop,
    Values,
    stream_of,
)
from tests.client.counting import one_counter
from tests.client.scripted_gateway import TOKEN, ScriptedGateway
from tests.waiting import wait_for


@contextmanager
def ctrl_c_when(ready: Callable[[], bool]) -> Iterator[None]:
    """Sends this process a SIGINT once ``ready``, from another thread; and again if a finalizer swallows it."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            if ready():
                os.kill(os.getpid(), signal.SIGINT)
                stop.wait(5)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def call_forever(one: Any, sent: list[FutureProxy[int]]) -> None:
    while True:
        sent.append(one.add.call_one(len(sent)))
        if len(sent) > 2000:
            sent[-1].get(timeout=30)


def send_forever(one: Any, sent: list[FutureProxy[int]]) -> None:
    while True:
        sent.append(one.echo.call_one(b"x" * 1_000_000))


def hold_calls(gateway: ScriptedGateway) -> Callable[[], None]:
    """Makes the gateway hold calls until the returned function is called."""
    held: list[tuple[Any, Any, Any]] = []
    reply = gateway.on[Call]
    gateway.on[Call] = lambda *call: held.append(call)

    def resume() -> None:
        gateway.on[Call] = reply
        gateway.do(lambda: [reply(*call) for call in held])

    return resume


def test_ctrl_c_in_get_raises_keyboard_interrupt_and_the_call_goes_on(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    resume = hold_calls(gateway)
    future = one.add.call_one(1)
    with ctrl_c_when(lambda: bool(future._wakers)), pytest.raises(KeyboardInterrupt):
        future.get(timeout=30)
    assert future._wakers == []
    resume()
    assert future.get(timeout=30) == 1
    assert one.add.call_one(2).get(timeout=30) == 2


def test_a_call_is_cancelled_behind_its_message_and_its_failure_is_not_reported(
    gateway: ScriptedGateway, client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    one = one_counter(client)
    assert one.add.call_one(0).get(timeout=30) == 0
    hold_calls(gateway)

    def cancelled(session: Any, header: CancelCall, _: object) -> None:
        failure = Failure(kind="cancelled", message="", total=1, unanswered=1, ranks=(0,))
        session.send(Failed(call=header.cancelled, failure=failure), stream=stream_of(one._object))

    gateway.on[CancelCall] = cancelled
    future, unread = one.add.call_one(1), one.add.call_one(2)
    assert unread.cancel()
    assert future.cancel()
    with pytest.raises(CallCancelledError, match=r"^counters\.add was cancelled: 1 of 1 ranks had not answered$"):
        future.get(timeout=30)
    first, second = (header.call for header in gateway.got(Call)[-2:])
    sent = [header for header in gateway.received if isinstance(header, (Call, CancelCall))][-4:]
    assert [type(header) for header in sent] == [Call, Call, CancelCall, CancelCall]
    assert [header.cancelled for header in sent[2:]] == [second, first]
    assert isinstance(future.exception(), CancelledError)
    assert not future.cancel()
    assert not one.initialized.cancel()
    add = one.add
    add._is_users = False  # as endpoints of this package's own actors
    assert not add.call_one(3).cancel()
    del future, unread
    gc.collect()
    client.unread.close(timeout=5)
    assert "CallCancelledError" not in capfd.readouterr().err


@pytest.mark.parametrize("detached", [False, True])
def test_ctrl_c_at_a_prompt_cancels_the_call_unless_its_session_is_detached(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch, *, detached: bool
) -> None:
    one = one_counter(client)
    hold_calls(gateway)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(client, "detached", "night" if detached else "")
    future = one.add.call_one(1)
    with ctrl_c_when(lambda: bool(future._wakers)), pytest.raises(KeyboardInterrupt):
        future.get(timeout=30)
    behind = one.add.call_one(2)
    wait_for(lambda: len(gateway.got(Call)) == 2, "the call behind")
    assert not behind.done()
    interrupted = gateway.got(Call)[0].call
    assert [header.cancelled for header in gateway.got(CancelCall)] == ([] if detached else [interrupted])


@contextmanager
def small_queue(gateway: ScriptedGateway) -> Iterator[tuple[NetworkProxy, Client, Any]]:
    """A connection that can be cut, a client whose send queue is soon full, and an actor."""
    settings = ClientSettings(queue_limit=1 << 16, close_timeout=5)
    with (
        NetworkProxy("127.0.0.1", gateway.port) as proxy,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{proxy.port}", TOKEN), settings=settings) as client,
    ):
        one = one_counter(client)
        one.initialized.get(timeout=20)
        yield proxy, client, one


@contextmanager
def full_queue(proxy: NetworkProxy, client: Client) -> Iterator[None]:
    """In the block there is no connection, and no space in the queue."""
    proxy.refuse()
    wait_for(lambda: not client._connection.connected, "the cut")
    for _ in range(3000):
        client._connection.post(Configure(stream_output=True), stream=0, waits=False)
    session, gate = client._connection._session, client._connection._queue._small_gate
    limit = client.settings.queue_limit
    wait_for(lambda: session.queued_small_bytes > limit and not gate.is_open, "a full queue")
    try:
        yield
    finally:
        proxy.accept()


@pytest.mark.timeout(60)
def test_a_cancellation_without_a_connection_is_sent_once_later_however_much_waits(gateway: ScriptedGateway) -> None:
    with small_queue(gateway) as (proxy, client, one):
        hold_calls(gateway)
        call = one.add.call_one(1)
        with full_queue(proxy, client):
            assert all(call.cancel() for _ in range(2))
        wait_for(lambda: gateway.got(CancelCall), "the cancellation")
        assert [header.cancelled for header in gateway.got(CancelCall)] == [gateway.got(Call)[0].call]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "sent"),
    [
        (lambda client, hosts: hosts.shutdown().get(timeout=20), Stop),
        (lambda client, hosts: client.detach("training").get(timeout=20), Detach),
        (lambda client, hosts: Channel.open(client=client, name="losses"), OpenChannel),
    ],
    ids=["shutdown", "detach", "channel"],
)
def test_a_request_that_ctrl_c_has_interrupted_while_it_waited_for_space_can_be_made_again(
    gateway: ScriptedGateway, make: Callable[[Client, Any], object], sent: type
) -> None:
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    with small_queue(gateway) as (proxy, client, _):
        hosts = client.attach_hosts("workers", 2)
        hosts.initialized.get(timeout=20)
        waiting = client._connection._queue._small_gate._waiting
        with full_queue(proxy, client), ctrl_c_when(lambda: bool(waiting)), pytest.raises(KeyboardInterrupt):
            make(client, hosts)
        assert (client.detached, hosts._owned.remote.stopped, gateway.got(sent)) == ("", "", [])
        make(client, hosts)
        wait_for(lambda: gateway.got(sent), "the request")


@pytest.mark.timeout(60)
def test_the_use_of_a_future_does_not_wait_for_space(gateway: ScriptedGateway) -> None:
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    gateway.on[Fetch] = lambda session, header, _: session.send(Values(call=header.calls[0]), pickle.dumps(5))
    with small_queue(gateway) as (proxy, client, one):
        client.detach("training").get(timeout=20)
        call = PendingValue(one._object, "counters.add")
        client.restore_call(10**6, call)
        with full_queue(proxy, client):
            assert not call.future.done()  # asks for the result
            with pytest.raises(TimeoutError):
                call.future.get(timeout=0)
            port = ProxyFactory(client).port("some address", None, False)  # as what reads a result does
            hosts = ProxyFactory(client).hosts(MeshHandle(-1), Extent(["hosts"], [2]).region)
        assert call.future.get(timeout=20) == 5
        assert len(gateway.got(Fetch)) == 1
        wait_for(lambda: len(gateway.got(Adopt)) == 2, "what was read")
        del port, hosts


def test_a_result_whose_request_was_interrupted_is_requested_again(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    client.detach("training").get(timeout=20)
    call = PendingStream(1, "counters.add", 2)
    client.restore_call(10**6, call)
    with monkeypatch.context() as patch:
        patch.setattr(ConnectionThread, "post", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call.futures()[0].get()
    assert not any(future.done() for future in call.futures())
    client.detach("training").get(timeout=20)  # behind it
    assert gateway.got(Fetch) == [Fetch(calls=(10**6,))]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.timeout(60)
def test_what_was_released_is_sent_while_the_queue_is_full(gateway: ScriptedGateway) -> None:
    with small_queue(gateway) as (proxy, client, _):
        with full_queue(proxy, client):
            client._connection._released.append((7, (), False))  # as release() does, before the connection thread looks
            client.post_released()
        wait_for(lambda: gateway.got(Release) == [Release(objects=(7,))], "the release")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_sending_leaves_the_session_usable(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    for _ in range(5):
        sent: list[FutureProxy[int]] = []
        with ctrl_c_when(lambda sent=sent: len(sent) > 50), pytest.raises(KeyboardInterrupt):  # type: ignore[misc]
            call_forever(one, sent)
        assert one.add.call_one(7).get(timeout=30) == 7
        assert [future.get(timeout=30) for future in sent] == list(range(len(sent)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_blocked_by_back_pressure_leaves_the_session_usable(gateway: ScriptedGateway) -> None:
    gateway.functions["echo"] = lambda rank, value: len(value)
    with small_queue(gateway) as (proxy, client, one):
        proxy.freeze()
        sent: list[FutureProxy[int]] = []
        with (
            ctrl_c_when(lambda: not client._connection._queue._gate.is_open and len(sent) > 1),
            pytest.raises(KeyboardInterrupt),
        ):
            send_forever(one, sent)
        proxy.thaw()
        assert [future.get(timeout=60) for future in sent] == [1_000_000] * len(sent)
        assert one.echo.call_one(b"xyz").get(timeout=30) == 3


def test_an_interrupted_read_starts_again(gateway: ScriptedGateway, client: Client) -> None:
    future: FutureProxy[int] = FutureProxy()
    reads: list[int] = []

    def read() -> int:
        reads.append(1)
        if len(reads) == 1:
            raise KeyboardInterrupt
        return 5

    future.settle(read)
    with pytest.raises(KeyboardInterrupt):
        future.get()
    assert future.get() == 5


def test_cancelling_an_await_cancels_only_the_wait(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    resume = hold_calls(gateway)
    future = one.add.call_one(1)

    async def main() -> int:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)
        task = asyncio.ensure_future(_await(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        observed = future.as_asyncio()
        observed.cancel()
        await asyncio.sleep(0)
        assert future._wakers == []
        resume()
        return int(await future)

    assert asyncio.run(main()) == 1


async def _await(future: FutureProxy[int]) -> int:
    return await future


def test_interrupting_one_waiter_leaves_the_others_waiting(gateway: ScriptedGateway, client: Client) -> None:
    future: FutureProxy[int] = FutureProxy()
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(future.get(timeout=30)))
    other.start()
    with ctrl_c_when(lambda: len(future._wakers) == 2), pytest.raises(KeyboardInterrupt):
        future.get(timeout=30)
    future.settle(lambda: 3)
    other.join(30)
    assert seen == [3]


def test_a_reply_to_a_call_whose_future_is_gone_is_ignored(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    resume = hold_calls(gateway)
    one.add.call_one(1)
    resume()
    assert one.add.call_one(2).get(timeout=30) == 2


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from meshgate import Client, UrlDialer
from tests.client.counting import Counter

client = Client.connect(UrlDialer({url!r}, {token!r}))
mesh = client.attach_hosts("workers", 2).spawn("counters", Counter)
future = mesh.add.call(1)
mesh.initialized.get()
print("waiting", flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("future.get()", -signal.SIGINT), ("sys.exit(3)", 3), ("raise SystemExit(4)", 4), ("pass", 0)],
)
def test_a_program_closes_its_session_however_it_exits(gateway: ScriptedGateway, ending: str, code: int) -> None:
    gateway.on[Call] = lambda *_: None
    program = PROGRAM.format(path=sys.path, url=gateway.url, token=TOKEN, ending=ending)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        if code < 0:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "EndSession" in {type(header).__name__ for header in gateway.received}


def test_a_second_reply_to_a_call_is_ignored(gateway: ScriptedGateway, client: Client) -> None:
    one = one_counter(client)
    assert one.add.call_one(1).get(timeout=20) == 1
    session = gateway.session()
    again = Values(call=gateway.got(Call)[0].call)
    gateway.do(lambda: session.send(again, b"", stream=stream_of(one._object)))
    assert one.add.call_one(2).get(timeout=20) == 2
