"""``meshgate ui``: a job in the browser."""

from __future__ import annotations

import asyncio
import webbrowser
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from meshgate.cli import jobs
from meshgate.cli.console import Job, Namespace, console, fail
from meshgate.jobs.find import find_job
from meshgate.jobs.trait import JobTrait
from meshgate.ranks.stacks import read_stacks
from meshgate.ui.server import Feed, StackRequest, run_page


def open_page(
    job: Job = None,
    namespace: Namespace = None,
    port: Annotated[int, typer.Option("--port", help="The port of the page on this machine; 0: a free one.")] = 0,
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
    feed = Feed(found, repr(found), _stack_reader(found), read_events, may_end=may_end)
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
            stacks = read_stacks({place.mesh: meshes[place.mesh].slice(hosts=place.rank)}, asked.rank)
        finally:
            client = (found._running or found)._client
            if client is not None:
                client.close()
        texts = [each.text() for each in stacks if (each.session, each.mesh) == (asked.session, asked.mesh)]
        return "\n".join(texts or stacks.problems.values()) or "no process of this rank runs"

    return read


def _events_reader(name: str, namespace: str | None) -> Callable[[], Sequence[dict[str, Any]]] | None:
    if namespace is None:
        return None
    return lambda: [event.model_dump() for event in jobs.objects_and_events(name, namespace)[1]]
