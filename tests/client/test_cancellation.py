"""What an interrupted wait leaves behind: nothing, and everything still works."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshgate.client import Client
from meshgate.dialing import UrlDialer
from meshgate.future import FutureProxy
from meshgate.settings import ClientSettings
from meshgate_wire.messages import Call, Values, stream_of
from tests.client.counting import Counter
from tests.client.fake_gateway import TOKEN, FakeGateway
from tests.relay import Relay


@contextmanager
def ctrl_c_when(ready: Callable[[], bool]) -> Iterator[None]:
    """Sends this process a SIGINT once ``ready``, from another thread; again where a finalizer swallowed it."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            if ready():
                os.kill(os.getpid(), signal.SIGINT)
                stop.wait(3)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def one_of(client: Client) -> Any:
    return client.attach_hosts("workers", 2).spawn("counters", Counter).slice(hosts=0)


def call_for_ever(one: Any, sent: list[FutureProxy[int]]) -> None:
    while True:
        sent.append(one.add.call_one(len(sent)))
        if len(sent) > 2000:
            sent[-1].get(timeout=30)


def send_for_ever(one: Any, sent: list[FutureProxy[int]]) -> None:
    while True:
        sent.append(one.echo.call_one(b"x" * 1_000_000))


def hold_calls(gateway: FakeGateway) -> Callable[[], None]:
    """The gateway keeps calls back until the returned function is called."""
    held: list[tuple[Any, Any, Any]] = []
    answer = gateway.on[Call]
    gateway.on[Call] = lambda *call: held.append(call)

    def let_go() -> None:
        gateway.on[Call] = answer
        gateway.do(lambda: [answer(*call) for call in held])

    return let_go


def test_ctrl_c_in_get_is_a_keyboard_interrupt_and_the_call_goes_on(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = one_of(client)
    let_go = hold_calls(gateway)
    future = one.add.call_one(1)
    with ctrl_c_when(lambda: bool(future._wakers)), pytest.raises(KeyboardInterrupt):
        future.get(timeout=30)
    assert future._wakers == []
    let_go()
    assert future.get(timeout=30) == 1
    assert one.add.call_one(2).get(timeout=30) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_sending_leaves_the_session_usable(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = one_of(client)
    for _ in range(5):
        sent: list[FutureProxy[int]] = []
        with ctrl_c_when(lambda sent=sent: len(sent) > 50), pytest.raises(KeyboardInterrupt):  # type: ignore[misc]
            call_for_ever(one, sent)
        assert one.add.call_one(7).get(timeout=30) == 7
        assert [future.get(timeout=30) for future in sent] == list(range(len(sent)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_blocked_by_back_pressure_leaves_the_session_usable(gateway: FakeGateway) -> None:
    gateway.functions["echo"] = lambda rank, value: len(value)
    settings = ClientSettings(queue_limit=1 << 16, close_timeout=5)
    with (
        Relay("127.0.0.1", gateway.port) as relay,
        Client.connect(UrlDialer(f"ws://127.0.0.1:{relay.port}", TOKEN), settings=settings) as client,
    ):
        one = one_of(client)
        one.initialized.get(timeout=20)
        relay.freeze()
        sent: list[FutureProxy[int]] = []
        with (
            ctrl_c_when(lambda: not client._connection._room.is_set() and len(sent) > 1),
            pytest.raises(KeyboardInterrupt),
        ):
            send_for_ever(one, sent)
        relay.thaw()
        assert [future.get(timeout=60) for future in sent] == [1_000_000] * len(sent)
        assert one.echo.call_one(b"xyz").get(timeout=30) == 3


def test_an_interrupted_reading_starts_again(gateway: FakeGateway, client: Client) -> None:
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


def test_a_cancelled_await_cancels_the_waiting_only(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = one_of(client)
    let_go = hold_calls(gateway)
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
        let_go()
        return int(await future)

    assert asyncio.run(main()) == 1


async def _await(future: FutureProxy[int]) -> int:
    return await future


def test_an_interrupted_waiter_leaves_the_others_waiting(gateway: FakeGateway, client: Client) -> None:
    future: FutureProxy[int] = FutureProxy()
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(future.get(timeout=30)))
    other.start()
    with ctrl_c_when(lambda: len(future._wakers) == 2), pytest.raises(KeyboardInterrupt):
        future.get(timeout=30)
    future.settle(lambda: 3)
    other.join(30)
    assert seen == [3]


def test_an_answer_to_a_call_whose_future_is_gone_is_harmless(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = one_of(client)
    let_go = hold_calls(gateway)
    one.add.call_one(1)
    let_go()
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
def test_a_program_ends_its_session_however_it_ends(gateway: FakeGateway, ending: str, code: int) -> None:
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


def test_a_value_for_a_released_call_number_is_ignored(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = one_of(client)
    assert one.add.call_one(1).get(timeout=20) == 1
    session = gateway.session()
    again = Values(call=gateway.got(Call)[0].call)
    gateway.do(lambda: session.send(again, b"", stream=stream_of(one._object)))
    assert one.add.call_one(2).get(timeout=20) == 2
