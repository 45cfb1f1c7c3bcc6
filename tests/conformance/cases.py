"""What a case is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.conformance.actors import Worker


@dataclass
class Kit:
    """What a case works with: ``api`` is ``monarch.actor`` or ``meshgate``, ``jobs`` is ``monarch.job`` or
    ``meshgate``, and ``hosts`` a mesh of two hosts.

    Processes that a case spawns through ``procs`` and ``spawn`` are stopped when the case is over.
    """

    api: Any
    jobs: Any
    hosts: Any
    _spawned: list[Any] = field(default_factory=list)

    def procs(self, per_host: int = 2, hosts: Any = None, bootstrap: Callable[[], None] | None = None) -> Any:
        """New processes, ``per_host`` on each host in a dimension named ``gpus``."""
        hosts = hosts if hosts is not None else self.hosts
        procs = hosts.spawn_procs(per_host={"gpus": per_host}, bootstrap=bootstrap)
        self._spawned.append(procs)
        return procs

    def spawn(self, Class: type = Worker, *args: Any, per_host: int = 2, **kwargs: Any) -> Any:
        """An actor mesh on new processes."""
        return self.procs(per_host).spawn(Class.__name__.lower(), Class, *args, **kwargs)

    def spawn_on(self, procs: Any) -> Any:
        """Workers on processes; a process of one dimension of size 1 is reduced to its only rank."""
        procs = procs.slice(gpus=0) if procs.size("gpus") == 1 else procs
        return procs.spawn("worker", Worker)

    def one(self, Class: type = Worker, *args: Any, **kwargs: Any) -> Any:
        """A single actor on a process of its own."""
        procs = self.procs(1, self.hosts.slice(hosts=0))
        return procs.spawn(Class.__name__.lower(), Class, *args, **kwargs)

    def stop_all(self) -> None:
        """Stops what the case has spawned; meshes that are broken or stopped already are left to the job."""
        for procs in reversed(self._spawned):
            try:
                procs.stop().get(timeout=20)
            except Exception as error:  # noqa: BLE001 - a case may have killed its processes
                print(f"# stop: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        self._spawned.clear()


Case: TypeAlias = Callable[[Kit], None]


def raises(expected: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], object]) -> Any:
    """The exception that ``call`` raises. Fails if it raises none, or another."""
    try:
        value = call()
    except expected as error:
        return error
    raise AssertionError(f"returned {value!r} instead of raising {expected}")
