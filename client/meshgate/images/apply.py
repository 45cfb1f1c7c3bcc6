"""Runs the steps of an image on the hosts of a mesh, through an actor on each.

A step runs on all hosts in parallel; the next one starts when every host has completed it. A session asks its hosts
once, and again after one has restarted; as long as nothing changes, later calls cost one round trip.
"""

from __future__ import annotations

import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from meshgate.errors import ActorError, ImageStepFailed
from meshgate.images.image import Image
from meshgate.images.on_host import StepRunner
from meshgate.images.plan import PlannedStep, chunks, plan
from meshgate.proxies import HostMeshProxy
from meshgate.session.futures import FutureProxy
from meshgate.session.session import ClientSession

CHUNK = 2 << 20
IN_FLIGHT = 4  # chunks per host

_applied: weakref.WeakKeyDictionary[ClientSession, dict[str, tuple[str, int]]] = weakref.WeakKeyDictionary()


def apply_image(hosts: HostMeshProxy, mesh: str, image: Image) -> None:
    """Runs the steps of ``image`` that the hosts of the mesh named ``mesh`` have not completed.

    Raises ImageStepFailed without running later steps, and ValueError if something to copy does not exist.
    Interrupting it ends the running steps.
    """
    steps = plan(image.live_steps)
    applied = _applied.setdefault(hosts._client, {})
    if not steps:
        return
    if mesh in applied:
        hosts._initialized(wait_for_all=False).get()  # by then the restart count below is up to date
    wanted = (steps[-1].digest, hosts._client.objects.host_restarts[mesh])
    if applied.get(mesh) == wanted:
        return
    procs = hosts.spawn_procs(name="meshgate_image")
    try:
        runners = _Runners(procs.spawn("meshgate_image", StepRunner), steps)
        for index in range(runners.completed(), len(steps)):
            runners.run(index)
    finally:
        procs.stop()
    applied[mesh] = wanted


class _Runners:
    """The step runners of all hosts. Each skips the steps that its host has already completed."""

    def __init__(self, mesh: Any, steps: Sequence[PlannedStep]) -> None:
        self._mesh = mesh
        self._steps = steps
        self._payloads = [step.payload for step in steps]
        self._names: list[str] = []
        self._completed: list[int] = []

    def completed(self) -> int:
        """The number of leading steps that every host has completed."""
        results = list(self._mesh.completed_steps.call([step.digest for step in self._steps]).get().values())
        self._names = [name for name, _, _ in results]
        self._completed = [count for _, count, _ in results]
        self._require([problem for _, _, problem in results], self._steps[0])
        return min(self._completed)

    def _require(self, problems: Sequence[str], step: PlannedStep, ranks: Sequence[int] | None = None) -> None:
        """Raises ImageStepFailed if one of ``problems`` is not empty. They are those of all hosts, or of ``ranks``."""
        wrong = [(rank, text) for rank, text in zip(ranks or range(len(problems)), problems, strict=True) if text]
        if wrong:
            raise _failure(self._names[wrong[0][0]], step, None, wrong[0][1], len(wrong) - 1)

    def run(self, index: int) -> None:
        step = self._steps[index]
        try:
            if step.content is not None:
                self._send_content(index)
            results = cast("list[dict[str, Any]]", list(self._mesh.run_step.call(index, self._payloads).get().values()))
        except ActorError as error:
            raise _failure(self._names[error.rank or 0], step, None, str(error.exception)) from error
        failed = [rank for rank, result in enumerate(results) if result["code"] != 0]
        if failed:
            first = results[failed[0]]
            raise _failure(self._names[failed[0]], step, first["code"], first["output"], len(failed) - 1)

    def _send_content(self, index: int) -> None:
        """Sends the content of step ``index`` to the hosts that lack it; the gateway gets it once if all of them do."""
        step = self._steps[index]
        lacking = [rank for rank, completed in enumerate(self._completed) if completed <= index]
        targets: list[tuple[Any, list[int]]] = [(self._mesh.slice(hosts=rank), [rank]) for rank in lacking]
        if len(lacking) == len(self._completed):
            targets = [(self._mesh, lacking)]
        in_flight: deque[tuple[FutureProxy[Any], list[int]]] = deque()

        def finish_one() -> None:
            future, ranks = in_flight.popleft()
            self._require(list(future.get().values()), step, ranks)

        with tempfile.TemporaryFile() as file:
            assert step.content is not None
            step.content.write_tar(file)
            for offset, data in chunks(file, CHUNK):
                for target, ranks in targets:
                    in_flight.append((target.receive_content.call(step.digest, offset, data), ranks))
                while len(in_flight) > IN_FLIGHT * len(targets):
                    finish_one()
        while in_flight:
            finish_one()


def _failure(host: str, step: PlannedStep, code: int | None, output: str, others: int = 0) -> ImageStepFailed:
    where = f"{host} and {others} other host{'' if others == 1 else 's'}" if others else host
    if code is None:  # ``output`` is the reason
        message = f"image step {step.title!r} could not run on {where}: {output.rstrip()}"
    else:
        message = f"image step {step.title!r} failed with exit code {code} on {where}"
        if output.strip():
            message = f"{message}. Last output:\n{output.rstrip()}"
    return ImageStepFailed(message, host=host, step=step.title, exit_code=code, output=output, others=others)
