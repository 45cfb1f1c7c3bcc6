"""``take_over`` on what a gateway may send. What an engine sends is tested end to end."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.errors import InvalidRequestError
from meshgate.proxies.attached import take_over
from meshgate.session.detached import Takeover
from meshgate.session.objects import ObjectTable
from meshgate.session.pending_calls import PendingCalls
from meshgate_wire.messages import (
    Attached,
    AttachHosts,
    Failure,
    KeptCall,
    KeptCalls,
    MeshRef,
    NameKept,
    OpenChannel,
    ReadKept,
    Region,
    SpawnActors,
    SpawnProcs,
)

FIRST_HOST = Region(labels=("hosts",), offset=0, sizes=(1,), strides=(1,))
ALL = Region(labels=("hosts", "gpus"), offset=0, sizes=(2, 2), strides=(2, 1))


class Client:
    """The parts of a client that a takeover uses."""

    def __init__(self) -> None:
        self.objects, self.calls = ObjectTable(), PendingCalls()
        self.takeover = Takeover(self.objects, {"workers": 2})
        self.session_id, self.detached = "ab" * 16, ""
        self.code_version: str | None = None
        self.code_paths: tuple[str, ...] = ()
        self.restored: dict[int, Any] = {}
        self.inboxes: list[tuple[int, str]] = []
        self.replayed: bool | None = None
        self.requested: list[ReadKept] = []
        self.released: list[int] = []
        self.named_values: dict[int, object] = {}

    def restore_call(self, number: int, call: Any) -> None:
        self.restored[number] = call

    def request(self, call: Any, make_header: Any, *, stream: int) -> None:
        self.requested.append(make_header(99))

    def open_inbox(self, number: int, name: str) -> None:
        self.inboxes.append((number, name))

    def resume_output(self, *, replay: bool) -> None:
        self.replayed = replay

    def release(self, number: int, *, at_once: bool) -> None:
        assert at_once
        self.released.append(number)

    def unreference(self, number: int) -> None: ...


def kept(number: int, target: MeshRef, adverb: Any = "call", **options: Any) -> KeptCall:
    options = {"state": "finished", **options}
    return KeptCall(call=number, target=target, endpoint="step", adverb=adverb, age=1.0, **options)


@pytest.fixture
def client() -> Client:
    client = Client()
    add = client.takeover.add
    add(AttachHosts(object=1, mesh="workers"))
    procs_ref = MeshRef(object=1)
    add(SpawnProcs(object=2, hosts=procs_ref, per_host={"gpus": 2}, name="procs"))
    add(SpawnProcs(object=3, hosts=MeshRef(object=1, region=FIRST_HOST), per_host={}, name="procs"))
    for number, procs in ((4, 2), (5, 3), (6, 99)):
        add(SpawnActors(object=number, procs=MeshRef(object=procs), name="actors", class_name="a.B", kind="sync"))
    add(OpenChannel(object=7, name="numbers"))
    add(OpenChannel(object=8))
    for number, name in ((32, "batch"), (31, "failed"), (30, "batch")):  # newest first
        add(NameKept(kept=number, name=name, label="actors.step.keep()", procs=2, region=ALL))
    client.objects.fail(31, Failure(kind="actor", message="it raised"))
    client.objects.fail(5, Failure(kind="actor", message="its constructor raised"))
    actors = MeshRef(object=4)
    calls = (
        kept(1, actors, tag="step-1"),
        kept(2, actors, "stream", state="in flight"),
        kept(3, actors, "choose", state="lost", reason="too large"),
        kept(4, MeshRef(object=6)),
    )
    add(KeptCalls(calls=calls))
    add(Attached(name="train", takeovers=2, next_object=9, next_call=5, code_version="abc", code_paths=("src",)))
    return client


def test_meshes_have_their_shapes_and_failed_ones_are_left_out(client: Client) -> None:
    session = take_over(client, replay=True, timeout=0)  # type: ignore[arg-type]
    assert len(session.hosts["workers"]) == 2
    assert len(session["actors"]) == 4
    assert session["actors"] is session.actors["actors"]
    assert {name: len(mesh) for name, mesh in session.procs.items()} == {"procs": 1, "procs#2": 4}
    assert [*session.actors] == ["actors"]
    with pytest.raises(KeyError, match="no mesh 'other'; its meshes are: actors, procs, procs#2, workers"):
        session["other"]
    assert client.replayed is True
    assert (client.code_version, client.code_paths, client.detached) == ("abc", ("src",), "train")
    assert client.inboxes == [(7, "numbers"), (8, "")]
    assert [*session.channels] == ["numbers", "#8"]
    assert client.calls.next_number() == 5


def test_named_values_have_their_shapes_and_those_of_failed_calls_are_left_out(client: Client) -> None:
    session = take_over(client, replay=False, timeout=0)  # type: ignore[arg-type]
    assert {name: (len(kept), kept._remote.number) for name, kept in session.kept.items()} == {
        "batch": (4, 32),
        "batch#30": (4, 30),
    }
    assert [(header.target.object, header.describe) for header in client.requested] == [(32, True), (30, True)]
    assert repr(session.kept["batch"]) == "<KeptMesh actors.step.keep(): {hosts: 2, gpus: 2}, not there yet>"


def test_values_that_are_released_under_one_name_are_released_under_the_others(client: Client) -> None:
    client.takeover.add(NameKept(kept=32, name="part", label="actors.step.keep()", procs=2, region=FIRST_HOST))
    session = take_over(client, replay=False, timeout=0)  # type: ignore[arg-type]
    session.kept["batch"].release()
    session.kept["part"].release()
    assert client.released == [32]
    for name in ("batch", "part"):
        with pytest.raises(InvalidRequestError, match=r"were released with release\(\)"):
            session.kept[name].get(0)
    assert not session.kept["batch#30"]._remote.released


def test_calls_have_futures_and_lost_ones_an_error(client: Client) -> None:
    session = take_over(client, replay=False, timeout=0)  # type: ignore[arg-type]
    finished, stream, lost = session.calls  # the mesh of the fourth is unknown here
    assert (finished.endpoint, finished.tag, finished.state) == ("actors.step", "step-1", "finished")
    assert session.tagged("step-1") == [finished]
    assert len(stream.futures) == 4
    with pytest.raises(ValueError, match="4 futures"):
        _ = stream.future
    with pytest.raises(InvalidRequestError, match=r"the result of actors\.step is lost: too large"):
        lost.future.get()
    assert sorted(client.restored) == [1, 2]
    assert repr(finished) == f"<call actors.step: finished, {finished.age:.0f} s old at the attach, tag 'step-1'>"
    assert repr(lost) == f"<call actors.step: lost, {lost.age:.0f} s old at the attach>"
    assert repr(session) == "<session 'train': actors ['actors'], calls: 1 finished, 1 in flight, 1 lost>"
