"""Tensors travel as their memory. torch is large, so its few names that matter here are played by numpy."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest

from meshgate.pickling import OUT_OF_BAND, dumps
from meshgate.tensors import reduce_tensor

played = types.ModuleType("torch")
STRIDED, SPARSE = object(), object()


class _Base:
    """As much of a tensor as is asked about; slotted, so that ``Tensor.__dict__`` holds only what users set."""

    __slots__ = ("array", "conj", "device", "is_quantized", "layout", "neg", "requires_grad")

    def __init__(self, array: Any, *, device: str = "cpu", **facts: Any) -> None:
        self.array = np.asarray(array)
        self.device = types.SimpleNamespace(type=device)
        self.layout = facts.pop("layout", STRIDED)
        self.conj, self.neg = facts.pop("conj", False), facts.pop("neg", False)
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

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def reshape(self, shape: Any) -> Tensor:
        return Tensor(self.array.reshape(shape))


class Tensor(_Base):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, ("torch's own way",)


def frombuffer(buffer: Any, *, dtype: Any) -> Tensor:
    assert not memoryview(buffer).readonly, "torch warns about this"
    return Tensor(np.frombuffer(buffer, dtype=dtype))


for each in (Tensor, frombuffer):
    each.__module__ = "torch"
    setattr(played, each.__name__, each)
played.strided = STRIDED  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", played)


def sent(value: Any) -> tuple[Any, int]:
    """What arrives, and how many buffers travelled beside the pickle."""
    pickled = dumps(value)
    return pickle.loads(pickled.data, buffers=map(bytearray, pickled.buffers)), len(pickled.buffers)


def test_a_tensor_travels_as_its_memory() -> None:
    array = np.arange(30_000, dtype=np.float32).reshape(100, 300)
    got, buffers = sent(Tensor(array))
    assert (type(got), buffers) == (Tensor, 1)
    np.testing.assert_array_equal(got.array, array)
    assert got.array.flags.writeable


def test_a_tensor_is_sent_as_it_was_at_the_call() -> None:
    array = np.zeros(5_000)
    pickled = dumps(Tensor(array))
    array[:] = 7
    got = pickle.loads(pickled.data, buffers=map(bytearray, pickled.buffers))
    assert got.array.max() == 0


def test_a_part_of_a_tensor_takes_only_its_own_memory_along() -> None:
    array = np.arange(100_000)
    got, _ = sent(Tensor(array[::10]))
    np.testing.assert_array_equal(got.array, array[::10])


def test_the_same_tensor_twice_arrives_as_one() -> None:
    tensor = Tensor(np.zeros(5_000))
    (one, two), buffers = sent([tensor, tensor])
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
        {"user": "attribute"},
    ],
)
def test_any_other_tensor_travels_as_torch_has_it(facts: dict[str, Any]) -> None:
    assert sent(Tensor(np.zeros(5_000), **facts)) == ("torch's own way", 0)


def test_small_tensors_travel_as_torch_has_it() -> None:
    assert sent(Tensor(np.zeros(OUT_OF_BAND // 8 - 1))) == ("torch's own way", 0)
    assert sent(Tensor(np.zeros(OUT_OF_BAND // 8)))[1] == 1


def test_without_torch_nothing_is_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert reduce_tensor(Tensor(np.zeros(5_000))) is None
