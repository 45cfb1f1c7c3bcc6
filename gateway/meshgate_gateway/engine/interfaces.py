"""The functions that parts of the engine get from it in place of the engine itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias

from meshgate_wire import Fragments
from meshgate_wire.messages import Header

CONTROL_STREAM = 0

# Handles a message. Returns an awaitable if it must wait, which holds up the later messages of the same stream.
Handler: TypeAlias = Callable[[Any, Sequence[Fragments]], "Awaitable[None] | None"]


class Send(Protocol):
    def __call__(self, header: Header, buffers: Sequence[Any] = (), *, stream: int = CONTROL_STREAM) -> None:
        """Sends a message to the client, in order within its stream."""


class Answer(Protocol):
    def __call__(self, closed: bool, factor: float) -> None:
        """Answers a process's report of what it has sent to a port: it may send more, or the channel is ``closed``.
        ``factor``: how much larger its messages are than it reports."""


class Ask(Protocol):
    def __call__(self, mesh: int, rank: int, nbytes: int, *, reply: bool, kept: bool) -> str:
        """Why the process may not send a message of ``nbytes`` to the engine, or empty if it may."""


class StartTask(Protocol):
    def __call__(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]:
        """Runs ``work`` as a task of the engine, which keeps a reference until it ends."""


class CallLater(Protocol):
    def __call__(self, delay: float, callback: Callable[..., None], /, *args: Any) -> object:
        """Calls ``callback`` on the event loop after ``delay`` seconds."""


class SetUpProcess(Protocol):
    def __call__(self, mesh: int, code: Any = None, bootstrap: Any = None, name: str = "", per_host: int = 0) -> Any:
        """What each process of ``mesh`` runs first, for ``Monarch.spawn_procs``. With a ``name``, the mesh's, other
        processes on the host can read its stacks. ``per_host`` processes of the mesh share the GPUs of a host; 0: they
        use none."""
