"""The store of a process's kept values, outside of a worker."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshgate_gateway.engine.on_worker import kept_values
from meshgate_gateway.engine.on_worker.kept_values import (
    KeptStore,
    describe,
    kept_limit,
    port_of_call,
    require_frame,
)
from meshgate_gateway.engine.on_worker.large_messages import call_in

CALL = "makers.make.keep()"


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The rank of the message at hand."""
    message = SimpleNamespace(rank=2)
    monarch: Any = pytest.importorskip("monarch.actor")
    monkeypatch.setattr(monarch, "context", lambda: SimpleNamespace(message_rank=message))
    return message


def test_the_result_of_a_call_that_keeps_stays_and_its_port_gets_a_description(rank: SimpleNamespace) -> None:
    store, value = KeptStore(None), b"x" * 100
    response_port, other = object(), object()
    assert store.keep("arguments", 7, CALL) == "arguments"
    assert store.result(other, value) is value
    description = store.result(response_port, value)
    assert description == {"type": "bytes", "nbytes": sys.getsizeof(value), "dtype": "", "shape": None}
    assert store.result(response_port, value) is value  # what else is sent to it
    kept = store.find(7, 2)
    assert kept is not None
    assert kept.value is value
    assert store.find(7, 1) is None


def test_a_call_that_raises_keeps_nothing(rank: SimpleNamespace) -> None:
    store = KeptStore(None)
    response_port = object()
    store.keep((), 7, CALL)
    store.failed(response_port)
    assert store.result(response_port, "later") == "later"


def test_a_release_whose_call_has_no_port_to_be_seen_is_named() -> None:
    frame: Any = SimpleNamespace(f_locals={}, f_back=None)
    with pytest.raises(RuntimeError, match="does not show where a result goes"):
        port_of_call(frame)
    deep: Any = SimpleNamespace(f_locals={"response_port": 1}, f_back=None)
    for _ in range(3):
        deep = SimpleNamespace(f_locals={}, f_back=deep)
    assert port_of_call(deep) == 1


def test_a_full_process_refuses_the_next_value_and_says_who_keeps_what() -> None:
    store = KeptStore(10_000_000)
    for position in range(2):
        store.add(1, position, CALL, np.zeros(3_000_000, dtype="uint8"))
    store.add(2, 0, "procs.put()", np.zeros(1_000_000, dtype="uint8"))
    with pytest.raises(MemoryError) as refused:
        store.add(3, 0, CALL, np.zeros(4_000_000, dtype="uint8"))
    text = str(refused.value)
    assert "the result has 4.0 MB, but this process already keeps 7.0 MB of the 10.0 MB" in text
    assert "(makers.make.keep() 6.0 MB, procs.put() 1.0 MB)" in text
    assert ".release()" in text
    assert "MESHGATE_KEPT_MEMORY" in text
    store.drop([1], late=False)
    store.add(3, 0, CALL, np.zeros(4_000_000, dtype="uint8"))
    assert store.statistics() == {"values": 2, "nbytes": 5_000_000, "deliveries": 0}


def test_a_message_that_keeps_makes_room_first() -> None:
    store = KeptStore(3000)
    store.add(1, 0, CALL, b"x" * 2000)
    assert store.make_room("arguments", [1]) == "arguments"
    store.add(2, 0, CALL, b"x" * 2000)
    assert store.find(1, 0) is None


def test_what_is_kept_after_its_object_was_dropped_is_forgotten() -> None:
    store = KeptStore(None)
    store.add(1, 0, CALL, "early")
    store.drop([1, 2], late=True)
    store.add(1, 1, CALL, "late")
    store.add(2, 0, CALL, "late")
    store.drop([3], late=False)
    store.add(3, 0, CALL, "kept")
    assert store.statistics()["values"] == 1


def test_a_delivered_value_is_taken_once() -> None:
    store = KeptStore(None)
    store.expect(5, 1)
    store.deliver(5, {0: "first", 2: "second"})
    store.expect(6, 1)
    store.deliver(6, {0: "other call"})
    assert (store.take(5, 2), store.take(5, 0)) == ("second", "first")
    assert store.statistics()["deliveries"] == 1
    store.forget(6)
    store.forget(6)
    with pytest.raises(KeyError):
        store.take(6, 0)


def test_values_that_arrive_for_a_forgotten_call_are_dropped() -> None:
    store = KeptStore(None)
    for delivery, target in ((5, 1), (6, 2), (7, 3)):
        store.expect(delivery, target)
    store.forget(5)
    store.forget_calls_of([2])
    for delivery in (5, 6, 7):
        store.deliver(delivery, {0: "value"})
    assert store.statistics()["deliveries"] == 1
    assert store.take(7, 0) == "value"


def test_replies_are_recognized_as_far_from_their_handler_as_without_kept_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor_mesh: Any = pytest.importorskip("monarch._src.actor.actor_mesh")
    found: list[Any] = []

    class Port:
        def send(self, value: Any) -> None:
            found.append(call_in(sys._getframe(1)))

        _pending_result = exception = send

    def handler(port: Any, correlation_id: int) -> None:
        def endpoint() -> None:
            helper(lambda: port.send(b"large"))

        def helper(reply: Any) -> None:
            reply()

        endpoint()

    monkeypatch.setattr(actor_mesh, "Port", Port)
    handler(Port(), 1)
    kept_values.keep_results(KeptStore(None))
    handler(Port(), 2)
    assert [each["correlation_id"] for each in found] == [1, 2]


def test_arrays_are_described_by_type_and_shape() -> None:
    assert describe(np.zeros((3, 4), dtype="float32")) == {
        "type": "numpy.ndarray",
        "nbytes": 48,
        "dtype": "float32",
        "shape": (3, 4),
    }

    class Holder:
        def __init__(self) -> None:
            self.parts = {"a": [np.zeros(1000), np.zeros(1000)]}

    assert 16_000 < describe(Holder())["nbytes"] < 17_000
    numbers = [[0.5] * 1000 for _ in range(100)]
    assert 100 * 1000 * 8 < describe(numbers)["nbytes"] < 100 * 1000 * 40

    class Odd:
        @property
        def shape(self) -> tuple[int, ...]:
            raise ValueError("no shape")

    assert describe(Odd())["shape"] is None


class Tensor:
    """As torch's."""

    dtype = "torch.uint8"

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes, self.shape, self.device = nbytes, (nbytes,), SimpleNamespace(type=device)


def test_tensors_of_a_gpu_take_no_memory_of_the_host() -> None:
    store = KeptStore(1000)
    description = store.add(1, 0, CALL, Tensor(40_000, "cuda"))
    assert (description["nbytes"], description["dtype"], description["shape"]) == (40_000, "torch.uint8", (40_000,))
    nested = [Tensor(40_000, "cuda")]
    assert store.add(2, 0, CALL, nested)["nbytes"] == sys.getsizeof(nested) + 40_000
    for value in (Tensor(1000, "cpu"), {"gpu": Tensor(40_000, "cuda"), "host": Tensor(1000, "cpu")}):
        with pytest.raises(MemoryError, match=r"the result has 0\.0 MB, but this process already keeps 0\.0 MB of"):
            store.add(3, 0, CALL, value)


def test_a_value_that_no_message_may_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pickles: list[int] = []  # the sizes of those to come
    monkeypatch.setattr(kept_values, "pickled", lambda value: SimpleNamespace(buffer=lambda: bytes(pickles.pop())))
    array = np.zeros(100, dtype="uint8")
    require_frame(array, 100, 101)
    with pytest.raises(RuntimeError, match=r"smaller than Monarch's codec_max_frame_length, 0\.0 MB: keep"):
        require_frame(array, 100, 100)
    pickles += [100, 99]
    require_frame([0.5], 400, 100)  # takes more memory than its pickle
    with pytest.raises(RuntimeError, match="the value has"):
        require_frame([0.5], 400, 100)
    assert not pickles


def test_the_limit_is_the_setting_or_a_part_of_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_KEPT_MEMORY", "1234")
    assert kept_limit(4) == 1234
    monkeypatch.delenv("MESHGATE_KEPT_MEMORY")
    monkeypatch.setattr(kept_values, "memory_limit", lambda: 8000)
    assert (kept_limit(1), kept_limit(4)) == (4000, 1000)


def test_a_process_has_one_store_however_many_actors_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[KeptStore] = []
    monkeypatch.setattr(kept_values, "keep_results", patched.append)
    monkeypatch.setattr(kept_values, "MODULE", "_meshgate_kept_for_a_test")
    try:
        store = kept_values.process_store(1, KeptStore)
        assert kept_values.process_store(1, KeptStore) is store
        assert sys.modules["_meshgate_kept_for_a_test"].store is store
    finally:
        del sys.modules["_meshgate_kept_for_a_test"]
    assert patched == [store]


def test_threads_keep_and_drop_at_the_same_time() -> None:
    store = KeptStore(None)

    def work(first: int) -> None:
        for number in range(first, first + 200):
            store.add(number, 0, CALL, b"x")
            store.statistics()
            store.drop([number], late=False)

    threads = [threading.Thread(target=work, args=(1000 * each,)) for each in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.statistics() == {"values": 0, "nbytes": 0, "deliveries": 0}
