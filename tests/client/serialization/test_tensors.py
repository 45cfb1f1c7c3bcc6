"""Tensors are sent as their memory. torch is large, so a fake of the few names that matter is built on numpy."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest

from meshgate.serialization.pickling import OUT_OF_BAND_BYTES, dumps
from meshgate.serialization.tensors import reduce_tensor

fake_torch = types.ModuleType("torch")
STRIDED, SPARSE = object(), object()


class _Base:
    """The attributes that are read; slotted, so that ``Tensor.__dict__`` has users' attributes only."""

    __slots__ = ("array", "conj", "device", "is_nested", "is_quantized", "layout", "neg", "requires_grad")

    def __init__(self, array: Any, *, device: str = "cpu", **facts: Any) -> None:
        self.array = np.asarray(array)
        self.device = types.SimpleNamespace(type=device)
        self.layout = facts.pop("layout", STRIDED)
        self.conj, self.neg = facts.pop("conj", False), facts.pop("neg", False)
        self.is_nested = facts.pop("is_nested", False)
        self.is_quantized, self.requires_grad = facts.pop("is_quantized", False), facts.pop("requires_grad", False)
        self.__dict__.update(facts)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def shape(self) -> Any:
        return self.array.shape

    def is_conj(self) -> bool:
        return self.conj

    def is_neg(self) -> bool:
        return self.neg

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array))

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def untyped_storage(self) -> Any:
        memory = self.array
        while memory.base is not None and isinstance(memory.base, np.ndarray):
            memory = memory.base
        return types.SimpleNamespace(nbytes=lambda: memory.nbytes)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def reshape(self, shape: Any) -> Tensor:
        return Tensor(self.array.reshape(shape))


class Tensor(_Base):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, ("pickled by torch",)


def frombuffer(buffer: Any, *, dtype: Any) -> Tensor:
    assert not memoryview(buffer).readonly, "torch warns about this"
    return Tensor(np.frombuffer(buffer, dtype=dtype))


for each in (Tensor, frombuffer):
    each.__module__ = "torch"
    setattr(fake_torch, each.__name__, each)
fake_torch.strided = STRIDED  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch)


def send(value: Any) -> tuple[Any, int]:
    """The received value and the number of out-of-band buffers."""
    pickled = dumps(value)
    return pickle.loads(pickled.data, buffers=map(bytearray, pickled.buffers)), len(pickled.buffers)


def test_a_tensor_is_sent_as_its_memory() -> None:
    array = np.arange(30_000, dtype=np.float32).reshape(100, 300)
    got, buffers = send(Tensor(array))
    assert (type(got), buffers) == (Tensor, 1)
    np.testing.assert_array_equal(got.array, array)
    assert got.array.flags.writeable


def test_a_tensor_is_copied_at_the_time_of_the_call() -> None:
    array = np.zeros(5_000)
    pickled = dumps(Tensor(array))
    array[:] = 7
    got = pickle.loads(pickled.data, buffers=map(bytearray, pickled.buffers))
    assert got.array.max() == 0


def test_a_slice_of_a_tensor_is_sent_without_the_rest() -> None:
    array = np.arange(100_000)
    got, _ = send(Tensor(array[::10]))
    np.testing.assert_array_equal(got.array, array[::10])


def test_the_same_tensor_twice_arrives_as_one() -> None:
    tensor = Tensor(np.zeros(5_000))
    (one, two), buffers = send([tensor, tensor])
    assert one is two
    assert buffers == 1


@pytest.mark.parametrize(
    "facts",
    [
        {"requires_grad": True},
        {"device": "cuda"},
        {"layout": SPARSE},
        {"is_quantized": True},
        {"conj": True},
        {"neg": True},
        {"is_nested": True},
        {"user": "attribute"},
    ],
)
def test_any_other_tensor_is_pickled_by_torch(facts: dict[str, Any]) -> None:
    assert send(Tensor(np.zeros(5_000), **facts)) == ("pickled by torch", 0)


def test_small_tensors_are_pickled_by_torch() -> None:
    assert send(Tensor(np.zeros(OUT_OF_BAND_BYTES // 8 - 1))) == ("pickled by torch", 0)
    assert send(Tensor(np.zeros(OUT_OF_BAND_BYTES // 8)))[1] == 1


def test_a_view_that_is_larger_than_its_memory_is_pickled_by_torch() -> None:
    assert send(Tensor(np.broadcast_to(np.zeros(1), (100_000,)))) == ("pickled by torch", 0)


def test_a_tensor_without_memory_is_pickled_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Base, "data_ptr", lambda self: 0)
    assert send(Tensor(np.zeros(5_000))) == ("pickled by torch", 0)


def test_tensors_that_share_memory_arrive_apart() -> None:
    array = np.arange(100_000)
    (one, two), buffers = send([Tensor(array), Tensor(array[:50_000])])
    assert buffers == 2
    assert not np.shares_memory(one.array, two.array)


def test_without_torch_nothing_is_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert reduce_tensor(Tensor(np.zeros(5_000))) is None
