"""A laptop reads what Monarch's workers pickle: values, meshes, ports and any exception."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import importlib
import io
import json
import operator
import os
import pathlib
import pickle
import resource
import subprocess
import sys
import textwrap
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import monarch.actor
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from monarch._src.actor.actor_mesh import ActorError as TheirActorError

from meshgate.errors import ActorError, MeshgateError, UnreadableResult, ValueLostError
from meshgate.serialization.monarch_names import ExceptionStandIn
from meshgate.serialization.pickling import dump_class
from meshgate.serialization.unpickling import MAX_REPORT, MeshHandle, ReadingRules, loads, loads_exception
from meshgate.shapes.shape import Extent, Point, Region, Shape
from meshgate.shapes.value_mesh import ValueMesh
from tests.client.beside_monarch import their_shape
from tests.client.laptop import run_without

OTHER_PYTHON = ReadingRules(same_python=False)
DATA_ONLY = ReadingRules(data_only=True)

# --- values


def test_monarchs_shapes_and_value_meshes_become_ours() -> None:
    shape = Extent(["hosts", "gpus"], [2, 3]).region.as_shape()
    theirs = their_shape(shape)
    mesh = monarch.actor.ValueMesh(theirs, list("abcdef"))
    points = [point for point, _ in mesh.items()]
    got = loads(cloudpickle.dumps([theirs, theirs.region, theirs.extent, theirs.ndslice, mesh, points[4]]))
    assert got[:4] == [shape, shape.region, shape.extent, shape.ndslice]
    assert isinstance(got[4], ValueMesh)
    assert repr(got[4]) == repr(mesh)
    assert got[5] == Point(4, shape.extent)


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=10))
def test_plain_values_arrive_unchanged(value: Any) -> None:
    assert loads(cloudpickle.dumps(value)) == value


def test_functions_arrive_if_python_is_the_same() -> None:
    assert loads(cloudpickle.dumps(lambda x: x + 1))(1) == 2


def test_bytecode_of_another_python_is_not_run() -> None:
    value = {"fine": 1, "function": lambda x: x + 1}
    got = loads(cloudpickle.dumps(value), rules=OTHER_PYTHON)
    assert got["fine"] == 1
    with pytest.raises(
        UnreadableResult, match=r"cannot call .*<lambda>: it was pickled by value, as bytecode of another Python"
    ):
        got["function"](1)


def test_the_error_names_a_module_that_cannot_be_imported() -> None:
    module = types.ModuleType("only_on_workers")
    exec("class Thing: pass", module.__dict__)
    sys.modules["only_on_workers"] = module
    data = cloudpickle.dumps(module.Thing())
    del sys.modules["only_on_workers"]
    with pytest.raises(
        UnreadableResult, match=r"contains a only_on_workers\.Thing, which this machine cannot import"
    ) as error:
        loads(data)
    assert error.value.module == "only_on_workers"
    assert "Make module 'only_on_workers' importable here" in str(error.value)


def test_the_error_reports_why_a_value_cannot_be_unpickled() -> None:
    with pytest.raises(UnreadableResult, match=r"cannot unpickle the result: ZeroDivisionError: .*by zero\. If the"):
        loads(pickle.dumps(FailsToUnpickle()))
    with pytest.raises(UnreadableResult, match="cannot unpickle the result: UnpicklingError"):
        loads(pickle.dumps([1, 2, 3])[:-1])


class FailsToUnpickle:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


# --- data only


class Calls:
    """Pickles as the call ``function(*args)``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


@dataclass
class Project:
    name: str


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=10))
def test_plain_values_are_data(value: Any) -> None:
    assert loads(cloudpickle.dumps(value), rules=DATA_ONLY) == value


@pytest.mark.parametrize("protocol", [4, 5])
def test_containers_times_numbers_and_arrays_are_data(protocol: int) -> None:
    numpy = pytest.importorskip("numpy")
    values = [
        {"set": {1}, "bytes": b"x", "array": bytearray(b"y"), "complex": 1j},
        collections.Counter("aab"),
        collections.OrderedDict(a=1),
        collections.deque([1], 3),
        collections.defaultdict(list, a=[1]),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
        decimal.Decimal("1.5"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=1),
        pathlib.PurePosixPath("/a"),
        ValueError("of data"),
    ]
    got = loads(pickle.dumps(values, protocol), rules=DATA_ONLY)
    assert repr(got) == repr(values)
    array = numpy.arange(12, dtype="float32").reshape(3, 4)
    for each in (array, array[:, 1], array[0, 0], numpy.array(["a", "b"])):
        got = loads(pickle.dumps(each, protocol), rules=DATA_ONLY)
        assert (got == each).all()
        assert got.dtype == each.dtype


def test_monarchs_shapes_and_value_meshes_are_data() -> None:
    shape = Extent(["gpus"], [2]).region.as_shape()
    got = loads(cloudpickle.dumps(monarch.actor.ValueMesh(their_shape(shape), [1, 2])), rules=DATA_ONLY)
    assert isinstance(got, ValueMesh)
    assert list(got.values()) == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        Calls(os.system, "true"),
        Calls(eval, "1"),
        Calls(getattr, 1, "real"),
        Calls(importlib.import_module, "json"),
        Calls(operator.attrgetter("real")),
        Calls(cloudpickle.loads, pickle.dumps(1)),
        Calls(cloudpickle.cloudpickle._builtin_type, "FunctionType"),
        Calls(io.FileIO, "/dev/null"),
        Project("importable"),
        types.SimpleNamespace(a=1),
        Project,
        str.format,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_a_data_type_is_refused_before_it_runs(value: Any) -> None:
    with pytest.raises(UnreadableResult, match=r"cannot unpickle|contains .*, and this process reads data only"):
        assert loads(cloudpickle.dumps(value), rules=DATA_ONLY) is None, "it ran, or was imported"
    raised = loads_exception(cloudpickle.dumps(value), rules=DATA_ONLY).exception
    assert raised is None or isinstance(raised, ExceptionStandIn), "it ran, or was imported"


def test_a_function_by_value_is_not_data() -> None:
    for value in (lambda: 1, json):
        function = loads(cloudpickle.dumps({"function": value}), rules=DATA_ONLY)["function"]
        with pytest.raises(UnreadableResult, match="pickled by value, as code, and this process reads data only"):
            function()


def test_a_class_by_value_is_not_data() -> None:
    class Local:
        pass

    data = cloudpickle.dumps(Local())
    with pytest.raises(UnreadableResult, match="_make_skeleton_class, which is not a data type"):
        loads(data, rules=DATA_ONLY)


def test_exceptions_are_read_as_data_by_stand_ins() -> None:
    class Custom(Exception):
        pass

    for error in (Custom("why"), json.JSONDecodeError("why", "doc", 0), UnicodeDecodeError("ascii", b"x", 0, 1, "why")):
        raised = loads_exception(cloudpickle.dumps(TheirActorError(error, "failed")), rules=DATA_ONLY)
        assert type(raised.exception).__name__ == type(error).__name__
        assert isinstance(raised.exception, ExceptionStandIn) != isinstance(error, UnicodeDecodeError)
        assert "why" in str(raised.exception)


# --- meshes and ports


@dataclass
class Proxies:
    """Records the requested proxies."""

    made: list[tuple[Any, ...]] = field(default_factory=list)

    def _make(self, *proxy: Any) -> Any:
        self.made.append(proxy)
        return proxy

    def hosts(self, handle: MeshHandle, region: Region) -> Any:
        return self._make("hosts", handle.object, dict(region.as_shape().extent))

    def procs(self, handle: MeshHandle, hosts: Any, region: Region, root: Region) -> Any:
        return self._make("procs", handle.object, hosts, region.slice().offset, dict(root.as_shape().extent))

    def actors(self, handle: MeshHandle, Class: type, name: str, shape: Shape, procs: Any) -> Any:
        return self._make("actors", handle.object, Class.__name__, name, shape.ranks(), procs)

    def port(self, address: str, rank: int | None, once: bool) -> Any:
        return self._make("port", address, rank, once)

    def kept(self, number: int, rank: int, label: str) -> Any:
        return self._make("kept", number, rank, label)


@pytest.mark.parametrize("rules", [ReadingRules(), OTHER_PYTHON, DATA_ONLY])
def test_references_to_kept_values_become_kept_meshes(rules: ReadingRules) -> None:
    pickled = b"c_meshgate_kept\nKeptRef\n(I5\nI1\nI6\nVmakers.make.keep()\ntR."
    assert loads(pickled, make_proxy=Proxies(), rules=rules) == ("kept", 5, 6, "makers.make.keep()")
    with pytest.raises(UnreadableResult, match="supported in results of endpoints only"):
        loads(pickled, rules=rules)


def test_the_loss_of_a_value_that_an_actor_cannot_get_is_ours() -> None:
    pickled = b"c_meshgate_kept\nValueLostError\n(Vkilled\ntR}(Vcall\nVmakers.make.keep()\nVranks\n(I1\ntub."
    raised = loads_exception(pickled, rules=DATA_ONLY).exception
    assert isinstance(raised, ValueLostError)
    assert (str(raised), raised.call, raised.ranks) == ("killed", "makers.make.keep()", (1,))


@pytest.fixture(scope="module")
def pickled_by_monarch() -> dict[str, bytes]:
    """Meshes and ports, pickled by Monarch as on a worker."""
    code = """
        import os, pickle, sys
        from monarch._rust_bindings.monarch_hyperactor.pickle import pickle as monarchs_pickle
        from monarch.actor import Actor, Channel, endpoint, this_host

        class T(Actor):
            @endpoint
            def f(self): return 1

        def data(value):
            buffer = monarchs_pickle(value, False, True).buffer()
            return buffer.read(1 << 24)

        hosts = this_host()
        procs = hosts.spawn_procs({"gpus": 2})
        pickles = {"pending": data(procs)}
        procs.initialized.get()
        actors = procs.spawn("t", T)
        actors.initialized.get()
        pickles |= {"hosts": data(hosts), "procs": data(procs), "part": data({"mesh": actors.slice(gpus=1)})}
        pickles |= {"port": data(Channel.open()[0]), "once": data([Channel.open(once=True)[0]])}
        procs.stop().get()
        sys.stdout.buffer.write(b"PICKLES" + pickle.dumps(pickles))
        sys.stdout.flush()
        os._exit(0)  # not by the interpreter's shutdown, in which Monarch's threads may abort the process
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=60, check=True)
    pickles: dict[str, bytes] = pickle.loads(done.stdout.partition(b"PICKLES")[2])
    return pickles


HOSTS = ("hosts", -1, {})


@pytest.mark.parametrize("rules", [ReadingRules(), OTHER_PYTHON, DATA_ONLY])
def test_meshes_become_proxies(pickled_by_monarch: dict[str, bytes], rules: ReadingRules) -> None:
    def read(name: str, *objects: int) -> Any:
        return loads(pickled_by_monarch[name], objects=objects, make_proxy=Proxies(), rules=rules)

    assert read("hosts", -1) == HOSTS
    procs = ("procs", -1, ("hosts", -2, {}), 0, {"gpus": 2})
    assert read("procs", -1, -2) == procs
    assert read("pending", -1, -2) == procs
    procs = ("procs", -2, ("hosts", -3, {}), 0, {"gpus": 2})
    if rules.data_only:  # a mesh of actors comes with its class, which is code
        with pytest.raises(UnreadableResult, match="this process reads data only"):
            read("part", -1, -2, -3)
        return
    assert read("part", -1, -2, -3) == {"mesh": ("actors", -1, "T", "t", [1], procs)}


@pytest.mark.parametrize("rules", [ReadingRules(), OTHER_PYTHON, DATA_ONLY])
def test_ports_become_proxies(pickled_by_monarch: dict[str, bytes], rules: ReadingRules) -> None:
    kind, address, rank, once = loads(pickled_by_monarch["port"], make_proxy=Proxies(), rules=rules)
    assert (kind, rank, once) == ("port", None, False)
    assert ":" in address
    ((kind, other, rank, once),) = loads(pickled_by_monarch["once"], make_proxy=Proxies(), rules=rules)
    assert (kind, rank, once) == ("port", None, True)
    assert other != address


def test_meshes_can_be_read_without_monarch(pickled_by_monarch: dict[str, bytes]) -> None:
    output = run_without(
        "monarch",
        code="""
        import json, pickle
        from meshgate.serialization.unpickling import loads
        class Proxies:
            def hosts(self, handle, region): return "hosts"
            def procs(self, handle, hosts, region, root): return ["procs", hosts]
            def actors(self, handle, Class, name, shape, procs): return ["actors", Class.__mro__[1].__module__, procs]
            def port(self, address, rank, once): return ["port", once]
        pickles = pickle.loads(sys.stdin.buffer.read())
        print(json.dumps({name: loads(data, objects=(-1, -2, -3), make_proxy=Proxies())
            for name, data in pickles.items()}))
        """,
        stdin=pickle.dumps(pickled_by_monarch),
    )
    procs = ["procs", "hosts"]
    assert json.loads(output) == {
        "hosts": "hosts",
        "procs": procs,
        "pending": procs,
        "part": {"mesh": ["actors", "meshgate.actors.standins", procs]},
        "port": ["port", False],
        "once": [["port", True]],
    }


def test_meshes_that_cannot_be_resolved_are_rejected(pickled_by_monarch: dict[str, bytes]) -> None:
    with pytest.raises(UnreadableResult, match="contains more meshes than the gateway announced"):
        loads(pickled_by_monarch["procs"], objects=(-1,), make_proxy=Proxies())
    with pytest.raises(
        UnreadableResult, match="contains a mesh or a port, which is supported in results of endpoints only"
    ):
        loads(pickled_by_monarch["port"])


# --- classes pickled by value


class Colour(enum.Enum):
    RED = 1


def test_an_instance_of_a_local_class_comes_back_as_one_of_that_class() -> None:
    class Local:
        def method(self) -> str:
            return "original"

    dump_class(Local, by_value=True)
    before = Local.method
    data = cloudpickle.dumps(Local())
    got = loads(data)
    assert type(got) is Local
    assert Local.method is before, "cloudpickle would have replaced it"
    assert loads(data, rules=OTHER_PYTHON).method() == "original"


def test_a_local_class_that_a_worker_returns_is_unchanged() -> None:
    """The worker's copy of a class comes back with the id under which it was sent."""

    class Local:
        x = 1

        def method(self) -> int:
            return self.x

    echo = """
        import pickle, cloudpickle, sys
        value = pickle.loads(sys.stdin.buffer.read())
        value.x = 2
        sys.stdout.buffer.write(cloudpickle.dumps(value()))
    """
    data = run_without("meshgate", code=echo, stdin=dump_class(Local, by_value=True))
    before = Local.method
    got = loads(data)
    assert (type(got), Local.x, Local.method) == (Local, 1, before)


def test_a_class_of_the_worker_arrives_by_value() -> None:
    made = """
        import cloudpickle, enum, sys
        class Theirs:
            def method(self): return "by value"
        class Kind(enum.Enum):
            A = 1
        sys.stdout.buffer.write(cloudpickle.dumps([Theirs(), Kind.A]))
    """
    data = run_without("meshgate", code=made)
    one, kind = loads(data)
    assert one.method() == "by value"
    assert (kind.name, kind.value) == ("A", 1)
    again, _ = loads(data)
    assert type(again) is type(one)


def test_an_actor_class_by_value_has_its_endpoints() -> None:
    from meshgate.actors.actor_class import endpoints_of

    made = """
        import cloudpickle, sys
        from monarch.actor import Actor, endpoint
        class T(Actor):
            @endpoint
            def f(self, x): return x
        sys.stdout.buffer.write(cloudpickle.dumps(T))
    """
    assert list(endpoints_of(loads(run_without("meshgate", code=made))).endpoints) == ["f"]


# --- exceptions


def failed(exception: BaseException, message: str = "Actor call t.f failed.") -> bytes:
    """What a worker sends when an endpoint raises ``exception``."""
    try:
        raise exception
    except BaseException as raised:  # noqa: BLE001
        return cloudpickle.dumps(TheirActorError(raised, message))


class WithState(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return WithState, (self.code,), {"attribute": "state"}


class NeedsTwo(Exception):
    """Can be pickled but not unpickled: its args do not match its constructor."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class RaisesInState(Exception):
    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no state here")

    def __reduce__(self) -> Any:
        return RaisesInState, self.args, {"x": 1}


class NotPrintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be printed")


def test_an_exception_that_can_be_imported_is_the_original() -> None:
    raised = loads_exception(failed(WithState(7)))
    assert isinstance(raised.exception, WithState)
    assert (raised.exception.code, raised.exception.attribute) == (7, "state")  # type: ignore[attr-defined]
    assert raised.message == "Actor call t.f failed."
    assert raised.exception_formatted.startswith("Traceback of where the remote call failed")
    assert raised.exception_formatted.endswith("WithState: code 7\n")


@pytest.mark.parametrize("pickled", [failed, pickle.dumps], ids=["raised", "sent"])
def test_a_very_long_traceback_loses_its_middle_and_the_exception_nothing(pickled: Any) -> None:
    raised = loads_exception(pickled(ValueError("x" * 1_000_000 + "end")))
    assert len(raised.exception_formatted) <= MAX_REPORT
    assert "characters cut]" in raised.exception_formatted
    assert raised.exception_formatted.endswith("xend\n")
    assert str(raised.exception) == "x" * 1_000_000 + "end"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, KeyError, UnicodeDecodeError, OSError])
def test_builtin_exceptions_arrive_unchanged(kind: type[BaseException]) -> None:
    arguments: dict[Any, tuple[Any, ...]] = {
        UnicodeDecodeError: ("utf-8", b"x", 0, 1, "bad"),
        OSError: (2, "No such file", "x"),
    }
    sent = kind(*arguments.get(kind, ("text",)))
    raised = loads_exception(failed(sent))
    assert type(raised.exception) is type(sent)
    assert str(raised.exception) == str(sent)


def without_module(exception: BaseException, module: str) -> bytes:
    """The pickle of a worker that has ``module``, which cannot be imported here."""
    kind = type(exception)
    fake = types.ModuleType(module)
    setattr(fake, kind.__name__, kind)
    kind.__module__ = module
    sys.modules[module] = fake
    try:
        return failed(exception)
    finally:
        del sys.modules[module]


def test_an_exception_that_cannot_be_imported_has_a_stand_in() -> None:
    missing = type("CudaError", (Exception,), {"__qualname__": "CudaError"})
    data = without_module(missing("out of memory", 3), "cuda_things")
    raised = loads_exception(data)
    stand_in = raised.exception
    assert isinstance(stand_in, ExceptionStandIn)
    assert (type(stand_in).__module__, type(stand_in).__qualname__) == ("cuda_things", "CudaError")
    assert stand_in.args == ("out of memory", 3)
    assert str(stand_in) == "('out of memory', 3)"
    assert "cuda_things.CudaError: ('out of memory', 3)" in raised.exception_formatted
    assert type(loads_exception(data).exception) is type(stand_in)
    copy = pickle.loads(pickle.dumps(stand_in))
    assert (type(copy), copy.args) == (type(stand_in), stand_in.args)


def test_an_exception_as_a_value_has_a_stand_in_too() -> None:
    missing = type("TrainingError", (Exception,), {"__qualname__": "TrainingError"})
    data = pickle.loads(pickle.dumps(without_module(missing("x"), "training_things")))
    error = loads(data)
    assert isinstance(error, ActorError)
    assert type(error.exception).__qualname__ == "TrainingError"


@pytest.mark.parametrize("exception", [NeedsTwo(1, 2), RaisesInState("x")])
def test_an_exception_that_cannot_be_unpickled_has_a_stand_in(exception: Exception) -> None:
    raised = loads_exception(failed(exception))
    assert isinstance(raised.exception, ExceptionStandIn)
    assert type(raised.exception).__qualname__ == type(exception).__qualname__
    assert raised.exception.args == exception.args
    assert raised.message == "Actor call t.f failed."
    assert type(exception).__name__ in raised.exception_formatted


def test_a_builtin_exception_with_an_unreadable_attribute_is_the_builtin() -> None:
    exception = ValueError("bad value")
    exception.part = FailsToUnpickle()  # type: ignore[attr-defined]
    raised = loads_exception(failed(exception))
    assert type(raised.exception) is ValueError
    assert str(raised.exception) == "bad value"
    assert "ValueError: bad value" in raised.exception_formatted


def test_an_exception_that_cannot_be_printed_is_reported() -> None:
    raised = loads_exception(failed(NotPrintable("x")))
    assert isinstance(raised.exception, NotPrintable)
    assert "NotPrintable: <exception str() failed>" in raised.exception_formatted


def test_an_exception_with_arguments_that_cannot_be_imported_is_reported() -> None:
    module = types.ModuleType("only_on_workers")
    exec(
        "class Thing:\n    def __init__(self): self.x = 1\nclass Items(list): pass\nclass Table(dict): pass",
        module.__dict__,
    )
    sys.modules["only_on_workers"] = module
    data = failed(ValueError("with parts", module.Thing(), module.Items([1, 2]), module.Table(a=1)))
    del sys.modules["only_on_workers"]
    raised = loads_exception(data)
    assert isinstance(raised.exception, ValueError)
    assert raised.exception.args[0] == "with parts"
    assert [type(part).__qualname__ for part in raised.exception.args[1:]] == ["Thing", "Items", "Table"]


SCRIPT_ERROR = """
    import cloudpickle, sys
    from monarch._src.actor.actor_mesh import ActorError
    class ScriptError(Exception):
        def __init__(self, a, b):
            super().__init__(a, b)
        def __str__(self): return "of the script"
    try: raise ScriptError(1, 2)
    except ScriptError as e: sys.stdout.buffer.write(cloudpickle.dumps(ActorError(e, "failed.")))
"""


@pytest.mark.parametrize("same_python", [True, False])
def test_an_exception_by_value_is_reported(same_python: bool) -> None:
    raised = loads_exception(run_without("meshgate", code=SCRIPT_ERROR), rules=ReadingRules(same_python))
    assert type(raised.exception).__name__ == "ScriptError"
    assert raised.exception is not None
    assert raised.exception.args == (1, 2)
    assert str(raised.exception) == ("of the script" if same_python else "(1, 2)")
    assert "ScriptError: of the script" in raised.exception_formatted


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps(5), pickle.dumps(None), pickle.dumps("text")])
def test_an_invalid_pickle_is_reported_as_a_failed_call(data: bytes) -> None:
    raised = loads_exception(data)
    assert raised.exception is None
    assert raised.message.startswith("A remote call failed")


@contextmanager
def little_memory() -> Iterator[None]:
    """A pickle may ask for a memo of four billion entries, which the unpickler fills at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 500_000_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@given(st.binary(max_size=200))
@example(b"Nr\xff\xff\xff\xff.")
def test_reading_an_exception_never_raises(garbage: bytes) -> None:
    with little_memory():
        assert loads_exception(b"\x80\x05" + garbage).message


@given(st.integers(0, 400), st.integers(0, 255))
def test_reading_a_damaged_exception_never_raises(position: int, byte: int) -> None:
    data = bytearray(failed(ValueError("x")))
    data[position % len(data)] = byte
    with little_memory():
        assert loads_exception(bytes(data)).message is not None


def test_an_exception_that_an_actor_sent_is_raised_itself() -> None:
    raised = loads_exception(pickle.dumps(MeshgateError("bare")))
    assert isinstance(raised.exception, MeshgateError)
    assert raised.exception_formatted == "meshgate.errors.MeshgateError: bare\n"
    assert raised.exception_to_raise() is raised.exception


def test_an_exception_that_an_endpoint_raised_is_not_raised_itself() -> None:
    assert loads_exception(failed(ValueError("x"))).exception_to_raise() is None


@pytest.mark.parametrize("sent", [KeyboardInterrupt(), SystemExit(1), NeedsTwo(1, 2)], ids=repr)
def test_a_sent_exception_that_is_unreadable_or_would_end_the_program_is_not_raised_itself(sent: BaseException) -> None:
    assert loads_exception(pickle.dumps(sent)).exception_to_raise() is None


def test_monarchs_error_as_a_value_is_ours_with_the_remote_traceback() -> None:
    error = loads(failed(KeyError("k")))
    assert type(error) is ActorError
    assert isinstance(error, TheirActorError)
    assert "in failed" in error.exception_formatted
    assert isinstance(error.__cause__, KeyError)
