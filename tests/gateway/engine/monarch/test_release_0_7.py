"""What the adapter does without a running Monarch; tests/end_to_end runs it with one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshgate_gateway.engine.monarch import release_0_7
from meshgate_gateway.engine.monarch.interface import BatchedReply, BootstrapFailed, Fault, Reply
from meshgate_gateway.engine.monarch.release_0_7 import ARGUMENTS, HOSTS_PYTHON, Messages, native_commands
from meshgate_gateway.engine.on_worker.batches import encode_replies
from meshgate_wire.messages import BootstrapCommand, Launch, Region
from tests.gateway.engine.fakes import WAIT_TIMEOUT


@dataclass
class Failure:
    """As Monarch's: only its repr names the ranks."""

    ranks: str
    text: str = "actor crashed"
    mesh_name: str = "actors-unique"

    def __repr__(self) -> str:
        return f"MeshFailure(event, {self.ranks})"

    def report(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("crashed_ranks=[3, 11]", (3, 11)), ("crashed_ranks=[0]", (0,)), ("crashed_ranks=[]", ()), ("", ())],
)
def test_the_ranks_of_a_fault_are_read_from_its_repr(text: str, ranks: tuple[int, ...]) -> None:
    assert release_0_7._fault(Failure(text)) == Fault("actors-unique", ranks, "actor crashed")


def test_a_fault_by_sigkill_names_the_likely_cause() -> None:
    fault = release_0_7._fault(Failure("", text="Killed(sig=9)"))
    assert "ran out of memory" in fault.report


async def test_messages_of_another_thread_are_received_together_and_in_order() -> None:
    messages = Messages(asyncio.get_running_loop(), "no state")
    thread = threading.Thread(target=lambda: [messages("no state", number) for number in range(1000)])
    thread.start()
    received: list[int] = []
    while len(received) < 1000:
        several = await asyncio.wait_for(messages.all(), WAIT_TIMEOUT)
        assert several
        received += several
    thread.join()
    assert received == list(range(1000))


async def test_several_messages_wake_the_loop_once_and_a_cancelled_receive_takes_none() -> None:
    loop, woken = asyncio.get_running_loop(), 0

    class Loop:
        create_future = loop.create_future

        def call_soon_threadsafe(self, deliver: Callable[[], object]) -> None:
            nonlocal woken
            woken += 1
            loop.call_soon(deliver)

    messages = Messages(cast(asyncio.AbstractEventLoop, Loop()), "no state")
    messages.all().cancel()
    for number in range(3):
        assert messages("no state", number) == "no state"
    await asyncio.sleep(0)
    assert woken == 1
    assert messages.all().result() == [0, 1, 2]
    waiting = messages.all()
    messages("no state", 3)
    assert (await asyncio.wait_for(waiting, WAIT_TIMEOUT), woken) == ([3], 2)


class BootstrapRaised:
    """A mesh of Monarch's with a bootstrap that raised."""

    @property
    async def initialized(self) -> None:
        from monarch.actor import ActorError

        raise ActorError(ValueError("no device"), "Actor call setup failed.")


def test_a_bootstrap_that_raised_is_reported_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import monarch.actor

    client = object.__new__(release_0_7.Client)
    client._api = monarch.actor
    with pytest.raises(BootstrapFailed, match=r"ValueError: no device$"):
        asyncio.run(client.wait_initialized(BootstrapRaised()))


def test_settings_are_withheld_while_hosts_are_attached_to() -> None:
    order: list[str] = []

    def attaching(attached: Coroutine[Any, Any, None]) -> None:
        attached.close()
        order.append("attaching")

    client: Any = object.__new__(release_0_7.Client)
    client._settings = SimpleNamespace(withhold=lambda: order.append("withheld"), attaching=attaching)
    client._api = SimpleNamespace(attach_to_workers=lambda **_: order.append("attach"))
    client.attach("workers", [])
    assert order == ["withheld", "attach", "attaching"]


def test_the_ids_of_processes_are_read_from_the_repr_of_their_mesh() -> None:
    ranks = ", ".join(
        f"ProcRef {{ proc_id: <'anon-{rank}' anon-{rank}<FQEUXHHxDxr>@anon-{rank}<FQEUXHHxDxr>.ipc:///tmp/w_0>, "
        f"create_rank: {rank}, agent: ActorRef {{ actor_addr: <'proc_agent.anon-{rank}' proc_agent> }} }}"
        for rank in range(2)
    )

    class Native:
        def __repr__(self) -> str:
            return f"<ProcMeshRefImpl ProcMeshRef {{ ranks: [{ranks}], region: Region }}>"

    procs = SimpleNamespace(_proc_mesh=SimpleNamespace(poll=Native))
    client = object.__new__(release_0_7.Client)
    assert client.process_ids(procs) == tuple(
        f"'anon-{rank}' anon-{rank}<FQEUXHHxDxr>@anon-{rank}<FQEUXHHxDxr>.ipc:///tmp/w_0" for rank in range(2)
    )


def client_that_batches(*, limits_frames: bool = False, collects: bool = False) -> Any:
    client: Any = object.__new__(release_0_7.Client)
    client._settings = SimpleNamespace(limits_frames=limits_frames)
    client._collects = collects
    return client


class Ports:
    """Monarch's mailbox, of which a port is both sender and receiver."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.sent: list[object] = []

    def open(self, kind: str) -> tuple[Ports, Ports]:
        self.opened.append(kind)
        return self, self

    def open_port(self) -> tuple[Ports, Ports]:
        return self.open("port")

    def open_once_port(self) -> tuple[Ports, Ports]:
        return self.open("port for one message")

    def open_accum_port(self, messages: Messages) -> tuple[Ports, Ports]:
        return self.open("port with an accumulator")

    def bind(self) -> Ports:
        return self

    def send(self, sender: object, message: object) -> None:
        self.sent.append(message)


async def test_only_a_port_for_one_reply_of_one_rank_is_for_one_message_and_a_receive_that_nothing_ends_gets_one() -> (
    None
):
    client: Any = object.__new__(release_0_7.Client)
    client._ports, client._native, client._no_state = Ports(), None, "nothing"
    for several, explicit_port, kind, ends in (
        (False, False, "port for one message", ["nothing"]),
        (False, True, "port", ["nothing"]),
        (True, False, "port with an accumulator", []),
    ):
        _, receiver = client._reply_port(several, explicit_port)
        client.close(receiver)
        assert (client._ports.opened.pop(), client._ports.sent) == (kind, ends)
        client._ports.sent = []


def test_what_is_more_than_one_pickle_cannot_be_in_a_batch() -> None:
    client = client_that_batches()
    plain = client.payload([b"12", b"345"])
    region = Region(labels=("gpus",), offset=0, sizes=(2,), strides=(1,))
    assert client.size_in_batch(plain) == 5
    assert client.size_in_batch(client.payload([b"1"], buffers=[[b"2"]])) is None
    assert client.size_in_batch(client.payload([b"1"], objects=["mesh"])) is None
    assert client.size_in_batch(client.payload_at(plain, 1, region)) is None
    assert client.size_in_batch(client.payload_with_trace(plain, {})) is None


@pytest.mark.parametrize("reason", ["limits_frames", "collects"])
def test_nothing_is_batched_while_monarch_counts_messages(reason: str) -> None:
    client = client_that_batches(**{reason: True})
    assert client.size_in_batch(client.payload([b"1"])) is None


def test_the_replies_to_a_batch_share_what_the_message_says() -> None:
    client = client_that_batches()
    data = b"".join(encode_replies([(4, False, 0.5, b"value"), (2, True, 0.25, b"error")]))
    client.reply_of = lambda message: message
    assert client.replies_of(Reply(3, False, data, (), (7, 8))) == [
        BatchedReply(4, 0.5, Reply(3, False, b"value", (), (7, 8))),
        BatchedReply(2, 0.25, Reply(3, True, b"error", (), (7, 8))),
    ]
    for own in (Reply(3, True, data, ()), Reply(3, False, b"\x80\x05N.", ())):
        assert client.replies_of(own) == [BatchedReply(None, 0.0, own)]


def test_without_commands_the_hosts_use_their_own() -> None:
    assert native_commands(Launch(binding=({"cpus": "0"},))) is None


def test_each_rank_has_its_command() -> None:
    commands = tuple(
        BootstrapCommand(program=f"/python{each}", args=("-m", "worker"), env={"A": None}, inherit_env=False)
        for each in range(2)
    )
    native = native_commands(Launch(commands=commands, command_of=(1, 0)))
    assert native is not None
    made = [native(SimpleNamespace(rank=rank)) for rank in range(2)]
    assert [each.program for each in made] == ["/python1", "/python0"]
    assert (made[0].args, made[0].env, made[0].inherit_env) == (["-m", "worker"], {"A": None}, False)


def test_a_command_without_a_program_starts_the_python_of_the_host() -> None:
    native = native_commands(Launch(commands=(BootstrapCommand(),)))
    assert native is not None
    command = native(SimpleNamespace(rank=5))
    assert (command.program, command.args[-2:]) == ("/bin/sh", list(ARGUMENTS))
    parent = f"import subprocess; subprocess.run(['/bin/sh', '-c', {HOSTS_PYTHON!r}, '/fallback', '-c', {PRINT!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == sys.executable


PRINT = "import sys; print(sys.executable)"
