from __future__ import annotations

import asyncio
import fcntl
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshgate_gateway.engine.code.host_agents import PROCESS_MODULES, worker_sources
from meshgate_gateway.engine.on_worker import process
from meshgate_gateway.engine.on_worker.process import (
    activate,
    apply_image,
    connect,
    descendants,
    import_sources,
    lock_packages,
)
from meshgate_sync.store.place import default_home
from tests.gateway.server_process import DEADLINE, wait_gone
from tests.waiting import wait_for

# --- modules from source text


def test_modules_are_imported_from_source_text_below_a_package_of_their_own() -> None:
    sources = {"tree.scan": "from .files import COUNT\n", "tree.files": "COUNT = 3\n"}
    package = import_sources(sources)
    assert import_sources(dict(sources)) == package
    assert import_sources({**sources, "tree.files": "COUNT = 4\n"}) != package
    scan: Any = __import__(f"{package}.tree.scan", fromlist=["COUNT"])
    assert scan.COUNT == 3
    with pytest.raises(ModuleNotFoundError):
        __import__(f"{package}.tree.missing")


# --- imports


def test_a_module_of_a_package_that_another_thread_imports_waits_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = import_packages_first(monkeypatch)
    gate = SimpleNamespace(began=threading.Event(), go=threading.Event())
    monkeypatch.setitem(sys.modules, "gate_of_package", gate)
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "imported_at_once"
    package.mkdir()
    begin = "from gate_of_package import began, go\nbegan.set()\nassert go.wait(60)\nname = 1\n"
    (package / "__init__.py").write_text(f"{begin}from imported_at_once.module import value\n")
    (package / "module.py").write_text("from imported_at_once import name\nvalue = name\n")
    (package / "broken.py").write_text("raise ValueError('broken')\n")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(importlib.import_module, "imported_at_once")
        assert gate.began.wait(DEADLINE)
        identity: SimpleQueue[int] = SimpleQueue()

        def second_import() -> Any:
            identity.put(threading.get_ident())
            return importlib.import_module("imported_at_once.module")

        second = threads.submit(second_import)
        thread = identity.get(timeout=DEADLINE)
        wait_for(lambda: importing._blocking_on.get(thread), "the second import to wait")
        gate.go.set()
        assert (first.result(DEADLINE).value, second.result(DEADLINE).value) == (1, 1)
    with pytest.raises(ValueError, match="broken") as failed:
        __import__("imported_at_once.broken")
    assert "load_with_packages" not in {entry.name for entry in failed.traceback}


def test_imports_that_wait_for_one_another_get_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importing = import_packages_first(monkeypatch)
    gate = SimpleNamespace(began=threading.Event(), go=threading.Event(), second=SimpleQueue())
    monkeypatch.setitem(sys.modules, "gate_of_cycle", gate)
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "in_a_cycle"
    package.mkdir()
    begin = "from gate_of_cycle import began, go\nbegan.set()\nassert go.wait(60)\n"
    (package / "__init__.py").write_text(
        f"{begin}from importlib import import_module\nimport_module('other_in_cycle')\n"
    )
    (package / "module.py").write_text("value = 1\n")
    other = "import threading\nfrom gate_of_cycle import second\nsecond.put(threading.get_ident())\n"
    (tmp_path / "other_in_cycle.py").write_text(f"{other}from in_a_cycle.module import value\n")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(importlib.import_module, "in_a_cycle")
        assert gate.began.wait(DEADLINE)
        second = threads.submit(importlib.import_module, "other_in_cycle")
        thread = gate.second.get(timeout=DEADLINE)
        wait_for(lambda: importing._blocking_on.get(thread), "the second import to wait")
        gate.go.set()
        assert first.result(DEADLINE) is sys.modules["in_a_cycle"]
        assert second.result(DEADLINE).value == 1


def test_a_module_that_is_there_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import_packages_first(monkeypatch)
    module = ModuleType("no_package.module")
    monkeypatch.setitem(sys.modules, "no_package.module", module)
    assert importlib.import_module("no_package.module") is module


def import_packages_first(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Until the end of the test; returns importlib's own module."""
    importing: Any = importlib.import_module("_frozen_importlib")
    monkeypatch.setattr(importing, "_find_and_load", importing._find_and_load)  # to have it back afterwards
    process.import_packages_first()
    return importing


# --- bootstrap


def test_a_plain_bootstrap_runs_inside_the_context_of_the_release() -> None:
    ran: list[str] = []
    asyncio.run(process.run_bootstrap(lambda: ran.append("plain"), "contextlib:nullcontext"))
    with pytest.raises(ModuleNotFoundError):
        asyncio.run(process.run_bootstrap(lambda: ran.append("never"), "no_such_module:context"))
    assert ran == ["plain"]


def test_an_async_bootstrap_is_awaited() -> None:
    ran: list[str] = []

    async def bootstrap() -> None:
        ran.append("async")

    asyncio.run(process.run_bootstrap(bootstrap, "no_such_module:context"))
    assert ran == ["async"]


# --- image steps


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHGATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_image_steps_nothing_changes(home: Path) -> None:
    before = dict(os.environ)
    apply_image()
    assert dict(os.environ) == before


def test_the_variables_and_the_directory_of_image_steps_are_applied(home: Path) -> None:
    (home / "data").mkdir()
    os.environ["MODE"] = "before"
    image = {"variables": {"MODE": "fast"}, "directory": str(home / "data")}
    (home / "environment.json").write_text(json.dumps(image))
    apply_image()
    assert os.environ["MODE"] == "fast"
    assert json.loads(os.environ["MESHGATE_IMAGE_REPLACED"]) == {"MODE": "before"}
    assert Path.cwd() == home / "data"


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME", "MESHGATE_HOME", "TMPDIR"])
def test_variables_of_an_image_do_not_move_the_store_of_the_host(
    home: Path, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "MESHGATE_HOME"):
        monkeypatch.delenv(name)
    store = Path(default_home())
    store.mkdir(parents=True)
    (store / "environment.json").write_text(json.dumps({"variables": {variable: "/elsewhere"}}))
    apply_image()
    assert default_home() == str(store)


def test_a_version_that_is_not_here_raises_an_error_that_the_engine_can_read(home: Path) -> None:
    with pytest.raises(RuntimeError, match=r"version abababababab is not in .*; sync again") as caught:
        activate(worker_sources(PROCESS_MODULES), "ab" * 32, [""])
    assert type(pickle.loads(pickle.dumps(caught.value))) is RuntimeError


def test_installed_packages_precede_those_of_the_interpreter(home: Path) -> None:
    packages = home / "packages"
    packages.mkdir()
    apply_image()
    assert sys.path[0] == str(packages)
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(packages)
    assert os.environ["PATH"].split(os.pathsep)[0] == str(packages / "bin")


def test_the_copy_of_a_local_package_is_locked_until_the_process_ends(tmp_path: Path) -> None:
    synced, packages = tmp_path / "synced", tmp_path / "packages"
    copy = synced / "mine" / "abc"
    copy.mkdir(parents=True)
    packages.mkdir()
    (packages / "_meshgate_mine.pth").write_text(f"{copy}/src\n")
    (packages / "_meshgate_gone.pth").write_text(f"{synced}/gone/abc\n")
    lock_packages(str(synced), str(packages))
    handle = os.open(copy, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)


# --- connections and processes


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_worker_connects_over_unix_sockets_and_tcp(kind: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as listener:
        listener.bind(str(tmp_path / "socket") if kind == "unix" else ("127.0.0.1", 0))
        listener.listen()
        name = listener.getsockname()
        address = f"unix:{name}" if kind == "unix" else f"tcp:127.0.0.1:{name[1]}"
        with connect(address) as connection:
            assert connection.getblocking()
            assert kind == "unix" or connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
def test_descendants_include_grandchildren() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert {parent.pid, child} <= set(descendants(os.getpid()))
        assert descendants(parent.pid) == [child]
        assert parent.stdin is not None
        parent.stdin.close()
        parent.wait(DEADLINE)
    assert descendants(parent.pid) == []


WORKER = """
import socket, subprocess, sys
from meshgate_gateway.engine.on_worker.process import connect, end_with_connection
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
connection = connect(sys.argv[1])
connection.sendall(f"{child.pid}\\n".encode())
end_with_connection(connection, lambda call: print("cancelled", call, flush=True))
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
def test_a_process_hears_what_is_cancelled_and_ends_with_its_children_when_the_connection_does(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        listener.settimeout(60)
        command = [sys.executable, "-c", WORKER, f"unix:{tmp_path / 'socket'}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            connection, _ = listener.accept()
            child = int(connection.makefile().readline())
            assert child in descendants(worker.pid)
            connection.sendall(b"12\n7\n")
            assert [worker.stdout.readline() for _ in range(2)] == ["cancelled 12\n", "cancelled 7\n"]
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            assert worker.wait(DEADLINE) == -9
    wait_gone(child)


@pytest.mark.parametrize(
    ("gpus", "per_host", "parts"),
    [
        ("0,1,2,3", 4, ["0", "1", "2", "3"]),
        ("4,5,6,7", 2, ["4,5", "6,7"]),
        ("0,1,2", 2, ["0", "1,2"]),
        ("0,1", 4, ["0", "0", "1", "1"]),
    ],
)
def test_processes_of_a_host_divide_its_gpus(gpus: str, per_host: int, parts: list[str]) -> None:
    found = []
    for local_rank in range(per_host):
        environment = {"CUDA_VISIBLE_DEVICES": gpus}
        process.take_gpus(environment, local_rank, per_host)
        found.append(environment["CUDA_VISIBLE_DEVICES"])
        assert environment["MESHGATE_HOST_CUDA_VISIBLE_DEVICES"] == gpus
    assert found == parts


def test_without_gpus_there_is_nothing_to_divide() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    process.take_gpus(environment, 0, 2)
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}
