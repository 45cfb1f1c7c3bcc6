"""What large values may take of the engine's memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from meshgate_gateway.engine import memory
from meshgate_gateway.engine.memory import UNCHECKED, ValueMemory, memory_left
from meshgate_gateway.engine.on_worker.large_messages import LARGE

MB = 2**20
MACHINE = 8_000 * 1024  # what a machine in these tests has left
System: TypeAlias = Callable[..., "int | None"]


def always(mesh: int, rank: int) -> bool:
    return True


@pytest.fixture
def left(tmp_path: Path) -> System:
    """What is left of the memory of a machine, for a process in ``groups``, with files of control groups."""

    def of(groups: str, files: dict[str, str]) -> int | None:
        (tmp_path / "self").mkdir(exist_ok=True)
        (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
        (tmp_path / "self" / "cgroup").write_text(groups)
        (tmp_path / "self" / "statm").write_text("10 5 0 0 0 0 0")
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return memory_left(tmp_path, tmp_path / "groups")

    return of


def group(folder: str, limit: str, used: int, cache: int = 0, active: int = 0) -> dict[str, str]:
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon 1\ninactive_file {cache}\nactive_file {active}\n",
    }


def test_without_limits_the_machine_decides(left: System) -> None:
    assert left("0::/\n", {}) == MACHINE
    assert left("0::/job\n", group("job/", "max", 10)) == MACHINE


def test_each_group_around_the_process_limits_it(left: System) -> None:
    assert left("0::/job/step\n", group("job/", "1000", 400) | group("job/step/", "max", 300)) == 600
    assert left("0::/job/step\n", group("job/step/", "900", 800)) == 100
    assert left("0::/job/step\n", group("job/step/", "900", 950)) == 0


def test_cached_files_count_as_left(left: System) -> None:
    assert left("0::/\n", group("", "1000", 900, cache=500)) == 600
    assert left("0::/\n", group("", "1000", 900, cache=300, active=200)) == 600


def test_in_a_container_the_mounted_root_is_the_own_group(left: System) -> None:
    assert left("0::/kubepods/pod1/container\n", group("", "1000", 400)) == 600


def test_groups_of_the_first_version_count_too(left: System) -> None:
    cached = "total_inactive_file 30\ntotal_active_file 20"
    files = {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "700", "memory.stat": cached}
    groups = "4:cpu:/job\n3:cpuset,memory:/job\n0::/\n"
    assert left(groups, {f"memory/job/{name}": text for name, text in files.items()}) == 350


def test_ulimit_counts_what_the_process_has_mapped(left: System, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = 10 * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (mapped + 500, resource.RLIM_INFINITY))
    assert left("0::/\n", {}) == 500


def test_what_is_left_is_unknown_without_proc() -> None:
    assert memory_left(Path("/no such folder")) is None


def test_a_value_may_take_three_quarters_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_left", lambda: 4_000_000)
    values = ValueMemory(always, limit=0)
    refusal = values.ask(1, 0, 3_000_001, reply=True)
    assert "has 3.0 MB" in refusal
    assert "Compute(memory=...)" in refusal
    assert "Leave the value in the cluster, with endpoint.keep() in place of call()" in refusal
    assert values.ask(1, 0, 2_900_000, reply=True) == ""
    assert "room for 0.1 MB" in values.ask(1, 1, 200_000, reply=True)
    monkeypatch.setattr(memory, "memory_left", lambda: None)
    assert values.ask(1, 1, 2**40, reply=True) == ""


def test_the_error_of_a_kept_value_that_cannot_be_fetched_does_not_advise_keep() -> None:
    values = ValueMemory(always, limit=100)
    refusal = values.ask(1, 0, 101, reply=True, kept=True)
    assert refusal.startswith("the kept value has 0.0 MB, but ")
    assert "MESHGATE_VALUE_MEMORY=100 of the gateway sets this limit. It stays in the cluster: pass it to" in refusal
    assert "endpoint.keep()" not in refusal


def test_replies_on_their_way_share_the_room() -> None:
    values = ValueMemory(always, limit=100)
    assert not values.ask(1, 0, 60, reply=True)
    assert "MESHGATE_VALUE_MEMORY=100 " in values.ask(1, 1, 60, reply=True)
    assert not values.ask(1, 1, 40, reply=False)  # a channel's: it is not promised any
    assert values.room() == 40
    values.arrived(59)
    assert values.room() == 40
    values.arrived(60)
    assert values.room() == 100


def test_arguments_need_twice_their_size_and_share_the_room() -> None:
    values = ValueMemory(always, limit=64 * MB)
    assert not values.refuse_arguments(32 * MB, 0)
    assert "this message has 33.6 MB, " in values.refuse_arguments(32 * MB + 1, 0)
    assert "has room for 12.6 MB. MESHGATE_VALUE_MEMORY" in values.refuse_arguments(13 * MB, 20 * MB)
    values.ask(1, 0, 20 * MB, reply=True)
    assert not values.refuse_arguments(22 * MB, 0)
    assert values.refuse_arguments(23 * MB, 0)
    assert not values.refuse_arguments(LARGE - 1, 64 * MB)


def test_what_waits_for_the_driver_takes_room() -> None:
    unsent = 0
    values = ValueMemory(always, lambda: unsent, limit=100)
    assert values.ask(1, 0, 90, reply=True) == ""
    values.arrived(90)
    unsent = 90
    assert values.room() == 10
    assert "room for 0.0 MB. MESHGATE_VALUE_MEMORY=100 " in values.ask(1, 0, 90, reply=True)
    unsent = 0
    assert values.room() == 100


def test_a_reply_that_did_not_ask_is_refused_while_too_much_waits_for_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "memory_left", lambda: 8 * MB)
    unsent = UNCHECKED - 1
    values = ValueMemory(always, lambda: unsent, limit=0)
    assert values.refuse_reply([bytes(7 * MB)]) == ""
    unsent = UNCHECKED
    assert values.refuse_reply([bytes(6 * MB)]) == ""
    refusal = values.refuse_reply([bytes(6 * MB), b"1"])
    assert refusal.startswith("the result has 6.3 MB, but the session's engine, in the gateway, has room for 6.3 MB.")
    assert "67.1 MB of messages wait for the driver, which takes them more slowly than they come" in refusal
    assert "with endpoint.keep() in place of call(), and pass it to other calls; save it to a file" in refusal
    assert "If one rank's value fits, fetch a slice" in values.refuse_reply([bytes(7 * MB)], kept=True)
    assert values.refuse_reply([bytes(LARGE)]) == ""  # it has asked
    monkeypatch.setattr(memory, "memory_left", lambda: None)
    assert values.refuse_reply([bytes(7 * MB)]) == ""


def test_a_lower_limit_is_compared_with_once_a_quarter_of_it_waits() -> None:
    unsent = 1 * MB - 1
    values = ValueMemory(always, lambda: unsent, limit=4 * MB)
    assert values.refuse_reply([bytes(5 * MB)]) == ""
    unsent = 1 * MB
    assert values.refuse_reply([bytes(3 * MB)]) == ""
    assert "MESHGATE_VALUE_MEMORY" in values.refuse_reply([bytes(3 * MB + 1)])


def test_what_processes_were_promised_is_free_once_they_have_ended() -> None:
    values = ValueMemory(always, limit=100)
    for mesh, rank in ((1, 0), (1, 1), (2, 0)):
        values.ask(mesh, rank, 10, reply=True)
    values.process_ended(1, 0)
    assert values.room() == 80
    values.process_ended(1, 0)
    values.process_ended(2, 1)
    assert values.room() == 80


def test_a_reply_that_no_call_awaits_is_promised_nothing() -> None:
    awaited = {(1, 0), (1, 1)}
    values = ValueMemory(lambda mesh, rank: (mesh, rank) in awaited, limit=100)
    for rank in range(3):
        assert values.ask(1, rank, 10, reply=True) == ""
    assert values.room() == 80
    awaited.discard((1, 0))
    values.call_ended()
    assert values.room() == 90


def test_groups_that_cannot_be_read_count_as_without_limit(left: System, tmp_path: Path) -> None:
    (tmp_path / "groups/job/memory.max").mkdir(parents=True)  # IsADirectoryError, for root as well
    assert left("0::/job\n", {}) == MACHINE
