"""A job is made whole or not at all, whoever interrupts it, and whoever else makes the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from meshgate_kubernetes import jobs, provision, readiness
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Conflict, NotFound, Refused, Unreachable
from meshgate_kubernetes.jobs import RunningJob
from meshgate_kubernetes.manifests import SPEC_KEY
from meshgate_kubernetes.readiness import JobNotReady, Progress
from meshgate_kubernetes.spec import JobSpec
from tests.gateway.kubernetes.fake_api import FakeApi
from tests.gateway.kubernetes.objects import Object, job, mesh


class Silent:
    def created(self, obj: Object) -> None: ...
    def progress(self, progress: Progress) -> None: ...


class InterruptedAfter(Silent):
    """Ctrl-C as object ``number`` is told."""

    def __init__(self, number: int) -> None:
        self._left = number

    def created(self, obj: Object) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _short_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "HEARTBEAT", 0.05)


def start(api: FakeApi, spec: JobSpec | None = None, listener: Any = None, timeout: float | None = 10) -> RunningJob:
    return jobs.start(cast("Api", api), spec or job(), listener or Silent(), timeout=timeout)


def test_a_job_is_made_and_found_with_its_token() -> None:
    api = FakeApi()
    made = start(api)
    assert len(made.token) >= 32
    assert jobs.find(cast("Api", api), "trainer", "team") == made


@pytest.mark.parametrize("number", [1, 2, 5, 10])
def test_an_interruption_leaves_nothing_wherever_it_comes(number: int) -> None:
    api = FakeApi()
    with pytest.raises(KeyboardInterrupt):
        start(api, listener=InterruptedAfter(number))
    assert api.left() == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Unreachable("no answer"), Refused("no answer")])
def test_an_interruption_of_the_first_request_leaves_nothing_though_the_server_has_done_it(
    interruption: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeApi()
    create = api.create

    def made_but_not_told(obj: Object) -> Object:
        create(obj)
        raise interruption

    monkeypatch.setattr(api, "create", made_but_not_told)
    with pytest.raises(type(interruption)):
        start(api)
    assert api.left() == []


def test_an_interruption_of_the_first_request_does_not_touch_the_job_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeApi()
    other = start(api)

    def interrupted(obj: Object) -> Object:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(api)
    assert jobs.runs(cast("Api", api), other)


def test_the_same_job_is_taken_as_it_is() -> None:
    api = FakeApi()
    first = start(api)
    made = list(api.made)
    assert start(api) == first
    assert api.made == made


def test_a_different_job_of_the_name_is_refused_with_the_way_to_end_it() -> None:
    api = FakeApi()
    start(api)
    with pytest.raises(Conflict, match=r"'trainer' runs already .* `meshgate kill -n team trainer` ends it"):
        start(api, job(mesh(replicas=3)))


def in_thread(deed: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    came: list[object] = []

    def run() -> None:
        try:
            came.append(deed())
        except Exception as error:  # noqa: BLE001 - handed to the test
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, came


def test_two_programs_that_start_the_same_at_once_share_it() -> None:
    api = FakeApi()
    api.pods_come_up = False
    threads = [in_thread(lambda: start(api)) for _ in range(2)]
    api.wait_for_kind("StatefulSet")
    api.bring_up()
    for thread, _ in threads:
        thread.join(10)
    (first,), (second,) = (came for _, came in threads)
    assert isinstance(first, RunningJob)
    assert first == second


def test_who_waits_for_a_job_that_another_gives_up_is_told() -> None:
    api = FakeApi()
    api.pods_come_up = False
    thread, came = in_thread(lambda: start(api))
    api.wait_for_kind("StatefulSet")
    provision.delete(cast("Api", api), "trainer", "team")
    thread.join(10)
    assert isinstance(came[0], NotFound)
    assert "job 'trainer' was ended while it came up" in str(came[0])


def test_what_a_killed_program_has_begun_the_next_one_completes() -> None:
    api = FakeApi()
    provision.create_parent(cast("Api", api), job())
    assert start(api).name == "trainer"
    assert api.made[-1] == "StatefulSet"


def test_a_job_of_another_program_that_does_not_come_up_is_left_and_the_way_to_end_it_told() -> None:
    api = FakeApi()
    api.pods_come_up = False
    provision.create_parent(cast("Api", api), job())
    with pytest.raises(JobNotReady, match=r"left as it is; `meshgate kill -n team trainer` ends it"):
        start(api, timeout=0.2)
    assert ("ConfigMap", "team", "trainer") in api.left()


def test_what_an_earlier_job_left_is_replaced() -> None:
    api = FakeApi()
    first = start(api)
    for kind, namespace, name in api.left():
        if kind != "Secret":
            api.drop_alone(kind, name, namespace)
    second = start(api)
    assert second.token != first.token


class InterruptedAfterTheFirst(FakeApi):
    """Whoever ends a job there gets a Ctrl-C as soon as it has asked for the deletion."""

    def delete(self, *what: Any, **how: Any) -> None:
        super().delete(*what, **how)
        raise KeyboardInterrupt

    def serves(self, kind: str) -> bool:
        raise AssertionError("the deletion comes first")


def test_the_deletion_is_asked_for_before_anything_else() -> None:
    api = FakeApi()
    start(api)
    ended = InterruptedAfterTheFirst()
    ended.__dict__.update(api.__dict__)
    with pytest.raises(KeyboardInterrupt):
        provision.delete(cast("Api", ended), "trainer", "team")
    assert ended.left() == []


class OfAnotherVersion(FakeApi):
    def _put(self, obj: Object) -> Object:
        if obj["kind"] == "ConfigMap":
            obj = {**obj, "data": {SPEC_KEY: '{"format": 9}'}}
        return super()._put(obj)


def test_a_job_of_another_version_is_listed_ended_and_named_to_who_would_use_it() -> None:
    api = cast("Api", OfAnotherVersion())
    provision.create_parent(api, job())
    (found,) = jobs.listed(api)
    assert (found.name, found.meshes) == ("trainer", None)
    running = RunningJob(name="trainer", namespace="team", uid=found.uid, token="", meshes={})
    assert jobs.runs(api, running)
    with pytest.raises(Refused, match=r"another version of meshgate: .* `meshgate kill -n team trainer` does"):
        jobs.find(api, "trainer", "team")
    jobs.end_listed(api, found)
    assert not jobs.runs(api, running)
    assert jobs.listed(api) == []
