"""The way to the gateway of a job: a unix socket, forwarded by ssh unless the gateway is on this machine."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from typing import Any

from pydantic import ValidationError

from meshgate.errors import ConnectionFailedError, JobError
from meshgate.jobs.slurm import login_program
from meshgate.jobs.slurm.login_node import LoginNode
from meshgate.session.dialing import Route, describe_response
from meshgate_slurm.messages import JobReport, RunningSlurmJob

__all__ = ["SlurmDialer", "ask_gateway", "read_report"]

REQUEST_TIMEOUT = 20.0


class SlurmDialer:
    """A ``Dialer``: connects again, by a new ssh connection if needed."""

    def __init__(self, login: LoginNode, job: RunningSlurmJob, python: str) -> None:
        self._login, self._job, self._python = login, job, python

    async def dial(self) -> Route:
        try:
            path = await asyncio.to_thread(self._login.forward, self._job.socket)
        except JobError as error:
            raise ConnectionFailedError(str(error)) from error
        headers = {"Authorization": f"Bearer {self._job.token}"}
        return Route("ws://gateway.meshgate", unix_socket=path, headers=headers, through_proxy=False)

    async def gone(self) -> str | None:
        try:
            state = await asyncio.to_thread(login_program.gateway_state, self._login, self._job, self._python)
        except (JobError, OSError):  # unknown while the login node does not answer
            return None
        if state.alive or state.host != self._job.host:
            return None
        output = f". Its last output:\n{state.output[-1000:]}" if state.output else ""
        return f"its process on {state.host} has ended{output}"

    def __str__(self) -> str:
        return f"the gateway of Slurm job {self._job.job_id} on {self._job.host}"


def ask_gateway(path: str, job: RunningSlurmJob) -> JobReport:
    """What the gateway behind the unix socket ``path`` reports about its job. Raises OSError if it does not answer."""
    connection = _UnixConnection(path)
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


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("gateway.meshgate", timeout=REQUEST_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
