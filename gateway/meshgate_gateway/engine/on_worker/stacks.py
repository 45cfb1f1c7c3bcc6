"""Lets another process on the host read this process's Python stacks, even while it is busy. Delivered by value.

An anonymous file (memfd) named ``meshgate-stacks`` marks the process. Its first line says which process it is. There
are two ways to ask, because neither works always:

- Eight bytes into a pipe: a thread appends a line of JSON that begins with them, with all threads and asyncio tasks, or
  starts debugpy. It needs the interpreter's lock, which Python code gives up every few milliseconds.
- A signal: ``faulthandler`` appends the threads, without the lock, so also while C code holds it.

Only processes of the same user can open the file and the pipe, through ``/proc``. Without ``/proc`` (macOS) there is
nothing to open, and nothing is set up.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import linecache
import os
import signal
import sys
import threading
from typing import Any

NAME = "meshgate-stacks"
THREAD = "meshgate-stacks"
MAX_ANSWERS = 8 << 20  # bytes of earlier answers that are kept
MAX_FRAMES = 100
MAX_TASKS = 1000


def serve_stacks(mesh: str, rank: int, host: str, session: str) -> None:
    """Sets up both ways for this process. Sessions may have meshes of the same name."""
    if not hasattr(os, "memfd_create"):
        return
    import faulthandler  # noqa: PLC0415 - resolved on the worker

    answers = os.memfd_create(NAME)
    fcntl.fcntl(answers, fcntl.F_SETFL, os.O_APPEND)
    requests, ask = os.pipe()
    number = int(signal.SIGRTMAX) - 3  # programs use the first real-time signals, and Python none
    about = {"pid": os.getpid(), "mesh": mesh, "rank": rank, "host": host, "ask": ask, "signal": number}
    about["session"] = session
    about["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")  # as set up, for ``meshgate top``
    header = json.dumps(about).encode() + b"\n"
    os.write(answers, header)
    faulthandler.register(number, file=answers, all_threads=True, chain=False)
    thread = threading.Thread(target=answer_requests, args=(requests, answers, len(header)), name=THREAD, daemon=True)
    thread.start()


def answer_requests(requests: int, answers: int, start: int) -> None:
    """Answers until the process ends. ``start``: the size of the first line. A request for debugpy begins with a D."""
    debugpy: dict[str, Any] = {}
    while request := os.read(requests, 8):
        if request.startswith(b"D"):
            debugpy = debugpy if "port" in debugpy else start_debugpy()
            found = json.dumps(debugpy)
        else:
            found = json.dumps({"threads": read_threads(), "tasks": read_tasks()})
        if os.fstat(answers).st_size > MAX_ANSWERS:
            os.ftruncate(answers, start)
        os.write(answers, request + found.encode() + b"\n")


def start_debugpy() -> dict[str, Any]:
    """The loopback ``port`` at which debugpy waits for an editor and the ``roots`` of synced code, or a ``problem``."""
    try:
        import debugpy  # noqa: PLC0415 - few processes are debugged by an editor
    except ImportError:
        return {"problem": "debugpy is not installed there; add it to the image: Image(...).pip_install(['debugpy'])"}
    try:
        _, port = debugpy.listen(("127.0.0.1", 0))
    except Exception as error:  # noqa: BLE001 - of many types, for the laptop
        return {"problem": f"debugpy does not start: {error}"}
    homes = [module for name, module in list(sys.modules.items()) if name.startswith("_meshgate_sync_")]
    roots = [root for home in homes if hasattr(home, "active_paths") for root in home.active_paths()]
    return {"port": port, "roots": roots}


def read_threads() -> list[dict[str, Any]]:
    """The stacks of all threads but this one, outermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, innermost in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames: list[tuple[str, int, str, str]] = []
        frame: Any = innermost
        while frame is not None and len(frames) < MAX_FRAMES:
            frames.append(describe_frame(frame, frame.f_lineno))
            frame = frame.f_back
        found.append({"name": names.get(ident, f"thread {ident}"), "frames": frames[::-1]})
    return found


def read_tasks() -> list[dict[str, Any]]:
    """The stacks of suspended asyncio tasks of every running loop, outermost frame first."""
    found: list[dict[str, Any]] = []
    for loop in running_loops():
        try:
            tasks = list(asyncio.all_tasks(loop))
        except RuntimeError:  # too many tasks begin and end meanwhile
            continue
        for task in tasks[:MAX_TASKS]:
            frames: list[tuple[str, int, str, str]] = []
            waiting: Any = task.get_coro()
            while waiting is not None and len(frames) < MAX_FRAMES:
                frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
                if frame is not None:
                    frames.append(describe_frame(frame, frame.f_lineno))
                waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
            if frames:
                found.append({"name": task.get_name(), "frames": frames})
    return found


def running_loops() -> list[asyncio.AbstractEventLoop]:
    """The loops that some thread runs now, found in its frames."""
    loops = []
    for innermost in sys._current_frames().values():
        frame: Any = innermost
        while frame is not None:
            if frame.f_code.co_name in ("run_forever", "run_until_complete", "run"):
                runner = frame.f_locals.get("self")
                loop = runner if isinstance(runner, asyncio.AbstractEventLoop) else getattr(runner, "_loop", None)
                if isinstance(loop, asyncio.AbstractEventLoop) and loop not in loops:
                    loops.append(loop)
            frame = frame.f_back
    return loops


def describe_frame(frame: Any, line: int | None) -> tuple[str, int, str, str]:
    """File, line, function and the text of the line."""
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    return code.co_filename, line or 0, name, linecache.getline(code.co_filename, line or 0, frame.f_globals).strip()
