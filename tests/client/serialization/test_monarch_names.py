"""Monarch's names have equivalents on the laptop, or raise an error that says that they have none."""

from __future__ import annotations

import pickle
from pkgutil import resolve_name
from typing import Any

import cloudpickle
import pytest
from monarch._src.actor.pickle import _load_from_bytes

from meshgate.errors import UnreadableResult
from meshgate.serialization.monarch_names import AS_DATA, LOCAL_EQUIVALENTS, PortAddress, unavailable_type
from meshgate.serialization.unpickling import loads
from tests.client.laptop import run_without


@pytest.mark.parametrize(("module", "name"), LOCAL_EQUIVALENTS)
def test_every_name_with_an_equivalent_exists_in_monarch(module: str, name: str) -> None:
    assert resolve_name(f"{module}:{name}") is not None


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
