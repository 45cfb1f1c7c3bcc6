"""What actors print, in the program's output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.conformance.cases import Kit

ARRIVAL_SECONDS = 60


@contextlib.contextmanager
def _output() -> Iterator[Callable[[], str]]:
    """What the program writes to its standard output and error, by whatever route, inside the ``with`` block."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)

        def read() -> str:
            return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")

        try:
            yield read
        finally:
            sys.stdout.flush()
            for descriptor, before in zip((1, 2), kept, strict=True):
                os.dup2(before, descriptor)
                os.close(before)


def _arrives(read: Callable[[], str], *texts: str) -> None:
    deadline = time.monotonic() + ARRIVAL_SECONDS
    while missing := [text for text in texts if text not in read()]:
        if time.monotonic() > deadline:
            raise AssertionError(f"{missing} did not arrive; the output is {read()!r}")
        time.sleep(0.1)


def _worker(kit: Kit, *, shown: bool = True, per_host: int = 1) -> Any:
    procs = kit.procs(per_host, kit.hosts.slice(hosts=0))
    asyncio.run(procs.logging_option(stream_to_client=shown, aggregate_window_sec=None))
    return kit.spawn_on(procs)


def similar_lines_are_counted_over_a_window(kit: Kit) -> None:
    procs = kit.procs(2, kit.hosts.slice(hosts=0))
    with _output() as read:
        asyncio.run(procs.logging_option(stream_to_client=True, aggregate_window_sec=2))
        worker = kit.spawn_on(procs)
        for _ in range(3):
            worker.print.call("printed again and again").get()
        _arrives(read, "[6 similar log lines]", "printed again and again")


def what_an_actor_prints_arrives(kit: Kit) -> None:
    worker = _worker(kit)
    with _output() as read:
        worker.print.call_one("printed by an actor").get()
        _arrives(read, "printed by an actor")


def what_an_actor_writes_to_standard_error_arrives(kit: Kit) -> None:
    worker = _worker(kit)
    with _output() as read:
        worker.print_error.call_one("an actor's error").get()
        _arrives(read, "an actor's error")


def what_an_actor_logs_arrives(kit: Kit) -> None:
    worker = _worker(kit)
    with _output() as read:
        worker.log.call_one("logged by an actor").get()
        _arrives(read, "logged by an actor")


def every_ranks_lines_arrive(kit: Kit) -> None:
    workers = _worker(kit, per_host=2)
    with _output() as read:
        workers.slice(gpus=0).print.call_one("from rank zero").get()
        workers.slice(gpus=1).print.call_one("from rank one").get()
        _arrives(read, "from rank zero", "from rank one")


def output_can_be_turned_off(kit: Kit) -> None:
    hidden, shown = _worker(kit, shown=False), _worker(kit)
    with _output() as read:
        hidden.print.call_one("hidden").get()
        shown.print.call_one("shown").get()
        _arrives(read, "shown")
        assert "hidden" not in read()
