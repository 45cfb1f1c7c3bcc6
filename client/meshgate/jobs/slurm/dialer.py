"""The way to the gateway of a job: a unix socket, or the address of a node, through ssh unless that is not needed."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from meshgate.errors import ConnectionFailedError, JobError
from meshgate.session.dialing import Route, call_in_thread, describe_response
from meshgate_slurm.messages import JobReport, RunningSlurmJob

__all__ = ["SlurmDialer", "ask_gateway", "read_report"]

REQUEST_TIMEOUT = 20.0


class SlurmDialer:
    """A ``Dialer``: connects again, by a new ssh connection if needed.

    ``find`` returns the path of a unix socket or ``host:port``, ``why_gone`` why the gateway will never answer again if
    that is certain. Both may block and raise JobError and OSError.
    """

    def __init__(
        self, job: RunningSlurmJob, where: str, find: Callable[[], str], why_gone: Callable[[], str | None]
    ) -> None:
        self._job, self._where, self._find, self._why_gone = job, where, find, why_gone

    async def dial(self) -> Route:
        try:
            found = await call_in_thread(self._find)
        except JobError as error:
            raise ConnectionFailedError(str(error)) from error
        headers = {"Authorization": f"Bearer {self._job.token}"}
        if _is_path(found):
            return Route("ws://gateway.meshgate", unix_socket=found, headers=headers, through_proxy=False)
        return Route(f"ws://{found}", headers=headers, through_proxy=False)

    async def gone(self) -> str | None:
        try:
            return await call_in_thread(self._why_gone)
        except (JobError, OSError):  # unknown while the login node does not answer
            return None

    def __str__(self) -> str:
        return f"the gateway of Slurm job {self._job.job_id} on {self._where}"


def ask_gateway(place: str, job: RunningSlurmJob) -> JobReport:
    """What the gateway at ``place``, a unix socket or ``host:port``, reports about its job. Raises OSError if it does
    not answer."""
    connection = (
        _UnixConnection(place) if _is_path(place) else http.client.HTTPConnection(place, timeout=REQUEST_TIMEOUT)
    )
    try:
        connection.request("GET", "/v1/job", headers={"Authorization": f"Bearer {job.token}"})
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise ConnectionFailedError(f"the gateway answered {describe_response(response.status, body)}")
        return read_report(json.loads(body))
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionFailedError(f"the gateway does not answer: {error!r}") from error
    finally:
        connection.close()


def read_report(facts: dict[str, Any]) -> JobReport:
    """The report in a gateway's description of its job. Raises ConnectionFailedError if it has none."""
    try:
        return JobReport.model_validate(facts["slurm"])
    except (KeyError, ValidationError) as error:
        raise ConnectionFailedError(f"the gateway does not report on a Slurm job: {error!r}") from error


def _is_path(place: str) -> bool:
    return place.startswith("/")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("gateway.meshgate", timeout=REQUEST_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
