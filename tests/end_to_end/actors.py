"""Actors of the end-to-end tests, imported by name in the workers."""

from __future__ import annotations

import logging
import operator
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from meshgate import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Port,
    context,
    current_actor_name,
    current_rank,
    endpoint,
    get_or_spawn_controller,
    returns_future,
    send,
    this_host,
    this_proc,
)


class UserError(Exception):
    """An exception that the user defines."""


class Point2:
    """A value class that the user defines."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point2) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


class Worker(Actor):
    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.recorded_numbers: list[int] = []

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)

    @endpoint
    def coordinates(self) -> dict[str, int]:
        return dict(current_rank())

    @endpoint
    def temporary_file(self) -> str:
        handle, path = tempfile.mkstemp(suffix=" written by an actor")
        os.close(handle)
        return path

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    @endpoint
    def record(self, number: int) -> int:
        self.recorded_numbers.append(number)
        return number

    @endpoint
    def recorded(self) -> list[int]:
        return self.recorded_numbers

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def doubled(self, array: Any) -> Any:
        array *= 2  # a received array is writable, as in Monarch
        return array

    @endpoint
    def array(self, length: int) -> Any:
        import numpy as np  # in few of the processes

        return np.arange(length, dtype=np.float32)

    @endpoint
    def fail(self, message: str = "no") -> None:
        raise UserError(message)

    @endpoint
    def fail_if(self, ranks: list[int]) -> int:
        rank = int(current_rank().rank)
        if rank in ranks:
            raise UserError(f"rank {rank} failed")
        return rank

    @endpoint
    def type_of(self, value: Any) -> str:
        return f"{type(value).__module__}.{type(value).__qualname__}"

    @endpoint
    def call_others(self, others: Any, amount: int) -> list[int]:
        return sorted(others.add.call(amount).get().values())

    @endpoint
    def return_mesh(self, mesh: Any) -> Any:
        return mesh

    @endpoint
    def send_to(self, port: Any, count: int, size: int = 0) -> None:
        for number in range(count):
            port.send((number, bytes(size)) if size else number)

    @endpoint
    def say(self, text: str, end: str = "\n", error: bool = False) -> None:
        print(text, end=end, flush=True, file=sys.stderr if error else sys.stdout)

    @endpoint
    def say_natively(self, text: str) -> None:
        os.write(1, f"{text}\n".encode())
        subprocess.run(["/bin/sh", "-c", f"echo {text} of a child >&2"], check=True)

    @endpoint
    def log(self, text: str) -> None:
        logging.getLogger("trainer").warning(text)

    @endpoint
    def wait_for_file(self, path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.02)
        return f"found {os.path.basename(path)}"

    @endpoint
    def wait_on(self, ranks: list[int], path: str) -> None:
        while int(current_rank().rank) in ranks and not os.path.exists(path):
            time.sleep(0.02)

    @endpoint
    def hang(self) -> None:
        threading.Event().wait()

    @endpoint
    def hang_if(self, ranks: list[int]) -> None:
        if int(current_rank().rank) in ranks:
            threading.Event().wait()

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Owner(Actor):
    """Spawns processes of its own and returns meshes in them. Deaths there are no failures of this actor."""

    def __supervise__(self, failure: Any) -> bool:
        return True

    @endpoint
    def spawn(self, processes: int) -> Any:
        self.inner = this_host().spawn_procs(per_host={"inner": processes}).spawn("inner", Worker)
        self.inner.initialized.get()
        return self.inner

    @endpoint
    def spawn_here(self) -> Any:
        return this_proc().spawn("inner", Worker)

    @endpoint
    def spawn_on(self, procs: Any) -> Any:
        self.inner = procs.spawn("inner", Worker)
        self.inner.initialized.get()
        return self.inner

    @endpoint
    def spawned(self) -> Any:
        return self.inner

    @endpoint
    def stop_spawned(self) -> None:
        self.inner.stop().get()

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Sharing(Actor):
    @endpoint
    async def add(self, name: str, amount: int) -> tuple[int, int]:
        """The total of a shared worker, and its process."""
        shared: Any = await get_or_spawn_controller(name, Worker, 100)
        return await shared.add.call_one(amount), await shared.pid.call_one()


class Ported(Actor):
    @endpoint(explicit_response_port=True)
    def increment(self, port: Any, value: int) -> None:
        port.send(value + 1)


class HoldsALock(UserError):
    """An exception that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class RaisesLocks(Actor):
    @endpoint
    def fail(self) -> None:
        raise HoldsALock("the optimizer is busy")

    @endpoint(explicit_response_port=True)
    def fail_through_port(self, port: Any) -> None:
        port.exception(HoldsALock("the loader is busy"))

    @endpoint
    def state(self) -> str:
        return "alive"


class FailingInit(Actor):
    def __init__(self) -> None:
        raise UserError("not today")

    @endpoint
    def ping(self) -> str:
        return "pong"


class Async(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        return value


class OpensAChannel(Actor):
    @endpoint
    async def send(self, port: Any) -> None:
        port.send("the only message")

    @endpoint
    async def ask(self, other: Any) -> Any:
        port, receiver = Channel[Any].open(once=True)
        await other.send.call_one(port)
        return await receiver.recv()


class Ranked(Actor):
    """Reads ``self.rank``, as Kubetorch's programs do; with ``named`` it sets the attribute itself."""

    def __init__(self, named: bool = False) -> None:
        if named:
            self.rank = "mine"

    @endpoint
    def rank_attribute(self) -> object:
        return self.rank


class SendsMeshes(Actor):
    """Sends meshes through a port, the first before its own constructor has returned."""

    def __init__(self, procs: Any, port: Port[Any]) -> None:
        port.send(procs.spawn("inner", Worker, 5))

    @endpoint
    def send(self, mesh: Any, port: Port[Any]) -> None:
        port.send([mesh, mesh])


class PortedToMeshgate(Actor):
    """Uses meshgate's names inside an actor, as a program does that changes its imports."""

    @endpoint
    async def sum_of(self, workers: Any) -> int:
        total: int = await Accumulator(workers.rank, 0, operator.add).accumulate()
        return total

    @endpoint
    async def first_reply(self, workers: Any) -> Any:
        port, receiver = Channel[Any].open()
        send(workers.rank, (), {}, port=port, selection="choose")
        return await receiver.recv()

    @endpoint
    async def caught(self, worker: Any) -> str:
        try:
            await worker.fail.call_one("caught")
        except ActorError as error:
            return str(error)
        return ""

    @endpoint
    async def later(self) -> str:
        @returns_future
        async def name() -> str:
            return current_actor_name()

        return await name()


class StopsItself(Actor):
    @endpoint
    def stop_on(self, rank: int) -> str:
        instance = context().actor_instance
        if instance.rank.rank == rank:
            instance.stop("done with it")
        return "stopping"

    @endpoint
    def step(self) -> int:
        return context().actor_instance.rank.rank


class Stopping(Actor):
    """Stops for a debugger, which may change ``value``."""

    @endpoint
    def double(self, value: int) -> int:
        breakpoint()
        return value * 2


class AsyncStopping(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        breakpoint()
        return value


def export_spans(directory: str) -> None:
    """Writes the spans of this process to a file in ``directory``, one on each line."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    file = open(os.path.join(directory, f"{os.getpid()}.json"), "a", buffering=1)  # noqa: SIM115
    provider = TracerProvider()
    exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def own_span() -> object:
    """Ends a span of the program's own, and returns the baggage that its caller has set."""
    from opentelemetry import baggage, trace

    with trace.get_tracer("program").start_as_current_span("inner"):
        return baggage.get_baggage("run")


class Traced(Actor):
    def __init__(self, directory: str) -> None:
        export_spans(directory)

    @endpoint
    def step(self, count: int) -> object:
        return own_span()

    @endpoint
    def fail(self) -> None:
        raise ValueError("no such step")


class AsyncTraced(Actor):
    def __init__(self, directory: str) -> None:
        export_spans(directory)

    @endpoint
    async def step(self, count: int) -> object:
        return own_span()

    @endpoint
    async def fail(self) -> None:
        raise ValueError("no such step")
