"""The meshes of a fake gateway, and the calls on them that are not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshgate.shapes.shape import Region
from meshgate.testing.fake_process import FakeProcess
from meshgate_wire.messages import Call, ErrorGroup, Failed, Failure, Item, Values

RANKS_NAMED = 64  # the most ranks that a failure lists, as in the real gateway


@dataclass(slots=True)
class FakeMesh:
    """A mesh of hosts, processes or actors. Lists are by base rank; hosts have no processes."""

    number: int
    kind: Literal["hosts", "procs", "actors"]
    name: str
    region: Region
    hosts: list[str]
    processes: list[FakeProcess] = field(default_factory=list)
    dead: dict[int, str] = field(default_factory=dict)  # base rank to reason; shared by procs and their actors
    aborted: dict[int, str] = field(default_factory=dict)  # the same of actors alone; for procs: of any of their actors
    parent: FakeMesh | None = None  # what it was spawned on
    failure: Failure | None = None


@dataclass(slots=True)
class PendingCall:
    """A call and the replies so far, by position in the target."""

    header: Call
    mesh: FakeMesh
    ranks: list[int]
    send: Callable[..., None]
    replies: dict[int, tuple[bytes, bool]] = field(default_factory=dict)
    done: bool = False

    def reply(self, position: int, data: bytes, is_error: bool) -> None:
        if self.done or position in self.replies:
            return
        self.replies[position] = data, is_error
        complete = len(self.replies) == len(self.ranks)
        if self.header.adverb == "broadcast":
            self.done = complete
        elif self.header.adverb == "stream":
            self.done = complete
            if is_error:
                failure = self._failure([ErrorGroup(ranks=(position,), count=1, buffer=0)])
                self.send(Failed(call=self.header.call, rank=position, failure=failure), data)
            else:
                self.send(Item(call=self.header.call, rank=position), data)
        elif complete:
            self._finish()

    def _finish(self) -> None:
        self.done = True
        positions_of: dict[bytes, list[int]] = {}
        for position, (data, is_error) in sorted(self.replies.items()):
            if is_error:
                positions_of.setdefault(data, []).append(position)
        if positions_of:
            groups = [
                ErrorGroup(ranks=tuple(positions[:RANKS_NAMED]), count=len(positions), buffer=buffer)
                for buffer, positions in enumerate(positions_of.values())
            ]
            self.send(Failed(call=self.header.call, failure=self._failure(groups)), *positions_of)
        else:
            ranks = (0,) if self.header.adverb == "choose" else None
            self.send(Values(call=self.header.call, ranks=ranks), *(self.replies[i][0] for i in sorted(self.replies)))

    def _failure(self, groups: Sequence[ErrorGroup]) -> Failure:
        positions = [position for group in groups for position in group.ranks]
        return Failure(
            kind="actor",
            message=f"Actor call {self.mesh.name}.{self.header.endpoint} failed.",
            mesh=self.mesh.name,
            ranks=tuple(positions[:RANKS_NAMED]),
            hosts={position: self.mesh.hosts[self.ranks[position]] for position in positions[:RANKS_NAMED]},
            errors=tuple(groups),
            total=len(self.ranks),
        )

    def fail(self, failure: Failure) -> None:
        if not self.done:
            self.done = True
            if self.header.adverb != "broadcast":
                self.send(Failed(call=self.header.call, failure=failure))

    def fail_if_dead(self) -> None:
        """Fails the call if a rank that has not replied is dead."""
        reasons = {**self.mesh.dead, **self.mesh.aborted}
        lost = [i for i, rank in enumerate(self.ranks) if rank in reasons and i not in self.replies]
        if lost:
            self.fail(
                Failure(
                    kind="supervision",
                    message=reasons[self.ranks[lost[0]]],
                    mesh=self.mesh.name,
                    ranks=tuple(lost[:RANKS_NAMED]),
                    hosts={i: self.mesh.hosts[self.ranks[i]] for i in lost[:RANKS_NAMED]},
                    total=len(self.ranks),
                    unanswered=len(self.ranks) - len(self.replies),
                )
            )
