"""Takeovers: what a new holder of a session finds, from the gateway's first messages, and tags to recognize calls."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshgate.session.futures import FutureProxy
from meshgate.session.objects import ObjectTable
from meshgate_wire.messages import (
    Attached,
    AttachHosts,
    Header,
    KeptCall,
    KeptCalls,
    NameKept,
    OpenChannel,
    SpawnActors,
    SpawnProcs,
    Stop,
)

Creation = AttachHosts | SpawnProcs | SpawnActors | OpenChannel | NameKept


@dataclass(slots=True)
class Takeover:
    """The state of a session that an earlier holder left. ``complete`` settles once all of it has arrived, and fails if
    the session ends before that.

    ``mesh_sizes``: the number of hosts of each of the job's meshes. Messages are added on the connection thread.
    """

    objects: ObjectTable
    mesh_sizes: Mapping[str, int]
    created: list[Creation] = field(default_factory=list)
    calls: list[KeptCall] = field(default_factory=list)
    complete: FutureProxy[Attached] = field(default_factory=FutureProxy)

    def add(self, header: Header) -> None:
        """Takes one of the gateway's messages about the state."""
        if isinstance(header, KeptCalls):
            self.calls += header.calls
        elif isinstance(header, Attached):
            self.objects.continue_at(header.next_object)
            self.complete.settle(lambda: header)
        elif isinstance(header, Stop):
            if self.objects.get(header.target.object) is not None:
                self.objects.stop(header.target.object, header.reason)
        elif isinstance(header, Creation):
            self._created(header)

    def _created(self, header: Creation) -> None:
        """Notes an object at once, since messages about it may follow."""
        number = header.kept if isinstance(header, NameKept) else header.object
        if isinstance(header, NameKept):
            self.objects.restore(number, "kept", header.label, header.label, (header.procs,))
        elif isinstance(header, AttachHosts):
            hosts = self.objects.restore(number, "hosts", header.mesh, f"attaching the hosts of {header.mesh!r}")
            hosts.expected_hosts = self.mesh_sizes.get(header.mesh, 0)
        elif isinstance(header, SpawnProcs):
            step = f"spawn_procs({dict(header.per_host)}, name={header.name!r})"
            self.objects.restore(number, "procs", header.name, step, (header.hosts.object,))
        elif isinstance(header, SpawnActors):
            parents = (header.procs.object, *(argument.ref.object for argument in header.arguments))
            step = f"spawn({header.name!r}, {header.class_name})"
            self.objects.restore(number, "actors", header.name, step, parents)
        else:
            self.objects.restore(number, "port", header.name, "Channel.open()")
        self.created.append(header)


MAX_TAG = 256  # characters

_tag: contextvars.ContextVar[str] = contextvars.ContextVar("meshgate_tag", default="")
current_tag = _tag.get


@contextlib.contextmanager
def tag(text: str) -> Iterator[None]:
    """Marks the calls made in a ``with`` block, as in ``with meshgate.tag("step-12")``.

    After ``job.attach()`` each call has its tag. The innermost block counts. Raises TypeError or ValueError if ``text``
    is not a string of 1 to 256 characters.
    """
    if not isinstance(text, str):
        raise TypeError(f"a tag must be a string, not {text!r}")
    if not text or len(text) > MAX_TAG or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"a tag must be valid text of 1 to {MAX_TAG} characters, not {text[:300]!r}")
    token = _tag.set(text)
    try:
        yield
    finally:
        _tag.reset(token)
