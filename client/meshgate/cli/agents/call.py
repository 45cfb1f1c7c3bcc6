"""``meshgate call``: edits, syncs, reloads and calls in one command, in a session that outlives it."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshgate.caller import theirs
from meshgate.cli.agents.program import error_report
from meshgate.cli.agents.run import Edits, make_edits
from meshgate.cli.console import FAILED, AsJson, Namespace, emit
from meshgate.cli.models import Called, ErrorReport, RankValue, Reload
from meshgate.code_sync.project import driver_tree
from meshgate.errors import JobError
from meshgate.jobs.find import find_job
from meshgate.jobs.sessions import SessionInfo, SessionList, choose_session
from meshgate.jobs.signals import hold_signals
from meshgate.jobs.trait import JobTrait
from meshgate.proxies import ActorMeshProxy, HostMeshProxy, ProcMeshProxy
from meshgate.session.futures import CONTINUES

OWN_SESSION = "agent"
MOST_TEXT = 20_000  # characters of a value that is not JSON
OUTPUT_GRACE = 0.1  # seconds to wait for what the call has printed; the next command shows output that arrives later
CANCEL_TIMEOUT = 5.0  # seconds for the gateway to answer that a call is cancelled
LEAVE_TIMEOUT = 2.0  # seconds for the gateway to notice that an earlier command has left the session
_KEYWORD = re.compile(r"([A-Za-z_]\w*)=")
_Values = tuple[list[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint of the actors ``name``, or with ``module`` of new actors of its class ``name``."""

    module: str
    name: str
    endpoint: str


@dataclass(slots=True)
class _Steps:
    """How long each step took, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - started, 4)


@dataclass(slots=True)
class _Work:
    """A call, and what is known of it so far."""

    job: JobTrait
    target: Target
    values: _Values
    init: _Values
    sync: bool
    sync_dirs: list[str] | None
    procs: str | None
    timeout: float | None
    steps: _Steps = field(default_factory=_Steps)
    session: str = ""
    reload: Reload | None = None
    found: list[RankValue] = field(default_factory=list)

    def run(self, session: str | None, *, take_over: bool) -> None:
        """Raises what fails."""
        with self.steps("attach"):
            actors, procs, hosts = self._meshes(session, take_over=take_over)
        files, version = 0, ""
        if self.sync:
            with self.steps("sync"):
                files, version = self._sync()
        if self.sync and procs is not None:
            with self.steps("reload"):
                reports = procs.reload().get(self.timeout).values()
            modules, old = ({name for each in reports for name in each[of]} for of in ("modules", "old_classes"))
            self.reload = Reload(version=version, files=files, modules=sorted(modules), old_classes=sorted(old))
        if actors is not None:
            self._call(actors)
            return
        with self.steps("spawn"):
            args, kwargs = self.init
            procs = procs or _only(hosts, "host mesh").spawn_procs(name=self.procs or OWN_SESSION)
            actors = procs.spawn(self.target.name.lower(), self._load_class(), *args, **kwargs)
            actors.initialized.get(self.timeout)
        try:
            self._call(actors)
        finally:
            actors.stop()

    def _meshes(
        self, session: str | None, *, take_over: bool
    ) -> tuple[ActorMeshProxy | None, ProcMeshProxy | None, Mapping[str, HostMeshProxy]]:
        """The actors, or none if the target is a class; their processes, or none; and the hosts."""
        wanted = session or (OWN_SESSION if self.target.module else None)
        sessions = self.job.sessions(None)
        if self.target.module and wanted not in {each.name for each in sessions}:
            self.job._detached = self.session = wanted or OWN_SESSION
            return None, None, self.job._state()._hosts
        chosen = self._choose(sessions, wanted)
        deadline = time.monotonic() + LEAVE_TIMEOUT
        while chosen.connected and not take_over:
            if time.monotonic() > deadline:
                raise JobError(
                    f"session {chosen.name or chosen.id[:8]} is held by {chosen.holder}, which would lose it: name "
                    "another session, or pass --take-over"
                )
            time.sleep(LEAVE_TIMEOUT / 20)
            chosen = self._choose(self.job.sessions(None), wanted)
        attached = self.job.attach(chosen.id, cached_path=None)
        self.session = attached.name
        if not self.target.module:
            actors = _named(attached.actors, self.target.name, "actors", attached.name)
            return actors, actors._procs, attached.hosts
        if self.procs is not None:
            return None, _named(attached.procs, self.procs, "processes", attached.name), attached.hosts
        return None, _only(attached.procs, "proc mesh") if attached.procs else None, attached.hosts

    def _choose(self, sessions: list[SessionInfo], wanted: str | None) -> SessionInfo:
        with_actors = [each for each in sessions if self.target.name in each.actors]
        if wanted is None and not with_actors and sum(each.detached for each in sessions) > 1:
            known = "; ".join(f"{each.name or each.id[:8]}: {', '.join(each.actors) or 'none'}" for each in sessions)
            raise JobError(f"no session has actors {self.target.name!r}. Actors of each session: {known}")
        chosen = with_actors if wanted is None and with_actors else sessions
        return choose_session(SessionList(sessions=chosen), wanted)

    def _sync(self) -> tuple[int, str]:
        """The directories that processes of the session import from stay those that they are."""
        client = self.job._client
        top = driver_tree(self.sync_dirs).top
        sys.path += [str(top / path) for path in (client.code_paths if client is not None else ())]
        report = self.job.sync(sync_dirs=self.sync_dirs, quiet=True)
        return report.files, report.version

    def _load_class(self) -> type:
        sys.path.insert(0, str(Path.cwd()))
        return getattr(importlib.import_module(self.target.module), self.target.name)  # type: ignore[no-any-return]

    def _call(self, actors: Any) -> None:
        try:
            with self.steps("call"):
                values = self._value(getattr(actors, self.target.endpoint)).values()
            self.found = [json_value(rank, value) for rank, value in enumerate(values)]
        finally:
            time.sleep(OUTPUT_GRACE)

    def _value(self, endpoint: Any) -> Any:
        """Calls the endpoint. Raises TimeoutError, or what Ctrl-C or SIGTERM raise; the call is cancelled then: its
        result would not be read."""
        args, kwargs = self.values
        result = None
        try:
            with hold_signals():  # until the call that was sent can be cancelled
                result = endpoint.call(*args, **kwargs)
            return result.get(self.timeout)
        except (TimeoutError, KeyboardInterrupt, SystemExit) as error:
            if result is None:
                raise
            result.cancel()
            result.exception(CANCEL_TIMEOUT)
            if not isinstance(error, TimeoutError):
                raise
            waited = str(error).removesuffix(CONTINUES)
            raise TimeoutError(
                f"{waited}the call was cancelled: an async endpoint ends where it awaits, any other runs to its end "
                "(`why` shows where it is). Pass a longer timeout if it needs one"
            ) from None


def call_endpoint(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="MESH.ENDPOINT, or MODULE:CLASS.ENDPOINT to spawn actors for it.")
    ],
    values: Annotated[list[str] | None, typer.Argument(metavar="VALUE", help="JSON, or NAME=JSON.")] = None,
    job: Annotated[str | None, typer.Option("--job", "-j", help="An id, a job file, or with -n a name.")] = None,
    session: Annotated[
        str | None,
        typer.Option("--session", help="A detached session; default: the one with these actors; for a class, 'agent'."),
    ] = None,
    edits: Edits = None,
    sync: Annotated[bool, typer.Option("--sync", help="Sync this directory's code and reload it first.")] = False,
    directories: Annotated[
        list[str] | None, typer.Option("--dir", help="A directory to sync instead of the project.")
    ] = None,
    init: Annotated[list[str] | None, typer.Option("--init", help="JSON or NAME=JSON for the constructor.")] = None,
    procs: Annotated[
        str | None, typer.Option("--procs", help="The proc mesh to spawn on; default: the only one.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the session from a program that holds it.")
    ] = False,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds to wait for each step.")] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Call an endpoint on every rank, after edits and a reload.

    The actors are those of a detached session, which keeps them and their processes between calls.
    """
    parsed = parse_target(target)
    arguments, constructor = parse_values(values), parse_values(init)
    steps = _Steps()
    with steps("find"):
        found = find_job(job, namespace)
    make_edits(edits)
    syncs = sync or bool(edits) or bool(parsed.module)
    work = _Work(found, parsed, arguments, constructor, syncs, directories, procs, timeout, steps)
    error, output = _run(work, session, take_over=take_over)
    result = Called(
        target=target,
        session=work.session,
        values=work.found,
        output=output,
        error=error,
        reload=work.reload,
        seconds=work.steps.seconds,
    )
    emit(result, as_json, lambda console: _show(result, console))
    if error is not None:
        raise typer.Exit(FAILED)


def _run(work: _Work, session: str | None, *, take_over: bool) -> tuple[ErrorReport | None, str]:
    """The error, and what was printed meanwhile."""
    error: ErrorReport | None = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            work.run(session, take_over=take_over)
        except Exception as failure:  # noqa: BLE001 - reported as data, whatever it is
            error = error_report(failure.with_traceback(theirs(failure, Exception)))
        finally:
            with work.steps("leave"):
                work.job._leave()
    return error, printed.getvalue()


def parse_target(text: str) -> Target:
    module, colon, rest = text.rpartition(":")
    name, _, endpoint = rest.rpartition(".")
    if not name or not endpoint.isidentifier() or (colon and not (module and name.isidentifier())):
        raise typer.BadParameter(f"{text!r} is neither MESH.ENDPOINT nor MODULE:CLASS.ENDPOINT")
    return Target(module, name, endpoint)


def parse_values(texts: Sequence[str] | None) -> _Values:
    """Positional and keyword arguments: each text is JSON, or NAME=JSON."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for text in texts or ():
        keyword = _KEYWORD.match(text)
        try:
            value = json.loads(text[keyword.end() :] if keyword else text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not JSON, nor NAME=JSON; a text needs double quotes") from None
        if keyword:
            keywords[keyword[1]] = value
        else:
            positional.append(value)
    return positional, keywords


def json_value(rank: int, value: Any) -> RankValue:
    try:
        return RankValue(rank=rank, value=json.loads(json.dumps(value, allow_nan=False)))
    except (TypeError, ValueError, RecursionError):
        return RankValue(rank=rank, value=None, text=repr(value)[:MOST_TEXT])


def _named(meshes: Mapping[str, Any], name: str, kind: str, session: str) -> Any:
    if name not in meshes:
        raise JobError(f"session {session!r} has no {kind} {name!r}; it has: {', '.join(meshes) or 'none'}")
    return meshes[name]


def _only(meshes: Mapping[str, Any], kind: str) -> Any:
    if len(meshes) != 1:
        raise JobError(f"name a {kind} with --procs: the session has {', '.join(meshes) or 'none'}")
    return next(iter(meshes.values()))


def _show(result: Called, console: Console) -> None:
    if result.output:
        console.print(result.output.rstrip("\n"))
    for each in result.values:
        console.print(f"rank {each.rank}: {each.text or json.dumps(each.value)}")
    if result.reload is not None and result.reload.old_classes:
        console.print(f"objects of {', '.join(result.reload.old_classes)} still run their old code")
    if result.error is not None:
        console.print(_error_text(result.error))


def _error_text(error: ErrorReport) -> str:
    groups = [f"rank {', '.join(map(str, group.ranks))}:\n{group.traceback}" for group in error.groups]
    return "\n".join(groups) or error.traceback or f"{error.type}: {error.message}"
