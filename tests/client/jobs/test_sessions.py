from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate import JobError, JobNotRunning, JobUnsupported, LocalJob, ProcessJob, job_load
from meshgate.jobs import sessions as module
from meshgate.jobs.sessions import EndedSession, SessionInfo, SessionList, choose_session
from meshgate.session.dialing import Dialer, UrlDialer
from meshgate.session.futures import FutureProxy
from meshgate.testing import FakeJob


def info(name: str, start: str, *, detached: bool = True) -> SessionInfo:
    return SessionInfo(id=start + "0" * (32 - len(start)), name=name, detached=detached)


def known(*sessions: SessionInfo, ended: tuple[EndedSession, ...] = (), restarted: str = "") -> SessionList:
    return SessionList(sessions=list(sessions), ended=list(ended), restarted=restarted)


def test_a_session_is_chosen_by_name_or_by_the_start_of_its_id() -> None:
    sessions = [info("train", "aaaa1"), info("eval", "bbbb1"), info("", "cccc1", detached=False)]
    assert choose_session(known(*sessions), "eval").name == "eval"
    assert choose_session(known(*sessions), "cccc1").id.startswith("cccc1")
    assert choose_session(known(sessions[0], sessions[2]), None).name == "train"


@pytest.mark.parametrize(("name", "text"), [("missing", "does not have session 'missing'"), ("aaa", "'aaa'")])
def test_a_name_that_matches_nothing_lists_the_sessions(name: str, text: str) -> None:
    with pytest.raises(JobError, match=rf"{text}.*train \(id aaaa1000, detached, 0 s old\)"):
        choose_session(known(info("train", "aaaa1")), name)
    with pytest.raises(JobError, match=r"does not have a detached session\. Its sessions are: none"):
        choose_session(known(), None)


def test_a_session_that_ended_with_its_gateway_is_missed_with_the_reason() -> None:
    with pytest.raises(JobError, match=r"does not have session 'train'.*Sessions end with their gateway: it was OOM"):
        choose_session(known(restarted="it was OOMKilled"), "train")


def test_a_name_that_matches_several_sessions_is_ambiguous() -> None:
    sessions = [info("train", "aaaa1"), info("train", "aaaa2")]
    for name in ("train", "aaaa", None):
        with pytest.raises(JobError, match=r"2 sessions match.*job\.end_session\(id\) ends one"):
            choose_session(known(*sessions), name)
    assert choose_session(known(*sessions), "aaaa2").id.startswith("aaaa2")


KILLED = "the session's engine was killed by SIGKILL"
DIED = EndedSession(id="ab" * 16, name="night", kind="died", reason=KILLED, output="the last words\n", ago=60)


@pytest.mark.parametrize("name", ["night", "abab", None])
def test_a_session_that_has_ended_is_missed_with_when_and_why(name: str | None) -> None:
    early, unnamed = (
        EndedSession(id=start * 16, name=name, reason="no") for start, name in (("00", "night"), ("11", ""))
    )
    with pytest.raises(JobError) as error:
        choose_session(known(ended=(early, DIED, unnamed)), name)
    assert re.search(
        rf"The session 'night' ended at \d\d:\d\d: {KILLED}; its last output:\nthe last words$", str(error.value)
    )


def test_an_end_of_yesterday_has_its_day() -> None:
    assert re.match(
        r"session 'abababab' ended at \w+ \d+ \w+, \d\d:\d\d: no$",
        str(EndedSession(id="ab" * 16, reason="no", ago=86400)),
    )


BUSY = "its engine did not answer within 3 s"


def test_a_session_whose_engine_does_not_answer_is_found_by_the_name_that_the_gateway_knows() -> None:
    busy = replace(info("night", "aaaa1"), error=BUSY)
    assert choose_session(known(busy), "night") == busy
    with pytest.raises(JobError, match=rf"night \(id aaaa1000, detached, not known further: {BUSY}\)"):
        choose_session(known(busy), "other")


def test_a_session_is_looked_for_again_while_an_engine_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, other = SessionInfo(id="aa" * 16, error=BUSY), info("other", "bbbb1")
    answers = iter([known(busy, other), known(info("night", "aaaa1"), other)])
    monkeypatch.setattr(module, "_read_sessions", lambda dialer: next(answers))
    dialer: Any = None
    assert module._find_session(dialer, "night").name == "night"
    answers = iter([known(other)])
    with pytest.raises(JobError, match="does not have session 'night'"):  # at once
        module._find_session(dialer, "night")
    monkeypatch.setattr(module, "BUSY_TIMEOUT", 0.0)
    answers = iter([known(busy)])
    with pytest.raises(JobError, match=rf"aaaaaaaa \(id aaaaaaaa, not known further: {BUSY}\)"):
        module._find_session(dialer, "night")


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
