"""Looking at hosts again and again; one of them fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from meshgate import ranks
from meshgate.errors import GatewayLostError
from meshgate.ranks import HOSTS_TIMEOUT
from meshgate.ranks.usage import Gpu, ProcessUsage, UsageMeter
from meshgate.session.futures import FutureProxy


def process(rank: int, mesh: str = "procs", gpus: tuple[int, ...] = ()) -> dict[str, Any]:
    facts = {"host": "workers-0", "pid": 100 + rank, "cpu": 5.0, "memory": 7, "gpu_memory": None}
    return {"mesh": mesh, "rank": rank, "gpus": list(gpus), **facts}


def gpu(index: int) -> dict[str, Any]:
    return {"index": index, "uuid": f"GPU-{index}", "utilization": 50, "memory": 1, "memory_total": 2}


class Hosts:
    """Two hosts that answer, or fail if their answer is an error."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.spawned: list[int] = []
        self.stopped: list[int] = []

    def __len__(self) -> int:
        return len(self.answers)

    def slice(self, hosts: slice) -> Any:
        outer, rank = self, hosts.start

        class Actors:
            @property
            def read(self) -> Any:
                return self

            def call_one(self) -> FutureProxy[Any]:
                answer = outer.answers[rank]
                return FutureProxy.failed(answer) if isinstance(answer, Exception) else FutureProxy.resolved(answer)

        class Procs:
            def spawn(self, name: str, Class: type) -> Actors:
                return Actors()

            def stop(self) -> None:
                outer.stopped.append(rank)

        class Part:
            def spawn_procs(self, name: str) -> Procs:
                outer.spawned.append(rank)
                return Procs()

        return Part()


def answer(*processes: dict[str, Any], gpus: int = 0, problem: str = "") -> dict[str, Any]:
    return {"host": "workers-0", "processes": list(processes), "gpus": [*map(gpu, range(gpus))], "problem": problem}


def test_a_failed_host_is_reported_and_tried_again_while_the_others_answer() -> None:
    hosts: Any = Hosts(
        answer(process(1), process(0), process(0, "meshgate_top"), process(0, "gather")), GatewayLostError("gone")
    )
    with UsageMeter({"workers": hosts}) as meter:
        found = meter.read()
        assert [(each.mesh, each.rank) for each in found.processes] == [("gather", 0), ("procs", 0), ("procs", 1)]
        assert found.problems == {"workers-1": "gone"}
        hosts.answers[1] = answer(problem="nvidia-smi failed")
        assert meter.read().problems == {"workers-1": "nvidia-smi failed"}
        meter.read()
        assert hosts.spawned == [0, 1, 1]
    assert hosts.stopped == [0, 1]


def test_silent_hosts_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Silent:
        def get(self, timeout: float) -> NoReturn:
            waits.append(timeout)
            clock.now += timeout
            raise TimeoutError("no result within 59.99 s; the operation continues")

    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(FutureProxy, "resolved", lambda _: Silent())
    hosts: Any = Hosts(answer(), answer(), answer())
    with UsageMeter({"workers": hosts}) as meter:
        assert meter.read().problems == dict.fromkeys(("workers-0", "workers-1", "workers-2"), "did not answer in time")
    assert waits == [HOSTS_TIMEOUT, 0.0, 0.0]


def test_the_only_process_of_a_host_uses_its_gpus_if_nothing_else_is_known() -> None:
    alone: Any = Hosts(answer(process(0), process(0, "meshgate_stacks"), gpus=2))
    with UsageMeter({"workers": alone}) as meter:
        found = meter.read()
    assert found.gpus == [Gpu("workers-0", 0, 50, 1, 2), Gpu("workers-0", 1, 50, 1, 2)]
    assert found.processes == [ProcessUsage("procs", 0, "workers-0", 100, 5.0, 7, (0, 1), None)]
    shared: Any = Hosts(answer(process(0, gpus=(1,)), process(1), gpus=2))
    with UsageMeter({"workers": shared}) as meter:
        assert [each.gpus for each in meter.read().processes] == [(1,), ()]
