"""Runs the steps of an image on the hosts of a mesh, through an actor on each.

Every step runs on all hosts side by side, and the next begins when it is done everywhere. A session asks its
hosts once, and again when one has come back; while nothing has changed, later calls cost a round trip.
"""

from __future__ import annotations

import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from meshgate.client import Client
from meshgate.errors import ActorError, ImageStepFailed
from meshgate.future import FutureProxy
from meshgate.images.on_host import StepRunner
from meshgate.images.plan import Order, chunks, plan
from meshgate.jobs.image import Image
from meshgate.proxies import HostMeshProxy

__all__ = ["apply_image"]

CHUNK = 2 << 20
IN_FLIGHT = 4  # chunks for each host

_applied: weakref.WeakKeyDictionary[Client, dict[str, tuple[str, int]]] = weakref.WeakKeyDictionary()


def apply_image(hosts: HostMeshProxy, mesh: str, image: Image) -> None:
    """Runs those steps of ``image`` that the hosts of the mesh named ``mesh`` have not run.

    Raises ImageStepFailed, with nothing run after the step that failed, and ValueError where there is nothing to
    copy. When it is interrupted the steps that run are ended.
    """
    orders = plan(image.live_steps)
    applied = _applied.setdefault(hosts._client, {})
    if not orders:
        return
    if mesh in applied:
        hosts._up(whole=False).get()  # by now it is known here whether hosts have come back
    wanted = (orders[-1].digest, hosts._client.objects.returned.get(mesh, 0))
    if applied.get(mesh) == wanted:
        return
    procs = hosts.spawn_procs(name="image")
    try:
        runners = _Runners(procs.spawn("image", StepRunner), orders)
        for index in range(runners.done(), len(orders)):
            runners.run(index)
    finally:
        procs.stop()
    applied[mesh] = wanted


class _Runners:
    """The runners of all hosts. A host that has done a step already finds that out itself."""

    def __init__(self, mesh: Any, orders: Sequence[Order]) -> None:
        self._mesh = mesh
        self._orders = orders
        self._told = [order.told for order in orders]
        self._names: list[str] = []
        self._done: list[int] = []

    def done(self) -> int:
        """How many of the leading steps every host has done."""
        answers = list(self._mesh.begin.call([order.digest for order in self._orders]).get().values())
        self._names = [name for name, _ in answers]
        self._done = [done for _, done in answers]
        return min(self._done)

    def run(self, index: int) -> None:
        order = self._orders[index]
        try:
            if order.content is not None:
                self._send(index)
            answers = cast("list[dict[str, Any]]", list(self._mesh.run.call(index, self._told).get().values()))
        except ActorError as error:
            raise _failure(self._names[error.rank or 0], order, None, str(error.exception)) from error
        failed = [place for place, answer in enumerate(answers) if answer["code"] != 0]
        if failed:
            first = answers[failed[0]]
            raise _failure(self._names[failed[0]], order, first["code"], first["output"], len(failed) - 1)

    def _send(self, index: int) -> None:
        """Sends the content of step ``index`` to the hosts that need it: once to the gateway, where all do."""
        order = self._orders[index]
        needing = [place for place, done in enumerate(self._done) if done <= index]
        targets = [self._mesh] if len(needing) == len(self._done) else [self._mesh.slice(hosts=i) for i in needing]
        flying: deque[FutureProxy[Any]] = deque()
        with tempfile.TemporaryFile() as file:
            assert order.content is not None
            order.content.write_tar(file)
            for offset, data in chunks(file, CHUNK):
                for target in targets:
                    flying.append(target.receive.call(order.digest, offset, data))
                while len(flying) > IN_FLIGHT * len(targets):
                    flying.popleft().get()
        for future in flying:
            future.get()


def _failure(host: str, order: Order, code: int | None, output: str, others: int = 0) -> ImageStepFailed:
    where = f"{host} and {others} more" if others else host
    how = "could not be run" if code is None else f"ended with exit code {code}"
    message = f"image step {order.title!r} {how} on {where}"
    if output.strip():
        message = f"{message}. Its last lines:\n{output.rstrip()}"
    return ImageStepFailed(message, host=host, step=order.title, exit_code=code, output=output, others=others)
