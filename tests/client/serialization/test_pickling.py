"""Pickled values arrive unchanged in a process that has torchmonarch but not meshgate."""

from __future__ import annotations

import functools
import gc
import json
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle as by_value
import monarch.actor
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.actors import api, standins
from meshgate.actors.actor_class import endpoints_of
from meshgate.errors import ActorError, ClassNotImportable, UnpicklableArgument
from meshgate.serialization import pickling
from meshgate.serialization.pickling import (
    OUT_OF_BAND_BYTES,
    Pickled,
    dump_class,
    dumps,
    dumps_call,
    pickled_by_value,
    reduce_tensor,
)
from meshgate.shapes.ndslice import Slice
from meshgate.shapes.shape import Extent, Point, Region, Shape
from meshgate.shapes.value_mesh import ValueMesh
from meshgate_wire.messages import Argument, MeshRef
from tests.client.laptop import run_without


class Proxy:
    """A fake mesh proxy, which must not be pickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise AssertionError("a proxy was pickled")


def resolve(obj: object) -> Argument | None:
    return Argument(kind="actors", ref=MeshRef(object=obj.number)) if isinstance(obj, Proxy) else None


class EngineUnpickler(pickle.Unpickler):
    """Reads a pickle with its buffers and objects, as the engine does."""

    def __init__(self, pickled: Pickled) -> None:
        import io

        super().__init__(io.BytesIO(pickled.data), buffers=[bytearray(buffer) for buffer in pickled.buffers])
        self._objects = [f"object {argument.ref.object}" for argument in pickled.arguments]

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid]


def received(pickled: Pickled) -> Any:
    return EngineUnpickler(pickled).load()


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.lists(plain_values, max_size=3), st.dictionaries(st.text(), plain_values, max_size=3))
def test_arguments_arrive_unchanged(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert received(dumps_call(tuple(args), kwargs, resolve)) == (tuple(args), kwargs)


# --- buffers


@given(st.lists(st.integers(0, 3 * OUT_OF_BAND_BYTES), max_size=4))
def test_large_arrays_are_sent_out_of_band(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
    pickled = dumps(arrays)
    assert [len(buffer) for buffer in pickled.buffers] == [size for size in sizes if size >= OUT_OF_BAND_BYTES]
    assert len(pickled.data) < 1000 + sum(size for size in sizes if size < OUT_OF_BAND_BYTES)
    for sent, got in zip(arrays, received(pickled), strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.flags.writeable


def test_of_many_arrays_only_the_large_ones_are_all_sent_out_of_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "MANY_BUFFERS", 3)
    arrays = [np.full(size, at, dtype=np.uint8) for at, size in enumerate([5000] * 5 + [1 << 20, 5000])]
    pickled = dumps(arrays)
    assert [len(buffer) for buffer in pickled.buffers] == [5000] * 3 + [1 << 20]
    for sent, got in zip(arrays, received(pickled), strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.flags.writeable


def test_an_array_is_copied_at_the_time_of_the_call() -> None:
    array = np.zeros(10_000)
    pickled = dumps(array)
    array[:] = 7
    assert received(pickled).max() == 0


def test_a_read_only_view_of_mutable_memory_is_copied() -> None:
    array = np.zeros(10_000)
    view = array.view()
    view.flags.writeable = False
    pickled = dumps(view)
    array[:] = 7
    assert received(pickled).max() == 0


class Blob:
    def __init__(self, memory: bytes) -> None:
        self.memory = memory

    def __reduce__(self) -> Any:
        return Blob, (pickle.PickleBuffer(self.memory),)


def test_immutable_memory_is_not_copied() -> None:
    memory = bytes(100_000)
    (buffer,) = dumps(Blob(memory)).buffers
    assert isinstance(buffer, memoryview)
    assert buffer.obj is memory


def test_arrays_of_any_layout_arrive_unchanged() -> None:
    square = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    arrays = [
        square.T,
        square[::2, ::3],
        np.asfortranarray(square),
        np.empty((0, 5)),
        np.array(["a", None], dtype=object),
    ]
    for sent, got in zip(arrays, received(dumps(arrays)), strict=True):
        np.testing.assert_array_equal(got, sent)
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)


# --- proxies and ports


def test_each_proxy_becomes_one_reference() -> None:
    one, two = Proxy(1), Proxy(2)
    pickled = dumps_call((one, [two, {"again": one}]), {"also": two}, resolve)
    assert [argument.ref.object for argument in pickled.arguments] == [1, 2]
    assert received(pickled) == (("object 1", ["object 2", {"again": "object 1"}]), {"also": "object 2"})


def test_a_proxy_inside_an_object_or_a_function_becomes_a_reference() -> None:
    proxy = Proxy(3)
    holder = types.SimpleNamespace(mesh=proxy, data=np.zeros(5_000))
    pickled = dumps([holder, lambda: proxy], resolve)
    namespace, function = received(pickled)
    assert (namespace.mesh, function()) == ("object 3", "object 3")
    assert len(pickled.arguments) == len(pickled.buffers) == 1


def test_resolve_is_not_called_with_numbers() -> None:
    resolved: list[object] = []
    value = {"numbers": list(range(1000)), "object": types.SimpleNamespace()}
    assert received(dumps(value, resolved.append))["numbers"] == value["numbers"]
    assert resolved == [value["object"]]


# --- meshgate's classes arrive as Monarch's


SHAPE = Extent(["hosts", "gpus"], [2, 3]).region.as_shape()

OURS = {
    "ValueMesh": ValueMesh(SHAPE, list("abcdef")),
    "Point": Point(4, SHAPE.extent),
    "Extent": SHAPE.extent,
    "Shape": SHAPE,
    "Region": SHAPE.region,
    "Slice": SHAPE.ndslice,
}


def on_worker(pickled: Pickled, expression: str) -> Any:
    """Evaluates ``expression`` with the unpickled ``value`` in a process with torchmonarch and without meshgate."""
    output = run_without(
        "meshgate",
        "meshgate_wire",
        code=f"""
        import json, pickle
        value = pickle.loads(sys.stdin.buffer.read())
        print(json.dumps({expression}))
        """,
        stdin=pickled.data,
    )
    return json.loads(output)


def test_shapes_and_value_meshes_arrive_as_monarchs() -> None:
    expression = "{name: [type(each).__module__, type(each).__name__, repr(each)] for name, each in value.items()}"
    facts = on_worker(dumps(OURS), expression)
    for name, (module, kind, text) in facts.items():
        assert module.startswith("monarch."), name
        assert kind == name
        if name != "Region":
            assert text == repr(OURS[name])


def test_the_classes_themselves_arrive_as_monarchs() -> None:
    names = ["Actor", "endpoint", "ValueMesh", "Point", "Extent", "current_rank", "as_endpoint", "ActorError"]
    sources = {"ActorError": ActorError, "ValueMesh": ValueMesh, "Point": Point, "Extent": Extent}
    sent = [sources.get(name) or getattr(api, name) for name in names]
    sent += [standins.Actor, standins.endpoint, standins.current_rank, standins.EndpointProperty]
    got = pickle.loads(dumps(sent).data)
    assert got[: len(names)] == [getattr(monarch.actor, name) for name in names]
    assert [each.__name__ for each in got[len(names) :]] == ["Actor", "endpoint", "current_rank", "EndpointProperty"]
    assert all(each.__module__.startswith("monarch.") for each in got)


def test_an_actor_error_as_an_argument_arrives_as_monarchs() -> None:
    error = ActorError(ValueError("x"), "Actor call t.f failed.")
    got = pickle.loads(dumps(error).data)
    assert type(got) is monarch.actor.ActorError
    assert (got.message, got.exception_formatted) == (error.message, error.exception_formatted)


# --- classes


def stand_in_actor() -> type:
    class Counter(standins.Actor):
        start = 5

        def __init__(self, by: int) -> None:
            self.by = by

        @standins.endpoint
        def add(self, n: int) -> dict[str, Any]:
            return {"sum": n + self.by + self.start, "rank": standins.current_rank().rank, "name": Counter.__name__}

        @standins.endpoint(explicit_response_port=True, instrument=False)
        def reply(self, port: Any) -> None:
            port.send("reply")

    return Counter


def stand_in_concurrent() -> type:
    class Concurrent(standins.Actor):
        @standins.concurrent_endpoint
        async def one(self, n: int) -> int:
            return n + 1

    return Concurrent


ENDPOINTS = "{name: [found._explicit_response_port, found._instrument] for name, found in vars(value).items() "

ENDPOINTS += "if type(found).__module__.startswith('monarch.')}"


def test_a_stand_in_class_arrives_as_a_monarch_actor() -> None:
    mro = "[base.__module__ for base in value.__mro__[1:2]]"
    counter = Pickled(dump_class(stand_in_actor(), by_value=True))
    assert on_worker(counter, mro) == ["monarch._src.actor.actor_mesh"]
    assert on_worker(counter, ENDPOINTS) == {"add": [False, True], "reply": [True, False]}
    concurrent = Pickled(dump_class(stand_in_concurrent(), by_value=True))
    assert on_worker(concurrent, ENDPOINTS) == {"one": [True, False]}


def test_a_stand_in_actor_runs_on_a_worker_that_has_only_torchmonarch() -> None:
    classes = pickle.dumps([dump_class(make(), by_value=True) for make in (stand_in_actor, stand_in_concurrent)])
    output = run_without(
        "meshgate",
        "meshgate_wire",
        code="""
        import json, pickle
        from monarch.actor import this_proc, shutdown_context
        one, two = map(pickle.loads, pickle.loads(sys.stdin.buffer.read()))
        counters = this_proc().spawn("counters", one, 1)
        results = [counters.add.call_one(2).get(), counters.reply.call_one().get()]
        results.append(this_proc().spawn("concurrent", two).one.call_one(1).get())
        shutdown_context().get()
        print(json.dumps(results))
        """,
        stdin=classes,
    )
    assert json.loads(output.splitlines()[-1]) == [{"sum": 8, "rank": 0, "name": "Counter"}, "reply", 2]


def test_a_class_defined_without_monarch_arrives_as_a_monarch_actor() -> None:
    data = run_without(
        "monarch",
        code="""
        import meshgate as kt
        from meshgate.serialization.pickling import dump_class, pickled_by_value

        class Base(kt.Actor):
            @kt.endpoint
            def f(self, x: int) -> int: return x + kt.current_rank().rank

        class T(Base):
            @kt.endpoint
            def g(self) -> None: super().f

        assert pickled_by_value(T)
        sys.stdout.buffer.write(dump_class(T, by_value=True))
        """,
    )
    kind = pickle.loads(data)
    assert issubclass(kind, monarch.actor.Actor)
    assert sorted(endpoints_of(kind).endpoints) == ["f", "g"]
    output = run_without(
        "meshgate",
        "meshgate_wire",
        code="""
        import pickle
        kind = pickle.loads(sys.stdin.buffer.read())
        print(kind.f._method.__globals__["kt"].__name__)
        """,
        stdin=data,
    )
    assert output == b"monarch.actor\n"


def test_a_monarch_class_by_value_needs_only_monarch() -> None:
    class Plain(monarch.actor.Actor):
        @monarch.actor.endpoint
        def f(self) -> str:
            return "fine"

    kind = on_worker(Pickled(dump_class(Plain, by_value=True)), "[value.__name__, value.__mro__[1].__module__]")
    assert kind == ["Plain", "monarch._src.actor.actor_mesh"]


def test_a_class_by_value_contains_its_arrays() -> None:
    class Array:
        def __reduce_ex__(self, protocol: Any) -> Any:
            return bytes, (pickle.PickleBuffer(b"x" * OUT_OF_BAND_BYTES),)

    class Plain:
        weights = Array()

    assert received(Pickled(dump_class(Plain, by_value=True))).weights == b"x" * OUT_OF_BAND_BYTES


def test_tracebacks_on_a_worker_show_the_source_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from meshgate.serialization.pickling import dump_class\n"
        "class T:\n"
        "    def fail(self):\n"
        "        raise ValueError('wrong')  # this line is shown\n"
        "sys.stdout.buffer.write(dump_class(T, by_value=True))\n"
    )
    data = run_without("nothing", code=f"exec(compile(open({str(script)!r}).read(), {str(script)!r}, 'exec'))")
    script.unlink()
    output = run_without(
        "meshgate",
        code="""
        import pickle, traceback
        try: pickle.loads(sys.stdin.buffer.read())().fail()
        except ValueError: print(traceback.format_exc())
        """,
        stdin=data,
    )
    assert b"# this line is shown" in output


def test_code_keeps_the_name_of_its_file_with_every_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    real = by_value._code_reduce

    def reduce_as_3_1_3(code: types.CodeType) -> tuple[Any, ...]:
        make, arguments = real(code)
        return make, tuple("<dynamic-code>" if each == code.co_filename else each for each in arguments)

    monkeypatch.setattr(by_value, "_code_reduce", reduce_as_3_1_3)
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def step():\n    return (lambda: 1)", "train.py", "exec"), script)
    step = received(dumps(script["step"]))
    assert [code.co_filename for code in (step.__code__, step().__code__)] == ["train.py", "train.py"]
    assert step()() == 1


def test_a_class_of_a_module_is_pickled_by_name() -> None:
    assert not pickled_by_value(Proxy)
    assert pickle.loads(dump_class(Proxy, by_value=False)) is Proxy
    assert len(dump_class(Proxy, by_value=False)) < 100


def test_definitions_that_cannot_be_imported_are_pickled_by_value() -> None:
    assert pickled_by_value(stand_in_actor())
    assert pickled_by_value(type("T", (), {"__module__": "__main__"}))
    assert pickled_by_value(type("T", (), {"__module__": "no_such_module"}))
    assert pickled_by_value(lambda: None)
    assert not pickled_by_value(json.JSONDecoder)
    assert not pickled_by_value(functools.partial)


@pytest.fixture
def in_memory() -> Iterator[types.ModuleType]:
    module = types.ModuleType("made_in_memory")
    exec("class T:\n    def f(self): return helper()\ndef helper(): return 'helped'", module.__dict__)
    sys.modules["made_in_memory"] = module
    yield module
    del sys.modules["made_in_memory"]


def test_a_module_in_memory_is_pickled_by_value(in_memory: types.ModuleType) -> None:
    assert pickled_by_value(in_memory.T)
    assert on_worker(Pickled(dump_class(in_memory.T, by_value=True)), "value().f()") == "helped"
    pickled = dumps([in_memory.helper, in_memory.T()])
    assert on_worker(pickled, "[value[0](), value[1].f()]") == ["helped", "helped"]


def test_a_registered_module_is_pickled_by_value() -> None:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        assert pickled_by_value(Proxy)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert not pickled_by_value(Proxy)


def test_a_class_that_its_module_does_not_define_is_rejected() -> None:
    with pytest.raises(
        ClassNotImportable, match=r"cannot import .*Counter: module .*test_pickling.* does not define it"
    ) as error:
        dump_class(stand_in_actor(), by_value=False)
    assert error.value.module == __name__


def test_only_code_asks_for_the_python_of_the_workers() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked: list[str] = []

    def worker_python() -> str:
        asked.append(here)
        return f"{here}.99"

    dumps([1, len, Proxy], worker_python=worker_python)
    assert not asked
    assert on_worker(dumps([lambda: 1, lambda: 2], worker_python=worker_python), "value[1]()") == 2
    assert asked == [here]


# --- unpicklable values


LOCK = threading.Lock()


def test_the_error_names_the_argument_by_position_and_parameter() -> None:
    with pytest.raises(
        UnpicklableArgument, match=r"^cannot pickle argument 'config' \(position 1\) of trainers.step \("
    ) as error:
        dumps_call((1, {"lock": LOCK}), {}, resolve, called="trainers.step", parameters=("batch", "config"))
    assert "(the lock at ['lock']): cannot pickle '_thread.lock' object" in str(error.value)
    assert str(error.value).endswith("Nothing was sent. Pass what it is made from, and create it on the worker.")
    with pytest.raises(UnpicklableArgument, match=r"^cannot pickle argument \(position 1\): cannot"):
        dumps_call((1, LOCK), {})


def test_the_full_stop_of_an_error_is_not_doubled() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnpicklableArgument, match=r"recursion required\. Nothing was sent"):
        dumps_call((deep,), {})
    while deep:
        deep = deep.pop()  # type: ignore[assignment]  # its own deallocation would recurse


def test_the_error_names_the_path_to_the_unpicklable_part() -> None:
    with pytest.raises(UnpicklableArgument, match=r"^cannot pickle argument 'model' of trainers.step") as error:
        dumps_call((1,), {"model": {"lock": LOCK}}, resolve, called="trainers.step")
    assert (error.value.argument, error.value.path) == ("argument 'model'", "['lock']")
    assert isinstance(error.value, TypeError)


def test_the_error_of_a_value_names_no_argument() -> None:
    with pytest.raises(UnpicklableArgument, match=r"^cannot pickle the value \(the lock at \['x'\]\)"):
        dumps({"x": LOCK})


def test_the_error_names_an_unpicklable_class() -> None:
    class Holder(standins.Actor):
        lock = LOCK

    with pytest.raises(UnpicklableArgument, match=r"cannot pickle class .*Holder \(the lock at \.lock\)"):
        dump_class(Holder, by_value=True)


def test_a_value_that_is_nested_too_deeply_is_rejected() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnpicklableArgument, match="recursion"):
        dumps(deep)
    while deep:  # otherwise freeing it recurses
        deep = deep[0]


def test_arguments_that_fail_only_together_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = pickling._dump

    def fails_once(*args: Any, **kwargs: Any) -> Pickled:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError("too much at once")
        return original(*args, **kwargs)

    monkeypatch.setattr(pickling, "_dump", fails_once)
    with pytest.raises(UnpicklableArgument, match=r"^cannot pickle the arguments: too much at once"):
        dumps_call((1, 2), {})


def test_every_public_shape_has_a_reduction() -> None:
    for kind in (Shape, Region, Extent, Point, Slice, ValueMesh):
        assert kind in pickling._RULES


def test_pickled_buffers_are_freed_without_a_garbage_collection() -> None:
    while gc.collect():
        pass  # finalizers may leave more
    gc.disable()
    try:
        assert dumps([np.zeros(OUT_OF_BAND_BYTES), "text", {1: object}]).buffers
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_large_array_is_copied_in_pieces() -> None:
    array = np.arange(400_000)
    (buffer,) = dumps(array).buffers
    array[:] = 0
    assert isinstance(buffer, list)
    assert (np.frombuffer(b"".join(buffer), array.dtype) == np.arange(400_000)).all()


class AnswersAll(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__} has no {name}"


class OfAnsweringClass(metaclass=AnswersAll):
    def __init__(self, value: int) -> None:
        self.value = value


def test_an_object_whose_metaclass_answers_for_any_attribute_is_pickled() -> None:
    assert pickle.loads(dumps(OfAnsweringClass(7)).data).value == 7


def test_a_class_of_the_script_is_pickled_by_value_in_a_spawned_child(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__mp_main__")
    main.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    monkeypatch.setattr(OfAnsweringClass, "__module__", "__mp_main__")
    assert pickling.pickled_by_value(OfAnsweringClass)


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


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch)


def send(value: Any) -> tuple[Any, int]:
    """The received value and the number of out-of-band buffers."""
    pickled = dumps(value)
    return pickle.loads(pickled.data, buffers=map(bytearray, pickled.buffers)), len(pickled.buffers)


@pytest.mark.usefixtures("_torch")
def test_a_tensor_is_sent_as_its_memory() -> None:
    array = np.arange(30_000, dtype=np.float32).reshape(100, 300)
    got, buffers = send(Tensor(array))
    assert (type(got), buffers) == (Tensor, 1)
    np.testing.assert_array_equal(got.array, array)
    assert got.array.flags.writeable


@pytest.mark.usefixtures("_torch")
def test_a_tensor_is_copied_at_the_time_of_the_call() -> None:
    array = np.zeros(5_000)
    pickled = dumps(Tensor(array))
    array[:] = 7
    got = pickle.loads(pickled.data, buffers=map(bytearray, pickled.buffers))
    assert got.array.max() == 0


@pytest.mark.usefixtures("_torch")
def test_a_slice_of_a_tensor_is_sent_without_the_rest() -> None:
    array = np.arange(100_000)
    got, _ = send(Tensor(array[::10]))
    np.testing.assert_array_equal(got.array, array[::10])


@pytest.mark.usefixtures("_torch")
def test_the_same_tensor_twice_arrives_as_one() -> None:
    tensor = Tensor(np.zeros(5_000))
    (one, two), buffers = send([tensor, tensor])
    assert one is two
    assert buffers == 1


@pytest.mark.usefixtures("_torch")
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


@pytest.mark.usefixtures("_torch")
def test_small_tensors_are_pickled_by_torch() -> None:
    assert send(Tensor(np.zeros(OUT_OF_BAND_BYTES // 8 - 1))) == ("pickled by torch", 0)
    assert send(Tensor(np.zeros(OUT_OF_BAND_BYTES // 8)))[1] == 1


@pytest.mark.usefixtures("_torch")
def test_a_view_that_is_larger_than_its_memory_is_pickled_by_torch() -> None:
    assert send(Tensor(np.broadcast_to(np.zeros(1), (100_000,)))) == ("pickled by torch", 0)


@pytest.mark.usefixtures("_torch")
def test_a_tensor_without_memory_is_pickled_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Base, "data_ptr", lambda self: 0)
    assert send(Tensor(np.zeros(5_000))) == ("pickled by torch", 0)


@pytest.mark.usefixtures("_torch")
def test_tensors_that_share_memory_arrive_apart() -> None:
    array = np.arange(100_000)
    (one, two), buffers = send([Tensor(array), Tensor(array[:50_000])])
    assert buffers == 2
    assert not np.shares_memory(one.array, two.array)


@pytest.mark.usefixtures("_torch")
def test_without_torch_nothing_is_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert reduce_tensor(Tensor(np.zeros(5_000))) is None
