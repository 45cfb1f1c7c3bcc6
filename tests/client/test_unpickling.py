"""What Monarch's workers pickle is read on a laptop: values, meshes, ports, and errors however odd."""

from __future__ import annotations

import enum
import json
import pickle
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import monarch.actor
import pytest
from hypothesis import given
from hypothesis import strategies as st
from monarch._src.actor.actor_mesh import ActorError as TheirActorError

from meshgate.errors import ActorError, MeshgateError, UnreadableResult
from meshgate.extent import Extent, Point
from meshgate.likeness import Likeness
from meshgate.pickling import dump_class
from meshgate.shape import Region, Shape
from meshgate.unpickling import MeshHandle, loads, loads_raised
from meshgate.value_mesh import ValueMesh
from tests.client.beside_monarch import their_shape
from tests.client.laptop import run_without

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
def test_plain_values_come_as_they_were(value: Any) -> None:
    assert loads(cloudpickle.dumps(value)) == value


def test_functions_come_where_python_is_the_same() -> None:
    assert loads(cloudpickle.dumps(lambda x: x + 1))(1) == 2


def test_code_of_another_python_is_not_run() -> None:
    value = {"fine": 1, "function": lambda x: x + 1}
    got = loads(cloudpickle.dumps(value), same_python=False)
    assert got["fine"] == 1
    with pytest.raises(UnreadableResult, match=r"function .*<lambda> came as code of another Python version"):
        got["function"](1)


def test_a_module_that_the_laptop_lacks_is_named() -> None:
    module = types.ModuleType("only_on_workers")
    exec("class Thing: pass", module.__dict__)
    sys.modules["only_on_workers"] = module
    data = cloudpickle.dumps(module.Thing())
    del sys.modules["only_on_workers"]
    with pytest.raises(UnreadableResult, match=r"holds a only_on_workers\.Thing, and this machine cannot") as error:
        loads(data)
    assert error.value.module == "only_on_workers"
    assert "'only_on_workers' must be importable on the laptop too" in str(error.value)


def test_a_tensor_on_a_laptop_without_torch_is_told() -> None:
    from monarch._src.actor.pickle import _load_from_bytes

    class Storage:
        def __reduce__(self) -> Any:
            return _load_from_bytes, (b"memory",)

    told = run_without(
        "torch",
        "monarch",
        code="""
        from meshgate.errors import UnreadableResult
        from meshgate.unpickling import loads
        try: loads(sys.stdin.buffer.read())
        except UnreadableResult as error: print(error.module, "|", error)
        """,
        stdin=cloudpickle.dumps([Storage()]),
    )
    assert told.startswith(b"torch | a tensor in the result needs module 'torch', which this machine cannot import")


def test_a_value_that_fails_to_be_made_is_told() -> None:
    with pytest.raises(UnreadableResult, match=r"cannot be read here: ZeroDivisionError: .*by zero"):
        loads(pickle.dumps(Explosive()))
    with pytest.raises(UnreadableResult, match="cannot be read here: UnpicklingError"):
        loads(pickle.dumps([1, 2, 3])[:-1])


class Explosive:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


# --- meshes and ports


@dataclass
class Proxies:
    """Keeps what proxies would be made of."""

    made: list[tuple[Any, ...]] = field(default_factory=list)

    def _make(self, *what: Any) -> Any:
        self.made.append(what)
        return what

    def hosts(self, handle: MeshHandle, region: Region) -> Any:
        return self._make("hosts", handle.object, dict(region.as_shape().extent))

    def procs(self, handle: MeshHandle, hosts: Any, region: Region, root: Region) -> Any:
        return self._make("procs", handle.object, hosts, region.slice().offset, dict(root.as_shape().extent))

    def actors(self, handle: MeshHandle, Class: type, name: str, shape: Shape, procs: Any) -> Any:
        return self._make("actors", handle.object, Class.__name__, name, shape.ranks(), procs)

    def port(self, address: str, rank: int | None, once: bool) -> Any:
        return self._make("port", address, rank, once)


@pytest.fixture(scope="module")
def pickled_by_monarch() -> dict[str, bytes]:
    """Meshes and ports as a worker pickles them, by a real Monarch."""
    code = """
        import pickle, sys
        from monarch._rust_bindings.monarch_hyperactor.pickle import pickle as monarchs_pickle
        from monarch.actor import Actor, Channel, endpoint, shutdown_context, this_host

        class T(Actor):
            @endpoint
            def f(self): return 1

        def data(value):
            buffer = monarchs_pickle(value, False, True).buffer()
            return buffer.read(1 << 24)

        hosts = this_host()
        procs = hosts.spawn_procs({"gpus": 2})
        told = {"pending": data(procs)}
        procs.initialized.get()
        actors = procs.spawn("t", T)
        actors.initialized.get()
        told |= {"hosts": data(hosts), "procs": data(procs), "part": data({"mesh": actors.slice(gpus=1)})}
        told |= {"port": data(Channel.open()[0]), "once": data([Channel.open(once=True)[0]])}
        procs.stop().get()
        shutdown_context().get()
        sys.stdout.buffer.write(b"PICKLES" + pickle.dumps(told))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=60, check=True)
    pickles: dict[str, bytes] = pickle.loads(done.stdout.partition(b"PICKLES")[2])
    return pickles


HOSTS = ("hosts", -1, {})


@pytest.mark.parametrize("same_python", [True, False])
def test_meshes_become_proxies(pickled_by_monarch: dict[str, bytes], same_python: bool) -> None:
    def read(name: str, *objects: int) -> Any:
        return loads(pickled_by_monarch[name], objects=objects, make_proxy=Proxies(), same_python=same_python)

    assert read("hosts", -1) == HOSTS
    procs = ("procs", -1, ("hosts", -2, {}), 0, {"gpus": 2})
    assert read("procs", -1, -2) == procs
    assert read("pending", -1, -2) == procs
    procs = ("procs", -2, ("hosts", -3, {}), 0, {"gpus": 2})
    assert read("part", -1, -2, -3) == {"mesh": ("actors", -1, "T", "t", [1], procs)}


@pytest.mark.parametrize("same_python", [True, False])
def test_ports_become_proxies(pickled_by_monarch: dict[str, bytes], same_python: bool) -> None:
    kind, address, rank, once = loads(pickled_by_monarch["port"], make_proxy=Proxies(), same_python=same_python)
    assert (kind, rank, once) == ("port", None, False)
    assert ":" in address
    ((kind, other, rank, once),) = loads(pickled_by_monarch["once"], make_proxy=Proxies(), same_python=same_python)
    assert (kind, rank, once) == ("port", None, True)
    assert other != address


def test_meshes_are_read_where_monarch_is_not_installed(pickled_by_monarch: dict[str, bytes]) -> None:
    told = run_without(
        "monarch",
        code="""
        import json, pickle
        from meshgate.unpickling import loads
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
    assert json.loads(told) == {
        "hosts": "hosts",
        "procs": procs,
        "pending": procs,
        "part": {"mesh": ["actors", "meshgate.standins", procs]},
        "port": ["port", False],
        "once": [["port", True]],
    }


def test_a_mesh_too_many_is_told(pickled_by_monarch: dict[str, bytes]) -> None:
    with pytest.raises(UnreadableResult, match="names more meshes than the gateway sent"):
        loads(pickled_by_monarch["procs"], objects=(-1,), make_proxy=Proxies())
    with pytest.raises(UnreadableResult, match="a mesh or port has no meaning here"):
        loads(pickled_by_monarch["port"])


# --- classes that came from here


class Colour(enum.Enum):
    RED = 1


def test_an_instance_of_a_class_by_value_comes_back_as_one_of_that_class() -> None:
    class Local:
        def method(self) -> str:
            return "original"

    dump_class(Local, by_value=True)
    before = Local.method
    data = cloudpickle.dumps(Local())
    got = loads(data)
    assert type(got) is Local
    assert Local.method is before, "cloudpickle would have replaced it"
    assert loads(data, same_python=False).method() == "original"


def test_a_worker_that_returns_the_class_leaves_it_as_it_was() -> None:
    """The worker's copy of a script's class comes back with the id under which it went out."""

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


def test_a_class_that_only_the_worker_has_comes_by_value() -> None:
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


def test_an_actor_class_that_came_by_value_has_its_endpoints() -> None:
    from meshgate.actors import endpoints_of

    made = """
        import cloudpickle, sys
        from monarch.actor import Actor, endpoint
        class T(Actor):
            @endpoint
            def f(self, x): return x
        sys.stdout.buffer.write(cloudpickle.dumps(T))
    """
    assert list(endpoints_of(loads(run_without("meshgate", code=made))).endpoints) == ["f"]


# --- errors


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
        return WithState, (self.code,), {"noted": "state"}


class NeedsTwo(Exception):
    """Pickles, but cannot be made again: its args are not what its constructor wants."""

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


def test_an_exception_that_the_laptop_has_is_the_original() -> None:
    raised = loads_raised(failed(WithState(7)))
    assert isinstance(raised.exception, WithState)
    assert (raised.exception.code, raised.exception.noted) == (7, "state")  # type: ignore[attr-defined]
    assert raised.message == "Actor call t.f failed."
    assert raised.exception_formatted.startswith("Traceback of where the remote call failed")
    assert raised.exception_formatted.endswith("WithState: code 7\n")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, KeyError, UnicodeDecodeError, OSError])
def test_builtin_exceptions_come_as_they_are(kind: type[BaseException]) -> None:
    arguments: dict[Any, tuple[Any, ...]] = {
        UnicodeDecodeError: ("utf-8", b"x", 0, 1, "bad"),
        OSError: (2, "No such file", "x"),
    }
    sent = kind(*arguments.get(kind, ("text",)))
    raised = loads_raised(failed(sent))
    assert type(raised.exception) is type(sent)
    assert str(raised.exception) == str(sent)


def without_module(exception: BaseException, module: str) -> bytes:
    """As from a worker that has ``module``, which the laptop has not."""
    kind = type(exception)
    fake = types.ModuleType(module)
    setattr(fake, kind.__name__, kind)
    kind.__module__ = module
    sys.modules[module] = fake
    try:
        return failed(exception)
    finally:
        del sys.modules[module]


def test_an_exception_that_the_laptop_lacks_has_a_likeness() -> None:
    lost = type("CudaError", (Exception,), {"__qualname__": "CudaError"})
    data = without_module(lost("out of memory", 3), "cuda_things")
    raised = loads_raised(data)
    likeness = raised.exception
    assert isinstance(likeness, Likeness)
    assert (type(likeness).__module__, type(likeness).__qualname__) == ("cuda_things", "CudaError")
    assert likeness.args == ("out of memory", 3)
    assert str(likeness) == "('out of memory', 3)"
    assert "cuda_things.CudaError: ('out of memory', 3)" in raised.exception_formatted
    assert type(loads_raised(data).exception) is type(likeness)
    copy = pickle.loads(pickle.dumps(likeness))
    assert (type(copy), copy.args) == (type(likeness), likeness.args)


def test_an_exception_as_a_value_has_a_likeness_too() -> None:
    lost = type("TrainingError", (Exception,), {"__qualname__": "TrainingError"})
    data = pickle.loads(pickle.dumps(without_module(lost("x"), "training_things")))
    error = loads(data)
    assert isinstance(error, ActorError)
    assert type(error.exception).__qualname__ == "TrainingError"


@pytest.mark.parametrize("exception", [NeedsTwo(1, 2), RaisesInState("x")])
def test_an_exception_that_cannot_be_made_again_has_a_likeness(exception: Exception) -> None:
    raised = loads_raised(failed(exception))
    assert isinstance(raised.exception, Likeness)
    assert type(raised.exception).__qualname__ == type(exception).__qualname__
    assert raised.exception.args == exception.args
    assert raised.message == "Actor call t.f failed."
    assert type(exception).__name__ in raised.exception_formatted


def test_a_builtin_exception_with_a_part_that_cannot_be_read_is_still_one() -> None:
    exception = ValueError("bad value")
    exception.part = Explosive()  # type: ignore[attr-defined]
    raised = loads_raised(failed(exception))
    assert type(raised.exception) is ValueError
    assert str(raised.exception) == "bad value"
    assert "ValueError: bad value" in raised.exception_formatted


def test_an_exception_that_cannot_be_printed_is_told() -> None:
    raised = loads_raised(failed(NotPrintable("x")))
    assert isinstance(raised.exception, NotPrintable)
    assert "NotPrintable: <exception str() failed>" in raised.exception_formatted


def test_an_exception_holding_what_the_laptop_lacks_is_told() -> None:
    module = types.ModuleType("only_on_workers")
    exec(
        "class Thing:\n    def __init__(self): self.x = 1\nclass Items(list): pass\nclass Table(dict): pass",
        module.__dict__,
    )
    sys.modules["only_on_workers"] = module
    data = failed(ValueError("with parts", module.Thing(), module.Items([1, 2]), module.Table(a=1)))
    del sys.modules["only_on_workers"]
    raised = loads_raised(data)
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
def test_an_exception_that_came_by_value_is_told(same_python: bool) -> None:
    raised = loads_raised(run_without("meshgate", code=SCRIPT_ERROR), same_python=same_python)
    assert type(raised.exception).__name__ == "ScriptError"
    assert raised.exception is not None
    assert raised.exception.args == (1, 2)
    assert str(raised.exception) == ("of the script" if same_python else "(1, 2)")
    assert "ScriptError: of the script" in raised.exception_formatted


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps(5), pickle.dumps(None), pickle.dumps("text")])
def test_an_error_that_cannot_be_read_is_told_as_such(data: bytes) -> None:
    raised = loads_raised(data)
    assert raised.exception is None
    assert raised.message.startswith("A remote call failed")


@given(st.binary(max_size=200))
def test_reading_an_error_never_raises(garbage: bytes) -> None:
    assert loads_raised(b"\x80\x05" + garbage).message


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_error_never_raises(position: int, byte: int) -> None:
    data = bytearray(failed(ValueError("x")))
    data[position % len(data)] = byte
    assert loads_raised(bytes(data)).message is not None


def test_a_bare_exception_is_told() -> None:
    raised = loads_raised(pickle.dumps(MeshgateError("bare")))
    assert isinstance(raised.exception, MeshgateError)
    assert raised.exception_formatted == "meshgate.errors.MeshgateError: bare\n"


def test_monarchs_error_as_a_value_is_ours_with_the_remote_traceback() -> None:
    error = loads(failed(KeyError("k")))
    assert type(error) is ActorError
    assert isinstance(error, TheirActorError)
    assert "in failed" in error.exception_formatted
    assert isinstance(error.__cause__, KeyError)
