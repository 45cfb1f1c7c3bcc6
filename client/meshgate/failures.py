"""From what the gateway says went wrong to the error that the user sees.

The gateway groups the ranks whose pickled errors were the same bytes. Here they are grouped further: the same type
raised at the same place counts as one kind, even where the message names the rank, so that 512 ranks that fail alike
are told once.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshgate.errors import (
    ActorError,
    ErrorKind,
    GatewayFault,
    InvalidRequestError,
    MeshFailure,
    MeshgateError,
    StaleCodeError,
    StepFailedError,
    SupervisionError,
    ranks_text,
)
from meshgate.remote_text import for_people, in_project
from meshgate_wire import messages

__all__ = ["Raised", "failure_of_fault", "from_failure"]

_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Raised:
    """What a worker pickled when an endpoint raised, as far as it can be read here."""

    exception: BaseException | None
    message: str
    exception_formatted: str

    def place(self) -> tuple[object, ...]:
        """The same for exceptions of one type that were raised at the same place."""
        type_name = type(self.exception).__name__ if self.exception is not None else ""
        frames = tuple(_FRAME.findall(in_project(self.exception_formatted)))
        return type_name, frames or self.exception_formatted


_NOT_SENT = Raised(None, "their errors were too many different ones to be sent", "")


def from_failure(
    failure: messages.Failure,
    raised: Sequence[Raised] = (),
    *,
    endpoint: str = "",
    cause: BaseException | None = None,
) -> MeshgateError:
    """The error to raise for ``failure``.

    ``raised``: the buffers of the message, decoded. ``endpoint``: what was called, such as ``trainers.step``.
    ``cause``: the error of the step that failed before, where the client knows it.
    """
    error = _build(failure, raised, endpoint)
    if cause is not None:
        error.__cause__ = cause
    return error


def _build(failure: messages.Failure, raised: Sequence[Raised], endpoint: str) -> MeshgateError:
    if failure.kind == "actor":
        return _actor_error(failure, raised, endpoint)
    if failure.kind == "supervision":
        died = MeshFailure(failure.mesh, for_people(failure.message), failure.ranks, dict(failure.hosts))
        called = f"{endpoint} has no answer: " if endpoint else ""
        return SupervisionError(f"{called}{died}", died, endpoint=endpoint)
    if failure.kind == "step":
        needed = f"{endpoint or 'this'} could not run because an earlier step failed"
        step = f": {failure.step}" if failure.step else ""
        return StepFailedError(f"{needed}{step}\n{for_people(failure.message)}", failure.step)
    if failure.kind == "invalid":
        return InvalidRequestError(failure.message)
    if failure.kind == "stale_code":
        return StaleCodeError(for_people(failure.message), tuple(failure.hosts.values()))
    return GatewayFault(failure.message)


def failure_of_fault(fault: messages.Fault) -> MeshFailure:
    """What ``unhandled_fault_hook`` is given."""
    return MeshFailure(fault.mesh, for_people(fault.report), fault.ranks, dict(fault.hosts))


def _actor_error(failure: messages.Failure, raised: Sequence[Raised], endpoint: str) -> ActorError:
    kinds = _fold(failure, raised)
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
    error.endpoint = endpoint
    error.report = _report(error, failure.unanswered)
    return error


def _fold(failure: messages.Failure, raised: Sequence[Raised]) -> tuple[ErrorKind, ...]:
    """The kinds of errors, most frequent first, and last those that were not sent."""
    kinds: dict[object, ErrorKind] = {}
    for group in failure.errors:
        known = group.buffer is not None and group.buffer < len(raised)
        what = raised[group.buffer or 0] if known else _NOT_SENT
        kind = ErrorKind(group.ranks, group.count, what.exception, what.message, what.exception_formatted, sent=known)
        before = kinds.get(what.place())
        if before is not None:
            ranks = tuple(sorted({*before.ranks, *kind.ranks}))
            varied = before.varied or in_project(kind.exception_formatted) != in_project(before.exception_formatted)
            kind = replace(before, ranks=ranks, count=before.count + kind.count, varied=varied)
        kinds[what.place()] = kind
    if not kinds:
        what = raised[0] if raised else Raised(None, failure.message, "")
        count = max(len(failure.ranks), 1)
        kinds[0] = ErrorKind(failure.ranks, count, what.exception, what.message, what.exception_formatted)
    return tuple(sorted(kinds.values(), key=lambda kind: (not kind.sent, -kind.count)))


def _report(error: ActorError, unanswered: int) -> str:
    called = error.endpoint or error.mesh or "the call"
    late = f" ({unanswered} had not answered yet)" if unanswered else ""
    if len(error.kinds) == 1 and error.count == 1:
        kind = error.kinds[0]
        worth_telling = error.host or (error.ranks and error.total > 1)
        where = f" on {_where(kind.ranks, error.hosts)}" if worth_telling else ""
        return f"{called} failed{where}{late}: {_headline(kind)}\n{_traceback(kind)}".rstrip()
    sent = sum(kind.sent for kind in error.kinds)
    distinct = "1 error" if sent <= 1 else f"{sent} distinct errors"
    distinct += "" if sent == len(error.kinds) else " or more"
    head = f"{called} failed: {error.count} of {error.total} ranks failed, {distinct}{late}:"
    return "\n".join([head, *(_kind_text(kind, error.hosts) for kind in error.kinds)])


def _kind_text(kind: ErrorKind, hosts: Mapping[int, str]) -> str:
    where = _where(kind.ranks, hosts) if kind.ranks else f"{kind.count} ranks"
    more = f" and {kind.count - len(kind.ranks)} more" if kind.ranks and kind.count > len(kind.ranks) else ""
    traceback = textwrap.indent(_traceback(kind), "  ")
    alike = " (the others' messages differ in detail)" if kind.varied else ""
    return f"\n{where}{more}: {_headline(kind)}{alike}\n{traceback}".rstrip()


def _where(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    named = list(dict.fromkeys(hosts[rank] for rank in ranks if hosts.get(rank)))
    shown = named if len(named) <= 4 else [*named[:3], f"{len(named) - 3} more"]
    return f"{ranks_text(ranks)} ({', '.join(shown)})" if named else ranks_text(ranks)


def _headline(kind: ErrorKind) -> str:
    """The last line of a traceback that is not indented: the exception and what it says."""
    lines = [line for line in kind.exception_formatted.splitlines() if line and not line[0].isspace()]
    return lines[-1] if lines else kind.message


def _traceback(kind: ErrorKind) -> str:
    return for_people(kind.exception_formatted.rstrip("\n"))
