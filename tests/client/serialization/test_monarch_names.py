"""Monarch's names have equivalents on the laptop, or raise an error that says that they have none."""

from __future__ import annotations

import pickle
from pkgutil import resolve_name
from typing import Any

import cloudpickle
import pytest
from monarch._src.actor.pickle import _load_from_bytes

from meshgate.errors import UnreadableResult
from meshgate.serialization.monarch_names import (
    AS_DATA,
    LOCAL_EQUIVALENTS,
    ExceptionStandIn,
    PortAddress,
    WorkerObject,
    is_data_type,
    is_of_workers,
    stand_in_for,
    unavailable_type,
    worker_object_type,
)
from meshgate.serialization.pickling import dumps
from meshgate.serialization.unpickling import ReadingRules, loads
from meshgate_gateway.engine.on_worker import kept_references
from tests.client.laptop import run_without

# What an actor pickles: an object made by __new__ with a state, which holds one made by calling its class.
PICKLED = (
    b"\x80\x05cmonarch._src.rdma.rdma\nRDMABuffer\n)\x81}X\x07\x00\x00\x00_buffer"
    b'cmonarch._rust_bindings.rdma\n_RdmaBuffer\nX\x09\x00\x00\x00{"size":1\x85Rsb.'
)


@pytest.mark.parametrize(("module", "name"), LOCAL_EQUIVALENTS)
def test_every_name_with_an_equivalent_exists_on_workers(module: str, name: str) -> None:
    source = kept_references.__name__ if module == kept_references.MODULE else module  # which is made on the worker
    assert resolve_name(f"{source}:{name}") is not None


def test_a_port_that_accepts_one_message_is_marked() -> None:
    native = "monarch._rust_bindings.monarch_hyperactor.mailbox"
    assert LOCAL_EQUIVALENTS[native, "PortRef"]("tcp:1") == PortAddress("tcp:1")
    assert LOCAL_EQUIVALENTS[native, "OncePortRef"]("tcp:1") == PortAddress("tcp:1", once=True)


def test_a_name_without_an_equivalent_can_be_referred_to_but_not_instantiated() -> None:
    kind = unavailable_type("monarch.tools", "Outer.Inner")
    assert (kind.__module__, kind.__name__, kind.__qualname__) == ("monarch.tools", "Inner", "Outer.Inner")
    assert unavailable_type("monarch.tools", "Outer.Inner") is kind
    with pytest.raises(
        UnreadableResult, match=r"contains a monarch\.tools\.Outer\.Inner, which exists on workers only"
    ) as error:
        kind()
    assert error.value.module == "monarch.tools"


def test_a_missing_monarch_name_is_reported_when_it_is_instantiated() -> None:
    data = pickle.dumps({"class": _load_from_bytes}).replace(b"_load_from_bytes", b"_no_such_name_in")
    kind = loads(data)["class"]
    assert (kind.__module__, kind.__name__) == ("monarch._src.actor.pickle", "_no_such_name_in")


def test_a_tensor_on_a_laptop_without_torch_names_torch() -> None:
    class Storage:
        def __reduce__(self) -> Any:
            return _load_from_bytes, (b"memory",)

    output = run_without(
        "torch",
        "monarch",
        code="""
        from meshgate.errors import UnreadableResult
        from meshgate.serialization.unpickling import loads
        try: loads(sys.stdin.buffer.read())
        except UnreadableResult as error: print(error.module, "|", error)
        """,
        stdin=cloudpickle.dumps([Storage()]),
    )
    assert output.startswith(b"torch | the result contains a tensor, and this machine cannot import torch (")


def test_no_equivalent_can_be_changed_to_call_another_function() -> None:
    """``functools.partial`` has a ``__setstate__`` that a pickle can call."""
    assert not any(hasattr(each, "func") for each in (LOCAL_EQUIVALENTS | AS_DATA).values())


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


def test_a_stand_in_has_the_name_of_the_class() -> None:
    kind = stand_in_for("cuda_errors", "Outer.CudaError")
    assert issubclass(kind, ExceptionStandIn)
    assert (kind.__module__, kind.__qualname__, kind.__name__) == ("cuda_errors", "Outer.CudaError", "CudaError")
    assert stand_in_for("cuda_errors", "Outer.CudaError") is kind
    assert stand_in_for("other_errors", "Outer.CudaError") is not kind


@pytest.mark.parametrize("kind", [ExceptionStandIn, stand_in_for("cuda_errors", "CudaError")])
def test_a_stand_in_survives_pickling(kind: type[ExceptionStandIn]) -> None:
    error = kind("out of memory", 3)
    error.device = 1  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, vars(copy)) == (kind, ("out of memory", 3), {"device": 1})


@pytest.mark.parametrize(
    ("state", "attributes"),
    [
        ({"a": 1}, {"a": 1}),
        (({"a": 1}, {"slot": 2}), {"a": 1, "slot": 2}),
        ((None, {"slot": 2}), {"slot": 2}),
        ({5: "key that is not a string"}, {"5": "key that is not a string"}),
        ("text", {}),
        ((1, 2, 3), {}),
    ],
)
def test_a_stand_in_accepts_any_state(state: object, attributes: dict[str, object]) -> None:
    error = ExceptionStandIn()
    error.__setstate__(state)
    assert vars(error) == attributes


def test_a_stand_in_for_a_class_makes_instances() -> None:
    assert stand_in_for("m", "Meta")("name")("argument").args == ("argument",)


def test_a_stand_in_for_a_container_keeps_its_items() -> None:
    error = ExceptionStandIn()
    error["key"] = "value"
    error.append(1)
    error.extend([2, 3])
    assert vars(error) == {"items": {"key": "value"}, "elements": [1, 2, 3]}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "set"),
        ("builtins", "ValueError"),
        ("collections", "OrderedDict"),
        ("datetime", "timedelta"),
        ("numpy", "dtype"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("torch._utils", "_rebuild_tensor_v2"),
    ],
)
def test_types_that_hold_data_are_accepted(module: str, name: str) -> None:
    assert is_data_type(module, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("builtins", "open"),
        ("builtins", "type"),
        ("builtins", "KeyboardInterrupt"),  # raised at get(), it would end the program
        ("builtins", "set.add"),
        ("collections", "abc"),
        ("numpy", "load"),
        ("os", "system"),
        ("torch", "load"),
        ("no.such.module", "Name"),
    ],
)
def test_other_names_are_not(module: str, name: str) -> None:
    assert not is_data_type(module, name)
