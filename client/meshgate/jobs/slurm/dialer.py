"""The way to the gateway of a job: a unix socket, or the address of a node, through ssh unless that is not needed."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from meshgate.errors import ConnectionFailedError, JobError
from meshgate.session.dialing import Route, call_in_thread, describe_response
from meshgate.session.gateway_http import get
from meshgate_slurm.messages import JobReport, RunningSlurmJob

GONE_INTERVAL = 5.0


class SlurmDialer:
    """A ``Dialer``: connects again, by a new ssh connection if needed.

    ``find`` returns the path of a unix socket or ``host:port``, ``why_gone`` why the gateway will never answer again if
    that is certain. Both may block and raise JobError and OSError.
    """

    def __init__(
        self, job: RunningSlurmJob, where: str, find: Callable[[], str], why_gone: Callable[[], str | None]
    ) -> None:
        self._job, self._where, self._find, self._why_gone = job, where, find, why_gone
        self._asked = -GONE_INTERVAL
        self._gone: str | None = None

    async def dial(self) -> Route:
        try:
            found = await call_in_thread(self._find)
        except JobError as error:
            raise ConnectionFailedError(str(error)) from error
        return _route(found, self._job)

    async def gone(self) -> str | None:
        """Asks at most every ``GONE_INTERVAL``: Slurm's controller, which may be asked, serves the whole site."""
        now = asyncio.get_running_loop().time()
        if now - self._asked >= GONE_INTERVAL:
            self._asked = now
            try:
                self._gone = await call_in_thread(self._why_gone)
            except (JobError, OSError):  # unknown while the login node does not answer
                self._gone = None
        return self._gone

    def __str__(self) -> str:
        return f"the gateway of Slurm job {self._job.job_id} on {self._where}"


def ask_gateway(place: str, job: RunningSlurmJob) -> JobReport:
    """What the gateway at ``place``, a unix socket or ``host:port``, reports about its job. Raises
    ConnectionFailedError if it does not answer."""
    gateway = f"the gateway of Slurm job {job.job_id}"
    try:
        status, body, proven = get(_route(place, job), "/v1/job")
        facts = json.loads(body) if status == http.client.OK and proven else None
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise ConnectionFailedError(f"{gateway} does not answer: {error!r}") from error
    if facts is None:
        raise ConnectionFailedError(f"{gateway} answered {describe_response(status, body, proven=proven)}")
    return read_report(facts)


def read_report(facts: dict[str, Any]) -> JobReport:
    """The report in a gateway's description of its job. Raises ConnectionFailedError if it has none."""
    try:
        return JobReport.model_validate(facts["slurm"])
    except (KeyError, ValidationError) as error:
        raise ConnectionFailedError(f"the gateway does not report on a Slurm job: {error!r}") from error


def _route(place: str, job: RunningSlurmJob) -> Route:
    headers = {"Authorization": f"Bearer {job.token}"}
    if place.startswith("/"):
        return Route("ws://gateway.meshgate", unix_socket=place, headers=headers, through_proxy=False)
    return Route(f"ws://{place}", headers=headers, through_proxy=False)
