"""Which status ends the wait for a pushed version."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from meshgate.code_sync import pushed_versions
from meshgate.code_sync.pushed_versions import PushedVersions, SessionChecks, raise_if_failed
from meshgate.errors import MeshFailure, SessionExpiredError, StaleCodeError, StepFailedError, SupervisionError
from meshgate_sync.upload.protocol import SyncStatus

ONE, TWO = "1" * 64, "2" * 64


class FakeSession:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.attach_failure = ""

    def checks(self) -> SessionChecks:
        return SessionChecks(lambda: self.error, lambda: self.attach_failure, lambda names: ("workers", {1: "b"}))


def status(version: str, ready: int = 0, **failed: str) -> SyncStatus:
    return SyncStatus(root=version, ready=ready, hosts=2, failed=failed)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def versions(session: FakeSession) -> PushedVersions:
    versions = PushedVersions(session.checks())
    versions.add(ONE, reset=True)
    return versions


def test_a_wait_ends_when_every_host_is_ready(versions: PushedVersions) -> None:
    seen: list[SyncStatus] = []
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(versions.wait, ONE, seen.append)
        versions.update(status(ONE, 1))
        versions.update(done := status(ONE, 2))
        assert waiting.result(30) is done


def test_a_newer_version_that_is_ready_ends_the_wait_for_an_older_one(versions: PushedVersions) -> None:
    versions.add(TWO, reset=True)
    versions.update(status(TWO, 2))
    assert versions.wait(ONE).root == TWO


def test_an_older_version_does_not_end_the_wait_for_a_newer_one(versions: PushedVersions) -> None:
    versions.update(status(ONE, 2))
    versions.add(TWO, reset=True)
    versions.update(failed := status(TWO, 1, host="full"))
    assert versions.wait(TWO) is failed


def test_a_failure_of_an_older_version_does_not_end_the_wait(versions: PushedVersions) -> None:
    versions.update(status(ONE, 1, host="full"))
    versions.add(TWO, reset=True)
    versions.update(status(TWO, 2))
    assert versions.wait(ONE).root == TWO


def test_a_version_that_is_offered_again_loses_its_old_status(versions: PushedVersions) -> None:
    versions.update(status(ONE, 1, host="full"))
    versions.add(ONE, reset=False)
    assert versions.failed() == [ONE]
    versions.add(ONE, reset=True)
    assert versions.failed() == []


def test_a_status_of_an_unknown_version_is_ignored(versions: PushedVersions) -> None:
    versions.update(status(TWO, 1, host="full"))
    assert versions.failed() == []


def test_a_wait_raises_the_error_of_an_ended_session(versions: PushedVersions, session: FakeSession) -> None:
    session.error = SessionExpiredError("the session expired")
    with pytest.raises(SessionExpiredError):
        versions.wait(ONE)


def test_the_end_of_the_session_explains_the_failure_of_a_host(versions: PushedVersions, session: FakeSession) -> None:
    versions.update(status(ONE, 1, host="its agent exited"))
    session.error = SessionExpiredError("the gateway was killed")
    with pytest.raises(SessionExpiredError):
        versions.wait(ONE)


def test_a_wait_without_attached_hosts_reports_why(versions: PushedVersions, session: FakeSession) -> None:
    session.attach_failure = "workers-1 was killed"
    with pytest.raises(StepFailedError, match="no host received code version 111111111111") as raised:
        versions.wait(ONE)
    assert "workers-1 was killed" in str(raised.value)
    assert raised.value.step == "attaching the hosts"


def test_closing_ends_a_wait(versions: PushedVersions) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(versions.wait, ONE)
        versions.close()
        with pytest.raises(StaleCodeError, match="closed before every host had code version 111111111111"):
            waiting.result(30)


def test_a_timeout_reports_how_many_hosts_are_ready(versions: PushedVersions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushed_versions, "SYNC_TIMEOUT", 0.0)
    with pytest.raises(StaleCodeError, match="did not reach every host within 0 s: no host has reported"):
        versions.wait(ONE)
    versions.update(status(ONE, 1))
    with pytest.raises(StaleCodeError, match="1 of 2 hosts have it"):
        versions.wait(ONE)


def test_an_error_names_the_failed_hosts_and_counts_the_rest(session: FakeSession) -> None:
    checks = session.checks()
    raise_if_failed(status(ONE, 2), checks)
    with pytest.raises(StaleCodeError, match=r"code version 111111111111 did not reach 1 host: a: full$") as raised:
        raise_if_failed(status(ONE, 1, a="full"), checks)
    assert raised.value.hosts == ("a",)
    many = SyncStatus(root=ONE, ready=0, hosts=10, failed={f"host-{number}": "full" for number in range(10)})
    with pytest.raises(StaleCodeError, match=r"did not reach 10 hosts: host-0: full; .*host-7: full \(and 2 more\)$"):
        raise_if_failed(many, checks)


def test_hosts_that_were_lost_are_a_supervision_error_with_host_and_reason(session: FakeSession) -> None:
    lost = SyncStatus(root=ONE, ready=1, hosts=2, failed={"b": "killed by SIGKILL"}, lost=("b",))
    with pytest.raises(
        SupervisionError, match=r"^1 host was lost, .* did not reach it: b: killed by SIGKILL$"
    ) as raised:
        raise_if_failed(lost, session.checks())
    assert raised.value.failure == MeshFailure("workers", "b: killed by SIGKILL", (1,), {1: "b"})


def test_a_lost_host_beside_one_that_cannot_store_the_version_is_named_too(session: FakeSession) -> None:
    both = SyncStatus(root=ONE, ready=0, hosts=2, failed={"a": "full", "b": "killed"}, lost=("b",))
    with pytest.raises(StaleCodeError, match="did not reach 2 hosts: a: full; b: killed"):
        raise_if_failed(both, session.checks())


def test_hosts_that_the_status_has_no_room_for_are_counted(session: FakeSession) -> None:
    some = SyncStatus(root=ONE, ready=0, hosts=5000, failed={"a": "full"}, failures=5000)
    with pytest.raises(StaleCodeError, match=r"did not reach 5000 hosts: a: full \(and 4999 more\)$"):
        raise_if_failed(some, session.checks())
