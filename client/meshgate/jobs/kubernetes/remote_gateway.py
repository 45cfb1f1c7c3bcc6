"""A gateway behind a URL, for a driver without permissions in the cluster.

It is either the gateway of one job, which is used as it is, or a provisioning gateway, which starts jobs within its
operator's policy and proxies connections to their gateways.
"""

from __future__ import annotations

import json
import os
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from meshgate.errors import ConnectionFailedError, JobError, JobNotRunning, JobStartFailed
from meshgate.jobs.kubernetes.display import choose_display, ready_message
from meshgate.jobs.kubernetes.requests import JobRequest
from meshgate.session.dialing import Dialer, UrlDialer, describe_response, error_of_response
from meshgate_kubernetes.jobs.lifecycle import RunningJob
from meshgate_kubernetes.jobs.provisioning_messages import (
    EndJob,
    FindJob,
    JobEnded,
    JobProgress,
    JobUp,
    ObjectCreated,
    ProvisioningReply,
    ProvisioningRequest,
    RequestRejected,
    StartJob,
    parse_reply,
)
from meshgate_kubernetes.manifests.names import generate_job_name

__all__ = ["RemoteGateway", "find_token"]

SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
REPLY_TIMEOUT = 30.0
END_TIMEOUT = 180.0
RECONNECT_TIMEOUT = 60.0
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0


def find_token() -> str:
    """The token for a gateway: ``$MESHGATE_TOKEN``, or that of the pod's service account."""
    if token := os.environ.get("MESHGATE_TOKEN"):
        return token.strip()
    try:
        return SERVICE_ACCOUNT_TOKEN.read_text().strip()
    except OSError:
        raise JobError("no token for the gateway of MESHGATE_URL: set MESHGATE_TOKEN as well") from None


class RemoteGateway:
    """One gateway and its token."""

    name_is_optional = True

    def __init__(self, url: str, token: str, ca: str | None) -> None:
        self._dialer = UrlDialer(url, token, ca=ca)
        self._url, self._token, self._ca = self._dialer.url, token, ca
        self._ssl = ssl.create_default_context(cafile=None) if self._url.startswith("wss:") else None
        if self._ssl is not None and ca is not None:
            self._ssl.load_verify_locations(ca)

    def start(self, request: JobRequest, created: Callable[[RunningJob], None] = lambda job: None) -> RunningJob:
        """Starts the job through the gateway. Raises JobStartFailed, leaving nothing behind, and
        ConnectionFailedError. Does not call ``created``: until the job is ready, the gateway itself deletes it if this
        process does not wait for it any more."""
        spec = request.spec(request.name or generate_job_name("meshgate"))
        replies = self._ask_with_retries(StartJob(job=spec, timeout=request.timeout))
        with choose_display(f"{spec.namespace}/{spec.name}") as display, closing(replies):
            for reply in replies:
                if isinstance(reply, ObjectCreated):
                    display.created({"kind": reply.kind, "metadata": {"name": reply.name}})
                elif isinstance(reply, JobProgress):
                    display.progress(reply.progress)
                elif isinstance(reply, JobUp):
                    display.done(ready_message(reply.job.meshes, spec.idle_timeout))
                    return reply.job
                elif isinstance(reply, RequestRejected):
                    raise JobStartFailed(f"{self._dialer}: {reply.reason}")
        raise AssertionError("the last reply is one of these")

    def find_job(self, name: str | None, namespace: str) -> RunningJob:
        """The job of this gateway, or the job of this name if it is a provisioning gateway. Raises JobNotRunning."""
        about = self._get("/v1/job")
        if about["meshes"] or name is None:
            return RunningJob(name=name or "", namespace=namespace, uid="", token=self._token, meshes=about["meshes"])
        for reply in self._ask_with_retries(FindJob(name=name, namespace=namespace)):
            if isinstance(reply, JobUp):
                return reply.job
            if isinstance(reply, RequestRejected):
                raise (JobNotRunning if reply.missing else JobError)(f"{self._dialer}: {reply.reason}")
        raise AssertionError("the last reply is one of these")

    def runs(self, job: RunningJob) -> bool:
        """Whether the job still exists. Raises GatewayError or JobError if that is unknown."""
        if not job.uid:
            return bool(self._get("/v1/job")["meshes"] == job.meshes)
        try:
            return self.find_job(job.name, job.namespace).uid == job.uid
        except JobNotRunning:
            return False

    def end(self, job: RunningJob) -> None:
        """Ends a job that the gateway started. A job whose own gateway this is keeps running."""
        if not job.uid:
            return
        for reply in self._ask_with_retries(EndJob(name=job.name, namespace=job.namespace)):
            if isinstance(reply, RequestRejected) and not reply.missing:
                raise JobError(f"{self._dialer}: {reply.reason}")
            if isinstance(reply, (RequestRejected, JobEnded)):
                return

    def dialer(self, job: RunningJob) -> Dialer:
        if not job.uid:
            return self._dialer
        return UrlDialer(f"{self._url}/v1/jobs/{job.namespace}/{job.name}", job.token, ca=self._ca)

    # --- requests

    def _get(self, path: str) -> dict[str, Any]:
        address = self._url.replace("ws", "http", 1) + path
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT, context=self._ssl) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise self._rejection(error.code, error.read()) from None
        except (OSError, ValueError) as error:
            raise ConnectionFailedError(f"cannot reach {self._dialer}: {error}") from error

    def _ask(self, request: ProvisioningRequest, timeout: float) -> Iterator[ProvisioningReply]:
        """The gateway's replies until it closes the connection; each comes within ``timeout`` seconds."""
        with self._connected() as connection:
            connection.send(request.model_dump_json())
            while True:
                try:
                    yield parse_reply(connection.recv(timeout))
                except WebSocketException:
                    return
                except TimeoutError:
                    raise ConnectionFailedError(f"{self._dialer} did not reply within {timeout:g} s") from None

    def _ask_with_retries(self, request: ProvisioningRequest) -> Generator[ProvisioningReply, None, None]:
        """The gateway's replies across lost connections: the request is sent again, and the gateway continues with the
        job as it is then. Raises ConnectionFailedError if the gateway stays unreachable."""
        reached, last_reply, delay = False, time.monotonic(), FIRST_DELAY
        while True:
            reason: object = "it closes each connection"
            try:
                timeout = END_TIMEOUT if isinstance(request, EndJob) else REPLY_TIMEOUT
                for reply in self._ask(request, timeout):
                    reached, last_reply, delay = True, time.monotonic(), FIRST_DELAY
                    yield reply
            except ConnectionFailedError as error:
                if not reached:
                    raise
                reason = error
            if time.monotonic() - last_reply > RECONNECT_TIMEOUT:
                raise ConnectionFailedError(
                    f"lost the connection to {self._dialer} and could not reconnect within "
                    f"{RECONNECT_TIMEOUT:g} s: {reason}"
                )
            reached = True
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
            status, body = error.response.status_code, bytes(error.response.body or b"")
            if status == HTTPStatus.NOT_FOUND and ":" in describe_response(status, body):  # the gateway's own response
                raise JobError(
                    f"{self._dialer} serves one job and creates none. To use its job, omit compute=, selector= and "
                    "add_mesh(); to create jobs, set MESHGATE_URL to a provisioning gateway, or use a kubeconfig"
                ) from None
            raise self._rejection(status, body) from None
        except (OSError, WebSocketException) as error:
            raise ConnectionFailedError(f"cannot reach {self._dialer}: {error}") from error
        with connection:
            yield connection

    def _rejection(self, status: int, body: bytes) -> Exception:
        error = error_of_response(status, body, str(self._dialer))
        return error or ConnectionFailedError(f"cannot reach {self._dialer}: {describe_response(status, body)}")
