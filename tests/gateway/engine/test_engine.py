"""The parts of the engine together: flow control, limits, hosts and the end."""

from __future__ import annotations

import pickle

import pytest

from meshgate_gateway.control import JobEnding
from meshgate_gateway.engine import engine as engine_module
from meshgate_gateway.engine.calls.channels import MAX_QUEUED
from meshgate_gateway.engine.monarch.interface import Fault as MonarchFault
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.output.lines import PrintedLine
from meshgate_wire import Limits
from meshgate_wire.handshake import PYTHON_VERSION
from meshgate_wire.messages import (
    Adopt,
    Configure,
    ConfigureMonarch,
    Done,
    EndSession,
    Failed,
    Fault,
    Host,
    HostEnding,
    HostsAttached,
    Initialized,
    MeshRef,
    ObjectFailed,
    Output,
    PortMessage,
    PutValue,
    Region,
    Release,
    Reload,
    SpawnProcs,
    Stop,
    Values,
)
from tests.gateway.engine.detached_session import end
from tests.gateway.engine.in_memory import MANY, PIECE, EngineClient, call
from tests.gateway.engine.oversized import OVERSIZED, limited_memory

__all__ = ["limited_memory"]

# What Monarch reports if a worker of another release gets the first message of an attach.
RETURNED = """undeliverable message to host_agent.service:<gmkDYMTEV4b>@tcp://10.0.0.0:1:
  message type: hyperactor_mesh::host_mesh::host_agent::SetClientConfig
  error: delivery failure: ttl expired for host_agent.service:<gmkDYMTEV4b>@tcp://10.0.0.0:1"""


async def test_a_mesh_that_was_stopped_and_released_leaves_its_hosts_usable() -> None:
    client = EngineClient()
    hosts = client.attach()
    procs = client.spawn_procs(hosts)
    client.send(Stop(call=1, target=MeshRef(object=procs)), stream=procs)
    client.send(Release(objects=(procs,)), stream=procs)
    await client.until(lambda: client.of(Done))
    client.spawn_actors(client.spawn_procs(hosts))
    await client.turns()
    assert not client.of(Failed)
    assert not client.of(ObjectFailed)
    await client.end()


async def test_the_answer_to_changed_settings_has_all_in_effect() -> None:
    client = EngineClient()
    client.send(ConfigureMonarch(call=3, settings={"rdma_qps_per_cq": 5, "use_direct_spawn": True}), stream=0)
    await client.until(lambda: client.of(Values))
    (answer,) = (each for each in client.received if isinstance(each.header, Values))
    assert answer.header == Values(call=3)
    assert pickle.loads(answer.buffers[0].join()) == {
        "stop_actor_timeout": "10s",
        "rdma_qps_per_cq": 5,
        "use_direct_spawn": True,
    }
    await client.end()


# --- limits


async def test_a_constructor_that_fails_with_a_long_text_is_answered() -> None:
    client = EngineClient()
    procs = client.spawn_procs(client.attach())
    await client.turns()
    client.monarch.hold = True
    actors = client.spawn_actors(procs)
    client.send(call(1, actors), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.casts)
    ready = client.monarch.meshes[-1].ready
    assert ready is not None
    ready.set_exception(RuntimeError("ValueError: " + "x" * 1_000_000 + " the end"))
    await client.until(lambda: client.of(ObjectFailed) and client.of(Failed))
    for failed in (client.of(Failed)[0].failure, client.of(ObjectFailed)[0].failure):
        assert failed.message.startswith("ValueError: xxx")
        assert failed.message.endswith("xxx the end")
    client.monarch.ports[-1].put(b"late", 0)
    await client.end()


async def test_calls_on_a_rank_that_dies_with_a_long_report_are_answered() -> None:
    client = EngineClient()
    actors = client.spawn_all()
    client.send(call(1, actors), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.casts)
    client.engine.fault(MonarchFault("actors-unique", (0,), "crashed " + "x" * 1_000_000))
    await client.until(lambda: client.of(Failed) and client.of(Fault))
    client.monarch.ports[-1].put(b"late", 0)
    await client.end()


async def test_a_request_that_fails_with_a_long_text_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EngineClient()

    def fail(*_: object) -> None:
        raise ValueError("x" * 1_000_000)

    monkeypatch.setattr(client.monarch, "attach", fail)
    number = client.attach()
    await client.until(lambda: client.of(ObjectFailed))
    assert client.of(ObjectFailed)[0].object == number
    await client.end()


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("region", OVERSIZED)
async def test_only_the_call_on_an_oversized_slice_fails(region: Region) -> None:
    client = EngineClient()
    actors = client.spawn_all()
    client.send(call(1, actors, region=region), b"arguments", stream=actors)
    client.send(call(2, actors), b"arguments", stream=actors)
    client.send(Stop(call=3, target=MeshRef(object=actors, region=region)), stream=actors)
    await client.until(lambda: len(client.of(Failed)) == 2 and client.monarch.casts)
    assert {failed.call: failed.failure.kind for failed in client.of(Failed)} == {1: "invalid", 3: "invalid"}
    for rank in range(2):
        client.monarch.ports[-1].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    await client.end()


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("per_host", [{"gpus": 2**16, "more": 2**16}, {str(at): 2**16 for at in range(64)}])
async def test_an_oversized_mesh_is_not_spawned(per_host: dict[str, int]) -> None:
    client = EngineClient()
    hosts, procs = client.attach(), client.number()
    header = SpawnProcs(object=procs, hosts=MeshRef(object=hosts), per_host=per_host, name="procs")
    client.send(header, stream=procs)
    await client.until(lambda: client.of(ObjectFailed))
    (failed,) = client.of(ObjectFailed)
    assert failed.failure.kind == "invalid"
    assert "in 64 dimensions" in failed.failure.message
    await client.end()


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("kind", ["hosts", "procs", "actors"])
@pytest.mark.parametrize("region", OVERSIZED)
async def test_an_oversized_mesh_is_not_adopted(region: Region, kind: str) -> None:
    client = EngineClient()
    number = client.engine._objects.add_reference(object())
    client.send(Adopt(object=number, kind=kind, region=region), stream=2**31 - number)  # type: ignore[arg-type]
    await client.until(lambda: client.of(ObjectFailed))
    assert client.of(ObjectFailed)[0].failure.kind == "invalid"
    await client.end()


# --- back-pressure


async def test_a_port_whose_messages_are_not_consumed_is_read_up_to_the_limit() -> None:
    client = EngineClient(consumes=False)
    await client.open_channel()
    (port,) = client.monarch.ports
    for _ in range(MANY):
        port.put(PIECE)
    await client.turns(MANY * 5)
    assert port.received * len(PIECE) < Limits().window + MAX_QUEUED + 2 * len(PIECE)
    assert client.engine.link.session.statistics().queued_bytes < MAX_QUEUED + 2 * len(PIECE)
    before = port.received
    client.consumes = True
    client.consume_all()
    await client.until(lambda: len(client.of(PortMessage)) == MANY)
    assert before < port.received == MANY
    await client.end()


async def test_a_full_channel_holds_up_neither_calls_nor_another_channel() -> None:
    client = EngineClient(consumes=False)
    full, empty = await client.open_channel(), await client.open_channel()
    for _ in range(MANY):
        client.monarch.ports[0].put(PIECE)
    await client.turns(MANY * 5)
    client.monarch.ports[1].put(b"small")
    actors = client.spawn_all()
    client.send(call(1, actors), b"arguments", stream=actors)
    await client.until(lambda: client.monarch.casts)
    for rank in range(2):
        client.monarch.ports[-1].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    assert {message.port for message in client.of(PortMessage)} == {full, empty}
    await client.end()


async def test_a_full_channel_that_is_released_is_not_read_any_more() -> None:
    client = EngineClient(consumes=False)
    number = await client.open_channel()
    (port,) = client.monarch.ports
    for _ in range(MANY):
        port.put(PIECE)
    await client.turns(MANY * 5)
    client.send(Release(objects=(number,)), stream=number)
    await client.turns()
    before = port.received
    client.consume_all()
    await client.turns(MANY)
    assert port.received == before
    await client.end()


def printed(text: str) -> list[PrintedLine]:
    return [PrintedLine("stdout", "trainers", 0, "workers-0", text, "\n")]


async def test_output_is_read_up_to_a_limit_that_is_higher_while_the_client_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "MAX_QUEUED_OUTPUT", 1000)
    monkeypatch.setattr(engine_module, "MAX_QUEUED_OUTPUT_DISCONNECTED", 10_000)
    client = EngineClient()
    reading: list[bool] = []
    monkeypatch.setattr(client.engine.streams, "set_reading", reading.append)
    client.engine.link.connection_closed(client, "the laptop sleeps")  # type: ignore[arg-type]
    client.engine._send_output(printed("x" * 5000))
    await client.turns(3)
    assert reading[-1]
    assert client.engine.link.silence == 7.0  # which decides how long the session is kept
    client.engine._send_output(printed("y" * 5000))
    await client.turns(3)
    assert not reading[-1]
    await client.engine.close("the test is over")


async def test_output_is_read_again_once_the_client_has_taken_what_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_QUEUED_OUTPUT", 1000)
    monkeypatch.setattr(engine_module, "MAX_QUEUED_OUTPUT_DISCONNECTED", 1000)
    client = EngineClient()
    client.engine.link.connection_closed(client, "the laptop sleeps")  # type: ignore[arg-type]
    client.engine._send_output(printed("x" * 5000))
    assert client.engine.streams.paused
    client.session.connection_made()
    client.engine.link.connection_opened(client)  # type: ignore[arg-type]
    await client.until(lambda: client.of(Output))
    await client.turns(3)
    assert not client.engine.streams.paused
    assert not client.engine.link.limiting  # nothing is left to be resumed
    await client.end()


async def test_a_client_that_does_not_want_output_gets_none() -> None:
    client = EngineClient()
    client.engine._send_output(printed("before"))
    client.send(Configure(stream_output=False), stream=0)
    await client.turns()
    client.engine._send_output(printed("after"))
    await client.turns()
    assert [line.text for output in client.of(Output) for line in output.lines] == ["before"]
    await client.end()


# --- hosts and processes


async def test_the_reason_of_a_lost_host_reaches_the_reports_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_gateway.engine.meshes.supervision.REASON_TIMEOUT", 0.0)
    client = EngineClient()
    procs = client.spawn_procs(client.attach())
    client.spawn_actors(procs)
    await client.turns()
    client.engine._process_ended(procs, 1, 11)
    await client.turns()
    client.engine.host_lost("workers-1", "OOMKilled", returns=True)
    await client.until(lambda: client.of(Fault))
    assert client.of(Fault)[0].report == "process 11 of rank 1 on workers-1 ended (workers-1: OOMKilled)"
    await client.end()


async def test_a_host_that_is_about_to_end_is_printed_once_and_explains_the_end_of_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshgate_gateway.engine.meshes.supervision.REASON_TIMEOUT", 0.0)
    client = EngineClient()
    procs = client.spawn_procs(client.attach())
    client.spawn_actors(procs)
    await client.turns()
    for _ in range(2):
        client.engine.host_ending("workers-1", "its pod is being deleted", 30.0)
    client.engine._process_ended(procs, 1, 11)
    await client.until(lambda: client.of(Fault))
    assert client.of(Fault)[0].report == "process 11 of rank 1 on workers-1 ended (workers-1: its pod is being deleted)"
    printed = [line.text for output in client.of(Output) for line in output.lines]
    assert printed == ["host workers-1 will end in 30 s: its pod is being deleted"]
    await client.end()


async def test_the_end_of_the_job_is_printed_and_that_of_hosts_that_are_attached_later() -> None:
    client = EngineClient()
    client.engine.job_ending(JobEnding(reason="its time limit", seconds=60.0, notice="Slurm ends the job"))
    client.attach()
    await client.until(lambda: client.of(HostEnding))
    assert {notice.reason for notice in client.of(HostEnding)} == {"its time limit"}
    assert [line.text for output in client.of(Output) for line in output.lines] == ["Slurm ends the job"]
    client.engine.job_ending(JobEnding())
    await client.until(lambda: len(client.of(HostsAttached)) == 2)
    assert len(client.of(Output)) == 1
    await client.end()


@pytest.mark.parametrize("target", ["procs", "actors"])
async def test_the_death_of_a_process_that_an_endpoint_returned_fails_what_its_kept_values_wait_for(
    target: str,
) -> None:
    client = EngineClient()
    procs, actors = (client.engine._objects.add_reference(object()) for _ in range(2))
    client.send(Adopt(object=procs, kind="procs", region=hosts_region(2)), stream=2**31 - procs)
    if target == "actors":
        header = Adopt(object=actors, kind="actors", name="inner", region=hosts_region(2), parent=MeshRef(object=procs))
        client.send(header, b"class", stream=2**31 - actors)
    number = actors if target == "actors" else procs
    put = PutValue(call=1, target=MeshRef(object=number), keep=client.number())
    client.send(put, b"value", stream=2**31 - number)
    await client.until(lambda: client.monarch.casts)
    assert [mesh.name for mesh in client.monarch.meshes].count("ProcessWatcher") == 1  # which reports the death
    client.engine._process_ended(procs, 1, 71)
    await client.until(lambda: client.of(Failed))
    (failed,) = client.of(Failed)
    assert (failed.call, failed.failure.kind, failed.failure.ranks) == (1, "supervision", (1,))
    await end(client)


async def test_the_death_of_a_process_that_an_endpoint_returned_fails_its_reload() -> None:
    async def hosts_have(version: str, hosts: object) -> str:
        return version

    client = EngineClient()
    client.engine._reloading._wait_for_version = hosts_have
    procs = client.engine._objects.add_reference(object())
    client.send(Adopt(object=procs, kind="procs", region=hosts_region(2)), stream=2**31 - procs)
    client.send(Reload(call=1, target=MeshRef(object=procs), version="v2", paths=()), stream=2**31 - procs)
    await client.until(lambda: client.monarch.casts)
    client.engine._process_ended(procs, 1, 71)
    await client.until(lambda: client.of(Failed))
    (failed,) = client.of(Failed)
    assert (failed.call, failed.failure.kind, failed.failure.ranks) == (1, "supervision", (1,))
    assert failed.failure.message == "process 71 of rank 1 of a mesh that an endpoint returned ended"
    await end(client)


async def test_a_restarted_host_is_usable_again_and_its_new_address_is_sent() -> None:
    client = EngineClient()
    hosts = client.attach()
    await client.turns()
    client.engine.host_lost("workers-1", "its pod was deleted", returns=True)
    client.send(Initialized(call=9, target=MeshRef(object=hosts), whole=True), stream=hosts)
    await client.turns()
    assert client.of(Done) == []
    client.engine.host_back("workers", 1, Host(name="workers-1", address="tcp://10.0.0.9:1"))
    await client.until(lambda: client.of(Done))
    assert client.of(HostsAttached)[-1].hosts[1].address == "tcp://10.0.0.9:1"
    assert client.monarch.attached[-1] == ("workers", ["tcp://10.0.0.0:1", "tcp://10.0.0.9:1"])
    await client.end()


async def test_a_host_that_does_not_accept_this_gateway_ends_the_wait_with_the_versions() -> None:
    client = EngineClient()
    client.monarch.hold = True
    hosts = client.attach()
    client.send(Initialized(call=9, target=MeshRef(object=hosts), whole=True), stream=hosts)
    procs = client.spawn_procs(hosts)
    await client.turns()
    client.engine.fault(MonarchFault("", (), RETURNED))
    await client.until(lambda: client.of(ObjectFailed))
    assert "workers-0 (tcp://10.0.0.0:1) answers, but not as the host" in client.of(Failed)[0].failure.message
    assert f"the laptop has Python {PYTHON_VERSION} and torchmonarch" in client.of(Failed)[0].failure.message
    (failed,) = client.of(ObjectFailed)
    assert (failed.object, failed.failure.message) == (procs, client.of(Failed)[0].failure.message)
    client.monarch.hold = False
    await client.end()


# --- the end


async def test_a_session_ends_when_the_client_asks_for_it() -> None:
    client = EngineClient()
    client.spawn_all()
    await client.turns()
    client.send(EndSession(call=5), stream=0)
    await client.until(client.engine.ended.is_set)
    await client.turns()
    assert [done.call for done in client.of(Done)] == [5]
    procs = next(mesh for mesh in client.monarch.meshes if mesh.name == "procs")
    assert procs.stopped == "the session ended"
