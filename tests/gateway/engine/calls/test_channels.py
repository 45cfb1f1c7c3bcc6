"""Channels, without an engine around; how they share a connection is in ``test_engine.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import pytest

from meshgate_gateway.engine.calls.channels import LOOK_INTERVAL, MAX_QUEUED, Backlog, Channels
from meshgate_gateway.engine.failures import RequestFailed, invalid
from meshgate_gateway.engine.objects.records import ActorMesh, Channel, KeptMesh
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.objects.table import KeptArgument, Lookup, ObjectTable
from meshgate_wire import Fragments, Header, MessageTooLarge
from meshgate_wire.messages import Argument, MeshRef, OpenChannel, PortMessage, PortSend, SendTo, stream_of
from tests.gateway.engine.fakes import (
    FakeMonarch,
    FakePort,
    Sent,
    Timers,
    actor_mesh,
    host_mesh,
    start_task,
    turns,
    until,
)

CHANNEL, ACTORS = 1, 2
VALUE = [Fragments((b"value",))]
PORT = "a port"
LIMIT = 100
KEPT, LOST = (
    KeptArgument(KeptMesh(number, "make.keep()", None, hosts_region(1), (0,), None), hosts_region(1), whole=False)  # type: ignore[arg-type]
    for number in (7, 8)
)


class Opened:
    """An open channel. ``queued`` is how many bytes wait to be sent, by stream."""

    def __init__(self, *, once: bool = False) -> None:
        self.monarch, self.objects, self.sent = FakeMonarch(), ObjectTable(), Sent()
        self.queued: dict[int, int] = {}
        self.limits: list[object] = []
        self.notices: list[str] = []
        self.through_processes: list[tuple[object, ...]] = []
        self.channels = Channels(
            self.objects,
            Lookup(self.objects, self.monarch),
            self.monarch,
            self.sent,
            Backlog(Timers(), lambda text: None),
            queued=lambda stream: self.queued.get(stream, 0),
            paused=lambda: self.limits.append(self.channels.full),
            start_task=start_task,
            kept=self,
            notice=self.notices.append,
        )
        self.open(CHANNEL, once=once)

    def open(self, number: int, *, once: bool = False) -> FakePort:
        self.handle(OpenChannel(object=number, once=once))
        return self.monarch.ports[-1]

    def handle(self, header: object, buffers: object = VALUE) -> object:
        return self.channels.handlers()[type(header)](header, buffers)  # type: ignore[arg-type]

    # as ``KeptValues``

    async def send(self, port: object, buffers: object, arguments: Sequence[object]) -> None:
        self.through_processes.append((port, *arguments))
        if LOST in arguments:
            raise invalid("no sample")

    async def deliver_cast(
        self, mesh: ActorMesh, endpoint: str, ref: MeshRef, arguments: Sequence[object], chosen: int | None
    ) -> list[object]:
        await self.send(chosen, (), arguments)
        return ["delivered"]

    async def close(self) -> None:
        self.channels.close()
        await turns()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # the fake Monarch's


async def test_what_actors_send_reaches_the_client_on_the_stream_of_the_channel() -> None:
    opened = Opened()
    opened.monarch.ports[0].put(b"first", 3, references=("a mesh",))
    opened.monarch.ports[0].put(b"second", exception=True)
    await until(lambda: len(opened.sent.messages) == 2)
    (first, stream, buffers), (second, _, _) = opened.sent.messages
    assert isinstance(first, PortMessage)
    assert isinstance(second, PortMessage)
    assert (first.port, first.rank, first.exception, first.objects.objects) == (CHANNEL, 3, False, (-1,))
    assert (stream, buffers) == (stream_of(CHANNEL), (b"first",))
    assert second.exception
    await opened.close()


async def test_a_channel_that_is_released_closes_its_port() -> None:
    opened = Opened()
    opened.open(2, once=True).put(b"the only message")
    await until(lambda: opened.sent.messages)
    opened.channels.close()
    await turns()
    assert [port.closed for port in opened.monarch.ports] == [True, False]
    await opened.close()


async def test_a_channel_opened_for_one_message_reads_one() -> None:
    opened = Opened(once=True)
    for data in (b"first", b"second"):
        opened.monarch.ports[0].put(data)
    await turns()
    assert len(opened.sent.messages) == 1


async def test_a_message_that_is_too_large_is_dropped_and_those_behind_it_arrive() -> None:
    opened = Opened()
    send = opened.channels._send_message

    def refuse_large(header: Header, buffers: Sequence[bytes] = (), *, stream: int = 0) -> None:
        if buffers == (b"large",):
            raise MessageTooLarge("bytes", 5_000_000_000, 4_294_967_296)
        send(header, buffers, stream=stream)

    opened.channels._send_message = refuse_large
    for data in (b"large", b"second"):
        opened.monarch.ports[0].put(data)
    await until(lambda: opened.sent.messages)
    assert [buffers for _, _, buffers in opened.sent.messages] == [(b"second",)]
    (notice,) = opened.notices
    assert notice.startswith("a message to a channel was not sent: cannot send a message with 5000000000 bytes")
    await opened.close()


async def test_a_port_is_not_read_while_its_channel_is_over_the_limit() -> None:
    opened = Opened()
    (port,) = opened.monarch.ports
    opened.queued[stream_of(CHANNEL)] = MAX_QUEUED
    for _ in range(3):
        port.put(b"value")
    await turns()
    assert port.received == 1
    assert opened.limits  # the engine calls resume from now on
    opened.channels.resume()
    await turns()
    assert port.received == 1
    opened.queued[stream_of(CHANNEL)] = MAX_QUEUED - 1
    opened.channels.resume()
    await until(lambda: port.received == 3)
    await opened.close()


async def test_a_full_channel_does_not_hold_up_another() -> None:
    opened = Opened()
    full, other = opened.monarch.ports[0], opened.open(7)
    opened.queued[stream_of(CHANNEL)] = MAX_QUEUED
    for port in (full, full, other, other):
        port.put(b"value")
    await until(lambda: other.received == 2)
    assert full.received == 1
    await opened.close()


async def test_a_value_is_sent_to_the_port_of_a_channel() -> None:
    opened = Opened()
    await opened.handle(PortSend(port=CHANNEL))  # type: ignore[misc]
    await opened.handle(PortSend(port=CHANNEL, return_undeliverable=False))  # type: ignore[misc]
    assert opened.monarch.sent == [(opened.monarch.ports[0], b"value")] * 2
    assert opened.monarch.dropped_if_undeliverable == [False, True]
    await opened.close()


async def test_the_replies_of_a_call_can_go_to_a_channel() -> None:
    opened = Opened()
    opened.objects.add(ACTORS, actor_mesh())
    header = SendTo(target=MeshRef(object=ACTORS), endpoint="step", port=CHANNEL)
    await opened.handle(header)  # type: ignore[misc]
    assert opened.monarch.casts == [("step", b"value", opened.monarch.ports[0])]
    await opened.close()


def kept_meshes(opened: Opened) -> tuple[Argument, Argument]:
    """What refers to kept values, and to others that are lost."""
    opened.objects.add(7, KEPT.kept)
    opened.objects.add(8, LOST.kept)
    return Argument(kind="kept", ref=MeshRef(object=7)), Argument(kind="kept", ref=MeshRef(object=8))


async def test_a_message_with_kept_values_is_sent_by_a_process() -> None:
    opened = Opened()
    kept, lost = kept_meshes(opened)
    await opened.handle(PortSend(port=CHANNEL, arguments=(kept,)))  # type: ignore[misc]
    assert opened.through_processes == [(opened.monarch.ports[0], KEPT)]
    with pytest.raises(RequestFailed):
        await opened.handle(PortSend(port=CHANNEL, arguments=(lost,)))  # type: ignore[misc]
    assert opened.notices == ["a message to a channel was not sent: no sample"]
    assert not opened.monarch.sent
    await opened.close()


async def test_a_call_whose_replies_go_to_a_channel_gets_kept_values_first() -> None:
    opened = Opened()
    opened.objects.add(ACTORS, actor_mesh())
    kept, lost = kept_meshes(opened)

    def header(argument: Argument, selection: Literal["all", "choose"]) -> SendTo:
        ref = MeshRef(object=ACTORS)
        return SendTo(target=ref, endpoint="step", port=CHANNEL, arguments=(argument,), selection=selection)

    await opened.handle(header(kept, "all"))  # type: ignore[misc]
    await opened.handle(header(kept, "choose"))  # type: ignore[misc]
    (called, _), (chosen, _) = opened.through_processes
    assert called is None
    ports, payload = opened.monarch.ports[0], (b"value", "delivered")
    assert opened.monarch.casts == [("step", payload, ports), ("step", ("at", chosen, (2,), payload), ports)]
    with pytest.raises(RequestFailed):
        await opened.handle(header(lost, "all"))  # type: ignore[misc]
    assert opened.notices == ["a message to actors.step was not sent: no sample"]
    await opened.close()


async def test_a_value_sent_to_something_that_is_not_a_port_is_rejected() -> None:
    opened = Opened()
    opened.objects.add(5, host_mesh())
    with pytest.raises(RequestFailed, match="object 5 is not a port"):
        await opened.handle(PortSend(port=5))  # type: ignore[misc]
    await opened.close()


async def test_closing_stops_reading_every_port() -> None:
    opened = Opened()
    opened.channels.close()
    await turns()
    channel = opened.objects.get(CHANNEL)
    assert isinstance(channel, Channel)
    assert channel.reader is not None
    assert channel.reader.done()


class Producers:
    """Processes that send to ``PORT``. ``answers``: by report, in order of their answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bool]] = []
        self.factor = 1.0
        self.warnings: list[str] = []
        self.timers = Timers()
        self.backlog = Backlog(self.timers, self.warnings.append, LIMIT)
        self.backlog.opened(PORT)
        self._reports = 0

    def report(self, messages: int = 10, nbytes: int = 60, port: str = PORT) -> None:
        number, self._reports = self._reports, self._reports + 1

        def answer(closed: bool, factor: float) -> None:
            self.answers.append((number, closed))
            self.factor = factor

        self.backlog.reported(port, messages, nbytes, answer)

    def read(self, messages: int = 10, nbytes: int = 6) -> None:
        for _ in range(messages):
            self.backlog.read(PORT, nbytes)


def test_reports_are_answered_at_once_while_there_is_space() -> None:
    producers = Producers()
    producers.report()
    assert producers.answers == [(0, False)]
    producers.report()
    assert len(producers.answers) == 1
    producers.read(9)
    assert len(producers.answers) == 1
    producers.read(1)
    assert producers.answers == [(0, False), (1, False)]


def test_a_report_is_answered_when_its_messages_are_read_although_another_channel_is_full() -> None:
    producers = Producers()
    producers.backlog.opened("another")
    producers.report(nbytes=LIMIT + 1, port="another")
    producers.report()
    assert producers.answers == []
    producers.read()
    assert producers.answers == [(1, False)]


def test_messages_that_were_read_before_they_were_reported_are_not_waited_for_for_good() -> None:
    producers = Producers()
    producers.read(10)
    producers.report(nbytes=LIMIT + 1)
    producers.read(10)
    producers.report(nbytes=LIMIT + 1)
    assert producers.answers == [(0, False)]
    producers.read(10)
    assert producers.answers == [(0, False), (1, False)]


def test_messages_that_are_not_reported_make_no_space() -> None:
    producers = Producers()
    producers.read(1000)
    producers.report(nbytes=LIMIT + 1)
    assert producers.answers == []


def test_processes_learn_that_their_messages_are_larger_than_they_report() -> None:
    producers = Producers()
    producers.report(messages=10, nbytes=1)
    producers.read(10, nbytes=7)
    producers.report()
    assert producers.factor == 70 / 61


def test_the_end_of_a_channel_releases_its_producers() -> None:
    producers = Producers()
    producers.report(nbytes=LIMIT + 1)
    producers.backlog.closed(PORT)
    assert producers.answers == [(0, True)]
    producers.report(nbytes=LIMIT + 1)  # to a port that belongs to no known channel
    assert producers.answers[1:] == [(1, False)]


def test_no_one_waits_for_the_messages_of_a_process_that_was_killed() -> None:
    producers = Producers()
    producers.report(nbytes=LIMIT + 1)  # and then it was killed
    producers.report()
    producers.timers.fire(LOOK_INTERVAL)
    assert producers.answers == [(0, False), (1, False)]
    assert not producers.warnings
    producers.report()
    assert producers.answers[2:] == [(2, False)]


def test_while_nothing_is_received_they_wait_and_the_user_is_warned_once() -> None:
    producers = Producers()
    producers.backlog.reading(PORT, False)
    producers.report(nbytes=LIMIT + 1)
    for _ in range(3):
        producers.timers.fire(LOOK_INTERVAL)
    assert producers.answers == []
    (warning,) = producers.warnings
    assert "Receive them, or close the channel" in warning
    producers.backlog.reading(PORT, True)
    producers.read(10)
    assert producers.answers == [(0, False)]
    producers.timers.fire(LOOK_INTERVAL)
    assert not producers.timers.waiting
