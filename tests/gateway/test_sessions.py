from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshgate_gateway.sessions import Begin, Gone, HandOver, Refuse, Sessions, Statistics

LEASE = 10.0


def table(limit: int = 4) -> Sessions:
    return Sessions(lease=LEASE, limit=limit, now=0.0)


def begun(*names: str, limit: int = 4) -> Sessions:
    sessions = table(limit)
    for name in names:
        assert sessions.admit(name, "me", resume=False, now=0.0) == Begin()
    return sessions


# --- who is let in ----------------------------------------------------------------------------------------


def test_a_new_session_is_begun_and_then_handed_over_to() -> None:
    sessions = begun("a")
    assert sessions.admit("a", "me", resume=False, now=1) == HandOver()
    assert sessions.admit("a", "me", resume=True, now=1) == HandOver()


def test_a_session_is_its_owners_alone() -> None:
    refused = begun("a").admit("a", "someone else", resume=True, now=1)
    assert isinstance(refused, Refuse)
    assert refused.forbidden


def test_an_unknown_session_cannot_be_resumed() -> None:
    gone = table().admit("a", "me", resume=True, now=0)
    assert isinstance(gone, Gone)
    assert gone.kind == "unknown"


def test_a_full_table_refuses_new_sessions_only() -> None:
    sessions = begun("a", limit=1)
    assert isinstance(sessions.admit("b", "me", resume=False, now=1), Refuse)
    assert sessions.admit("a", "me", resume=True, now=1) == HandOver()


def test_once_it_refuses_nobody_is_let_in() -> None:
    sessions = begun("a")
    assert sessions.refuse("it ends") == ["a"]
    for name in ("a", "b"):
        assert sessions.admit(name, "me", resume=False, now=1) == Refuse("it ends")


# --- how sessions end -------------------------------------------------------------------------------------


def test_a_dead_engine_leaves_its_reason_and_output() -> None:
    sessions = begun("a")
    gone = sessions.exited("a", "was killed by SIGKILL", "last words", now=5)
    assert gone == Gone("died", "the session's engine was killed by SIGKILL", "last words", at=5)
    assert sessions.admit("a", "me", resume=True, now=6) == gone
    assert sessions.admit("a", "me", resume=False, now=6) == gone


def test_an_ending_session_is_gone_to_its_client_before_its_engine_is() -> None:
    sessions = begun("a")
    sessions.ending("a", "enough", "expired")
    assert sessions.admit("a", "me", resume=True, now=1) == Gone("expired", "enough")


def test_the_first_reason_counts() -> None:
    sessions = begun("a")
    sessions.ending("a", "first")
    sessions.said_goodbye("a", "second")
    assert sessions.exited("a", "ended with exit code 0", "noise", now=1) == Gone("ended", "first", "", at=1)


def test_a_session_expires_a_lease_after_it_was_last_connected() -> None:
    sessions = begun("a")
    assert sessions.next_expiry() == LEASE
    sessions.connected("a")
    assert sessions.next_expiry() is None
    sessions.disconnected("a", 20)
    assert sessions.next_expiry() == 20 + LEASE
    assert sessions.expire(20 + LEASE - 0.01) == []
    assert sessions.expire(20 + LEASE) == ["a"]
    assert sessions.expire(20 + LEASE) == []
    assert sessions.exited("a", "ended with exit code 0", "", now=31).kind == "expired"


def test_why_a_session_ended_is_told_for_a_lease_and_then_forgotten() -> None:
    sessions = begun("a")
    sessions.exited("a", "ended", "", now=5)
    assert sessions.next_expiry() == 5 + LEASE
    sessions.expire(5 + LEASE)
    assert sessions.next_expiry() is None
    assert sessions.admit("a", "me", resume=False, now=20) == Begin()


def test_idleness_counts_from_the_last_session_on() -> None:
    sessions = table()
    assert sessions.idle_since == 0
    sessions.admit("a", "me", resume=False, now=1)
    assert sessions.idle_since is None
    sessions.exited("a", "ended", "", now=7)
    assert sessions.idle_since == 7


# --- what is left on the hosts ----------------------------------------------------------------------------


def test_the_meshes_of_a_dead_session_are_to_be_reaped() -> None:
    sessions = begun("a")
    sessions.uses("a", "workers")
    sessions.exited("a", "died", "", now=1)
    assert sessions.meshes_to_reap() == {"workers"}
    sessions.reaped(frozenset({"workers"}))
    assert sessions.meshes_to_reap() == frozenset()


def test_an_orderly_end_leaves_nothing_to_reap() -> None:
    sessions = begun("a")
    sessions.uses("a", "workers")
    sessions.said_goodbye("a", "done")
    sessions.exited("a", "ended with exit code 0", "", now=1)
    assert sessions.meshes_to_reap() == frozenset()


def test_a_mesh_is_reaped_when_no_session_uses_it_any_more() -> None:
    sessions = begun("a", "b", "c")
    for name, mesh in (("a", "workers"), ("a", "gpus"), ("b", "workers")):
        sessions.uses(name, mesh)
    sessions.exited("a", "died", "", now=1)
    assert sessions.meshes_to_reap() == {"gpus"}
    sessions.said_goodbye("b", "done")
    sessions.exited("b", "ended", "", now=2)
    assert sessions.meshes_to_reap() == {"gpus", "workers"}


def test_statistics_count() -> None:
    sessions = begun("a", "b", "c")
    sessions.connected("a")
    sessions.exited("c", "ended", "", now=1)
    assert sessions.statistics() == Statistics(sessions=2, connected=1, gone=1)
    assert sessions.describe() == {"a": "connected", "b": "disconnected"}


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens, in any order: what always holds does, and each session ends exactly once."""

    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.sessions, self.now = table(limit=3), 0.0
        self.live: set[str] = set()

    @rule(name=names, resume=st.booleans(), owner=st.sampled_from(["me", "you"]))
    def dial(self, name: str, resume: bool, owner: str) -> None:
        admission = self.sessions.admit(name, owner, resume=resume, now=self.now)
        assert isinstance(admission, Begin) <= (name not in self.live)
        assert isinstance(admission, HandOver) <= (name in self.live)
        if isinstance(admission, Begin):
            self.live.add(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), what=st.sampled_from(["connected", "disconnected", "uses", "goodbye", "ending", "exited"]))
    def happens(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        if what == "connected":
            self.sessions.connected(name)
        elif what == "disconnected":
            self.sessions.disconnected(name, self.now)
        elif what == "uses":
            self.sessions.uses(name, data.draw(st.sampled_from(["workers", "gpus"])))
        elif what == "goodbye":
            self.sessions.said_goodbye(name, "bye")
        elif what == "ending":
            self.sessions.ending(name, "enough")
        else:
            self.live.remove(name)
            gone = self.sessions.exited(name, "died", "", self.now)
            assert self.sessions.admit(name, "me", resume=True, now=self.now) == gone

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        expired = self.sessions.expire(self.now)
        assert set(expired) <= self.live
        upcoming = self.sessions.next_expiry()
        assert upcoming is None or upcoming > self.now

    @invariant()
    def holds(self) -> None:
        self.sessions.validate_state()
        assert set(self.sessions.describe()) == self.live


TestAnyHistory = AnyHistory.TestCase
