"""Every exception that meshgate raises, as one tree.

::

    MeshgateError
    ├── ActorError                   an endpoint raised an exception (also Monarch's ActorError, if installed)
    ├── SupervisionError             an actor, process or host died (also a RuntimeError); carries a MeshFailure
    ├── StepFailedError              an earlier step that this one depends on failed; names that step
    │   ├── BootstrapFailed         the bootstrap of its processes raised; an ActorError, too
    │   └── SpawnFailed             what it needs died while it started; a SupervisionError, too
    ├── CallCancelledError           the program cancelled the call (also a concurrent.futures.CancelledError)
    ├── ValueLostError               the process that kept a value has ended (also a RuntimeError)
    ├── InvalidRequestError          the gateway rejected a request (also a ValueError)
    ├── StaleCodeError               a host could not get the code version that a call needs
    ├── UnpicklableArgument          an argument cannot be pickled (also a TypeError); nothing was sent
    ├── UnreadableResult             a result cannot be unpickled on this machine (also a TypeError)
    ├── ClassNotImportable           workers cannot import an actor class by its name (also an ImportError)
    ├── GatewayError                 the gateway, or the connection to it, failed
    │   ├── ConnectionFailedError    the gateway cannot be reached (also a ConnectionError)
    │   ├── AuthenticationError      the gateway rejected the token
    │   ├── VersionMismatchError     the gateway speaks another protocol version
    │   ├── SessionExpiredError      the session was disconnected for longer than its lease
    │   ├── SessionTakenOverError    another process has taken over the session
    │   ├── GatewayLostError         the gateway is gone, and with it everything that the session held
    │   ├── EngineDiedError          the session's engine process died; carries its last output
    │   └── GatewayFault             the gateway failed because of a bug
    └── JobError                     a job failed
        ├── JobNotRunning            the job is not running
        ├── JobStartFailed           the job did not start; carries the last output of its processes
        ├── ImageStepFailed          a step of the job's image failed on a host
        ├── SPMDFailed               a rank of a run failed; carries its exit code, exception and last output
        ├── PullFailed               a file could not be copied from a host
        ├── JobUnsupported           this part of Monarch's job interface is missing (also a NotImplementedError)
        └── JobFileError             a saved job cannot be loaded (also a ValueError)

Warnings are ``JobCacheWarning`` (a cached job could not be used) and ``StaleCodeWarning`` (the script was saved after
it started). Invalid arguments, labels and ranges raise ``TypeError``, ``ValueError``, ``KeyError`` or ``IndexError``,
as in Monarch. Details are attributes. ``meshgate.session.errors.failures`` builds the errors that the gateway reports.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshgate.caller import hide_own_frames, ipython_traceback
from meshgate.monarch_classes import SeenAsMonarchs

__all__ = [
    "ActorError", "AuthenticationError", "BootstrapFailed", "CallCancelledError", "ClassNotImportable",
    "ConnectionFailedError", "EngineDiedError", "ErrorKind", "GatewayError", "GatewayFault", "GatewayLostError",
    "ImageStepFailed", "InvalidRequestError", "JobCacheWarning", "JobError", "JobFileError", "JobNotRunning",
    "JobStartFailed", "JobUnsupported", "MeshFailure", "MeshgateError", "PullFailed", "SPMDFailed",
    "SessionExpiredError", "SessionTakenOverError", "SpawnFailed", "StaleCodeError", "StaleCodeWarning",
    "StepFailedError", "SupervisionError", "UnpicklableArgument", "UnreadableResult", "ValueLostError",
    "VersionMismatchError",
]  # fmt: skip


class MeshgateError(Exception):
    """Base of all of meshgate's exceptions."""

    def _render_traceback_(self) -> list[str]:
        return ipython_traceback(self)


E = TypeVar("E", bound=BaseException)


def copy_of(error: E) -> E:
    """For one of several that raise ``error``: each raise adds to the traceback of its exception."""
    copied = copy.copy(error)  # with its notes
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Ranks whose endpoints failed in the same way, and the exception of one of them.

    ``ranks`` lists the first ones, ``count`` counts all. ``varied``: the messages of the others differ in detail.
    ``sent`` is False for ranks whose exceptions the gateway did not send, since there were too many distinct ones.
    """

    ranks: tuple[int, ...]
    count: int
    exception: BaseException | None
    message: str
    exception_formatted: str
    varied: bool = False
    sent: bool = True


class ActorError(MeshgateError):
    """An endpoint raised an exception: ``exception``, or a stand-in if its type cannot be imported here.

    If torchmonarch is installed, ``meshgate.actors.api`` makes this a subclass of Monarch's ``ActorError``.
    """

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
        self.report = ""  # what str() returns if the gateway reported more than the exception
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


@dataclass(frozen=True, slots=True, eq=False)
class MeshFailure(SeenAsMonarchs):
    """What died: ``ranks`` of the mesh ``mesh_name``, and the host of each of them.

    ``job_lost``, only for ``unhandled_fault_hook``: the job has no host any more, and ``kill()`` and ``apply()`` start
    it again. False in the errors of calls."""

    mesh_name: str
    reason: str
    ranks: tuple[int, ...] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)
    job_lost: bool = field(default=False, kw_only=True)

    _monarch_name = "MeshFailure"

    @property
    def mesh(self) -> None:
        """None, as in Monarch, which does not keep the mesh; ``mesh_name`` identifies it."""

    def report(self) -> str:
        """The supervisor's full report, without stack frames of Monarch and meshgate."""
        return self.reason

    def place(self) -> str:
        """What failed and where: ``rank 3 of mesh 'trainers' on workers-1``."""
        where = f" of mesh {self.mesh_name!r}" if self.mesh_name else ""
        failed = f"{ranks_text(self.ranks)}{where}" if self.ranks else f"part{where}"
        hosts = sorted({self.hosts[rank] for rank in self.ranks if self.hosts.get(rank)})
        on = f" on {', '.join(hosts)}" if hosts else ""
        return f"{failed}{on}"

    def __str__(self) -> str:
        return f"{self.place()} failed: {self.reason}"

    def __eq__(self, other: object) -> bool:
        return type(other) is MeshFailure and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((self.mesh_name, self.reason, self.ranks))

    def __reduce__(self) -> tuple[Any, ...]:
        return MeshFailure, self._fields()

    def _fields(self) -> tuple[Any, ...]:
        return self.mesh_name, self.reason, self.ranks, self.hosts


class SupervisionError(MeshgateError, RuntimeError):
    """An actor, process or host died before the call returned."""

    def __init__(self, message: str, failure: MeshFailure | None = None, *, endpoint: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.endpoint = endpoint


class StepFailedError(MeshgateError, RuntimeError):
    """An earlier step, named by ``step``, failed. ``__cause__`` is its exception, if known.

    A ``RuntimeError``, as Monarch's errors of what could not be spawned.
    """

    def __init__(self, message: str, step: str = "") -> None:
        super().__init__(message)
        self.step = step


class BootstrapFailed(StepFailedError, ActorError):
    """The step that failed is ``spawn_procs()``, whose bootstrap raised ``exception``. Handlers for
    ``ActorError``, which Monarch raises, catch it, too."""

    def __init__(self, message: str, step: str = "", raised: ActorError | None = None) -> None:
        ActorError.__init__(self, None, message)
        self.args = (message,)
        vars(self).update({} if raised is None else vars(raised), step=step, report=message)


class SpawnFailed(StepFailedError, SupervisionError):
    """The step that failed is a spawn: an actor, process or host died before it was up; ``failure`` says which.
    Handlers for ``SupervisionError`` catch it, too, so that they need not know when the loss came."""

    def __init__(self, message: str, step: str = "", failure: MeshFailure | None = None, *, endpoint: str = "") -> None:
        SupervisionError.__init__(self, message, failure, endpoint=endpoint)
        self.step = step


class CallCancelledError(MeshgateError, CancelledError):
    """``future.cancel()`` has ended the call. ``call`` names it; ``ranks`` had not answered."""

    def __init__(self, message: str, *, call: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.call = call
        self.ranks = tuple(ranks)


class ValueLostError(MeshgateError, RuntimeError):
    """A process has ended that kept a value.

    ``call`` is the call whose result it was, ``ranks`` are the ranks of the mesh whose values are lost, and ``hosts``
    where they were, by rank.
    """

    def __init__(
        self, message: str, *, call: str = "", ranks: Sequence[int] = (), hosts: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.call = call
        self.ranks = tuple(ranks)
        self.hosts: Mapping[int, str] = hosts or {}


class InvalidRequestError(MeshgateError, ValueError):
    """The gateway rejected a request."""


class StaleCodeError(MeshgateError):
    """Hosts, listed in ``hosts``, could not get the code version that a call needs."""

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hosts = tuple(hosts)


class UnpicklableArgument(MeshgateError, TypeError):
    """An argument cannot be pickled. ``argument`` names it, ``path`` leads to the object inside it that fails."""

    def __init__(self, message: str, *, argument: str = "", path: str = "") -> None:
        super().__init__(message)
        self.argument = argument
        self.path = path


def unpicklable_argument(raised: type[Exception]) -> type[UnpicklableArgument]:
    """The class of the error if pickling raised a ``raised``: it is both, so that handlers for either catch it."""
    if issubclass(UnpicklableArgument, raised):
        return UnpicklableArgument
    try:
        return type("UnpicklableArgument", (UnpicklableArgument, raised), {"__module__": __name__})
    except TypeError:  # some classes written in C cannot be combined
        return UnpicklableArgument


class UnreadableResult(MeshgateError, TypeError):
    """The result of ``endpoint`` cannot be unpickled here; ``module`` is the missing module, if that is why."""

    def __init__(self, message: str, *, module: str = "", endpoint: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.endpoint = endpoint


class ClassNotImportable(MeshgateError, ImportError):
    """Workers cannot import an actor class by name from ``module``."""

    def __init__(self, message: str, *, module: str = "") -> None:
        super().__init__(message)
        self.module = module


class GatewayError(MeshgateError):
    """The gateway, or the connection to it, failed."""


class ConnectionFailedError(GatewayError, ConnectionError):
    """The gateway cannot be reached."""


class AuthenticationError(GatewayError):
    """The gateway rejected the token."""


class VersionMismatchError(GatewayError):
    """The gateway speaks another protocol version."""


class SessionExpiredError(GatewayError):
    """The session was disconnected for longer than its lease, so the gateway ended it."""


class SessionTakenOverError(GatewayError):
    """Another process has taken over the session with ``job.attach()``."""


class GatewayLostError(GatewayError):
    """The gateway is gone, and with it everything that this session held."""


class EngineDiedError(GatewayError):
    """The gateway's process for this session died. ``output`` is the last output of that process."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason, output)
        self.reason = reason
        self.output = output

    def __str__(self) -> str:
        subject = "the session's engine"
        reason = self.reason if self.reason.startswith(subject) else f"{subject} died: {self.reason}"
        text = f"{reason}. Its meshes are gone; the job is still running."
        return f"{text}\nIts last output:\n{self.output.rstrip()}" if self.output.strip() else text


class GatewayFault(GatewayError):
    """The gateway failed because of a bug; please report it."""


class JobError(MeshgateError, RuntimeError):
    """A job failed."""


class JobNotRunning(JobError):
    """The job is not running."""


class JobStartFailed(JobError):
    """The job did not start. ``output`` is the last output of its processes, if any."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(f"{message}\n{output}" if output else message)
        self.output = output


class ImageStepFailed(JobError):
    """A step of an image failed; later steps did not run.

    ``exit_code`` is None if the step could not be started, ``output`` is its last output, and ``others`` is the number
    of other hosts on which it failed.
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


class SPMDFailed(JobError):
    """A run of a script failed.

    ``rank`` on ``host`` failed first, with ``exit_code`` (negative for a signal; None if its process or host was lost,
    or if it could not be started) and ``exception``, the line that names it, if its output or torch's error file has
    one, or why it could not be started. ``log_tail`` is its last output; ``exit_codes`` has what is known of all ranks.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str = "",
        exit_code: int | None = None,
        exception: str = "",
        log_tail: str = "",
        exit_codes: Mapping[int, int | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.exception = exception
        self.log_tail = log_tail
        self.exit_codes: Mapping[int, int | None] = exit_codes or {}


class PullFailed(JobError, OSError):
    """A file could not be copied from a host. ``path`` on ``host`` is at fault; ``host`` is empty for the laptop.
    ``absent`` if it does not exist there."""

    def __init__(self, message: str, *, host: str = "", path: str = "", absent: bool = False) -> None:
        super().__init__(message)
        self.host = host
        self.path = path
        self.absent = absent


class JobUnsupported(JobError, NotImplementedError):
    """A part of Monarch's job interface that this release does not implement."""


class JobFileError(JobError, ValueError):
    """A file is not a saved meshgate job, is not safe to load, or cannot be written."""


class StaleCodeWarning(UserWarning):
    """A spawned class was defined by the script as it was when it was started; the file has changed since."""


class JobCacheWarning(UserWarning):
    """The job in a cache file cannot be used; a new one replaces it."""


def ranks_text(ranks: Sequence[int], most: int | None = None) -> str:
    """The ranks in short: ``rank 3``, ``ranks 0-3, 9``; or ``ranks 0-3, 9 and 17 more`` if they are more sequences than
    ``most``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs[:most])
    if most is not None and len(runs) > most:
        text += f" and {sum(run[-1] - run[0] + 1 for run in runs[most:])} more"
    return f"rank {text}" if len(set(ranks)) == 1 else f"ranks {text}"


hide_own_frames(MeshgateError)
