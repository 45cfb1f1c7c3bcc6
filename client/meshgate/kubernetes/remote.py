"""A gateway behind a URL, as a driver without rights in the cluster sees it.

It may be the gateway of a job, which is then used as it is; or one that provisions, which makes jobs within its
operator's policy and relays to their gateways.
"""

from __future__ import annotations

import json
import os
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from meshgate.dialing import Dialer, UrlDialer, answered, refusal
from meshgate.errors import ConnectionFailedError, JobError, JobNotRunning, JobStartFailed
from meshgate.kubernetes.asked import JobAsked
from meshgate.kubernetes.progress import choose_display, told_when_up
from meshgate_kubernetes.jobs import RunningJob
from meshgate_kubernetes.names import generate_job_name
from meshgate_kubernetes.requests import Answer, Ask, Created, End, Ended, Find, Refused, Start, Told, Up, read_answer

__all__ = ["RemoteGateway", "token_here"]

SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
TIMEOUT = 30.0
END_TIMEOUT = 180.0
AWAY = 60.0
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0


def token_here() -> str:
    """What this process presents to a gateway: ``MESHGATE_TOKEN``, or the identity of the pod that it runs in."""
    if token := os.environ.get("MESHGATE_TOKEN"):
        return token.strip()
    try:
        return SERVICE_ACCOUNT_TOKEN.read_text().strip()
    except OSError:
        raise JobError("MESHGATE_URL names a gateway: set MESHGATE_TOKEN to its token as well") from None


class RemoteGateway:
    """One gateway and the credentials for it."""

    names_its_job = True

    def __init__(self, url: str, token: str, ca: str | None) -> None:
        self._dialer = UrlDialer(url, token, ca=ca)
        self._url, self._token, self._ca = self._dialer.url, token, ca
        self._ssl = ssl.create_default_context(cafile=None) if self._url.startswith("wss:") else None
        if self._ssl is not None and ca is not None:
            self._ssl.load_verify_locations(ca)

    def start(self, asked: JobAsked) -> RunningJob:
        """Has the gateway make the job. Raises JobStartFailed, with nothing left behind, and ConnectionFailedError."""
        spec = asked.spec(asked.name or generate_job_name("meshgate"))
        answers = self._ask_through_cuts(Start(job=spec, timeout=asked.timeout))
        with choose_display(f"{spec.namespace}/{spec.name}") as display, closing(answers):
            for answer in answers:
                if isinstance(answer, Created):
                    display.created({"kind": answer.kind, "metadata": {"name": answer.name}})
                elif isinstance(answer, Told):
                    display.progress(answer.progress)
                elif isinstance(answer, Up):
                    display.done(told_when_up(answer.job.meshes, spec.idle_timeout))
                    return answer.job
                elif isinstance(answer, Refused):
                    raise JobStartFailed(f"{self._dialer}: {answer.reason}")
        raise AssertionError("the last answer is one of these")

    def find_job(self, name: str | None, namespace: str) -> RunningJob:
        """The job that this is the gateway of, or else the one of this name. Raises JobNotRunning."""
        about = self._get("/v1/job")
        if about["meshes"] or name is None:
            return RunningJob(name=name or "", namespace=namespace, uid="", token=self._token, meshes=about["meshes"])
        for answer in self._ask_through_cuts(Find(name=name, namespace=namespace)):
            if isinstance(answer, Up):
                return answer.job
            if isinstance(answer, Refused):
                raise (JobNotRunning if answer.missing else JobError)(f"{self._dialer}: {answer.reason}")
        raise AssertionError("the last answer is one of these")

    def runs(self, job: RunningJob) -> bool:
        """Whether the job is there still. Raises GatewayError or JobError when nobody can tell."""
        if not job.uid:
            return bool(self._get("/v1/job")["meshes"] == job.meshes)
        try:
            return self.find_job(job.name, job.namespace).uid == job.uid
        except JobNotRunning:
            return False

    def end(self, job: RunningJob) -> None:
        """Has the gateway end a job that it made; one that was only reached through it lives on."""
        if not job.uid:
            return
        for answer in self._ask_through_cuts(End(name=job.name, namespace=job.namespace)):
            if isinstance(answer, Refused) and not answer.missing:
                raise JobError(f"{self._dialer}: {answer.reason}")
            if isinstance(answer, (Refused, Ended)):
                return

    def dialer(self, job: RunningJob) -> Dialer:
        if not job.uid:
            return self._dialer
        return UrlDialer(f"{self._url}/v1/jobs/{job.namespace}/{job.name}", job.token, ca=self._ca)

    # --- requests -----------------------------------------------------------------------------------------

    def _get(self, path: str) -> dict[str, Any]:
        address = self._url.replace("ws", "http", 1) + path
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT, context=self._ssl) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read()) from None
        except (OSError, ValueError) as error:
            raise ConnectionFailedError(f"{self._dialer} cannot be reached: {error}") from error

    def _ask(self, ask: Ask, timeout: float) -> Iterator[Answer]:
        """What the gateway says to ``ask``, until it closes; at most ``timeout`` seconds pass between two answers."""
        with self._connected() as connection:
            connection.send(ask.model_dump_json())
            while True:
                try:
                    yield read_answer(connection.recv(timeout))
                except WebSocketException:
                    return
                except TimeoutError:
                    raise ConnectionFailedError(f"{self._dialer} said nothing for {timeout:g} s") from None

    def _ask_through_cuts(self, ask: Ask) -> Generator[Answer, None, None]:
        """What the gateway says to ``ask``, whoever cuts the connection meanwhile: asked again, it tells of the job
        where that is by then. Raises ConnectionFailedError when the gateway stays away."""
        heard, last, delay = False, time.monotonic(), FIRST_DELAY
        while True:
            why: object = "it closes each connection"
            try:
                for answer in self._ask(ask, END_TIMEOUT if isinstance(ask, End) else TIMEOUT):
                    heard, last, delay = True, time.monotonic(), FIRST_DELAY
                    yield answer
            except ConnectionFailedError as error:
                if not heard:
                    raise
                why = error
            if time.monotonic() - last > AWAY:
                raise ConnectionFailedError(f"{self._dialer} went away, and was not back after {AWAY:g} s: {why}")
            heard = True
            time.sleep(random.uniform(0, delay))
            delay = min(2 * delay, LONGEST_DELAY)

    @contextmanager
    def _connected(self) -> Iterator[ClientConnection]:
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            connection = connect(
                f"{self._url}/v1/jobs", ssl=self._ssl, additional_headers=headers, compression=None, close_timeout=2
            )
        except InvalidStatus as error:
            raise self._refused(error.response.status_code, bytes(error.response.body or b"")) from None
        except (OSError, WebSocketException) as error:
            raise ConnectionFailedError(f"{self._dialer} cannot be reached: {error}") from error
        with connection:
            yield connection

    def _refused(self, status: int, body: bytes) -> Exception:
        known = refusal(status, body, str(self._dialer))
        return known or ConnectionFailedError(f"{self._dialer} cannot be reached now: {answered(status, body)}")
