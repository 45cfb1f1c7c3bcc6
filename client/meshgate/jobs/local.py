"""LocalJob: a job on this machine to develop a program with; on a cluster only the job changes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import Self

from meshgate.errors import JobUnsupported
from meshgate.images.image import Image
from meshgate.jobs.process import LocalGatewayJob, LocalRequest
from meshgate.jobs.saved import DEFAULT_JOB_PATH
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait

LOG_DIRECTORY = ".monarch/logs"


class LocalJob(LocalGatewayJob):
    """One host for each name in ``hosts``; a mapping, in ``hosts`` or ``meshes``, gives the number of hosts.

    The job ends with this process, and no other process finds it.
    """

    def __init__(
        self,
        hosts: Sequence[str] | Mapping[str, int] = ("hosts",),
        *,
        meshes: Mapping[str, int] | None = None,
        image: Image | None = None,
    ) -> None:
        if isinstance(hosts, str):
            raise TypeError(f"LocalJob: hosts must be a sequence of names, not {hosts!r}: write LocalJob([{hosts!r}])")
        names = meshes if meshes is not None else hosts
        if not isinstance(names, Iterable):
            raise TypeError(f"LocalJob: {names!r}: expected the names of hosts, or numbers of hosts by name")
        counts = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 1)
        super().__init__(LocalRequest.from_arguments("LocalJob", meshes=counts), image)
        self._script: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The script that ``apply(client_script=...)`` started."""
        if self._script is None:
            raise ValueError("no local batch job")
        return self._script

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH) -> JobState:
        """The host meshes; applies the job if necessary. Ignores ``cached_path``."""
        return super().state(None)

    def can_run(self, spec: JobTrait) -> bool:
        """Always False: a LocalJob is never reused."""
        return False

    def _create(self, client_script: str | None) -> None:
        if client_script is None:
            super()._create(None)
        else:
            self._script = _start_script(client_script)

    def _is_running(self) -> bool:
        if self._script is not None:
            return self._script.poll() is None
        return super()._is_running()

    def _kill(self) -> None:
        if self._script is not None:
            self._script.terminate()
            self._script.wait()
            self._script = None
        super()._kill()

    @property
    def _ends_with_driver(self) -> bool:
        return True

    def detach(self, name: str | None = None, cached_path: str | None = DEFAULT_JOB_PATH) -> NoReturn:
        """Raises JobUnsupported: a LocalJob always ends with its driver."""
        raise JobUnsupported("a LocalJob ends with its driver and cannot be detached: use ProcessJob")

    def _outlive_driver(self) -> None:
        """Does nothing: a LocalJob always ends with its driver."""

    def _spec(self) -> dict[str, Any]:
        return {"meshes": self._request.meshes}

    def _allocation(self) -> None:
        return None

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        return cls(LocalRequest.model_validate(spec).meshes)


def _start_script(script: str) -> subprocess.Popen[bytes]:
    """Starts the user's script with its output in a new directory under ``.monarch/logs``."""
    Path(LOG_DIRECTORY).mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="job_", dir=LOG_DIRECTORY))
    environment = {**os.environ, "MONARCH_BATCH_JOB": "1"}
    with (logs / "stdout.log").open("wb") as out, (logs / "stderr.log").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, script],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
