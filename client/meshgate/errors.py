"""Everything that meshgate raises, as one tree.

::

    MeshgateError
    ├── ActorError                   an endpoint raised (also a monarch.actor.ActorError, where installed)
    ├── SupervisionError             an actor, process or host died (also a RuntimeError); carries a MeshFailure
    ├── StepFailedError              an earlier step that this one needs failed; names it
    ├── InvalidRequestError          the gateway refuses what was asked (also a ValueError)
    ├── StaleCodeError               a host has not got the code
    ├── UnpicklableArgument          an argument cannot travel (also a TypeError); raised before anything is sent
    ├── UnreadableResult             a result needs something that the laptop does not have (also a TypeError)
    ├── ClassNotImportable           an actor class cannot be found by name (also an ImportError)
    ├── GatewayError                 the gateway, or the way to it
    │   ├── ConnectionFailedError    it cannot be reached (also a ConnectionError)
    │   ├── AuthenticationError      it does not accept the token
    │   ├── VersionMismatchError     it speaks another version of the protocol
    │   ├── SessionExpiredError      the session was away for longer than its lease
    │   ├── GatewayLostError         it is gone, and what it held
    │   ├── EngineDiedError          the session's engine died; carries its last output
    │   └── GatewayFault             it failed inside
    └── JobError                     a job
        ├── JobNotRunning            it is not running (or no longer)
        ├── JobStartFailed           it did not come up; carries its last output
        ├── ImageStepFailed          a step of its image ended badly on a host
        ├── PullFailed               a file could not be brought back from a host
        ├── JobUnsupported           a part of Monarch's jobs that this release has not (also a NotImplementedError)
        └── JobFileError             a saved job cannot be used (also a ValueError)

Warnings are ``JobCacheWarning``, a cache file was not used, and ``StaleCodeWarning``, the script was saved since it was
started. Wrong arguments, labels and ranges raise Python's own ``TypeError``, ``ValueError``, ``KeyError`` and
``IndexError``, as Monarch does. Facts are attributes; ``str()`` is a text to read. ``meshgate.failures`` builds the
errors that the gateway reports.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshgate.actors import MonarchActorError

__all__ = [
    "ActorError",
    "AuthenticationError",
    "ClassNotImportable",
    "ConnectionFailedError",
    "EngineDiedError",
    "ErrorKind",
    "GatewayError",
    "GatewayFault",
    "GatewayLostError",
    "ImageStepFailed",
    "InvalidRequestError",
    "JobCacheWarning",
    "JobError",
    "JobFileError",
    "JobNotRunning",
    "JobStartFailed",
    "JobUnsupported",
    "MeshFailure",
    "MeshgateError",
    "PullFailed",
    "SessionExpiredError",
    "StaleCodeError",
    "StaleCodeWarning",
    "StepFailedError",
    "SupervisionError",
    "UnpicklableArgument",
    "UnreadableResult",
    "VersionMismatchError",
]


class MeshgateError(Exception):
    """Base of all errors of meshgate."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Ranks whose endpoints failed in the same way, told by one of them.

    ``ranks``: those that are known, ``count``: all of them. ``varied``: the others' texts differ in detail. With
    ``sent`` false it is all ranks whose errors were too many different ones to be sent: nothing is known of them.
    """

    ranks: tuple[int, ...]
    count: int
    exception: BaseException | None
    message: str
    exception_formatted: str
    varied: bool = False
    sent: bool = True


class ActorError(MeshgateError, MonarchActorError):
    """An endpoint raised. ``exception`` is the original where its type can be had here, else a likeness of it."""

    def __init__(self, exception: BaseException | None, message: str = "A remote actor call has failed.") -> None:
        Exception.__init__(self, exception, message)
        self.exception = exception
        self.message = message
        self.exception_formatted = _remote_traceback(exception)
        self.rank: int | None = None
        self.ranks: tuple[int, ...] = ()
        self.host = ""
        self.hosts: Mapping[int, str] = {}
        self.mesh = ""
        self.endpoint = ""
        self.count = 1
        self.total = 1
        self.kinds: tuple[ErrorKind, ...] = ()
        self.report = ""  # what str() tells, where the gateway reported more than the exception
        self.__cause__ = exception

    def __str__(self) -> str:
        return self.report or f"{self.message}\n {self.exception_formatted}"


def _remote_traceback(exception: BaseException | None) -> str:
    if exception is None:
        return ""
    return "".join(traceback.format_exception(exception)).replace(
        "Traceback (most recent call last):",
        "Traceback of where the remote call failed (most recent call last):",
    )


@dataclass(frozen=True, slots=True)
class MeshFailure:
    """What died. ``ranks`` are those of the mesh ``mesh_name``; ``hosts`` says where each of them ran."""

    mesh_name: str
    reason: str
    ranks: tuple[int, ...] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)

    def report(self) -> str:
        """The whole report, as the supervisor wrote it, without frames that are Monarch's and meshgate's own."""
        return self.reason

    def __str__(self) -> str:
        where = f" of mesh {self.mesh_name!r}" if self.mesh_name else ""
        who = f"{ranks_text(self.ranks)}{where}" if self.ranks else f"part{where}"
        hosts = sorted({self.hosts[rank] for rank in self.ranks if self.hosts.get(rank)})
        on = f" on {', '.join(hosts)}" if hosts else ""
        return f"{who}{on} failed: {self.reason}"


class SupervisionError(MeshgateError, RuntimeError):
    """An actor, process or host died, so that the call has no answer."""

    def __init__(self, message: str, failure: MeshFailure | None = None, *, endpoint: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.endpoint = endpoint


class StepFailedError(MeshgateError):
    """An earlier step, ``step``, failed; ``__cause__`` is its error where that is known here."""

    def __init__(self, message: str, step: str = "") -> None:
        super().__init__(message)
        self.step = step


class InvalidRequestError(MeshgateError, ValueError):
    """The gateway refuses what was asked."""


class StaleCodeError(MeshgateError):
    """A host has not got the version of the code that the call needs."""

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hosts = tuple(hosts)


class UnpicklableArgument(MeshgateError, TypeError):
    """An argument cannot travel. ``argument`` names it, ``path`` leads to the object inside that refuses."""

    def __init__(self, message: str, *, argument: str = "", path: str = "") -> None:
        super().__init__(message)
        self.argument = argument
        self.path = path


class UnreadableResult(MeshgateError, TypeError):
    """What ``endpoint`` returned needs something that is not on the laptop; ``module`` names it."""

    def __init__(self, message: str, *, module: str = "", endpoint: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.endpoint = endpoint


class ClassNotImportable(MeshgateError, ImportError):
    """An actor class cannot be found under its name; ``module`` is where it was looked for."""

    def __init__(self, message: str, *, module: str = "") -> None:
        super().__init__(message)
        self.module = module


class GatewayError(MeshgateError):
    """The gateway, or the way to it."""


class ConnectionFailedError(GatewayError, ConnectionError):
    """The gateway cannot be reached."""


class AuthenticationError(GatewayError):
    """The gateway does not accept the token."""


class VersionMismatchError(GatewayError):
    """The gateway speaks another version of the protocol."""


class SessionExpiredError(GatewayError):
    """The session was disconnected for longer than its lease, so the gateway ended it."""


class GatewayLostError(GatewayError):
    """The gateway is gone, and with it all that this session held."""


class EngineDiedError(GatewayError):
    """The process that held this session died. ``reason`` says how, ``output`` is the last that it printed."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason, output)
        self.reason = reason
        self.output = output

    def __str__(self) -> str:
        told = f"the session's engine died: {self.reason}. Its meshes are gone; the job itself still answers."
        return f"{told}\nIts last output:\n{self.output.rstrip()}" if self.output.strip() else told


class GatewayFault(GatewayError):
    """The gateway failed inside; please report it."""


class JobError(MeshgateError):
    """Something about a job."""


class JobNotRunning(JobError):
    """The job is not running, or no longer."""


class JobStartFailed(JobError):
    """The job did not come up. ``output``: the last that its processes said, or nothing."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(f"{message}\n{output}" if output else message)
        self.output = output


class ImageStepFailed(JobError):
    """A step of an image failed; nothing after it was run.

    ``exit_code`` is None where the step could not be run at all, ``output`` is the last that it printed, and
    ``others`` is on how many more hosts it failed.
    """

    def __init__(
        self,
        message: str,
        *,
        host: str = "",
        step: str = "",
        exit_code: int | None = None,
        output: str = "",
        others: int = 0,
    ) -> None:
        super().__init__(message)
        self.host = host
        self.step = step
        self.exit_code = exit_code
        self.output = output
        self.others = others


class PullFailed(JobError, OSError):
    """A file could not be brought back. ``path`` is the one at fault, ``host`` where it is, empty for the laptop."""

    def __init__(self, message: str, *, host: str = "", path: str = "") -> None:
        super().__init__(message)
        self.host = host
        self.path = path


class JobUnsupported(JobError, NotImplementedError):
    """A part of Monarch's job interface that is not in this release."""


class JobFileError(JobError, ValueError):
    """What was to be loaded is no job of meshgate's, or is not safe to use."""


class StaleCodeWarning(UserWarning):
    """A class of the script was spawned as it was when the script was started; the file is another now."""


class JobCacheWarning(UserWarning):
    """The job in a cache file cannot be used; a new one takes its place."""


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 9``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {text}" if len(set(ranks)) == 1 else f"ranks {text}"
