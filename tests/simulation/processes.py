"""Simulated processes: event loops that share one virtual clock and take turns, in an order that a seed decides.

One callback of one process runs at a time. Between any two callbacks a process can be killed, as with SIGKILL: none of
its code runs any more, and its sockets are closed, as the kernel would do. Time passes only while no process can run,
apart from a little for each callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import logging
import os
import random
import socket
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

from meshgate.session.futures import arrival_queues

CALLBACK_SECONDS = 20e-6  # of virtual time that a callback takes


class World:
    """The processes, and the virtual time in seconds. Use it as a context manager, which patches the clock.

    ``checks`` are called after every callback. ``problems`` are exceptions that no one handled.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.steps = 0
        self.processes: list[Process] = []
        self.problems: list[str] = []
        self.trace: list[str] = []
        self.checks: list[Callable[[], None]] = []
        self.facts: dict[str, Any] = {}
        self.ports = 1  # that were given to servers; 1 is the gateway's
        self._dead: list[Process] = []
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> World:
        if not gc.get_freeze_count():  # once: collections then look at what simulations have made
            gc.collect()
            gc.freeze()
        self._finalizers = _finalizers()
        gc.disable()  # it would close sockets at points that depend on what ran before
        random.seed(self.chance.random())  # the client's jitter
        self._patches.enter_context(mock.patch("gc.enable"))  # which a process calls once it has started
        for name in ("time.monotonic", "time.time"):
            self._patches.enter_context(mock.patch(name, self._time))
        self._patches.enter_context(mock.patch.object(socket.socket, "__init__", _tracked(socket.socket.__init__)))
        return self

    def __exit__(self, *error: object) -> None:
        for process in [*self.processes]:
            process.kill()
        with mock.patch.object(sys, "unraisablehook"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the dead never closed
            logging.disable()  # what they would say of their end
            for process in self._dead:
                process.bury()
            for finalizer in _finalizers() - self._finalizers:
                finalizer.detach()  # it keeps alive what it would release
            self._dead.clear()
            self.checks.clear()
            self.facts.clear()
            self._timers.clear()
            self._patches.close()
            gc.enable()
            gc.collect()
            logging.disable(logging.NOTSET)

    def _time(self) -> float:
        return self.now

    def path_of(self, port: int) -> str:
        """The unix socket that stands for a port within the cluster."""
        return os.path.join(tempfile.gettempdir(), f"port-{port}")

    def note(self, text: str) -> None:
        """Adds a line to the trace, by which runs can be compared."""
        self.trace.append(f"{self.now:.6f} {text}")

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Calls ``callback`` outside of every process."""
        heapq.heappush(self._timers, (self.now + delay, next(self._numbers), callback))

    def run(self, until: Callable[[], bool], seconds: float) -> None:
        """Runs until ``until()`` is true. Raises AssertionError if it is not within ``seconds`` of virtual time."""
        deadline = self.now + seconds
        while not until():
            assert self.now < deadline, f"not done after {seconds} s: {self.waiting()}"
            self.step()

    def step(self) -> None:
        """One callback of one process; if none can run, the time until the next timer passes."""
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()
        everyone = self.chance.sample(self.processes, len(self.processes))
        process = next((process for process in everyone if process.is_runnable()), None)
        if process is None:
            times = [process.next_timer() for process in self.processes]
            times += [self._timers[0][0]] if self._timers else []
            soonest = min((time for time in times if time is not None), default=None)
            assert soonest is not None, f"everything waits, and no timer is set: {self.waiting()}"
            self.now = max(self.now, soonest)
            return
        self.steps += 1
        self.now += CALLBACK_SECONDS
        process.run_callback()
        for check in self.checks:
            check()

    def waiting(self) -> str:
        """What every task waits for, for people."""
        lines = []
        for process in self.processes:
            for task in asyncio.all_tasks(process.loop):
                frames = task.get_stack()
                where = f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else "?"
                lines.append(f"{process.name}: {task.get_coro()} at {where}")
        return "\n".join(lines)

    def died(self, process: Process) -> None:
        self.processes.remove(process)
        self._dead.append(process)


def _finalizers() -> set[Any]:
    return set(weakref.finalize._registry)  # type: ignore[attr-defined]


class Process:
    """A process whose code is the task ``main``. ``exited`` is called with its exit code, -9 if it was killed, after
    the callbacks ``at_end``, which do what the kernel does."""

    def __init__(self, world: World, name: str, exited: Callable[[int], None] = lambda code: None) -> None:
        self.world, self.name, self.alive = world, name, True
        self.facts: dict[str, Any] = {}
        self._exited = exited
        self._frozen_until = 0.0
        self._sockets: list[weakref.ref[socket.socket]] = []
        self._descriptors: list[int] = []
        self.at_end: list[Callable[[], None]] = []
        with self._current():
            self.loop = _Loop(world, self)
        world.processes.append(self)

    def start(self, main: Coroutine[Any, Any, Any]) -> None:
        """Runs ``main`` as a task. The process exits with it."""
        task = self.loop.create_task(main)
        self.facts["main"] = task
        task.add_done_callback(self._main_ended)

    def _main_ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.problems.append(f"{self.name} ended with {error!r}")
        self._end(0)

    def own(self, descriptor: int) -> None:
        """Closes the descriptor when the process ends."""
        self._descriptors.append(descriptor)

    def own_socket(self, opened: socket.socket) -> None:
        self._sockets.append(weakref.ref(opened))

    def freeze(self, seconds: float) -> None:
        """Runs none of its code for a time, as after SIGSTOP."""
        self._frozen_until = self.world.now + seconds
        self.world.call_later(seconds, lambda: None)

    def kill(self) -> None:
        if self.alive:
            self._end(-9)

    def _end(self, code: int) -> None:
        self.alive = False
        self.world.note(f"{self.name} ended with {code}")
        self.world.died(self)
        self.loop.close_descriptors()
        for reference in self._sockets:
            if (opened := reference()) is not None:
                opened.close()
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        for callback in self.at_end:
            callback()
        self._exited(code)

    def bury(self) -> None:
        """Frees what is left of it."""
        tasks = asyncio.all_tasks(self.loop)
        self.loop.forget()
        arrival_queues.pop(self.loop, None)
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):  # it cannot wait for anything any more
                task.get_coro().close()  # type: ignore[union-attr]
        if (client := self.facts.get("client")) is not None:
            client._closed = True  # the end of the program must not close it
        self.facts.clear()

    def is_runnable(self) -> bool:
        return self.world.now >= self._frozen_until and self.loop.poll()

    def next_timer(self) -> float | None:
        return None if self.world.now < self._frozen_until else self.loop.next_timer()

    def run_callback(self) -> None:
        with self._current():
            self.loop.run_callback()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        global _current  # noqa: PLW0603 - one process runs at a time
        previous, _current = _current, self
        try:
            yield
        finally:
            _current = previous


_current: Process | None = None


def current_process() -> Process:
    """The process whose code runs."""
    assert _current is not None
    return _current


def _tracked(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _current is not None:
            _current.own_socket(self)

    return __init__


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that runs one callback when asked to. Uses private parts of asyncio's."""

    _ready: Any
    _scheduled: list[Any]
    _selector: Any
    _transports: Any

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process = world, process
        self._turn = 0  # callbacks that are left of this turn
        super().__init__()
        self.set_exception_handler(self._note_exception)

    def time(self) -> float:
        return self.world.now

    def poll(self) -> bool:
        """Whether a callback can run. As in asyncio, one turn runs what was ready when it began."""
        if not self._turn:
            self._begin_turn()
        return self._turn > 0

    def _begin_turn(self) -> None:
        if self._selector.get_map():
            events = self._selector.select(0)
            events.sort(key=lambda event: event[0].fd)
            self._process_events(events)
        while self._scheduled and (self._scheduled[0]._cancelled or self._scheduled[0]._when <= self.world.now):
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            self._ready.append(handle)
        self._turn = len(self._ready)

    def next_timer(self) -> float | None:
        return self._scheduled[0]._when if self._scheduled else None

    def run_callback(self) -> None:
        handle = self._ready.popleft()
        self._turn -= 1
        if handle._cancelled:
            return
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)

    def is_running(self) -> bool:
        return self.process.alive

    def close_descriptors(self) -> None:
        """Closes the descriptors that callbacks wait for. Those of sockets are closed with their objects."""
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.fileobj, int) and key.fd not in self._socket_descriptors():
                with contextlib.suppress(OSError):
                    os.close(key.fd)

    def _socket_descriptors(self) -> set[int]:
        found = (reference() for reference in self.process._sockets)
        return {opened.fileno() for opened in found if opened is not None}

    def forget(self) -> None:
        self._ready.clear()
        self._scheduled.clear()
        for transport in list(self._transports.values()):
            transport._sock = None  # it would complain that no one has closed it
        self._selector.close()
        self._closed = True

    def _write_to_self(self) -> None:
        """No thread waits in the selector."""

    def _note_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.process.alive:
            self.world.problems.append(f"{self.process.name}: {context['message']}: {context.get('exception')!r}")

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:
        """In one callback: a thread would make the simulation depend on real time."""
        done = self.create_future()

        def run() -> None:
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)
            else:
                done.cancelled() or done.set_result(result)

        self.call_soon(run)
        return done

    def add_signal_handler(self, *args: Any) -> None:
        """No signals are sent to simulated processes."""

    def remove_signal_handler(self, *args: Any) -> bool:
        return False

    async def create_connection(self, factory: Any, host: Any = None, port: int = 0, **kwargs: Any) -> Any:
        """Connections of drivers go through the simulated network, those within the cluster over unix sockets."""
        if "network" not in self.process.facts and kwargs.get("sock") is None:
            return await self.create_unix_connection(factory, self.world.path_of(port))
        if kwargs.get("sock") is None:
            kwargs = {"sock": self.process.facts["network"].connect()}
        return await super().create_connection(factory, **kwargs)
