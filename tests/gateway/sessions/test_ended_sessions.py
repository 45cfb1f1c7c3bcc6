from __future__ import annotations

from typing import cast

from meshgate_gateway.sessions.ended_sessions import EndedSessions
from meshgate_gateway.sessions.session_table import Gone
from meshgate_gateway.supervisor.link import SupervisorLink
from tests.gateway.unsupervised import Unsupervised

DIED = Gone("died", "was killed by SIGKILL", "the last words", 3.0)
ENDED = Gone("ended", "the client ended the session", "", 4.0)


def test_what_one_server_keeps_the_next_restores() -> None:
    supervisor = cast("SupervisorLink", Unsupervised())
    ended = EndedSessions(supervisor)
    assert ended.restore() == {}
    ended.update({"a": DIED})
    ended.update({"a": DIED, "b": ENDED})
    assert EndedSessions(supervisor).restore() == {"a": DIED, "b": ENDED}


def test_what_the_table_forgets_is_dropped() -> None:
    supervisor = cast("SupervisorLink", Unsupervised())
    EndedSessions(supervisor).update({"a": DIED, "b": ENDED})
    EndedSessions(supervisor).update({"b": ENDED})
    assert EndedSessions(supervisor).restore() == {"b": ENDED}
