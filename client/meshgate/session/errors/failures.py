"""Turns a failure that the gateway reports into the error that the user sees.

The gateway groups ranks whose pickled errors are identical bytes. This module groups further: exceptions of one type
raised at the same place are one kind, even if their messages name the rank, so that 512 ranks that fail alike make
one report. An exception that an actor sent through its response port is raised itself, as in Monarch.

Workers' tracebacks are made readable: they start with frames of Monarch and meshgate, and their files are those of a
snapshot, ``…/snapshots/<digest>/pkg/model.py``, whose path differs from host to host. What remains starts in the user's
code and says ``pkg/model.py``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshgate.errors import (
    ActorError,
    BootstrapFailed,
    CallCancelledError,
    ErrorKind,
    GatewayFault,
    InvalidRequestError,
    MeshFailure,
    MeshgateError,
    SpawnFailed,
    StaleCodeError,
    StepFailedError,
    SupervisionError,
    ValueLostError,
    ranks_text,
)
from meshgate.serialization.unpickling import RemoteException
from meshgate.session.objects import ObjectTable
from meshgate_wire import messages
from meshgate_wire.fields import exception_line

SNAPSHOT_ROOT = r'[^"\n]*/snapshots/[0-9a-f]{64}/'
_SNAPSHOT = re.compile(rf'File "{SNAPSHOT_ROOT}')
_INTERNAL_FILES = "|".join(
    (
        r'[^"\n]*/monarch/_src/actor/',
        r'[^"\n]*/meshgate_gateway/engine/',
        r"<_meshgate_sync_",
        r"<frozen importlib",
        r'[^"\n]*/importlib/__init__\.py',
    )
)
_INTERNAL_FRAME = rf'File "(?:{_INTERNAL_FILES})[^\n]*\n(?:(?P=indent)  [^\n]*\n)*'  # with the code lines below it
# The first line of a traceback, and the internal frames that follow it. Those of an exception group begin with "  | ".
_TRACEBACK_START = re.compile(
    rf"^(?P<head>[^\n]*Traceback [^\n]*\n)(?P<indent>(?: *\|)? *){_INTERNAL_FRAME}(?:(?P=indent){_INTERNAL_FRAME})*"
    r"(?P<more>(?P=indent)File )?",
    re.MULTILINE,
)
_PICKLES_RESULT = re.compile(r'Traceback [^\n]*\n *File "[^"\n]*/cloudpickle/')
_POISONED = "Cannot spawn new actors on mesh with supervision events"
_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_MESH_OPERATIONS = frozenset({"initialized", "reload", "shutdown", "stop"})
_NOT_SENT = RemoteException(None, "too many distinct errors; these were not sent", "")
_OF_KEPT = RemoteException(None, "get() of its kept mesh raises the exception", "")  # which a failed creation lacks


def without_snapshot_paths(text: str) -> str:
    """``text`` with the files of snapshots named relative to the project."""
    return _SNAPSHOT.sub('File "', text)


def readable_report(text: str) -> str:
    """``text`` with the leading internal frames of each traceback removed.

    A traceback of internal frames only is kept, or dropped if ``text`` has another.
    """
    several = text.count("Traceback ") > 1

    def shorten(found: re.Match[str]) -> str:
        if found["more"]:
            return found["head"] + found["more"]
        return "" if several and found["head"].lstrip().startswith("Traceback ") else found[0]

    report = without_snapshot_paths(_TRACEBACK_START.sub(shorten, text))
    if _POISONED in text:
        report += "\nAn actor failed in these processes, so Monarch spawns no others in them: spawn new processes"
    return report


def result_unpicklable(report: str) -> bool:
    """Whether a ``readable_report`` is of an endpoint that returned, with a value that cannot be pickled."""
    return _PICKLES_RESULT.search(report) is not None


def from_failure(
    failure: messages.Failure,
    raised: Sequence[RemoteException] = (),
    *,
    endpoint: str = "",
    cause: BaseException | None = None,
    shared_environment: str = "",
) -> Exception:
    """The error to raise for ``failure``: a ``MeshgateError``, or the exception that the lowest rank to do so sent.

    ``raised``: the decoded buffers of the message. ``endpoint``: what was called, such as ``trainers.step``.
    ``cause``: the error of the earlier step that failed, if the client knows it. ``shared_environment``: where this
    program's packages are, if the workers use them as well.
    """
    error = _sent_exception(failure, raised) or _build(failure, raised, endpoint, shared_environment)
    if isinstance(error, StepFailedError) and isinstance(cause, ActorError):
        error = BootstrapFailed(str(error), error.step, cause)
    elif isinstance(error, StepFailedError) and isinstance(cause, SupervisionError):
        error = SpawnFailed(str(error), error.step, cause.failure, endpoint=endpoint)
    if cause is not None:
        error.__cause__ = cause
    return error


def _sent_exception(failure: messages.Failure, raised: Sequence[RemoteException]) -> Exception | None:
    buffers = [group.buffer for group in sorted(failure.errors, key=lambda group: group.ranks)]
    sent = (raised[each].exception_to_raise() for each in buffers if each is not None and each < len(raised))
    return next(filter(None, sent), None)


def _build(
    failure: messages.Failure, raised: Sequence[RemoteException], endpoint: str, shared_environment: str
) -> MeshgateError:
    if failure.kind == "actor":
        return _actor_error(failure, raised, endpoint, shared_environment)
    if failure.kind == "supervision":
        died = MeshFailure(failure.mesh, readable_report(failure.message), failure.ranks, dict(failure.hosts))
        return SupervisionError(_supervision_text(died, endpoint), died, endpoint=endpoint)
    if failure.kind == "step":
        dependent = f"{endpoint or 'this'} could not run because an earlier step failed"
        step = f": {failure.step}" if failure.step else ""
        return StepFailedError(f"{dependent}{step}\n{readable_report(failure.message)}", failure.step)
    if failure.kind == "lost":
        return _lost_error(failure, endpoint)
    if failure.kind == "cancelled":
        left = f"{failure.unanswered} of {failure.total} ranks had not answered" if failure.total else "it was not sent"
        return CallCancelledError(f"{endpoint} was cancelled: {left}", call=endpoint, ranks=failure.ranks)
    return _refusal(failure)


def _refusal(failure: messages.Failure) -> MeshgateError:
    if failure.kind == "invalid":
        return InvalidRequestError(failure.message)
    if failure.kind == "stale_code":
        return StaleCodeError(readable_report(failure.message), tuple(failure.hosts.values()))
    return GatewayFault(failure.message)


def _lost_error(failure: messages.Failure, endpoint: str) -> ValueLostError:
    where = f" on {_where(failure.ranks, failure.hosts)}" if failure.ranks else ""
    is_, values = ("is", "the value") if len(failure.ranks) == 1 else ("are", "the values")
    who = f"{endpoint or 'this'} could not run: " if endpoint != failure.step else ""
    text = (
        f"{who}{values} of {failure.step}{where} {is_} lost, because the process ended: "
        f"{readable_report(failure.message)}\nCall keep() or put() again, on a slice of the living ranks "
        "or on processes that are spawned again"
    )
    return ValueLostError(text, call=failure.step, ranks=failure.ranks, hosts=dict(failure.hosts))


def _supervision_text(died: MeshFailure, endpoint: str) -> str:
    """Begins as in Monarch, for programs that match the text, and ends with the place of the failure."""
    if not _is_call(endpoint):
        return f"{endpoint} failed: {died}" if endpoint else str(died)
    return f"Endpoint call {endpoint.removesuffix('()')}() failed, {died.reason}\n  Failed: {died.place()}"


def _is_call(endpoint: str) -> bool:
    """Whether it is an endpoint, and not an operation on a mesh."""
    return bool(endpoint) and endpoint.rpartition(".")[2] not in _MESH_OPERATIONS


def failure_of_fault(fault: messages.Fault) -> MeshFailure:
    """The argument of ``unhandled_fault_hook``."""
    report = readable_report(fault.report)
    return MeshFailure(fault.mesh, report, fault.ranks, dict(fault.hosts), job_lost=fault.job_lost)


def dependency_failure(
    objects: ObjectTable, number: int, endpoint: str, reason: messages.Failure | None = None
) -> Callable[[], Exception]:
    """Makes the errors of ``endpoint``, which cannot run because object ``number`` or an ancestor has failed.

    ``reason`` is used if the object has been released.
    """
    found = objects.failure_of(number)
    failed, failure = found if found is not None else (None, reason)
    assert failure is not None
    own_bootstrap = failed is not None and failed.number == number and failure.kind == "actor"
    if failed is not None and failed.kind == "procs" and failure.kind == "actor":
        failure = failure.model_copy(update={"step": ""})  # which is what failed, not a call whose result is missing
    only_stopped = failed is not None and failed.stopped and failed.failure is None
    target = objects.get(number)
    if only_stopped and failed is not None and target is not None and target.kind == "kept":
        stopped = f"{failed.kind} mesh {failed.name!r} was stopped: {failed.stopped}"
        failure = messages.Failure(kind="lost", message=stopped, step=target.name)
    if own_bootstrap or only_stopped or failure.kind == "step":
        return lambda: from_failure(failure, endpoint=endpoint)
    step = failure.model_copy(update={"kind": "step", "step": failure.step or (failed.step if failed else "")})
    return lambda: from_failure(step, endpoint=endpoint, cause=from_failure(failure))


def _actor_error(
    failure: messages.Failure, raised: Sequence[RemoteException], endpoint: str, shared_environment: str
) -> ActorError:
    kinds = _group(failure, raised)
    first = kinds[0]
    error = ActorError(first.exception, first.message)
    error.exception_formatted = first.exception_formatted
    error.kinds = kinds
    error.count = sum(kind.count for kind in kinds)
    error.total = max(failure.total, error.count)
    error.ranks = tuple(sorted({rank for kind in kinds for rank in kind.ranks}))
    error.rank = error.ranks[0] if len(error.ranks) == 1 and error.count == 1 else None
    error.hosts = dict(failure.hosts)
    error.host = failure.hosts.get(error.rank, "") if error.rank is not None else ""
    error.mesh = failure.mesh
    error.endpoint = failure.step or endpoint
    error.report = _report(error, failure.unanswered) + _remedy(kinds, shared_environment)
    if failure.step and endpoint != failure.step:
        error.report = (
            f"{endpoint or 'this'} could not run, because the call whose result it takes failed.\n{error.report}"
        )
    return error


def _group(failure: messages.Failure, raised: Sequence[RemoteException]) -> tuple[ErrorKind, ...]:
    """The kinds of errors, most frequent first; last those that were not sent."""
    kinds: dict[object, ErrorKind] = {}
    for group in failure.errors:
        sent = group.buffer is not None and group.buffer < len(raised)
        unsent = _NOT_SENT if raised or group.buffer is None else _OF_KEPT
        each = raised[group.buffer or 0] if sent else unsent
        kind = ErrorKind(group.ranks, group.count, each.exception, each.message, each.exception_formatted, sent=sent)
        same = kinds.get(raise_site(each))
        if same is not None:
            ranks = tuple(sorted({*same.ranks, *kind.ranks}))
            text, same_text = map(without_snapshot_paths, (kind.exception_formatted, same.exception_formatted))
            kind = replace(same, ranks=ranks, count=same.count + kind.count, varied=same.varied or text != same_text)
        kinds[raise_site(each)] = kind
    if not kinds:
        each = raised[0] if raised else _unsent(failure.message)
        count = max(len(failure.ranks), 1)
        kinds[0] = ErrorKind(failure.ranks, count, each.exception, each.message, each.exception_formatted)
    return tuple(sorted(kinds.values(), key=lambda kind: (not kind.sent, -kind.count)))


def _unsent(message: str) -> RemoteException:
    """An exception of which the gateway sent a message, or a whole traceback."""
    lines = message.rstrip().splitlines()
    return RemoteException(None, lines[-1], message) if len(lines) > 1 else RemoteException(None, message, "")


def raise_site(raised: RemoteException) -> tuple[object, ...]:
    """A key that is equal for exceptions of one type raised at the same place."""
    type_name = type(raised.exception).__name__ if raised.exception is not None else ""
    frames = tuple(_FRAME.findall(without_snapshot_paths(raised.exception_formatted)))
    return type_name, frames or raised.exception_formatted


def _report(error: ActorError, unanswered: int) -> str:
    called = f"Actor call {error.endpoint}" if _is_call(error.endpoint) else error.endpoint or error.mesh or "the call"
    late = f" ({unanswered} had not answered yet)" if unanswered else ""
    if len(error.kinds) == 1 and error.count == 1:
        kind = error.kinds[0]
        names_rank = error.host or (error.ranks and error.total > 1)
        where = f" on {_where(kind.ranks, error.hosts)}" if names_rank else ""
        return f"{called} failed{where}{late}: {headline(kind)}\n{_traceback(kind)}".rstrip()
    sent = sum(kind.sent for kind in error.kinds)
    distinct = "1 error" if sent <= 1 else f"{sent} distinct errors"
    distinct += "" if sent == len(error.kinds) else " or more"
    head = f"{called} failed: {error.count} of {error.total} ranks failed, {distinct}{late}:"
    return "\n".join([head, *(_kind_text(kind, error.hosts) for kind in error.kinds)])


def _remedy(kinds: Sequence[ErrorKind], shared_environment: str) -> str:
    """What to do if the workers lack a module, or if a result cannot be pickled."""
    if any(result_unpicklable(_traceback(kind)) for kind in kinds):
        return "\nThe endpoint returned a value that cannot be pickled. Return what it is made from."
    errors = (kind.exception for kind in kinds)
    missing = {str(each.name).partition(".")[0] for each in errors if isinstance(each, ModuleNotFoundError)}
    if not missing or missing == {"None"}:
        return ""
    names = ", ".join(map(repr, sorted(missing)))
    project = "If it is a module of your project, it must be synced (docs/code.md)."
    if shared_environment:
        return (
            f"\nThe workers cannot import {names}. They run the Python of this program: if it is a package, install it "
            f"in {shared_environment}, pip install {' '.join(sorted(missing))}. {project}"
        )
    return (
        f"\nThe workers cannot import {names}. If it is a package, their image does not contain it: add an image step, "
        f"Image().pip_install([{names}]), or choose another image, Compute(image=…). {project}"
    )


def _kind_text(kind: ErrorKind, hosts: Mapping[int, str]) -> str:
    where = _where(kind.ranks, hosts) if kind.ranks else f"{kind.count} ranks"
    more = f" and {kind.count - len(kind.ranks)} more" if kind.ranks and kind.count > len(kind.ranks) else ""
    traceback = textwrap.indent(_traceback(kind), "  ")
    varied = " (other ranks' messages differ in detail)" if kind.varied else ""
    return f"\n{where}{more}: {headline(kind)}{varied}\n{traceback}".rstrip()


def _where(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in ranks if hosts.get(rank)))
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return f"{ranks_text(ranks)} ({', '.join(shown)})" if names else ranks_text(ranks)


def headline(kind: ErrorKind) -> str:
    """The line of the exception with its type and the first line of its message. One that was never raised has no
    traceback, and begins with it."""
    formatted = kind.exception_formatted
    lines = (line for line in formatted.splitlines() if line.strip() and not line.startswith((" ", "Traceback")))
    return exception_line(formatted) or next(lines, kind.message)


def _traceback(kind: ErrorKind) -> str:
    return readable_report(kind.exception_formatted.rstrip("\n"))
