"""The actor class of these tests, and meshes of it. The scripted gateway's ``functions`` are what its endpoints do."""

from __future__ import annotations

from typing import Any

from meshgate.actors.api import Actor, endpoint
from meshgate.proxies.client import Client


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    def add(self, amount: int, *, twice: bool = False) -> Any: ...

    @endpoint
    def echo(self, value: Any) -> Any: ...

    @endpoint(explicit_response_port=True)
    def ported(self, port: Any, value: Any) -> None: ...

    def plain(self, value: int) -> int:
        return value


def counters(client: Client, **per_host: int) -> Any:
    """Actors on two hosts, with two processes each by default."""
    hosts = client.attach_hosts("workers", 2)
    return hosts.spawn_procs(per_host=per_host or {"gpus": 2}).spawn("counters", Counter)


def one_counter(client: Client) -> Any:
    """A mesh of one actor."""
    return client.attach_hosts("workers", 2).spawn("counters", Counter).slice(hosts=0)
