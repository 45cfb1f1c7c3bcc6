"""Sync agents on hosts: which hosts get one, when, and what happens if one dies."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshgate_gateway.engine.code import host_agents
from meshgate_gateway.engine.code.host_agents import (
    AGENT_MODULES,
    FIRST_NUMBER,
    MAX_DEATHS,
    PROCESS_MODULES,
    HostAgents,
    imported_modules,
    run_until,
    worker_sources,
)
from meshgate_gateway.engine.objects.records import HostMesh, attached_hosts
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_sync.errors import HostsBehind
from meshgate_sync.relay.plan import GATEWAY, HostSlot, Routes
from meshgate_wire.messages import Host
from tests.gateway.engine.fakes import FakeMesh, FakeMonarch, host_mesh, start_task, turns

ROOT = "ab" * 32
FIRST_GROUP = FIRST_NUMBER + 1


class FakeTree:
    """The distributor: records what it is notified of."""

    def __init__(self) -> None:
        self.expected: set[str] = set()
        self.added: list[str] = []
        self.restarted: list[str] = []
        self.removed: list[tuple[str, str | None]] = []

    def expect_hosts(self, names: Iterable[str]) -> None:
        self.expected.update(names)

    def add_hosts(self, hosts: Sequence[HostSlot]) -> dict[str, Routes]:
        self.added += [host.name for host in hosts]
        return {host.name: Routes((GATEWAY,), ()) for host in hosts}

    def restart_host(self, name: str) -> None:
        self.restarted.append(name)

    def remove_host(self, name: str, why: str | None) -> None:
        self.removed.append((name, why))


class Provided:
    """Hosts with agents. ``starts(endpoint, args)`` replaces what the actors of agents do."""

    def __init__(self, gateway: tuple[str, int] = ("127.0.0.1", 700)) -> None:
        self.monarch, self.tree = FakeMonarch(), FakeTree()
        self.monarch.on_engine_call = self._start
        self.ended: list[int] = []
        self.fails: Callable[[Sequence[str]], bool] = lambda names: False
        self.refused: dict[str, str] = {}
        self.agents = HostAgents(
            self.monarch,
            self.tree,
            gateway,
            part_of_hosts=Lookup(ObjectTable(), self.monarch).part_of_hosts,
            start_task=start_task,
            set_up_process=lambda mesh, code=None, bootstrap=None: mesh,
            end_processes=self.ended.append,
            secret=b"secret",
            owner="owner",
        )

    def _start(self, endpoint: str, args: Any) -> Any:
        if endpoint == "start":
            if self.fails(args[0]):
                raise RuntimeError(f"no process on {', '.join(args[0])}\n\nStack backtrace:\n rust")
            return [self.refused.get(name) or (f"10.0.0.{name[-1]}", 5) for name in args[0]]
        return None

    async def provide(self, hosts: HostMesh) -> None:
        self.agents.provide(hosts)
        await turns()

    def starts(self) -> list[list[str]]:
        """The hosts of each group of agents that was started, in order."""
        return [args[0] for _, endpoint, args in self.monarch.engine_calls if endpoint == "start"]

    async def ready(self, *names: str) -> None:
        await asyncio.wait_for(self.agents.wait_ready(names, ROOT), 5)


async def test_the_hosts_of_a_mesh_get_their_agents_together() -> None:
    provided = Provided()
    await provided.provide(host_mesh())
    await provided.ready("workers-0", "workers-1")
    assert provided.starts() == [["workers-0", "workers-1"]]
    assert provided.tree.added == ["workers-0", "workers-1"]
    _, endpoint, (routes, addresses) = provided.monarch.engine_calls[-1]
    assert endpoint == "configure"
    assert routes == {"workers-0": ((GATEWAY,), ()), "workers-1": ((GATEWAY,), ())}
    assert addresses == {GATEWAY: ("127.0.0.1", 700), "workers-0": ("10.0.0.0", 5), "workers-1": ("10.0.0.1", 5)}


async def test_agents_listen_on_loopback_unless_the_gateway_is_remote() -> None:
    local, remote = Provided(), Provided(("10.9.9.9", 700))
    for provided in (local, remote):
        await provided.provide(host_mesh(1))
    assert local.monarch.engine_calls[0][2][3:] == ("127.0.0.1", [""])
    assert remote.monarch.engine_calls[0][2][3:] == ("0.0.0.0", ["10.0.0.0"])
    ipv6 = Provided(("fd00::9", 700))
    host = Host(name="workers-0", address="tcp://[fd00::1]:1")
    await ipv6.provide(attached_hosts(FakeMesh("workers"), "workers", [host]))
    assert ipv6.monarch.engine_calls[0][2][3:] == ("::", ["fd00::1"])


async def test_hosts_that_are_attached_again_keep_their_agents() -> None:
    provided = Provided()
    await provided.provide(host_mesh())
    await provided.provide(host_mesh())
    assert len(provided.starts()) == 1


async def test_hosts_without_names_get_no_agents() -> None:
    provided = Provided()
    hosts = host_mesh()
    hosts.hosts = (Host(name=""),) * 2
    await provided.provide(hosts)
    assert provided.starts() == []


async def test_if_starting_together_fails_each_host_is_tried_alone() -> None:
    provided = Provided()
    provided.fails = lambda names: "workers-1" in names
    await provided.provide(host_mesh())
    assert provided.starts() == [["workers-0", "workers-1"], ["workers-0"], ["workers-1"]]
    await provided.ready("workers-0")
    assert provided.tree.removed == [("workers-1", "no process on workers-1")]
    assert provided.ended == [FIRST_GROUP, FIRST_GROUP + 2]


async def test_a_host_whose_disk_is_full_fails_for_that_reason_and_the_others_do_not() -> None:
    provided = Provided()
    provided.refused = {"workers-1": "no space left on the disk"}
    await provided.provide(host_mesh())
    await provided.ready("workers-0")
    assert provided.tree.removed == [("workers-1", "no space left on the disk")]


async def test_a_host_that_cannot_get_an_agent_is_named_and_tried_again_for_the_next_request() -> None:
    provided = Provided()
    provided.fails = lambda names: True
    await provided.provide(host_mesh(1))
    with pytest.raises(HostsBehind) as caught:
        await provided.ready("workers-0")
    assert caught.value.hosts == {"workers-0": "no process on workers-0"}
    provided.fails = lambda names: False
    await provided.ready("workers-0")


async def test_an_agent_that_does_not_start_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agents, "START_TIMEOUT", 0.01)
    provided = Provided()
    provided.monarch.hold = True
    hosts = host_mesh(1)
    provided.agents.provide(hosts)
    with pytest.raises(HostsBehind, match="the sync agent did not start within 0 s"):
        await provided.ready("workers-0")
    assert FIRST_GROUP in provided.ended


# --- hosts and agents that end


async def test_a_lost_host_is_missing_until_it_is_back() -> None:
    provided = Provided()
    hosts = host_mesh()
    await provided.provide(hosts)
    hosts.host_lost("workers-1", "evicted", returns=True)
    provided.agents.host_lost("workers-1", "evicted")
    with pytest.raises(HostsBehind) as caught:
        await provided.ready("workers-0", "workers-1")
    assert caught.value.hosts == {"workers-1": "evicted"}
    await provided.ready("workers-0")
    hosts.host_restarted(1, Host(name="workers-1", address="tcp://10.0.0.9:1"), same_address=False)
    await provided.provide(hosts)
    assert provided.tree.restarted == ["workers-1"]
    await provided.ready("workers-0", "workers-1")
    assert provided.starts() == [["workers-0", "workers-1"], ["workers-1"]]


async def test_the_new_address_of_a_restarted_agent_is_announced_to_the_others() -> None:
    provided = Provided()
    await provided.provide(host_mesh())
    assert provided.agents.process_ended(FIRST_GROUP, 1)
    await provided.ready("workers-0", "workers-1")
    ((endpoint, payload, _),) = provided.monarch.casts
    assert (endpoint, payload) == ("moved", ({"workers-1": ("10.0.0.1", 5)},))


async def test_a_host_that_is_lost_while_its_agent_starts_does_not_keep_the_others_from_theirs() -> None:
    provided = Provided()
    provided.monarch.hold = True
    provided.agents.provide(host_mesh())
    await turns()
    provided.monarch.hold = False
    provided.agents.host_lost("workers-1", "evicted")
    await turns()
    await provided.ready("workers-0")
    assert provided.starts() == [["workers-0"]]


async def test_an_agent_that_dies_as_it_has_started_is_started_again() -> None:
    provided, start = Provided(), []

    def die_at_the_end(endpoint: str, args: Any) -> Any:
        if endpoint == "configure" and not start:
            start.append(endpoint)
            assert provided.agents.process_ended(FIRST_GROUP, 1)
        return provided._start(endpoint, args)

    provided.monarch.on_engine_call = die_at_the_end
    await provided.provide(host_mesh())
    await provided.ready("workers-0", "workers-1")
    assert provided.starts() == [["workers-0", "workers-1"], ["workers-0"], ["workers-1"]]
    assert provided.ended == [FIRST_GROUP]


async def test_agents_do_not_wait_for_a_lost_host_that_had_not_answered_and_start_when_it_is_replaced() -> None:
    provided, hosts = Provided(), host_mesh()
    await provided.provide(hosts)
    hosts.attaching = asyncio.get_running_loop().create_future()  # again, after workers-0 has been replaced
    provided.monarch.hold = True
    assert provided.agents.process_ended(FIRST_GROUP, 0)
    await turns()
    hosts.host_lost("workers-1", "evicted", returns=True)
    provided.agents.host_lost("workers-1", "evicted")
    provided.monarch.hold = False
    await turns()
    with pytest.raises(HostsBehind) as caught:
        await provided.ready("workers-0")
    assert "so none can be used until they are replaced" in caught.value.hosts["workers-0"]
    hosts.host_restarted(1, Host(name="workers-1", address="tcp://10.0.0.9:1"), same_address=False)
    await provided.provide(hosts)
    await provided.ready("workers-0", "workers-1")


async def test_an_agent_that_dies_is_restarted_on_its_host_alone() -> None:
    provided = Provided()
    await provided.provide(host_mesh())
    assert provided.agents.process_ended(FIRST_GROUP, 1)
    assert not provided.agents.process_ended(7, 0)
    await provided.ready("workers-0", "workers-1")
    assert provided.starts() == [["workers-0", "workers-1"], ["workers-1"]]
    assert provided.tree.restarted == ["workers-1"]


async def test_an_agent_that_keeps_dying_is_restarted_only_for_a_request() -> None:
    provided = Provided()
    await provided.provide(host_mesh(1))
    for group in range(MAX_DEATHS + 1):
        assert provided.agents.process_ended(FIRST_GROUP + group, 0)
        await turns()
    assert len(provided.starts()) == 1 + MAX_DEATHS
    ((host, reason),) = provided.tree.removed
    assert host == "workers-0"
    assert reason.startswith("its sync agent exited 4 times, the last time after ")
    await provided.ready("workers-0")
    assert len(provided.starts()) == 2 + MAX_DEATHS


async def test_an_agent_that_ran_for_a_while_starts_a_new_series_of_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agents, "STABLE_AFTER", -1.0)
    provided = Provided()
    await provided.provide(host_mesh(1))
    for group in range(MAX_DEATHS + 1):
        provided.agents.process_ended(FIRST_GROUP + group, 0)
        await turns()
    assert len(provided.starts()) == 2 + MAX_DEATHS
    assert provided.tree.removed == []


async def test_a_replaced_host_is_no_longer_expected() -> None:
    provided = Provided()
    await provided.provide(host_mesh())
    provided.agents.host_replaced("workers-1")
    assert provided.tree.removed == [("workers-1", None)]
    await provided.ready("workers-0", "workers-1")  # a name that is not known is not waited for


async def test_closing_stops_the_agents_except_on_lost_hosts_and_starts_no_others() -> None:
    provided = Provided()
    kept, lost = host_mesh(name="kept"), host_mesh(name="lost")
    await provided.provide(kept)
    await provided.provide(lost)
    provided.agents.host_lost("lost-1", "evicted")
    await provided.agents.close()
    stopped = [mesh.stopped for mesh in provided.monarch.meshes if mesh.name == "meshgate_code"]
    assert stopped == ["the session ended", None]
    provided.agents.process_ended(FIRST_GROUP, 0)
    await turns()
    assert len(provided.starts()) == 2


async def test_agents_that_start_when_the_session_ends_fail_on_no_host() -> None:
    provided = Provided()
    provided.monarch.hold = True
    provided.agents.provide(host_mesh())
    await turns()
    await provided.agents.close()
    await turns()
    assert provided.tree.removed == []


@pytest.mark.parametrize("entry_points", [AGENT_MODULES, PROCESS_MODULES])
def test_modules_for_workers_import_only_stdlib_modules(entry_points: tuple[str, ...]) -> None:
    for name, source in worker_sources(entry_points).items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            else:
                continue
            foreign = [each for each in modules if each.split(".")[0] not in sys.stdlib_module_names]
            assert not foreign, f"{name} imports {foreign}"


def test_every_imported_module_is_included() -> None:
    modules = worker_sources(AGENT_MODULES)
    assert all(used in modules for name, source in modules.items() for used in imported_modules(name, source))


def test_the_modules_run_without_meshgate_installed() -> None:
    program = f"""
import sys
from importlib import import_module
for name in ("meshgate_sync", "meshgate_wire", "meshgate", "pydantic", "monarch"):
    sys.modules[name] = None
{import_sources_source()}
package = import_sources({dict(worker_sources(AGENT_MODULES))!r})
agent = import_module(package + ".distribution.agent")
import tempfile
agent.HostAgent("a", secret=b"s" * 32, owner="o", home=tempfile.mkdtemp()).stop()
print("it runs")
"""
    done = subprocess.run([sys.executable, "-I", "-"], input=program, capture_output=True, text=True, check=False)
    assert done.stdout == "it runs\n", done.stderr


def import_sources_source() -> str:
    """The source of ``import_sources`` and of the standard-library imports of its module."""
    from meshgate_gateway.engine.on_worker import process as on_worker

    tree = ast.parse(Path(str(on_worker.__file__)).read_text())
    kept = [
        node
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.AnnAssign))
        or (isinstance(node, ast.FunctionDef) and node.name == "import_sources")
    ]
    return ast.unparse(ast.Module([node for node in kept if not _left_out(node)], []))


def _left_out(node: ast.stmt) -> bool:
    """Whether ``node`` imports something that the program does not need or cannot import."""
    return isinstance(node, ast.ImportFrom) and node.module in ("__future__", "meshgate_sync.store.place")


class Work:
    """Runs until it is cancelled, and then takes a moment to end."""

    def __init__(self) -> None:
        self.ended = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended = True


async def fails() -> None:
    raise KeyError("what it raises")


def never() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def test_work_that_ends_first_is_done() -> None:
    async def main() -> bool:
        return await run_until((never(),), asyncio.sleep(0), timeout=60)

    assert asyncio.run(main())


def test_what_work_raises_is_raised() -> None:
    async def main() -> None:
        await run_until((never(),), fails())

    with pytest.raises(KeyError, match="what it raises"):
        asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 0.01])
async def test_work_that_is_cut_short_has_ended_on_return(timeout: float | None) -> None:
    work, stop = Work(), never()
    if timeout is None:
        asyncio.get_running_loop().call_soon(stop.set_result, None)
    assert not await run_until((stop,), work.run(), timeout=timeout)
    assert work.ended


async def test_cancelling_the_wait_cancels_the_work() -> None:
    work = Work()
    waiting = asyncio.ensure_future(run_until((never(),), work.run()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.ended
