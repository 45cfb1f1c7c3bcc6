"""What the adapter does without a running Monarch; tests/end_to_end runs it with one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate_gateway.engine.monarch import release_0_7
from meshgate_gateway.engine.monarch.interface import BootstrapFailed, Fault


@dataclass
class Failure:
    """As Monarch's: only its repr names the ranks."""

    ranks: str
    text: str = "actor crashed"
    mesh_name: str = "actors-unique"

    def __repr__(self) -> str:
        return f"MeshFailure(event, {self.ranks})"

    def report(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("crashed_ranks=[3, 11]", (3, 11)), ("crashed_ranks=[0]", (0,)), ("crashed_ranks=[]", ()), ("", ())],
)
def test_the_ranks_of_a_fault_are_read_from_its_repr(text: str, ranks: tuple[int, ...]) -> None:
    assert release_0_7._fault(Failure(text)) == Fault("actors-unique", ranks, "actor crashed")


def test_a_fault_by_sigkill_names_the_likely_cause() -> None:
    fault = release_0_7._fault(Failure("", text="Killed(sig=9)"))
    assert "ran out of memory" in fault.report


class BootstrapRaised:
    """A mesh of Monarch's with a bootstrap that raised."""

    @property
    async def initialized(self) -> None:
        from monarch.actor import ActorError

        raise ActorError(ValueError("no device"), "Actor call setup failed.")


def test_a_bootstrap_that_raised_is_reported_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import monarch.actor

    client = object.__new__(release_0_7.Client)
    client._api = monarch.actor
    with pytest.raises(BootstrapFailed, match=r"ValueError: no device$"):
        asyncio.run(client.wait_initialized(BootstrapRaised()))


def test_settings_are_withheld_while_hosts_are_attached_to() -> None:
    order: list[str] = []

    def attaching(attached: Coroutine[Any, Any, None]) -> None:
        attached.close()
        order.append("attaching")

    client: Any = object.__new__(release_0_7.Client)
    client._settings = SimpleNamespace(withhold=lambda: order.append("withheld"), attaching=attaching)
    client._api = SimpleNamespace(attach_to_workers=lambda **_: order.append("attach"))
    client.attach("workers", [])
    assert order == ["withheld", "attach", "attaching"]


def test_the_ids_of_processes_are_read_from_the_repr_of_their_mesh() -> None:
    ranks = ", ".join(
        f"ProcRef {{ proc_id: <'anon-{rank}' anon-{rank}<FQEUXHHxDxr>@anon-{rank}<FQEUXHHxDxr>.ipc:///tmp/w_0>, "
        f"create_rank: {rank}, agent: ActorRef {{ actor_addr: <'proc_agent.anon-{rank}' proc_agent> }} }}"
        for rank in range(2)
    )

    class Native:
        def __repr__(self) -> str:
            return f"<ProcMeshRefImpl ProcMeshRef {{ ranks: [{ranks}], region: Region }}>"

    procs = SimpleNamespace(_proc_mesh=SimpleNamespace(poll=Native))
    client = object.__new__(release_0_7.Client)
    assert client.process_ids(procs) == tuple(
        f"'anon-{rank}' anon-{rank}<FQEUXHHxDxr>@anon-{rank}<FQEUXHHxDxr>.ipc:///tmp/w_0" for rank in range(2)
    )
