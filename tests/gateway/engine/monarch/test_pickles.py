"""Pickles arrive at workers as their values, and replies stay unopened."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_gateway.engine.monarch import pickles
from meshgate_gateway.engine.monarch.pickles import (
    COPY_LIMIT,
    MARK,
    Forward,
    ForwardClass,
    ForwardItem,
    Large,
    OnProcess,
)
from meshgate_gateway.engine.on_worker.running_calls import MODULE


class Array:
    """Pickles its content out of band."""

    def __init__(self, content: bytearray) -> None:
        self.content = content

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return Array, (pickle.PickleBuffer(self.content),)


def cut(data: bytes, at: int) -> list[bytes]:
    return [data[:at], data[at:]]


@pytest.mark.parametrize("at", [0, 5])
def test_a_pickle_arrives_as_its_value_however_many_fragments_it_came_in(at: int) -> None:
    data = pickle.dumps({"batch": 32})
    fragments = cut(data, at) if at else [data]
    assert pickle.loads(pickle.dumps(Forward(fragments))) == {"batch": 32}


def test_out_of_band_buffers_and_objects_are_put_in_place() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(Array(bytearray(b"content")), protocol=5, buffer_callback=buffers.append)
    sent = Forward([data], [cut(bytes(buffers[0]), 3)])
    arrived = pickle.loads(pickle.dumps(sent))
    assert bytes(arrived.content) == b"content"
    assert isinstance(arrived.content, bytearray)  # users may write to what they get


def test_objects_replace_persistent_ids() -> None:
    persistent = b"\x80\x05K\x01Q."  # the object of persistent id 1
    assert pickle.loads(pickle.dumps(Forward([persistent], (), ["mesh a", "mesh b"]))) == "mesh b"


def test_code_keeps_the_name_of_its_file_with_every_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce_as_3_1_3(code: CodeType) -> tuple[Any, ...]:
        make, arguments = real(code)
        return make, tuple("<dynamic-code>" if each == code.co_filename else each for each in arguments)

    real = cloudpickle.cloudpickle._code_reduce
    monkeypatch.setattr(cloudpickle.cloudpickle, "_code_reduce", reduce_as_3_1_3)
    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, reduce_as_3_1_3)
    for module in (cloudpickle, cloudpickle.cloudpickle):
        for name in ("loads", "Pickler"):
            monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    pickles.change_cloudpickle()
    here = test_code_keeps_the_name_of_its_file_with_every_cloudpickle.__code__
    there = pickle.loads(cloudpickle.dumps(here))
    assert (there, there.co_filename) == (here, here.co_filename)


@pytest.fixture(scope="module")
def marks() -> Iterator[list[int]]:
    """The numbers with which the process's ``mark`` was called."""
    found: list[int] = []

    def mark(number: int, arguments: object = None) -> object:
        found.append(number)
        return arguments

    sys.modules[MODULE] = module = ModuleType(MODULE)
    vars(module).update(mark=mark, calls=SimpleNamespace(mark=mark))
    yield found
    del sys.modules[MODULE]


ARGUMENTS = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(value=ARGUMENTS, number=st.integers(1, 2**53), protocol=st.integers(2, 5))
def test_a_marked_pickle_has_its_value_and_says_which_call_it_is_of(
    marks: list[int], value: object, number: int, protocol: int
) -> None:
    whole = number.to_bytes(8, "little").join(MARK) + pickle.dumps((value, value), protocol)
    assert pickle.loads(whole) == (value, value)
    assert pickle._loads(whole) == (value, value)  # type: ignore[attr-defined]  # Python's own reader
    assert marks[-2:] == [number, number]


def test_arguments_with_objects_are_marked_as_a_whole(marks: list[int]) -> None:
    data = pickle.dumps(OnProcess(f"{MODULE}:calls", "mark", 5, Forward([b"\x80\x05K\x00Q."], (), ["a mesh"])))
    assert pickle.loads(data) == "a mesh"
    assert marks[-1] == 5


def test_an_item_of_a_forwarded_pair_arrives_alone() -> None:
    pair = Forward([pickle.dumps(((1, 2), {"key": 3}))])
    assert pickle.loads(pickle.dumps((ForwardItem(pair, 0), ForwardItem(pair, 1)))) == ((1, 2), {"key": 3})


def test_a_class_that_cannot_be_imported_lists_where_python_looked() -> None:
    missing = b"cno_such_module\nTrainer\n."
    with pytest.raises(
        ImportError, match=r"cannot import actor class m\.Trainer on the worker: .*[^.]\. Python .*\n  /"
    ):
        pickle.loads(pickle.dumps(ForwardClass([missing], "m.Trainer")))


def test_only_replies_are_left_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps("value")
    assert pickles._loads_or_bytes(data) == "value"
    monkeypatch.setattr(pickles._decoding, "references", 0, raising=False)
    assert pickles._loads_or_bytes(data) == (data, ())


@pytest.mark.parametrize("size", [COPY_LIMIT, COPY_LIMIT + 1])
def test_small_replies_are_copied_and_large_ones_viewed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(size)
    monkeypatch.setattr(pickles._decoding, "references", 0, raising=False)
    data, _ = pickles._loads_or_bytes(content)
    assert bytes(data) == bytes(content)
    assert isinstance(data, bytes) == (size <= COPY_LIMIT)


@pytest.fixture
def pickler() -> Callable[[object], bytes]:
    """Pickles as Monarch does, which looks cloudpickle's class up and passes it a file of its own."""

    class File(list[bytes]):
        def write(self, piece: bytes) -> None:
            assert type(piece) is bytes  # of nothing else does Monarch keep a reference instead of a copy
            self.append(piece)

    def dump(value: object) -> bytes:
        file = File()
        pickles.Pickler(file).dump(value)
        return b"".join(file)

    return dump


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 70_000]])
@pytest.mark.parametrize("load", [pickle.loads, pickle._loads])  # type: ignore[attr-defined]  # Python's own reader
def test_a_large_payload_arrives_as_a_small_one(
    sizes: list[int], load: Callable[[bytes], Any], pickler: Callable[[object], bytes], marks: list[int]
) -> None:
    out_of_band: list[pickle.PickleBuffer] = []
    sent = [Array(bytearray(b"x" * size)) for size in sizes], "text" * 20_000
    data = pickle.dumps(sent, protocol=5, buffer_callback=out_of_band.append)
    payload = Forward(cut(data, 9), [cut(bytes(buffer), 2) for buffer in out_of_band])
    whole = pickler(Large(OnProcess(f"{MODULE}:calls", "mark", 7, payload)))
    arrays, text = load(whole)
    assert [bytes(array.content) for array in arrays] == [array.content for array in sent[0]]
    assert all(type(array.content) is bytearray for array in arrays)  # users may write to what they get
    assert text == sent[1]
    assert marks[-1] == 7


def test_the_buffers_of_a_large_payload_are_written_as_they_came() -> None:
    buffer = [b"a" * 1000, b"b" * 1000]
    written: list[bytes] = []
    pickles.Pickler(SimpleNamespace(write=written.append)).dump(Large(Forward([pickle.dumps(None)], [buffer])))
    assert [piece for piece in written if any(piece is each for each in buffer)] == buffer


def test_large_payloads_can_name_objects(pickler: Callable[[object], bytes]) -> None:
    persistent = b"\x80\x05K\x01Q."  # the object of persistent id 1
    assert pickle.loads(pickler(Large(Forward([persistent], [[b"unused"]], ["mesh a", "mesh b"])))) == "mesh b"
    assert pickle.loads(pickle.dumps(Large(Forward([pickle.dumps("value")])))) == "value"  # with another pickler
