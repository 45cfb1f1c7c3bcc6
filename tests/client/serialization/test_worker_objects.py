"""RDMA buffers and the like pass through a driver, with or without torchmonarch, as they were pickled."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from meshgate.serialization.pickling import dumps
from meshgate.serialization.unpickling import ReadingRules, loads
from meshgate.serialization.worker_objects import WorkerObject, is_of_workers, worker_object_type
from tests.client.laptop import run_without

# What an actor pickles: an object made by __new__ with a state, which holds one made by calling its class.
PICKLED = (
    b"\x80\x05cmonarch._src.rdma.rdma\nRDMABuffer\n)\x81}X\x07\x00\x00\x00_buffer"
    b'cmonarch._rust_bindings.rdma\n_RdmaBuffer\nX\x09\x00\x00\x00{"size":1\x85Rsb.'
)


@pytest.mark.parametrize("rules", [ReadingRules(), ReadingRules(data_only=True)], ids=["any", "data only"])
def test_a_buffer_arrives_and_is_sent_as_it_was_pickled(rules: ReadingRules) -> None:
    buffer = loads(PICKLED, rules=rules)
    assert isinstance(buffer, WorkerObject)
    assert repr(buffer) == "<RDMABuffer, for actors>"
    again = pickle.loads(dumps_for_test(buffer))
    assert again == ("RDMABuffer", (), {"_buffer": ("_RdmaBuffer", ('{"size":1',), None)})


def dumps_for_test(value: Any) -> bytes:
    """The pickle that a worker gets, where a stand-in for Monarch's classes records how they are made."""
    code = f"""
        import json, pickle, sys, types

        def module(name):
            made = sys.modules[name] = types.ModuleType(name)
            return made

        for name in ("monarch", "monarch._src", "monarch._src.rdma", "monarch._rust_bindings"):
            module(name)

        def recording(name):
            class Recording:
                def __new__(cls, *args):
                    made = super().__new__(cls)
                    made.made = [name, args, None]
                    return made
                def __setstate__(self, state):
                    self.made[2] = {{key: tuple(value.made) for key, value in state.items()}}
            return Recording

        module("monarch._src.rdma.rdma").RDMABuffer = recording("RDMABuffer")
        module("monarch._rust_bindings.rdma")._RdmaBuffer = recording("_RdmaBuffer")
        buffer = pickle.loads({dumps(value).data!r})
        sys.stdout.buffer.write(pickle.dumps(tuple(buffer.made)))
    """
    return run_without("meshgate", code=code)


def test_it_cannot_be_used_in_the_driver() -> None:
    buffer = loads(PICKLED)
    with pytest.raises(AttributeError, match="an RDMABuffer can be used in actors only: pass it to an endpoint"):
        buffer.read_into(bytearray(1))


def test_the_driver_knows_the_size_of_a_buffer() -> None:
    buffer = loads(PICKLED.replace(b'\x09\x00\x00\x00{"size":1', b'\x0e\x00\x00\x00{"size":12345}'))
    assert buffer.size() == 12345  # type: ignore[attr-defined]


def test_only_modules_for_actors_are_kept() -> None:
    assert is_of_workers("monarch._src.rdma.rdma")
    assert is_of_workers("monarch._rust_bindings.rdma")
    assert not is_of_workers("monarch._rust_bindings.rdma_other")
    assert worker_object_type("a", "B") is worker_object_type("a", "B")
