"""Reads what arrived for a call: unpickles values, and turns failures into the errors to raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshgate.errors import UnreadableResult
from meshgate.serialization.unpickling import MakeProxy, ReadingRules, RemoteException, loads, loads_exception
from meshgate.session.errors.failures import from_failure
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, Failure


class ResultReader:
    """The session's ``Reader``. Meshes and ports in a result become the proxies that ``make_proxy`` makes.

    ``rules()`` says what a result may do here. ``shared_environment``: as for ``from_failure``.
    """

    def __init__(self, make_proxy: MakeProxy, rules: Callable[[], ReadingRules], shared_environment: str = "") -> None:
        self._make_proxy = make_proxy
        self._rules = rules
        self._shared_environment = shared_environment

    def value(self, buffer: Fragments, objects: Adopted, endpoint: str) -> Any:
        try:
            return loads(buffer, objects=objects.objects, make_proxy=self._make_proxy, rules=self._rules())
        except UnreadableResult as error:
            raise UnreadableResult(f"{endpoint}: {error}", module=error.module, endpoint=endpoint) from error

    def raised(self, buffer: Fragments, objects: Adopted) -> RemoteException:
        """What an endpoint raised, or an actor sent as an exception."""
        return loads_exception(buffer, objects=objects.objects, make_proxy=self._make_proxy, rules=self._rules())

    def error(self, failure: Failure, buffers: Sequence[Fragments], endpoint: str) -> Exception:
        raised = [self.raised(buffer, Adopted()) for buffer in buffers]
        return from_failure(failure, raised, endpoint=endpoint, shared_environment=self._shared_environment)
