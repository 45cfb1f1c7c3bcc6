"""Functions that run in worker processes, delivered by value: a worker needs nothing but torchmonarch.

cloudpickle sends the code of this module's functions, and of those they call, rather than their names; so only the
standard library may be used here, what is registered to travel as well, and Monarch's own names where the worker has
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import io
import json
import os
import pickle
import signal
import site
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from meshgate_sync.place import default_home  # by value too: ``Binding`` registers its module

# Modules of meshgate_sync, which a worker may not have: name to source.
Library: TypeAlias = "Mapping[str, str]"
# What a process is to run from: the library, the version's root digest, and what comes first on sys.path.
Code: TypeAlias = "tuple[Library, str, Sequence[str]]"


def rebuild(data: bytes | bytearray, buffers: list[bytearray], objects: list[Any]) -> Any:
    """The value of a pickle whose large buffers, and whose meshes and ports, travelled beside it."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return objects[pid]

    return Unpickler(io.BytesIO(data), buffers=buffers).load()


def resolve_class(data: bytes, name: str) -> Any:
    """The actor class in ``data``. Raises ImportError with the places that were searched."""
    try:
        return pickle.loads(data)
    except (ImportError, AttributeError) as error:
        places = "\n  ".join(place or "." for place in sys.path)
        raise ImportError(
            f"cannot import actor class {name} on the worker: {error}. Python looked in:\n  {places}"
        ) from error


async def begin(
    address: str,
    secret: str,
    mesh: int,
    code: Code | None,
    bootstrap: Callable[[], Awaitable[None] | None] | None,
) -> None:
    """The first thing a worker process runs: ties its output and its life to the engine, then ``bootstrap``.

    Standard output and error become sockets to the engine, so that every byte leaves as it is written, even
    the last ones of a crash. The engine never writes to them: when one reads as closed, the session is over
    and this process ends with its children. It then takes on what the host's image steps have left, and, with
    ``code``, takes hold of that version of the code.
    """
    from monarch.actor import current_rank  # noqa: PLC0415 - a name of the worker's, not of this process's

    hello = {"secret": secret, "mesh": mesh, "rank": current_rank().rank, "pid": os.getpid()}
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        connection = connect(address)
        connection.sendall(json.dumps({**hello, "stream": stream}).encode() + b"\n")
        os.dup2(connection.fileno(), descriptor)
        if descriptor == 1:
            watch = threading.Thread(target=end_with, args=(connection,), name="meshgate-lifetime", daemon=True)
            watch.start()
        else:
            connection.close()
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(line_buffering=True, write_through=True)
    give_ranks()
    apply_image()
    if code is not None:
        activate(*code)
    if bootstrap is not None:
        await run_bootstrap(bootstrap)


def give_ranks() -> None:
    """An actor's own rank as ``self.rank``, which Kubetorch's programs read, unless it has a ``rank`` of its own."""
    from monarch.actor import Actor, context  # noqa: PLC0415 - names of the worker's

    class Rank:
        """No data descriptor, so that ``self.rank = ...`` and a class's own ``rank`` go before it."""

        def __get__(self, actor: Any, owner: Any = None) -> Any:
            return self if actor is None else context().actor_instance.rank.rank

    if not hasattr(Actor, "rank"):
        Actor.rank = Rank()


def package_of(library: Library) -> str:
    """Makes the modules of ``library`` importable below the package whose name is returned."""
    digest = hashlib.blake2b(repr(sorted(library.items())).encode(), digest_size=8).hexdigest()
    package = f"_meshgate_sync_{digest}"
    if package in sys.modules:
        return package

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            head, _, tail = name.partition(".")
            if head != package or (tail and tail not in library):
                return None
            return importlib.util.spec_from_loader(name, self, origin=f"<{name}>", is_package=not tail)

        def exec_module(self, module: ModuleType) -> None:
            source = library.get(module.__name__.partition(".")[2], "")
            exec(compile(source, f"<{module.__name__}>", "exec", dont_inherit=True), vars(module))  # noqa: S102

    sys.meta_path.insert(0, Finder())
    importlib.import_module(package)
    return package


def activate(library: Library, root: str, paths: Sequence[str]) -> str:
    """Has this process run from version ``root`` of its host's store; returns the snapshot's directory."""
    home: Any = importlib.import_module(f"{package_of(library)}.home")
    path: str = home.activate(home.default_home(), root, paths)
    return path


def apply_image() -> None:
    """Takes on what the image steps of the client have left in this host's ``$MESHGATE_HOME``.

    That is the variables and the directory of ``environment.json``, and ``packages``, which come before those of
    the interpreter. What the variables were before is in ``MESHGATE_IMAGE_REPLACED``, for steps that run again.
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
        hold_packages(os.path.join(home, "synced"), packages)
        before = list(sys.path)
        site.addsitedir(packages)
        sys.path[:] = [*(place for place in sys.path if place not in before), *before]
        for name, place in (("PYTHONPATH", packages), ("PATH", os.path.join(packages, "bin"))):
            rest = variables.get(name, os.environ.get(name, ""))
            variables[name] = os.pathsep.join(filter(None, (place, rest)))
    if variables:
        replaced = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables, MESHGATE_IMAGE_REPLACED=json.dumps(replaced))
    if image.get("directory"):
        os.chdir(image["directory"])


def hold_packages(synced: str, packages: str) -> None:
    """Locks the copies of local packages that this process may load from, for as long as it lives."""
    for name in os.listdir(packages):
        if name.startswith("_meshgate_") and name.endswith(".pth"):
            with open(os.path.join(packages, name), encoding="utf-8") as file:
                package, content = os.path.relpath(file.read().strip(), synced).split(os.sep)[:2]
            with contextlib.suppress(FileNotFoundError):  # it was replaced just now: the import will find the next
                handle = os.open(os.path.join(synced, package, content), os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(handle, fcntl.LOCK_SH)  # stays open, and is locked until the process ends


async def run_bootstrap(bootstrap: Callable[[], Awaitable[None] | None]) -> None:
    """As Monarch runs it: a plain function sees no running loop."""
    if inspect.iscoroutinefunction(bootstrap):
        await bootstrap()
        return
    from monarch._src.actor.sync_state import fake_sync_state  # noqa: PLC0415 - a name of the worker's

    with fake_sync_state():
        bootstrap()


def connect(address: str) -> socket.socket:
    """A blocking socket to ``unix:path`` or ``tcp:host:port``; TCP notices a vanished peer within 35 s."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        local = socket.socket(socket.AF_UNIX)
        local.connect(place)
        return local
    host, _, port = place.rpartition(":")
    remote = socket.create_connection((host, int(port)), timeout=10)
    remote.settimeout(None)
    remote.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
    return remote


def end_with(connection: socket.socket) -> None:
    """Blocks until the engine's end closes, then ends this process and all it started."""
    with contextlib.suppress(OSError):
        while connection.recv(64):
            pass
    for child in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def end_siblings() -> None:
    """Ends every other process that this one's host has started, and all that those have."""
    for process in set(descendants(os.getppid())) - {os.getpid()}:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """The pids of the processes below ``ancestor``; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
            parent = int(stat.read().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    frontier = [ancestor]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found
