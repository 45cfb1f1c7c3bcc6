"""The encoding of control messages, on which the stub engine relies too."""

from __future__ import annotations

import json

import pytest

from meshgate_gateway.control import messages
from meshgate_gateway.control.channel import MAX_MESSAGE
from meshgate_gateway.control.messages import (
    CALL_BOUNDS,
    SYNC_BOUNDS,
    ControlMessage,
    EngineCounts,
    Samples,
    parse_message,
)
from meshgate_wire.messages import Host

HOST = Host(name="workers-0", address="tcp://10.0.0.1:26600")


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (messages.AssignSession(session="0" * 32, lease=1.5), "assign"),
        (messages.NewConnection(head="GET / HTTP/1.1\r\n\r\n"), "connection"),
        (messages.RunEnded(run="night"), "run_ended"),
        (messages.HostsReply(mesh="workers", hosts=(HOST,), more=True), "hosts"),
        (messages.HostLost(mesh="workers", host="workers-0", reason="OOMKilled", returns=True), "host_lost"),
        (messages.HostRestored(mesh="workers", rank=0, host=HOST), "host_back"),
        (messages.EndSession(reason="done"), "end"),
        (messages.ReportState(), "report_state"),
        (messages.EngineReady(), "ready"),
        (messages.EngineCounts(calls={"ok": 2}, call_times=Samples(buckets=(1, 1), seconds=0.5)), "counts"),
        (messages.HostsRequest(mesh="workers"), "ask_hosts"),
        (messages.ClientConnected(), "connected"),
        (messages.ClientDisconnected(), "disconnected"),
        (messages.SessionState(connected=False, disconnected_for=1.5), "state"),
        (messages.SessionEnded(reason="done"), "ended"),
    ],
)
def test_a_message_is_parsed_from_its_encoding(message: ControlMessage, kind: str) -> None:
    data = message.model_dump_json().encode()
    assert json.loads(data)["type"] == kind
    assert parse_message(data) == message


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b'{"type": "unknown"}', b'{"type": "end"}'])
def test_an_invalid_message_raises(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_message(data)


def test_the_longest_reason_fits_into_a_message() -> None:
    for message in (
        messages.EndSession(reason="\x01" * 1_000_000),
        messages.HostsReply(mesh="m", error="x" * 1_000_000),
    ):
        assert len(message.model_dump_json()) < MAX_MESSAGE


@pytest.mark.parametrize("bounds", [CALL_BOUNDS, SYNC_BOUNDS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_the_largest_counts_fit_into_a_control_message() -> None:
    most = 10**30
    samples = Samples(buckets=(most,) * (len(CALL_BOUNDS) + 1), seconds=float(most))
    counts = EngineCounts(
        calls={"ok": most, "failed": most}, call_times=samples, sync_times=samples, bytes_sent=most, lines=most
    )
    assert len(counts.model_dump_json()) < MAX_MESSAGE
