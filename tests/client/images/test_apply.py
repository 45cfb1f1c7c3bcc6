"""Which steps run, on a mesh of fake hosts."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate import Image, ImageStepFailed
from meshgate.images.apply import apply_image
from meshgate.images.plan import plan
from meshgate.session.futures import FutureProxy

IMAGE = Image().run_bash("a").run_bash("b").run_bash("c")


class FakeHosts:
    """Hosts that have completed some leading steps of ``IMAGE``, and record what they are sent."""

    def __init__(self, *completed: int) -> None:
        self.completed = completed
        self.results: dict[int, list[dict[str, Any]]] = {}
        self.problems: dict[int, str] = {}  # why no step can run, by host
        self.full: dict[int, str] = {}  # why content cannot be received
        self.ran: list[int] = []
        self.received: list[tuple[int | None, int, bytes]] = []  # host (None: all), offset, data
        self.stopped = 0
        self._client = FakeClient()

    def _initialized(self, *, wait_for_all: bool) -> FutureProxy[None]:
        return FutureProxy.resolved(None)

    def spawn_procs(self, name: str) -> Any:
        return SimpleNamespace(spawn=lambda name, actor: self.runners(), stop=self.stop)

    def stop(self) -> None:
        self.stopped += 1

    def runners(self, hosts: int | None = None) -> Any:
        def endpoint(call: Any) -> Any:
            return SimpleNamespace(call=lambda *arguments: FutureProxy.resolved(call(*arguments)))

        return SimpleNamespace(
            completed_steps=endpoint(self.completed_steps),
            run_step=endpoint(self.run_step),
            receive_content=endpoint(lambda digest, offset, data: self.receive(hosts, offset, data)),
            slice=self.runners,
        )

    def completed_steps(self, digests: list[str]) -> dict[int, tuple[str, int, str]]:
        return {
            rank: (f"workers-{rank}", min(count, len(digests)), self.problems.get(rank, ""))
            for rank, count in enumerate(self.completed)
        }

    def receive(self, host: int | None, offset: int, data: bytes) -> dict[int, str]:
        self.received.append((host, offset, data))
        ranks = range(len(self.completed)) if host is None else (host,)
        return dict(enumerate(self.full.get(rank, "") for rank in ranks))

    def run_step(self, index: int, payloads: Any) -> dict[int, dict[str, Any]]:
        self.ran.append(index)
        success = {"code": 0, "output": ""}
        return dict(enumerate(self.results.get(index, [success] * len(self.completed))))


class FakeClient:
    def __init__(self) -> None:
        self.objects = SimpleNamespace(host_restarts=Counter())


def apply(hosts: Any, image: Image = IMAGE) -> None:
    apply_image(hosts, "workers", image)


@pytest.mark.parametrize(
    ("completed", "ran"), [((0, 0), [0, 1, 2]), ((2, 1), [1, 2]), ((3, 3), []), ((3, 0), [0, 1, 2])]
)
def test_steps_run_from_the_first_that_some_host_lacks(completed: tuple[int, ...], ran: list[int]) -> None:
    hosts = FakeHosts(*completed)
    apply(hosts)
    assert hosts.ran == ran
    assert hosts.stopped == 1


def test_an_unchanged_image_is_applied_once_in_a_session_until_a_host_restarts() -> None:
    hosts = FakeHosts(0, 0)
    apply(hosts)
    apply(hosts)
    assert hosts.ran == [0, 1, 2]
    hosts._client.objects.host_restarts["workers"] = 1
    apply(hosts)
    assert hosts.ran == [0, 1, 2, 0, 1, 2]


def test_a_failed_step_is_reported_and_later_steps_do_not_run() -> None:
    hosts = FakeHosts(0, 0, 0)
    failure = {"code": 7, "output": "last line\n"}
    hosts.results[1] = [{"code": 0, "output": ""}, failure, failure]
    with pytest.raises(ImageStepFailed) as raised:
        apply(hosts)
    assert str(raised.value) == (
        "image step 'run b' failed with exit code 7 on workers-1 and 1 other host. Last output:\nlast line"
    )
    assert (raised.value.host, raised.value.exit_code, raised.value.others) == ("workers-1", 7, 1)
    assert hosts.ran == [0, 1]
    assert hosts.stopped == 1


def test_a_step_that_could_not_run_has_no_exit_code() -> None:
    hosts = FakeHosts(0)
    hosts.results[0] = [{"code": None, "output": "OSError: disk full"}]
    with pytest.raises(ImageStepFailed, match="'run a' could not run on workers-0: OSError: disk full"):
        apply(hosts)


def test_a_host_that_cannot_look_up_its_steps_is_named_before_any_runs() -> None:
    hosts = FakeHosts(0, 0)
    hosts.problems[1] = "no space left on the disk"
    with pytest.raises(ImageStepFailed, match=r"'run a' could not run on workers-1: no space left on the disk$"):
        apply(hosts)
    assert (hosts.ran, hosts.stopped) == ([], 1)


@pytest.mark.parametrize("completed", [(0, 0), (1, 0)])
def test_a_host_that_cannot_receive_content_is_named(tmp_path: Path, completed: tuple[int, ...]) -> None:
    (tmp_path / "data").write_text("content")
    hosts = FakeHosts(*completed)
    hosts.full[1] = "no space left on the disk"
    with pytest.raises(ImageStepFailed, match=r"could not run on workers-1: no space left on the disk$"):
        apply(hosts, Image().copy(tmp_path / "data", "/data"))
    assert hosts.ran == []


@pytest.mark.parametrize(("completed", "targets"), [((0, 0), [None]), ((0, 1), [0]), ((1, 1), [])])
def test_content_is_sent_only_to_the_hosts_that_lack_it(
    tmp_path: Path, completed: tuple[int, ...], targets: list[int | None]
) -> None:
    (tmp_path / "data").write_text("content")
    hosts = FakeHosts(*completed)
    image = Image().copy(tmp_path / "data", "/data")
    apply(hosts, image)
    assert [host for host, _, _ in hosts.received] == targets
    for _, offset, data in hosts.received:
        assert offset == 0
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            assert tar.getnames() == ["data"]


def test_an_image_without_steps_spawns_nothing() -> None:
    hosts = FakeHosts(0)
    apply(hosts, Image())
    assert hosts.stopped == 0
    assert plan(Image().live_steps) == ()
