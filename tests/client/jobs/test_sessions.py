from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate import JobError, JobNotRunning, JobUnsupported, LocalJob, ProcessJob, job_load
from meshgate.jobs.sessions import SessionInfo, choose_session
from meshgate.session.dialing import Dialer, UrlDialer
from meshgate.session.futures import FutureProxy
from meshgate.testing import FakeJob


def info(name: str, start: str, *, detached: bool = True) -> SessionInfo:
    return SessionInfo(id=start + "0" * (32 - len(start)), name=name, detached=detached)


def test_a_session_is_chosen_by_name_or_by_the_start_of_its_id() -> None:
    sessions = [info("train", "aaaa1"), info("eval", "bbbb1"), info("", "cccc1", detached=False)]
    assert choose_session(sessions, "", "eval").name == "eval"
    assert choose_session(sessions, "", "cccc1").id.startswith("cccc1")
    assert choose_session([sessions[0], sessions[2]], "", None).name == "train"


@pytest.mark.parametrize(("name", "text"), [("missing", "does not have session 'missing'"), ("aaa", "'aaa'")])
def test_a_name_that_matches_nothing_lists_the_sessions(name: str, text: str) -> None:
    with pytest.raises(JobError, match=rf"{text}.*train \(id aaaa1000, detached, 0 s old\)"):
        choose_session([info("train", "aaaa1")], "", name)
    with pytest.raises(JobError, match=r"does not have a detached session\. Its sessions are: none"):
        choose_session([], "", None)


def test_a_session_that_ended_with_its_gateway_is_missed_with_the_reason() -> None:
    with pytest.raises(JobError, match=r"does not have session 'train'.*Sessions end with their gateway: it was OOM"):
        choose_session([], "it was OOMKilled", "train")


def test_a_name_that_matches_several_sessions_is_ambiguous() -> None:
    sessions = [info("train", "aaaa1"), info("train", "aaaa2")]
    for name in ("train", "aaaa", None):
        with pytest.raises(JobError, match=r"2 sessions match.*job\.end_session\(id\) ends one"):
            choose_session(sessions, "", name)
    assert choose_session(sessions, "", "aaaa2").id.startswith("aaaa2")


def test_a_job_that_does_not_run_has_no_sessions_and_starts_none(tmp_path: Path) -> None:
    path = str(tmp_path / "job.pkl")
    job = ProcessJob({"workers": 1}, detached=True)
    assert job.sessions(path) == []
    with pytest.raises(JobNotRunning, match="no saved job"):
        job.attach(cached_path=path)
    with pytest.raises(JobNotRunning, match="has no session"):
        job.detach(cached_path=path)
    job.dump(path)  # before it runs
    with pytest.raises(JobNotRunning, match="has ended, or has a different specification"):
        ProcessJob({"workers": 2}).attach(cached_path=path)
    with pytest.raises(JobNotRunning, match="is not running"):
        job_load(path).attach(cached_path=None)
    assert not job.active


@pytest.mark.parametrize(
    ("name", "error"), [(1, TypeError), ("", ValueError), ("a\nb", ValueError), ("x" * 129, ValueError)]
)
def test_an_invalid_name_is_refused_by_the_constructor(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="the name of a session"):
        ProcessJob({"workers": 1}, detached=name)


def test_jobs_that_end_with_their_driver_cannot_be_detached() -> None:
    with pytest.raises(JobUnsupported, match="use ProcessJob"):
        LocalJob().detach()
    with FakeJob({"workers": 1}) as job:
        job.state()
        with pytest.raises(JobUnsupported, match="does not say how to reach its gateway"):
            job.detach()


class DetachedJob(FakeJob):
    """A job whose gateway has noted that its session is detached, while results are on their way."""

    def __init__(self) -> None:
        super().__init__({"workers": 1})
        self.outlives_driver = False
        self.noted: FutureProxy[None] = FutureProxy()
        self.returned: FutureProxy[None] = FutureProxy()
        self.noted.settle(lambda: None)
        client: Any = SimpleNamespace(
            closed=False,
            detached="",
            settings=SimpleNamespace(connect_timeout=0),
            start_detaching=lambda name: (self.noted, self.returned),
        )
        self._client = client

    @property
    def _running(self) -> DetachedJob:
        return self

    def _dialer(self) -> Dialer:
        return UrlDialer("ws://127.0.0.1:1", "token")

    def _outlive_driver(self) -> None:
        self.outlives_driver = True


def test_a_session_is_detached_once_its_gateway_says_so_although_results_take_too_long() -> None:
    job = DetachedJob()
    with pytest.raises(TimeoutError):
        job.detach("train", cached_path=None)
    assert (job._detached, job.outlives_driver) == ("train", True)
    job.returned.settle(lambda: None)
    assert job.detach("train", cached_path=None) == "train"


def test_a_session_is_not_detached_if_its_gateway_does_not_answer() -> None:
    job = DetachedJob()
    job.noted = FutureProxy()
    with pytest.raises(TimeoutError):
        job.detach("train", cached_path=None)
    assert (job._detached, job.outlives_driver) == (False, False)
