"""A provisioning gateway over a fake cluster, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import SecretStr
from websockets.asyncio.client import ClientConnection, connect

from meshgate_gateway.http.auth import TokenAuthenticator
from meshgate_gateway.http.kubernetes_auth import KubernetesUsers
from meshgate_gateway.http.server import Server, listen
from meshgate_gateway.provisioning.policy import Policy
from meshgate_gateway.provisioning.service import Provisioner
from meshgate_gateway.provisioning.slurm_service import SlurmProvisioner
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.jobs.provisioning_messages import (
    JobProgress,
    ProvisioningReply,
    ProvisioningRequest,
    RequestRejected,
    StartJob,
    parse_reply,
)
from meshgate_kubernetes.manifests.spec import JobSpec
from tests.clusters.kubernetes.fake_api import FakeApi
from tests.clusters.kubernetes.objects import job, mesh

T = TypeVar("T")
TOKEN = "correct-horse-battery-staple"
POLICY = Policy(
    callers=("alice", "trainers"),
    namespaces=("team",),
    images=("worker:",),
    gateway_image="gateway:operators",
    max_replicas=4,
    max_per_pod={"memory": "8Gi"},
    selectors=("app=mine",),
)
CREATED_KINDS = [
    "ConfigMap", "Secret", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Service", "Deployment",
    "PodDisruptionBudget", "NetworkPolicy", "Service", "StatefulSet",
]  # fmt: skip


def fake_api() -> FakeApi:
    """A cluster whose policy allows Alice and Carol's group to create jobs, but not Bob and the stranger."""
    api = FakeApi()
    api.users = {
        "alices": {"username": "alice"},
        "trainers": {"username": "carol", "groups": ["trainers"]},
        "bobs": {"username": "bob"},
        "strangers": {"username": "stranger"},
    }
    return api


def requested_job(*, replicas: int = 2, idle_timeout: int = 60, **worker: Any) -> JobSpec:
    return job(mesh(replicas=replicas, **{"memory": "4Gi", **worker}), idle_timeout=idle_timeout)


def provisioning_gateway(api: FakeApi, policy: Policy = POLICY) -> AbstractAsyncContextManager[str]:
    """The URL of a provisioning gateway whose cluster is ``api``."""
    seen = cast("Api", api)
    return served(Provisioner(seen, policy, TokenAuthenticator(SecretStr(TOKEN)), KubernetesUsers(seen)))


@asynccontextmanager
async def served(provisioner: Provisioner | SlurmProvisioner) -> AsyncIterator[str]:
    """The URL of a gateway that serves ``provisioner``."""
    listener = listen("127.0.0.1", 0)
    server = Server([listener], lambda request, conn: provisioner.respond(urlsplit(request.path).path, request, conn))
    serving = asyncio.create_task(server.serve())
    try:
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/jobs"
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await provisioner.close()
        await server.close()


def with_gateway(api: FakeApi, test: Callable[[str], Awaitable[T]], policy: Policy = POLICY) -> T:
    return run_at(provisioning_gateway(api, policy), test)


def run_at(gateway: AbstractAsyncContextManager[str], test: Callable[[str], Awaitable[T]]) -> T:
    """Runs ``test`` with the URL of ``gateway``, for 20 s at most."""

    async def run() -> T:
        async with gateway as url:
            return await asyncio.wait_for(test(url), 20)

    return asyncio.run(run())


def dial(url: str, token: str) -> connect:
    return connect(url, additional_headers={"Authorization": f"Bearer {token}"}, proxy=None)


async def replies(connection: ClientConnection) -> list[ProvisioningReply]:
    """The remaining replies, until the gateway closes."""
    return [parse_reply(text) async for text in connection]


def request(
    api: FakeApi, message: ProvisioningRequest | str, token: str = "alices", policy: Policy = POLICY
) -> list[ProvisioningReply]:
    """Every reply of the gateway to one request."""

    async def test(url: str) -> list[ProvisioningReply]:
        async with dial(url, token) as connection:
            await connection.send(message if isinstance(message, str) else message.model_dump_json())
            return await replies(connection)

    return with_gateway(api, test, policy)


def rejected(api: FakeApi, message: ProvisioningRequest | str, token: str = "alices") -> RequestRejected:
    (reply,) = request(api, message, token)
    assert isinstance(reply, RequestRejected)
    return reply


async def start_job(connection: ClientConnection, job: JobSpec) -> None:
    """Requests the job and returns at the first progress report."""
    await connection.send(StartJob(job=job).model_dump_json())
    while not isinstance(parse_reply(await connection.recv()), JobProgress):
        continue
