from __future__ import annotations

import pytest

import meshgate as kt
from meshgate.session.detached.takeover import Takeover, current_tag
from meshgate.session.objects import ObjectTable
from meshgate_wire.messages import (
    Argument,
    Attached,
    AttachHosts,
    KeptCall,
    KeptCalls,
    MeshRef,
    OpenChannel,
    SpawnActors,
    SpawnProcs,
    Stop,
)


def test_objects_are_known_at_once_and_numbers_continue() -> None:
    objects = ObjectTable()
    takeover = Takeover(objects, {"workers": 2})
    takeover.add(AttachHosts(object=1, mesh="workers"))
    takeover.add(SpawnProcs(object=2, hosts=MeshRef(object=1), per_host={"gpus": 2}, name="procs"))
    port = Argument(kind="port", ref=MeshRef(object=3))
    takeover.add(OpenChannel(object=3, name="numbers"))
    takeover.add(
        SpawnActors(object=4, procs=MeshRef(object=2), name="actors", class_name="a.B", kind="sync", arguments=(port,))
    )
    hosts = objects.get(1)
    assert hosts is not None
    assert hosts.expected_hosts == 2
    assert objects.derives_from(4, 1)
    assert objects.derives_from(4, 3)
    takeover.add(Stop(call=9, target=MeshRef(object=2), reason="enough"))
    takeover.add(Stop(call=9, target=MeshRef(object=77)))
    assert objects.failure_of(4) is not None
    assert objects.failure_of(1) is None
    takeover.add(
        KeptCalls(calls=(KeptCall(call=1, target=MeshRef(object=4), endpoint="e", adverb="call", age=1, state="read"),))
    )
    assert not takeover.complete.done()
    takeover.add(Attached(name="train", takeovers=1, next_object=10, next_call=20))
    assert takeover.complete.get(0).next_call == 20
    assert objects.create("port", "", "step").number == 10
    assert [header.object for header in takeover.created] == [1, 2, 3, 4]
    assert [call.call for call in takeover.calls] == [1]


def test_the_innermost_block_counts() -> None:
    assert current_tag() == ""
    with kt.tag("outer"):
        with kt.tag("inner"):
            assert current_tag() == "inner"
        assert current_tag() == "outer"
    assert current_tag() == ""


@pytest.mark.parametrize(
    ("text", "error"), [(1, TypeError), ("", ValueError), ("x" * 257, ValueError), ("\udcff", ValueError)]
)
def test_an_invalid_tag_is_refused_before_the_block(text: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="a tag must be"), kt.tag(text):  # type: ignore[arg-type]
        raise AssertionError("the block ran")
