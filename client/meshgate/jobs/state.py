"""The state of a running job: its host meshes, each an attribute of its name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshgate.html import card
from meshgate.suggestions import did_you_mean

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy
    from meshgate.proxies.client import Client
    from meshgate.ranks.telemetry import QueryEngineClient


class JobState:
    """The job's host meshes by name: ``state.trainers``, ``state.dataloaders``.

    An unknown name raises AttributeError that lists the known ones. ``hosts`` maps names to host meshes.
    """

    query_engine: None = None
    """As in Monarch, whose ``query_engine_client`` takes its place."""
    query_engine_client: QueryEngineClient | None = None
    """For SQL queries; None without ``enable_telemetry()``, and so are the two addresses on this machine."""
    telemetry_url: str | None = None
    dashboard_url: str | None = None
    admin_url: str | None = None
    """The address of the admin server on this machine; None without ``enable_admin()``, as in Monarch."""

    def __init__(self, hosts: Mapping[str, HostMeshProxy]) -> None:
        self._hosts = dict(hosts)

    def __getattr__(self, attr: str) -> HostMeshProxy:
        # copy and pickle look up special methods before _hosts is set
        hosts: dict[str, HostMeshProxy] = self.__dict__.get("_hosts", {})
        try:
            return hosts[attr]
        except KeyError:
            if attr.startswith("_"):  # libraries ask for such names, and expect a quick answer
                raise AttributeError(attr) from None
            available = ", ".join(sorted(hosts))
            message = f"'{attr}' is not a valid host mesh name. Available names: {available}{did_you_mean(attr, hosts)}"
            raise AttributeError(message, name=attr) from None

    if not TYPE_CHECKING:  # which reports this mistake itself

        def __getitem__(self, name):
            raise TypeError(f"a JobState is not subscriptable: write state.{name}, or getattr(state, name)")

    def _wait_for_hosts(self, timeout: float) -> None:
        """Returns once every host of every mesh is there. Raises TimeoutError, and what ``initialized`` raises."""
        deadline = time.monotonic() + timeout
        for waiting in [hosts.initialized for hosts in self._hosts.values()]:
            waiting.get(timeout=max(0.0, deadline - time.monotonic()))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._hosts]

    def _repr_html_(self) -> str:
        """For notebooks: the host meshes."""
        return card("JobState", {}, [hosts._repr_html_() for hosts in self._hosts.values()])

    def __repr__(self) -> str:
        return f"JobState(hosts={self._hosts})"


def attach_meshes(client: Client, meshes: Mapping[str, int], previous: JobState | None) -> JobState:
    """The host meshes ``meshes`` in ``client``'s session: usable ones of ``previous``, and newly attached others.

    A session attaches to the hosts of a mesh once. A host that restarts rejoins the mesh that lost it, and the other
    hosts stay usable. A mesh is attached again if it belongs to another session, failed to attach, was shut down, or
    has another size now.
    """
    known = previous._hosts if previous is not None else {}
    hosts: dict[str, HostMeshProxy] = {}
    for name, count in meshes.items():
        usable = name in known and known[name].is_usable_in(client)
        if usable and len(known[name]) == count:
            hosts[name] = known[name]
            continue
        if usable:  # the job was scaled: some of its hosts have nothing of what was done on the others
            client.objects.host_restarts[name] += 1
        hosts[name] = client.attach_hosts(name, count)
    return previous if previous is not None and hosts == known else JobState(hosts)
