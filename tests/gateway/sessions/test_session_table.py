from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshgate_gateway.control import SYNC_BOUNDS, EngineCounts, Samples
from meshgate_gateway.sessions.session_table import (
    MAX_GONE,
    Gone,
    HandOver,
    Reject,
    Sessions,
    Start,
    Statistics,
    Totals,
)

LEASE = 10.0


def table(limit: int = 4) -> Sessions:
    return Sessions(lease=LEASE, limit=limit, now=0.0)


def started(*names: str, limit: int = 4) -> Sessions:
    sessions = table(limit)
    for name in names:
        assert sessions.admit(name, "me", resume=False, now=0.0) == Start()
    return sessions


# --- admission --------------------------------------------------------------------------------------------


def test_a_new_session_starts_and_later_connections_are_handed_over() -> None:
    sessions = started("a")
    assert sessions.admit("a", "me", resume=False, now=1) == HandOver()
    assert sessions.admit("a", "me", resume=True, now=1) == HandOver()


def test_the_reasons_of_the_sessions_that_ended_last_are_kept() -> None:
    sessions = table()
    for number in range(MAX_GONE + 1):
        sessions.admit(f"s{number}", "me", resume=False, now=0)
        sessions.exited(f"s{number}", "exited", "", now=0)
    newest = sessions.admit(f"s{MAX_GONE}", "me", resume=True, now=0)
    oldest = sessions.admit("s0", "me", resume=True, now=0)
    assert isinstance(newest, Gone)
    assert isinstance(oldest, Gone)
    assert (newest.kind, oldest.kind) == ("died", "unknown")


def test_sessions_that_end_in_order_do_not_displace_one_that_someone_may_look_for() -> None:
    sessions = started("night")
    sessions.named("night", "night")
    sessions.exited("night", "exited", "", now=0)
    for number in range(2 * MAX_GONE):
        sessions.admit(f"s{number}", "other", resume=False, now=0)
        sessions.ended(f"s{number}", "the client ended the session")
        sessions.exited(f"s{number}", "exited", "", now=0)
    assert [name for name, _, _ in sessions.ended_of("me", now=1)] == ["night"]


def test_ended_sessions_that_someone_may_look_for_are_listed_for_their_owner() -> None:
    sessions = started("died", "ended", "night", "other")
    sessions.named("night", "evening")
    sessions.named("night", "night")
    for name in ("ended", "night"):
        sessions.ended(name, "the client ended the session")
    for number, name in enumerate(("died", "ended", "night")):
        sessions.exited(name, "exited", "", now=number)
    sessions.admit("theirs", "someone else", resume=False, now=0)
    sessions.exited("theirs", "exited", "", now=3)
    assert [(name, gone.name, gone.kind, ago) for name, gone, ago in sessions.ended_of("me", now=5)] == [
        ("died", "", "died", 5),
        ("night", "night", "ended", 3),
    ]
    assert [name for name, _, _ in sessions.ended_of("someone else", now=5)] == ["theirs"]


def test_a_session_belongs_to_its_owner() -> None:
    rejected = started("a").admit("a", "someone else", resume=True, now=1)
    assert isinstance(rejected, Reject)
    assert rejected.forbidden


def test_an_unknown_session_cannot_be_resumed() -> None:
    gone = table().admit("a", "me", resume=True, now=0)
    assert isinstance(gone, Gone)
    assert gone.kind == "unknown"


def test_a_full_table_rejects_only_new_sessions() -> None:
    sessions = started("a", limit=1)
    assert isinstance(sessions.admit("b", "me", resume=False, now=1), Reject)
    assert sessions.admit("a", "me", resume=True, now=1) == HandOver()


def test_after_stop_admitting_every_connection_is_rejected() -> None:
    sessions = started("a")
    assert sessions.stop_admitting("shutting down") == ["a"]
    for name in ("a", "b"):
        assert sessions.admit(name, "me", resume=False, now=1) == Reject("shutting down")


# --- how sessions end -------------------------------------------------------------------------------------


def test_the_reason_and_output_of_a_dead_engine_are_kept() -> None:
    sessions = started("a")
    gone = sessions.exited("a", "was killed by SIGKILL", "last words", now=5)
    assert gone == Gone("died", "the session's engine was killed by SIGKILL", "last words", 5, "me")
    assert sessions.admit("a", "me", resume=True, now=6) == gone
    assert sessions.admit("a", "me", resume=False, now=6) == gone


def test_an_ending_session_is_gone_for_its_client_before_its_engine_exits() -> None:
    sessions = started("a")
    sessions.ending("a", "enough", "expired")
    assert sessions.admit("a", "me", resume=True, now=1) == Gone("expired", "enough")


def test_the_first_end_reason_is_kept() -> None:
    sessions = started("a")
    sessions.ending("a", "first")
    sessions.ended("a", "second")
    assert sessions.exited("a", "ended with exit code 0", "noise", now=1) == Gone("ended", "first", "", 1, "me")


def test_a_session_expires_a_lease_after_it_was_last_connected() -> None:
    sessions = started("a")
    assert sessions.next_expiry() == LEASE
    sessions.connected("a", 5)
    assert sessions.next_expiry() is None
    assert sessions.disconnected("a", 20, silence=60) == LEASE
    assert sessions.next_expiry() == 20 + LEASE
    assert sessions.expire(20 + LEASE - 0.01) == {}
    assert sessions.expire(20 + LEASE) == {"a": "no client was connected for its lease of 10 s"}
    assert sessions.expire(20 + LEASE) == {}
    assert sessions.exited("a", "ended with exit code 0", "", now=31).kind == "expired"


def test_a_client_that_was_heard_from_until_its_connection_ended_gets_a_shorter_lease() -> None:
    sessions = Sessions(lease=14_400, limit=4, now=0.0)
    for name in ("killed", "asleep"):
        sessions.admit(name, "me", resume=False, now=0.0)
        sessions.connected(name, 0)
    assert sessions.disconnected("killed", 100, silence=15) == 1800
    assert sessions.disconnected("asleep", 100, silence=60) == 14_400
    assert sessions.next_expiry() == 1900
    assert sessions.expire(1900) == {"killed": "no client was connected for its lease of 1800 s"}
    sessions.connected("asleep", 4000)
    assert sessions.disconnected("asleep", 5000, silence=0) == 1800
    assert sessions.next_expiry() == 6800


def leases_after(*connections: tuple[float, float]) -> list[float]:
    """For how long a session is kept after each of its connections, given as age and silence at their end."""
    sessions, now, leases = Sessions(lease=14_400, limit=1, now=0.0), 0.0, []
    sessions.admit("a", "me", resume=False, now=now)
    for age, silence in connections:
        sessions.connected("a", now)
        now += age
        leases.append(sessions.disconnected("a", now, silence=silence))
        now += 1
    return leases


def test_a_cut_at_the_age_of_an_earlier_one_says_nothing_about_the_client() -> None:
    assert leases_after((30.2, 3), (30, 8), (30, 15)) == [1800, 14_400, 14_400]
    assert leases_after((600, 1), (12, 1), (655, 15)) == [1800, 1800, 14_400]  # Wi-Fi was lost in between
    assert leases_after((0.1, 0), (1.9, 0)) == [1800, 14_400]


def test_a_cut_at_another_age_says_that_the_client_was_killed() -> None:
    assert leases_after((30, 3), (30, 8), (12, 1)) == [1800, 14_400, 1800]
    assert leases_after((600, 1), (665, 1)) == [1800, 1800]
    assert leases_after((600, 60), (600, 1)) == [14_400, 1800]  # the first fell silent, and was not cut by age
    assert leases_after((600, 1), *[(age, 60) for age in (1, 2, 3, 4)], (600, 1))[-1] == 14_400
    assert leases_after((600, 1), *[(age, 1) for age in (10, 20, 40, 80)], (600, 1))[-1] == 1800  # too long ago


def test_an_end_reason_is_kept_for_a_lease() -> None:
    sessions = started("a")
    sessions.exited("a", "ended", "", now=5)
    assert sessions.next_expiry() == 5 + LEASE
    sessions.expire(5 + LEASE)
    assert sessions.next_expiry() is None
    assert sessions.admit("a", "me", resume=False, now=20) == Start()


def test_idle_time_counts_from_the_end_of_the_last_session() -> None:
    sessions = table()
    assert sessions.idle_since == 0
    sessions.admit("a", "me", resume=False, now=1)
    assert sessions.idle_since is None
    sessions.exited("a", "ended", "", now=7)
    assert sessions.idle_since == 7


# --- processes left on the hosts ----------------------------------------------------------------------------


def test_the_meshes_of_a_dead_session_need_reaping() -> None:
    sessions = started("a")
    sessions.add_mesh("a", "workers")
    sessions.exited("a", "died", "", now=1)
    assert sessions.meshes_to_reap() == {"workers"}
    sessions.reaped(frozenset({"workers"}))
    assert sessions.meshes_to_reap() == frozenset()


def test_a_session_that_stopped_its_meshes_needs_no_reaping() -> None:
    sessions = started("a")
    sessions.add_mesh("a", "workers")
    sessions.ended("a", "done")
    sessions.exited("a", "ended with exit code 0", "", now=1)
    assert sessions.meshes_to_reap() == frozenset()


def test_a_mesh_is_reaped_once_no_session_uses_it() -> None:
    sessions = started("a", "b", "c")
    for name, mesh in (("a", "workers"), ("a", "gpus"), ("b", "workers")):
        sessions.add_mesh(name, mesh)
    sessions.exited("a", "died", "", now=1)
    assert sessions.meshes_to_reap() == {"gpus"}
    sessions.ended("b", "done")
    sessions.exited("b", "ended", "", now=2)
    assert sessions.meshes_to_reap() == {"gpus", "workers"}


def test_statistics_count_sessions() -> None:
    sessions = started("a", "b", "c")
    sessions.connected("a", 0)
    sessions.exited("c", "ended", "", now=1)
    assert sessions.statistics() == Statistics(sessions=2, connected=1, gone=1)


class AnyHistory(RuleBasedStateMachine):
    """Any sequence of events keeps the invariants and ends each session exactly once."""

    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.sessions, self.now = table(limit=3), 0.0
        self.live: set[str] = set()

    @rule(name=names, resume=st.booleans(), owner=st.sampled_from(["me", "you"]))
    def dial(self, name: str, resume: bool, owner: str) -> None:
        admission = self.sessions.admit(name, owner, resume=resume, now=self.now)
        assert isinstance(admission, Start) <= (name not in self.live)
        assert isinstance(admission, HandOver) <= (name in self.live)
        if isinstance(admission, Start):
            self.live.add(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), what=st.sampled_from(["connected", "disconnected", "uses", "goodbye", "ending", "exited"]))
    def happens(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        if what == "connected":
            self.sessions.connected(name, self.now)
        elif what == "disconnected":
            self.sessions.disconnected(name, self.now, silence=data.draw(st.sampled_from([0.0, 60.0])))
        elif what == "uses":
            self.sessions.add_mesh(name, data.draw(st.sampled_from(["workers", "gpus"])))
        elif what == "goodbye":
            self.sessions.ended(name, "bye")
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
        assert set(self.sessions._live) == self.live


TestAnyHistory = AnyHistory.TestCase


# --- sessions of an earlier server ------------------------------------------------------------------------


def test_a_restored_session_is_live_with_its_owner_and_meshes() -> None:
    sessions = table()
    sessions.restore("a", "me", frozenset({"workers"}))
    assert sessions.admit("a", "me", resume=True, now=1) == HandOver()
    assert isinstance(sessions.admit("a", "someone else", resume=True, now=1), Reject)
    assert sessions.meshes_of("a") == {"workers"}
    assert sessions.idle_since is None
    sessions.validate_state()


def test_a_restored_session_expires_once_it_is_known_since_when_no_client_is_connected() -> None:
    sessions = table()
    sessions.restore("a", "me", frozenset())
    assert sessions.expire(now=1000) == {}
    sessions.disconnected("a", now=995, silence=0)
    assert sessions.expire(now=1000) == {}
    assert list(sessions.expire(now=995 + LEASE)) == ["a"]


def test_nothing_is_known_of_the_age_of_a_connection_that_an_earlier_server_accepted() -> None:
    sessions = Sessions(lease=14_400, limit=1, now=0.0)
    sessions.restore("a", "me", frozenset())
    assert sessions.disconnected("a", 30, silence=0) == 1800
    sessions.connected("a", 31)
    assert sessions.disconnected("a", 61, silence=0) == 1800


def test_the_reason_of_a_session_that_ended_under_an_earlier_server_is_kept() -> None:
    before = started("a")
    gone = before.exited("a", "was killed by SIGKILL", "the last words", now=1)
    after = table()
    after.restore_gone("a", before.gone["a"])
    assert after.admit("a", "me", resume=True, now=2) == gone
    after.validate_state()


def test_counts_of_all_engines_add_up() -> None:
    totals = Totals()
    syncs = Samples(buckets=(1,) + (0,) * (len(SYNC_BOUNDS) - 1) + (2,), seconds=1.5)
    for _ in range(2):
        totals.add(EngineCounts(calls={"ok": 3, "failed": 1}, casts=5, sync_times=syncs, bytes_sent=7, lines=9))
    assert totals.calls == {"ok": 6, "failed": 2}
    assert (totals.casts, totals.bytes_sent, totals.bytes_received, totals.lines) == (10, 14, 0, 18)
    assert (totals.sync_times.buckets[0], totals.sync_times.buckets[-1], totals.sync_times.seconds) == (2, 4, 3.0)
    assert sum(totals.call_times.buckets) == 0


def test_more_buckets_than_known_are_ignored() -> None:
    totals = Totals()
    totals.add(EngineCounts(call_times=Samples(buckets=(1,) * 100)))
    assert sum(totals.call_times.buckets) == len(totals.call_times.buckets)
