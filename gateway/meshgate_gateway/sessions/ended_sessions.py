"""Why sessions ended, kept with the supervisor for the clients that return only after the server was replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshgate_gateway.sessions.session_table import Gone
from meshgate_gateway.supervisor.link import SupervisorLink

PREFIX = "ended session/"


class EndedSessions:
    """A copy of the table's ended sessions."""

    def __init__(self, supervisor: SupervisorLink) -> None:
        self._supervisor = supervisor
        self._kept = {
            key.removeprefix(PREFIX): Gone(**kept.note)
            for key, kept in supervisor.kept.items()
            if key.startswith(PREFIX)
        }

    def restore(self) -> dict[str, Gone]:
        """What the last server has left."""
        return dict(self._kept)

    def update(self, gone: Mapping[str, Gone]) -> None:
        """To be called when sessions were added or forgotten."""
        for session in self._kept.keys() - gone.keys():
            self._supervisor.drop(PREFIX + session)
        for session in gone.keys() - self._kept.keys():
            self._supervisor.keep(PREFIX + session, dataclasses.asdict(gone[session]))
        self._kept = dict(gone)
