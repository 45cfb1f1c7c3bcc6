"""Which client may connect to the session, and what a new holder of a detached session receives first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshgate_gateway.engine.client_connection import ClientLink
from meshgate_gateway.engine.code.code_sync import CodeSync
from meshgate_gateway.engine.detached.holders import Applicant, Refusal
from meshgate_gateway.engine.detached.ledger import Ledger
from meshgate_gateway.engine.dispatch import Dispatch
from meshgate_gateway.engine.objects.records import HostMesh
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.messages import Header, ObjectFailed, Release


class Admission:
    """``described(number, hosts)`` are the messages about a mesh of hosts. ``connection_refused`` is called when a
    client may not connect, or has not, and ``holder_changed`` when another takes over."""

    def __init__(
        self,
        link: ClientLink,
        ledger: Ledger,
        dispatch: Dispatch,
        objects: ObjectTable,
        code: CodeSync,
        described: Callable[[int, HostMesh], Iterable[Header]],
        connection_refused: Callable[[], object],
        holder_changed: Callable[[], object],
    ) -> None:
        self._link, self._ledger, self._dispatch = link, ledger, dispatch
        self._objects, self._code, self._described = objects, code, described
        self.connection_refused, self._holder_changed = connection_refused, holder_changed

    def claim(self, applicant: Applicant) -> Refusal | None:
        """Whether a client may connect, before its handshake is answered. The order of these calls counts."""
        return self._ledger.holders.claim(applicant, detached=self._ledger.active)

    def admit(self, applicant: Applicant) -> Refusal | None:
        """Decides whether a client may connect, before its connection is opened. A new holder takes over here."""
        decision = self._ledger.holders.decide(applicant, detached=self._ledger.active)
        if isinstance(decision, Refusal):
            return decision
        if decision == "take over":
            self._take_over()
        return None

    def _take_over(self) -> None:
        self._link.replace_session()
        self._dispatch.session_replaced()
        self._ledger.holder_changed()
        creations = self._ledger.creations
        # Also what messages are going to create that have arrived, and wait to be handled.
        waiting = [header for _, header in self._dispatch.waiting()]
        for header in waiting:
            if isinstance(header, Release):  # the new holder must not find what the earlier one has given up
                self._ledger.record(header)
        coming = {getattr(header, field, 0) for header in waiting for field in ("object", "keep")}
        numbers = {*creations.numbers, *coming}
        next_object = max(0, *numbers, self._objects.fail_awaited(numbers)) + 1
        self._objects.forget_adopted()
        self._holder_changed()
        for header in creations:
            self._link.post(header)
        for number, failure in self._objects.failures():
            self._link.post(ObjectFailed(object=number, failure=failure))
        for number, known in self._objects.items():
            if isinstance(known, HostMesh) and number > 0:
                for message in self._described(number, known):
                    self._link.post(message)
        for part in self._ledger.welcome(next_object, self._code.current_version or None):
            self._link.post(part)
