"""What the server asks engines, with engines in this process."""

from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.control.messages import ControlMessage, Inspect, Inspected
from meshgate_gateway.hosts.provider import StaticHosts
from meshgate_gateway.sessions import inspection as module
from meshgate_gateway.sessions.inspection import Inspection
from meshgate_gateway.sessions.session_table import Sessions
from meshgate_wire.status import EngineStatus, MeshStatus, PrintedLine, SessionOutput


class Engine:
    """Answers in parts, unless ``mute``."""

    def __init__(self, answer: EngineStatus | SessionOutput, *, mute: bool = False) -> None:
        self.pid, self.answer, self.mute = 7, answer, mute
        self.asked: list[Inspect] = []
        self.inspection: Inspection

    def send(self, message: ControlMessage) -> bool:
        assert isinstance(message, Inspect)
        self.asked.append(message)
        body = self.answer.model_dump_json()
        for part, more in ((body[:10], True), (body[10:], False)) if not self.mute else ():
            self.inspection.received(Inspected(request=message.request, body=part, more=more))
        return True


def inspect(**engines: Engine) -> Inspection:
    table = Sessions(lease=60, limit=8, now=0)
    for name in engines:
        table.admit(name, "alice", resume=False, now=0)
    table.connected(next(iter(engines)))
    inspection = Inspection(table, engines, StaticHosts({"workers": ["tcp://a", "tcp://b"]}))
    for engine in engines.values():
        engine.inspection = inspection
    return inspection


def test_the_status_has_the_hosts_and_what_each_engine_knows() -> None:
    mesh = MeshStatus(kind="procs", name="procs", sizes={"hosts": 2})
    inspection = inspect(one=Engine(EngineStatus(version="cafe", meshes=(mesh,))), two=Engine(EngineStatus()))
    status = asyncio.run(inspection.status())
    assert status.meshes == {"workers": 2}
    assert [(host.name, host.rank) for host in status.hosts] == [("workers-0", 0), ("workers-1", 1)]
    one, two = status.sessions
    assert (one.session, one.owner, one.connected, one.pid, one.version) == ("one", "alice", True, 7, "cafe")
    assert one.meshes == (mesh,)
    assert not two.connected


def test_an_engine_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.01)
    inspection = inspect(one=Engine(EngineStatus(), mute=True), two=Engine(EngineStatus(version="cafe")))
    one, two = asyncio.run(inspection.status()).sessions
    assert one.problem == "its engine did not answer within 0.01 s"
    assert (two.problem, two.version) == ("", "cafe")
    inspection.received(Inspected(request=1, body="{}"))  # a late answer


def test_output_begins_after_the_lines_that_the_caller_has() -> None:
    line = PrintedLine(number=8, stream="stdout", mesh="m", ranks=(0,), count=1, host="h", text="hello", end="\n")
    one, two = Engine(SessionOutput(lines=(line,), last=8)), Engine(SessionOutput())
    page = asyncio.run(inspect(one=one, two=two).output({"one": 7}))
    assert [(each.session, each.lines) for each in page.sessions] == [("one", (line,)), ("two", ())]
    assert [engine.asked[0].after for engine in (one, two)] == [7, 0]
