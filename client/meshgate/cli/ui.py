"""``meshgate ui``: a job in the browser."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from meshgate.cli import jobs
from meshgate.cli.console import Job, Namespace, console, fail
from meshgate.cli.top import rank_usage
from meshgate.errors import JobNotRunning
from meshgate.jobs.find import find_job
from meshgate.jobs.trait import JobTrait
from meshgate.ranks.stacks import read_stacks
from meshgate.ranks.usage import UsageMeter
from meshgate.ui.server import Feed, Meter, StackRequest, run_page


def open_page(
    job: Job = None,
    namespace: Namespace = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port of the page on this machine; 0: a free one.")
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the link in a browser.")] = True,
) -> None:
    """Show a job in the browser, live, until interrupted.

    Its ranks, hosts, calls, sessions and output.

    The page is served on this machine only. The link works once, and then in the browser that used it.
    """
    found = find_job(job, namespace)
    found.status()  # raises if the gateway cannot be reached

    def started(url: str) -> None:
        console().print(f"{url}\nThe link works once; Ctrl-C ends it.")
        if browser:
            webbrowser.open(url)

    read_events = _events_reader(str(getattr(found, "name", "")), namespace)
    may_end = (found._running or found)._ends_when_killed
    open_meter = functools.partial(_open_meter, found, job, namespace)
    feed = Feed(found, repr(found), _stack_reader(found), open_meter, read_events, may_end=may_end)
    try:
        asyncio.run(run_page(feed, port, started))
    except OSError as error:
        fail(f"cannot serve the page on port {port}: {error.strerror or error}; choose another with --port")


def _stack_reader(found: JobTrait) -> Callable[[StackRequest], str]:
    """Returns what a process runs, as ``meshgate stacks`` does: from its host, in a session that then ends."""

    def read(asked: StackRequest) -> str:
        try:
            meshes, status = found._state()._hosts, found.status()
            hosts = [*status.hosts, *(host for session in status.sessions for host in session.hosts)]
            place = next((host for host in hosts if host.name == asked.host), None)
            if place is None:
                return f"the job has no host {asked.host!r} any more"
            stacks = read_stacks({place.mesh: meshes[place.mesh].slice(hosts=slice(place.rank, place.rank + 1))})
        finally:
            _close_session(found)
        wanted = asked.session, asked.mesh, asked.rank
        texts = [each.text() for each in stacks if (each.session, each.mesh, each.rank) == wanted]
        return "\n".join(texts or stacks.problems.values()) or "no process of this rank runs"

    return read


@contextlib.contextmanager
def _open_meter(shown: JobTrait, job: str | None, namespace: str | None) -> Iterator[Meter]:
    """Looks at what ranks use, as ``meshgate top`` does. In a session of its own: reading a stack closes that of
    ``shown``."""
    found = find_job(job, namespace)
    if namespace is None and found.apply_id != shown.apply_id:  # cluster jobs are found by name
        raise JobNotRunning(f"`meshgate ui` now finds another job than {shown!r}; run it again with the job's id")

    def look() -> dict[str, Any]:
        usage = meter.read()
        ranks = [rank_usage(process, usage, {}) for process in usage.processes]
        rows = [(each.mesh, each.rank, each.cpu, each.memory, each.gpu, each.gpu_memory) for each in ranks]
        return {"ranks": rows, "problems": usage.problems}

    try:
        with UsageMeter(found._state()._hosts) as meter:
            yield look
    finally:
        _close_session(found)


def _close_session(found: JobTrait) -> None:
    client = (found._running or found)._client
    if client is not None:
        client.close()


def _events_reader(name: str, namespace: str | None) -> Callable[[], Sequence[dict[str, Any]]] | None:
    if namespace is None:
        return None
    return lambda: [event.model_dump() for event in jobs.objects_and_events(name, namespace)[1]]
