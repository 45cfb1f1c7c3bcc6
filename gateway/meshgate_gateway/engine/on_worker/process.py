"""Functions that run in worker processes, delivered by value.

cloudpickle sends the code of these functions, and of those they call, instead of their names. So they may use only the
standard library, modules that are registered to travel by value as well, and, imported on the worker, Monarch itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import io
import json
import os
import pickle
import pkgutil
import signal
import site
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

# By value too: the adapter registers these modules.
from meshgate_gateway.engine.on_worker.batches import run_batches
from meshgate_gateway.engine.on_worker.breakpoints import install_breakpoints
from meshgate_gateway.engine.on_worker.kept_references import keep_what_is_passed_on, refer_to_values
from meshgate_gateway.engine.on_worker.large_messages import ask, ask_before_large_messages, pickled, send_pickled
from meshgate_gateway.engine.on_worker.output_marks import OutputMarks
from meshgate_gateway.engine.on_worker.ports import report_what_is_sent
from meshgate_gateway.engine.on_worker.running_calls import track_calls
from meshgate_gateway.engine.on_worker.stacks import serve_stacks
from meshgate_sync.store.place import default_home

# Modules of meshgate_sync, which a worker may not have: name to source.
Sources: TypeAlias = "Mapping[str, str]"
# The code that a process runs: sources of the sync, the root digest of a version, and what comes first on sys.path.
Code: TypeAlias = "tuple[Sources, str, Sequence[str]]"


def unpickle(data: bytes | bytearray, buffers: list[bytearray], objects: list[Any]) -> Any:
    """The value of a pickle with out-of-band ``buffers``, and with ``objects`` in place of its persistent ids."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return objects[pid]

    try:
        return Unpickler(io.BytesIO(data), buffers=buffers).load()
    finally:
        objects.clear()  # the class, which refers to them, is in a cycle: it stays until a garbage collection


def at_rank(value: Any, rank: int, labels: Sequence[str], sizes: Sequence[int], context_variable: str) -> Any:
    """Returns ``value``, and makes ``rank`` the rank of the message that is being unpickled.

    A call of one actor of a mesh is sent to that actor alone, which Monarch would show as rank 0 of nothing.
    """
    from monarch.actor import Extent, Point  # noqa: PLC0415 - resolved on the worker

    variable = pkgutil.resolve_name(context_variable)
    context = variable.get()

    class ContextAt:
        message_rank = Point(rank, Extent(labels, sizes))
        __class__ = type(context)

        def __getattr__(self, name: str) -> Any:
            return getattr(context, name)

    variable.set(ContextAt())
    return value


def load_class(data: bytes, name: str) -> Any:
    """The actor class that ``data`` holds. Raises ImportError with the directories that Python searched."""
    try:
        return pickle.loads(data)
    except (ImportError, AttributeError) as error:
        places = "\n  ".join(place or "." for place in sys.path)
        raise ImportError(
            f"cannot import actor class {name} on the worker: {str(error).rstrip('.')}. Python looked in:\n  {places}"
        ) from error


async def set_up_process(
    address: str,
    secret: str,
    mesh: int,
    code: Code | None,
    bootstrap: Callable[[], Awaitable[None] | None] | None,
    sync_context: str,
    log_prefix: str,
    root: str,
    name: str = "",
    per_host: int = 0,
    session: str = "",
) -> None:
    """The first thing that a worker process runs.

    1. Connects standard output and error to the engine, so that each byte leaves as it is written, even the last ones
       before a crash. On the first one the engine says which calls are cancelled; when it closes, the session has
       ended, and this process ends itself and its children. Leaves out Monarch's prefix of log messages, for which
       ``log_prefix`` (``module:name``) is.
    2. Applies what image steps left on the host, and takes its part of the host's GPUs.
    3. Makes imports of several threads wait for one another, and starts to run from ``code``, if given.
    4. Lets other processes read its stacks and debug it, if its mesh has a ``name``.
    5. Asks before it sends the engine, whose actor id is ``root``, a large message, and says with each reply how much
       it had printed. Makes ``Port.send`` wait while the engine has too many unread messages, and ``Port.exception``
       send every exception. Runs calls that arrive as one message. Lets actors have references to kept values.
    6. Runs the user's ``bootstrap``, inside the context manager ``sync_context`` (``module:name``) if it is not async.
    """
    from monarch.actor import current_rank  # noqa: PLC0415 - resolved on the worker

    gc.freeze()  # Monarch's modules stay until the end: garbage collections, of which the exit needs some, skip them
    rank = current_rank().rank
    hello = {"secret": secret, "mesh": mesh, "rank": rank, "pid": os.getpid()}
    calls = track_calls()
    marks = OutputMarks(connect_output(address, hello, calls.cancel))
    marks.know_concurrent_endpoints()
    log_without_prefix(log_prefix)
    add_rank_attribute()
    apply_image()
    if per_host > 1 and os.environ.get("MESHGATE_SPLIT_GPUS") == "1":
        take_gpus(os.environ, rank % per_host, per_host)
    import_packages_first()
    if code is not None:
        activate(*code)
    if name:
        host = os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()
        serve_stacks(name, hello["rank"], host, session)
        install_breakpoints(name, hello["rank"], host)
    connect_again = functools.partial(connect, address)
    send = ask_before_large_messages(connect_again, hello, root, marks.rank)
    keep_what_is_passed_on(refer_to_values(connect_again, hello), root)
    report_what_is_sent(connect_again, hello, send)
    send_every_exception(marks.rank)
    run_batches(marks.rank_for_engine, functools.partial(ask, connect_again, hello), standin_for, calls.arriving)
    if bootstrap is not None:
        await run_bootstrap(bootstrap, sync_context)


def connect_output(address: str, hello: Mapping[str, Any], cancel: Callable[[int], object]) -> list[socket.socket]:
    """Connects standard output and error to the engine, and returns the connections. ``cancel`` gets the number of each
    call that the engine cancels. The process ends itself when the first connection closes."""
    connections = []
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        connection = connect(address)
        connection.sendall(json.dumps({**hello, "stream": stream}).encode() + b"\n")
        os.dup2(connection.fileno(), descriptor)
        if descriptor == 1:
            watch = threading.Thread(
                target=end_with_connection, args=(connection, cancel), name="meshgate-lifetime", daemon=True
            )
            watch.start()
        connections.append(connection)
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(line_buffering=True, write_through=True)
    return connections


def log_without_prefix(setting: str) -> None:
    """Makes ``logging`` write messages as the program gives them.

    Lines have a label already, with the mesh, the rank and the host. Monarch's prefix says the same, and keeps equal
    messages of many ranks from being folded.
    """
    module, _, name = setting.partition(":")
    setattr(importlib.import_module(module), name, False)


def take_gpus(environment: MutableMapping[str, str], local_rank: int, per_host: int) -> None:
    """Leaves this process its part of the host's GPUs: several, one, or one that it shares if there are too few.

    The host's list stays in ``MESHGATE_HOST_…``, for programs that choose by their local rank, as torchrun's do.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        gpus = [gpu for gpu in environment.get(name, "").split(",") if gpu]
        if gpus:
            first, last = local_rank * len(gpus) // per_host, (local_rank + 1) * len(gpus) // per_host
            environment[f"MESHGATE_HOST_{name}"] = environment[name]
            environment[name] = ",".join(gpus[first : max(last, first + 1)])


def import_packages_first() -> None:
    """Makes an import of a module wait while another thread imports its package, as of Python 3.15.

    Before, both may fail with an ImportError of a "partially initialized module" (python/cpython#83065), as when a
    kept array arrives while an actor's class imports numpy: unpickling imports a module of numpy's.
    """
    bootstrap: Any = importlib.import_module("_frozen_importlib")
    find_and_load = bootstrap._find_and_load

    def initializing(name: str) -> bool:
        return getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False) is True

    def load_with_packages(name: str, import_: Callable[[str], Any]) -> Any:
        if name in sys.modules:
            module = sys.modules[name]
            if initializing(name):
                bootstrap._lock_unlock_module(name)  # not if that thread waits for this one
                if sys.modules.get(name) is module:
                    return module
            return find_and_load(name, import_)
        parts = name.split(".")
        for length in range(1, len(parts)):
            package = ".".join(parts[:length])
            if package not in sys.modules:
                bootstrap._call_with_frames_removed(import_, package)
            elif initializing(package):
                bootstrap._lock_unlock_module(package)
        return find_and_load(name, import_)

    if sys.version_info < (3, 15):
        # With the name of importlib's file, Python leaves it out of tracebacks.
        code = load_with_packages.__code__.replace(co_filename=find_and_load.__code__.co_filename)
        load_with_packages.__code__ = code
        bootstrap._find_and_load = load_with_packages


def add_rank_attribute() -> None:
    """Makes an actor's rank available as ``self.rank``, as Kubetorch does, unless its class defines a ``rank``."""
    from monarch.actor import Actor, context  # noqa: PLC0415 - resolved on the worker

    class Rank:
        """Not a data descriptor, so that ``self.rank = ...`` and a class's own ``rank`` take precedence."""

        def __get__(self, actor: Any, owner: Any = None) -> Any:
            return self if actor is None else context().actor_instance.rank.rank

    if not hasattr(Actor, "rank"):
        Actor.rank = Rank()


def send_every_exception(rank_of: Callable[[Any, Any], int | None]) -> None:
    """Makes an exception that cannot be pickled reach its caller, as a ``RuntimeError`` that has its text.

    Monarch pickles it after the ``try`` of the endpoint: the actor would die, and the caller see only that it did.
    ``rank_of(port, frame)`` is the rank in a reply.
    """
    from monarch._src.actor.actor_mesh import PythonMessageKind  # noqa: PLC0415 - resolved on the worker
    from monarch.actor import Port  # noqa: PLC0415 - resolved on the worker

    send_now = Port.exception

    def send(port: Any, error: Exception, rank: int | None) -> None:
        if rank == port._rank or not send_pickled(port, PythonMessageKind.Exception(rank), pickled(error)):
            send_now(port, error)

    def exception(self: Any, obj: Exception) -> None:
        rank = rank_of(self, sys._getframe(1))
        try:
            send(self, obj, rank)
        except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises
            send(self, standin_for(obj, error), rank)

    exception.__doc__ = send_now.__doc__
    Port.exception = exception


def standin_for(error: Exception, reason: Exception) -> Any:
    """What is sent in place of an exception that cannot be pickled, for this ``reason``."""
    from monarch.actor import ActorError  # noqa: PLC0415 - resolved on the worker

    wrapped: Any = error if isinstance(error, ActorError) else None
    text = "".join(traceback.format_exception_only(wrapped.exception if wrapped else error)).strip()
    why = "".join(traceback.format_exception_only(reason)).strip()
    standin: Any = RuntimeError(f"{text}\n(this exception cannot be pickled: {why})")
    if wrapped:
        standin = ActorError(standin, wrapped.message)
        standin.exception_formatted = wrapped.exception_formatted
    return standin


def import_sources(sources: Sources) -> str:
    """Makes the modules in ``sources`` importable below a package, and returns its name."""
    digest = hashlib.blake2b(repr(sorted(sources.items())).encode(), digest_size=8).hexdigest()
    package = f"_meshgate_sync_{digest}"
    if package in sys.modules:
        return package

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            head, _, tail = name.partition(".")
            is_folder = not tail or any(each.startswith(f"{tail}.") for each in sources)
            if head != package or not (is_folder or tail in sources):
                return None
            return importlib.util.spec_from_loader(name, self, origin=f"<{name}>", is_package=is_folder)

        def exec_module(self, module: ModuleType) -> None:
            source = sources.get(module.__name__.partition(".")[2], "")
            exec(compile(source, f"<{module.__name__}>", "exec", dont_inherit=True), vars(module))  # noqa: S102

    sys.meta_path.insert(0, Finder())
    importlib.import_module(package)
    return package


def activate(sources: Sources, root: str, paths: Sequence[str]) -> str:
    """Makes this process run from version ``root`` of its host's store, and returns the snapshot's directory."""
    package = import_sources(sources)
    home: Any = importlib.import_module(f"{package}.store.home")
    with sync_errors(package):
        path: str = home.activate(home.default_home(), root, paths)
    return path


@contextlib.contextmanager
def sync_errors(package: str) -> Iterator[None]:
    """Raises the errors of ``package`` as RuntimeError: the engine does not have their classes, so it could not
    unpickle them."""
    errors: Any = importlib.import_module(f"{package}.errors")
    try:
        yield
    except errors.SyncError as error:
        raise RuntimeError(str(error)) from None


def apply_image() -> None:
    """Applies what the client's image steps left in this host's ``$MESHGATE_HOME``.

    These are the environment variables and the working directory in ``environment.json``, and the directory
    ``packages``, which precedes the interpreter's own packages. ``MESHGATE_IMAGE_REPLACED`` gets the previous values of
    the variables, for steps that run again.
    """
    home = default_home()
    packages = os.path.join(home, "packages")
    try:
        with open(os.path.join(home, "environment.json"), encoding="utf-8") as file:
            image: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        image = {}
    variables: dict[str, str] = dict(image.get("variables", {}))
    if os.path.isdir(packages):
        lock_packages(os.path.join(home, "synced"), packages)
        before = list(sys.path)
        site.addsitedir(packages)
        sys.path[:] = [*(place for place in sys.path if place not in before), *before]
        for name, place in (("PYTHONPATH", packages), ("PATH", os.path.join(packages, "bin"))):
            rest = variables.get(name, os.environ.get(name, ""))
            variables[name] = os.pathsep.join(filter(None, (place, rest)))
    if variables:
        replaced = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables, MESHGATE_IMAGE_REPLACED=json.dumps(replaced))
        if variables.keys() & {"MESHGATE_HOME", "XDG_CACHE_HOME", "HOME", "TMPDIR"}:  # what is in the home stays there
            os.environ["MESHGATE_HOME"] = home
    if image.get("directory"):
        os.chdir(image["directory"])


def lock_packages(synced: str, packages: str) -> None:
    """Locks the copies of local packages that this process may import from, until it ends."""
    for name in os.listdir(packages):
        if name.startswith("_meshgate_") and name.endswith(".pth"):
            with open(os.path.join(packages, name), encoding="utf-8") as file:
                package, content = os.path.relpath(file.read().strip(), synced).split(os.sep)[:2]
            with contextlib.suppress(FileNotFoundError):  # replaced just now: imports find the new copy
                handle = os.open(os.path.join(synced, package, content), os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(handle, fcntl.LOCK_SH)  # never closed, so locked until the process ends


async def run_bootstrap(bootstrap: Callable[[], Awaitable[None] | None], sync_context: str) -> None:
    """Runs the bootstrap as Monarch does: a function that is not async sees no running event loop."""
    if inspect.iscoroutinefunction(bootstrap):
        await bootstrap()
        return
    module, _, name = sync_context.partition(":")
    with getattr(importlib.import_module(module), name)():
        bootstrap()


class Controllers:
    """Takes the place of Monarch's keeper of controllers in an actor: asks the engine for the session's own one.

    ``get_or_spawn_controller(name, ...)`` calls ``keeper.get_or_spawn.call_one(keeper, name, ...)``.
    """

    def __init__(self, address: str, secret: str) -> None:
        self._place = (address, secret)

    def __reduce__(self) -> Any:
        return type(self), self._place

    @property
    def get_or_spawn(self) -> Controllers:
        return self

    def call_one(self, _: Any, name: str, Class: type, *args: Any, **kwargs: Any) -> Any:
        address, secret = self._place
        with connect(address) as connection:
            hello = {"secret": secret, "mesh": 0, "rank": 0, "pid": os.getpid(), "stream": "controllers"}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            with connection.makefile("rb") as file:
                answer = file.read()
        if answer[:1] != b"+":
            raise RuntimeError(f"no controllers: {answer[1:].decode() or 'the session has ended'}")
        keeper = pickle.loads(answer[1:])
        return keeper.get_or_spawn.call_one(keeper, name, Class, *args, **kwargs)


def connect(address: str) -> socket.socket:
    """A blocking socket to ``unix:path`` or ``tcp:host:port``. TCP keepalive detects a lost peer within 35 s."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        local = socket.socket(socket.AF_UNIX)
        local.connect(place)
        return local
    host, _, port = place.rpartition(":")
    remote = socket.create_connection((host, int(port)), timeout=10)
    remote.settimeout(None)
    keep_alive(remote)
    return remote


def keep_alive(remote: Any) -> None:
    """Has the kernel close the TCP connection ``remote``, a socket or asyncio's wrapper of one, if its peer is lost."""
    remote.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def end_with_connection(connection: socket.socket, cancel: Callable[[int], object]) -> None:
    """Passes on what the engine writes, a line for each call to ``cancel``, until it closes the connection. Then kills
    this process and its descendants."""
    with contextlib.suppress(OSError), connection.makefile("rb") as lines:
        for line in lines:
            cancel(int(line))
    for child in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_siblings() -> None:
    """Kills every other descendant of the host process that started this one."""
    for process in set(descendants(os.getppid())) - {os.getpid()}:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """The pids of all descendants of ``ancestor``; empty on a system without /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", errors="replace") as stat:
            parent = int(stat.read().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    frontier = [ancestor]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found
