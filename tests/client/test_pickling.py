"""What goes to the workers arrives as it was, in a process that has torchmonarch and no meshgate."""

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
import monarch.actor
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate import actors, extent, pickling, standins
from meshgate.actors import endpoints_of
from meshgate.errors import ActorError, ClassNotImportable, UnpicklableArgument
from meshgate.extent import Extent, Point
from meshgate.pickling import (
    OUT_OF_BAND,
    Pickled,
    dump_class,
    dumps,
    dumps_call,
    require_same_python,
    travels_by_value,
)
from meshgate.shape import Shape
from meshgate.value_mesh import ValueMesh
from meshgate_wire.messages import Argument, MeshRef
from tests.client.laptop import run_without


class Proxy:
    """Stands for a mesh proxy, which must never be pickled itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise AssertionError("a proxy was pickled")


def resolve(obj: object) -> Argument | None:
    return Argument(kind="actors", ref=MeshRef(object=obj.number)) if isinstance(obj, Proxy) else None


class Far(pickle.Unpickler):
    """The other end: what the engine makes of a pickle, its buffers and its objects."""

    def __init__(self, pickled: Pickled) -> None:
        import io

        super().__init__(io.BytesIO(pickled.data), buffers=[bytearray(buffer) for buffer in pickled.buffers])
        self._objects = [f"object {argument.ref.object}" for argument in pickled.arguments]

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid]


def arrived(pickled: Pickled) -> Any:
    return Far(pickled).load()


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.lists(plain_values, max_size=3), st.dictionaries(st.text(), plain_values, max_size=3))
def test_arguments_arrive_as_they_were(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert arrived(dumps_call(tuple(args), kwargs, resolve)) == (tuple(args), kwargs)


# --- buffers


@given(st.lists(st.integers(0, 3 * OUT_OF_BAND), max_size=4))
def test_large_arrays_travel_beside_the_pickle(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
    pickled = dumps(arrays)
    assert [len(buffer) for buffer in pickled.buffers] == [size for size in sizes if size >= OUT_OF_BAND]
    assert len(pickled.data) < 1000 + sum(size for size in sizes if size < OUT_OF_BAND)
    for sent, got in zip(arrays, arrived(pickled), strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.flags.writeable


def test_an_array_is_sent_as_it_was_at_the_call() -> None:
    array = np.zeros(10_000)
    pickled = dumps(array)
    array[:] = 7
    assert arrived(pickled).max() == 0


def test_a_view_of_memory_that_others_may_change_is_copied_too() -> None:
    array = np.zeros(10_000)
    view = array.view()
    view.flags.writeable = False
    pickled = dumps(view)
    array[:] = 7
    assert arrived(pickled).max() == 0


class Blob:
    def __init__(self, memory: bytes) -> None:
        self.memory = memory

    def __reduce__(self) -> Any:
        return Blob, (pickle.PickleBuffer(self.memory),)


def test_memory_that_nobody_can_change_is_not_copied() -> None:
    memory = bytes(100_000)
    (buffer,) = dumps(Blob(memory)).buffers
    assert isinstance(buffer, memoryview)
    assert buffer.obj is memory


def test_odd_arrays_arrive() -> None:
    square = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    odd = [square.T, square[::2, ::3], np.asfortranarray(square), np.empty((0, 5)), np.array(["a", None], dtype=object)]
    for sent, got in zip(odd, arrived(dumps(odd)), strict=True):
        np.testing.assert_array_equal(got, sent)
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)


# --- proxies and ports


def test_a_proxy_becomes_a_reference_and_one_proxy_one_reference() -> None:
    one, two = Proxy(1), Proxy(2)
    pickled = dumps_call((one, [two, {"again": one}]), {"also": two}, resolve)
    assert [argument.ref.object for argument in pickled.arguments] == [1, 2]
    assert arrived(pickled) == (("object 1", ["object 2", {"again": "object 1"}]), {"also": "object 2"})


def test_a_proxy_inside_an_object_or_a_function_is_found() -> None:
    proxy = Proxy(3)
    holder = types.SimpleNamespace(mesh=proxy, data=np.zeros(5_000))
    pickled = dumps([holder, lambda: proxy], resolve)
    namespace, function = arrived(pickled)
    assert (namespace.mesh, function()) == ("object 3", "object 3")
    assert len(pickled.arguments) == len(pickled.buffers) == 1


def test_values_without_proxies_do_not_ask_about_numbers() -> None:
    asked: list[object] = []

    def asking(obj: object) -> None:
        asked.append(obj)

    value = {"numbers": list(range(1000)), "when": types.SimpleNamespace()}
    assert arrived(dumps(value, asking))["numbers"] == value["numbers"]
    assert asked == [value["when"]]


# --- meshgate's classes become Monarch's


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
    """The value of ``expression`` about ``value`` in a process with torchmonarch and without meshgate."""
    told = run_without(
        "meshgate",
        "meshgate_wire",
        code=f"""
        import json, pickle
        value = pickle.loads(sys.stdin.buffer.read())
        print(json.dumps({expression}))
        """,
        stdin=pickled.data,
    )
    return json.loads(told)


def test_shapes_and_value_meshes_arrive_as_monarchs() -> None:
    what = "{name: [type(each).__module__, type(each).__name__, repr(each)] for name, each in value.items()}"
    facts = on_worker(dumps(OURS), what)
    for name, (module, kind, text) in facts.items():
        assert module.startswith("monarch."), name
        assert kind == name
        if name != "Region":
            assert text == repr(OURS[name])


def test_the_classes_themselves_become_monarchs() -> None:
    names = ["Actor", "endpoint", "ValueMesh", "Point", "Extent", "current_rank", "as_endpoint", "ActorError"]
    sources = {"ActorError": ActorError, "ValueMesh": ValueMesh, "Point": Point, "Extent": Extent}
    things = [sources.get(name) or getattr(actors, name) for name in names]
    things += [standins.Actor, standins.endpoint, standins.current_rank, standins.EndpointProperty]
    got = pickle.loads(dumps(things).data)
    assert got[: len(names)] == [getattr(monarch.actor, name) for name in names]
    assert [thing.__name__ for thing in got[len(names) :]] == ["Actor", "endpoint", "current_rank", "EndpointProperty"]
    assert all(thing.__module__.startswith("monarch.") for thing in got)


def test_an_error_sent_on_arrives_as_monarchs() -> None:
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
            return {"sum": n + self.by + self.start, "rank": standins.current_rank().rank, "me": Counter.__name__}

        @standins.endpoint(explicit_response_port=True, instrument=False)
        def later(self, port: Any) -> None:
            port.send("later")

    return Counter


def stand_in_concurrent() -> type:
    class Concurrent(standins.Actor):
        @standins.concurrent_endpoint
        async def one(self, n: int) -> int:
            return n + 1

    return Concurrent


ENDPOINTS = "{name: [found._explicit_response_port, found._instrument] for name, found in vars(value).items() "
ENDPOINTS += "if type(found).__module__.startswith('monarch.')}"


def test_a_stand_in_class_becomes_a_true_actor() -> None:
    mro = "[base.__module__ for base in value.__mro__[1:2]]"
    counter = Pickled(dump_class(stand_in_actor(), by_value=True))
    assert on_worker(counter, mro) == ["monarch._src.actor.actor_mesh"]
    assert on_worker(counter, ENDPOINTS) == {"add": [False, True], "later": [True, False]}
    concurrent = Pickled(dump_class(stand_in_concurrent(), by_value=True))
    assert on_worker(concurrent, ENDPOINTS) == {"one": [True, False]}


def test_a_stand_in_actor_runs_on_a_worker_that_has_only_torchmonarch() -> None:
    classes = pickle.dumps([dump_class(make(), by_value=True) for make in (stand_in_actor, stand_in_concurrent)])
    told = run_without(
        "meshgate",
        "meshgate_wire",
        code="""
        import json, pickle
        from monarch.actor import this_proc, shutdown_context
        one, two = map(pickle.loads, pickle.loads(sys.stdin.buffer.read()))
        counters = this_proc().spawn("counters", one, 1)
        told = [counters.add.call_one(2).get(), counters.later.call_one().get()]
        told.append(this_proc().spawn("concurrent", two).one.call_one(1).get())
        shutdown_context().get()
        print(json.dumps(told))
        """,
        stdin=classes,
    )
    assert json.loads(told.splitlines()[-1]) == [{"sum": 8, "rank": 0, "me": "Counter"}, "later", 2]


def test_a_class_that_a_laptop_without_monarch_defines_becomes_a_true_actor() -> None:
    data = run_without(
        "monarch",
        code="""
        import meshgate as kt
        from meshgate.pickling import dump_class, travels_by_value

        class Base(kt.Actor):
            @kt.endpoint
            def f(self, x: int) -> int: return x + kt.current_rank().rank

        class T(Base):
            @kt.endpoint
            def g(self) -> None: super().f

        assert travels_by_value(T)
        sys.stdout.buffer.write(dump_class(T, by_value=True))
        """,
    )
    kind = pickle.loads(data)
    assert issubclass(kind, monarch.actor.Actor)
    assert sorted(endpoints_of(kind).endpoints) == ["f", "g"]
    told = run_without(
        "meshgate",
        "meshgate_wire",
        code="""
        import pickle
        kind = pickle.loads(sys.stdin.buffer.read())
        print(kind.f._method.__globals__["kt"].__name__)
        """,
        stdin=data,
    )
    assert told == b"monarch.actor\n"


def test_a_monarch_class_by_value_needs_nothing_of_the_laptops() -> None:
    class Plain(monarch.actor.Actor):
        @monarch.actor.endpoint
        def f(self) -> str:
            return "fine"

    kind = on_worker(Pickled(dump_class(Plain, by_value=True)), "[value.__name__, value.__mro__[1].__module__]")
    assert kind == ["Plain", "monarch._src.actor.actor_mesh"]


def test_tracebacks_on_a_worker_quote_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from meshgate.pickling import dump_class\n"
        "class T:\n"
        "    def fail(self):\n"
        "        raise ValueError('the line is quoted')  # a comment to be seen\n"
        "sys.stdout.buffer.write(dump_class(T, by_value=True))\n"
    )
    data = run_without("nothing", code=f"exec(compile(open({str(script)!r}).read(), {str(script)!r}, 'exec'))")
    script.unlink()
    told = run_without(
        "meshgate",
        code="""
        import pickle, traceback
        try: pickle.loads(sys.stdin.buffer.read())().fail()
        except ValueError: print(traceback.format_exc())
        """,
        stdin=data,
    )
    assert b"# a comment to be seen" in told


def test_a_class_of_a_module_travels_by_name() -> None:
    assert not travels_by_value(Proxy)
    assert pickle.loads(dump_class(Proxy, by_value=False)) is Proxy
    assert len(dump_class(Proxy, by_value=False)) < 100


def test_what_nobody_could_import_travels_by_value() -> None:
    assert travels_by_value(stand_in_actor())
    assert travels_by_value(type("T", (), {"__module__": "__main__"}))
    assert travels_by_value(type("T", (), {"__module__": "no_such_module"}))
    assert travels_by_value(lambda: None)
    assert not travels_by_value(json.JSONDecoder)
    assert not travels_by_value(functools.partial)


@pytest.fixture
def in_memory() -> Iterator[types.ModuleType]:
    module = types.ModuleType("made_in_memory")
    exec("class T:\n    def f(self): return helper()\ndef helper(): return 'helped'", module.__dict__)
    sys.modules["made_in_memory"] = module
    yield module
    del sys.modules["made_in_memory"]


def test_a_module_that_is_in_memory_only_travels_by_value(in_memory: types.ModuleType) -> None:
    assert travels_by_value(in_memory.T)
    assert on_worker(Pickled(dump_class(in_memory.T, by_value=True)), "value().f()") == "helped"
    pickled = dumps([in_memory.helper, in_memory.T()])
    assert pickled.code == ("made_in_memory.helper", "made_in_memory.T", "made_in_memory.T.f")
    assert on_worker(pickled, "[value[0](), value[1].f()]") == ["helped", "helped"]


def test_a_module_that_the_user_registered_travels_by_value() -> None:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        assert travels_by_value(Proxy)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert not travels_by_value(Proxy)


def test_a_class_that_its_module_does_not_have_is_named() -> None:
    with pytest.raises(ClassNotImportable, match=r"Counter is not what module .*test_pickling.* has") as error:
        dump_class(stand_in_actor(), by_value=False)
    assert error.value.module == __name__


def test_code_needs_the_same_python_on_both_ends() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    code = dumps(lambda: None).code
    require_same_python(code, f"{here}.99")
    require_same_python((), "3.1")
    with pytest.raises(UnpicklableArgument, match=rf"only Python {here} can run; the workers run 3\.1\. "):
        require_same_python(code, "3.1.4")


# --- what cannot travel


class Model:
    def __init__(self) -> None:
        self.layers = [{"name": "first"}, {"name": "second", "lock": threading.Lock()}]


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Stateful:
    def __getstate__(self) -> dict[str, object]:
        return {"handle": threading.Lock()}


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


class StubbornState:
    def __getstate__(self) -> Any:
        raise RuntimeError("no state for you")


def closure_over(value: object) -> Any:
    return lambda: value


LOCK = threading.Lock()
STUBBORN = Stubborn()


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        (threading.Lock(), "", "cannot pickle '_thread.lock' object"),
        (Model(), ".layers[1]['lock']", "cannot pickle '_thread.lock' object"),
        (Slotted([Slotted(threading.Lock())]), ".inner[0].inner", "lock"),
        (Stateful(), ".handle", "lock"),
        (Stubborn(), "", "I stay here"),
        (StubbornState(), "", "no state for you"),
        ({"a": [1, (2, Stubborn())]}, "['a'][1][1]", "I stay here"),
        ({Stubborn(): 1}, ".keys()", "I stay here"),
        (functools.partial(print, Stubborn()), ".args[0]", "I stay here"),
        (closure_over(Stubborn()), " variable 'value'", "I stay here"),
        (lambda: LOCK, " global 'LOCK'", "lock"),
        (lambda x=STUBBORN: x, " default 0", "I stay here"),
        (Model().layers[1].get, ".__self__['lock']", "lock"),
        ((n for n in range(3)), "", "generator"),
        (open, "", ""),
    ],
)
def test_the_object_that_refuses_is_found(value: Any, path: str, reason: str) -> None:
    if value is open:
        with open(__file__, "rb") as file:
            _refused(file, path, "cannot pickle")
    else:
        _refused(value, path, reason)


def _refused(value: object, path: str, reason: str) -> None:
    with pytest.raises(UnpicklableArgument) as error:
        dumps_call((1,), {"model": value}, resolve, called="trainers.step")
    assert reason in str(error.value)
    assert error.value.argument == "argument 'model'"
    assert error.value.path.startswith(path) if path else not error.value.path
    assert isinstance(error.value, TypeError)


def test_the_argument_is_named_by_position_and_parameter() -> None:
    with pytest.raises(
        UnpicklableArgument, match=r"^argument 'config' \(position 1\) of trainers.step cannot"
    ) as error:
        dumps_call((1, {"lock": LOCK}), {}, resolve, called="trainers.step", parameters=("batch", "config"))
    assert "the lock at ['lock'] in it refuses: cannot pickle '_thread.lock' object" in str(error.value)
    assert str(error.value).endswith("Nothing was sent. Pass what it is made from instead, and make it on the worker.")
    with pytest.raises(UnpicklableArgument, match=r"^argument \(position 1\) cannot travel"):
        dumps_call((1, LOCK), {})


def test_a_value_that_refuses_is_told_without_an_argument() -> None:
    with pytest.raises(UnpicklableArgument, match=r"^the value cannot travel to the workers: the lock at \['x'\]"):
        dumps({"x": LOCK})


def test_a_class_that_refuses_is_named() -> None:
    class Holder(standins.Actor):
        lock = LOCK

    with pytest.raises(UnpicklableArgument, match=r"class .*Holder cannot travel.*: the lock at \.lock in it"):
        dump_class(Holder, by_value=True)


def test_something_nested_without_end_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnpicklableArgument, match="recursion"):
        dumps(deep)
    while deep:  # or the interpreter recurses to free it
        deep = deep[0]


def test_two_arguments_that_only_together_refuse_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = pickling._dump

    def fails_once(*args: Any, **kwargs: Any) -> Pickled:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError("too much at once")
        return real(*args, **kwargs)

    monkeypatch.setattr(pickling, "_dump", fails_once)
    with pytest.raises(UnpicklableArgument, match=r"^the arguments cannot travel to the workers: too much at once"):
        dumps_call((1, 2), {})


def test_worker_names_are_names_of_monarch() -> None:
    from pkgutil import resolve_name

    from meshgate.far_names import WORKER_NAMES

    for name, path in WORKER_NAMES.items():
        assert resolve_name(path).__name__ in (name, "Future"), name


def test_every_exported_shape_has_a_rule() -> None:
    for kind in (Shape, Extent, Point, extent.Extent):
        assert kind in pickling._RULES


def test_what_was_pickled_is_let_go_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        assert dumps([np.zeros(OUT_OF_BAND), "text", {1: object}]).buffers
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_large_array_is_copied_in_pieces() -> None:
    array = np.arange(400_000)
    (beside,) = dumps(array).buffers
    array[:] = 0
    assert isinstance(beside, list)
    assert (np.frombuffer(b"".join(beside), array.dtype) == np.arange(400_000)).all()
