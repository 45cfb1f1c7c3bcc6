"""An interrupted wait leaves nothing behind, and the session still works."""

from __future__ import annotations

import asyncio
import gc
import os
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
from meshgate.proxies.client import Client
from meshgate.session.dialing import UrlDialer
from meshgate.session.futures import FutureProxy
from meshgate.session.settings import ClientSettings
from meshgate.testing import NetworkProxy
from meshgate_wire.messages import Call, CancelCall, Failed, Failure, Values, stream_of
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
    gateway.functions["add"] = lambda rank, amount: amount
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
    gateway.functions["add"] = lambda rank, amount: amount
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


@pytest.mark.timeout(60)
def test_a_cancellation_without_a_connection_is_sent_once_later_however_much_waits(gateway: ScriptedGateway) -> None:
    with small_queue(gateway) as (proxy, client, one):
        hold_calls(gateway)
        proxy.refuse()
        wait_for(lambda: not client._connection.connected, "the cut")
        sent: list[FutureProxy[int]] = []
        full = threading.Event()

        def fill() -> None:
            while not full.is_set():
                sent.append(one.add.call_one(1))

        filling = threading.Thread(target=fill)
        filling.start()
        wait_for(lambda: not client._connection._queue._small_gate.is_open, "a full queue")
        full.set()
        assert all(sent[0].cancel() for _ in range(2))
        proxy.accept()
        filling.join()
        wait_for(lambda: gateway.got(CancelCall), "the cancellation")
        assert [header.cancelled for header in gateway.got(CancelCall)] == [gateway.got(Call)[0].call]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_sending_leaves_the_session_usable(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
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
    gateway.functions["add"] = lambda rank, amount: amount
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
    gateway.functions["add"] = lambda rank, amount: amount
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
    gateway.functions["add"] = lambda rank, amount: amount
    one = one_counter(client)
    assert one.add.call_one(1).get(timeout=20) == 1
    session = gateway.session()
    again = Values(call=gateway.got(Call)[0].call)
    gateway.do(lambda: session.send(again, b"", stream=stream_of(one._object)))
    assert one.add.call_one(2).get(timeout=20) == 2
