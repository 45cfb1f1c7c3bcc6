"""Dialers for a gateway in a cluster: to its current pod, or by the URL of an ingress.

All of them ask the API server what happened if the gateway does not answer. A session lives in one gateway process;
once the pod that was reached first has ended, its session is lost, and the API server knows how the pod ended.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshgate.jobs.kubernetes.port_forward import ForwardFailed, open_forward
from meshgate.session.dialing import Route, UrlDialer, call_in_thread
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.jobs.gateway_pod import GatewayPod, find_gateway, gateway_gone_reason


class _WatchedGateway:
    """The gateway pod of ``job`` as the API server reports it."""

    def __init__(self, api: Api, job: str, namespace: str) -> None:
        self._api = api
        self._job = job
        self._namespace = namespace
        self._first: GatewayPod | None = None

    async def find(self) -> GatewayPod:
        """The pod to dial now. Raises ForwardFailed if there is none."""
        try:
            pod = await call_in_thread(find_gateway, self._api, self._job, self._namespace)
        except KubernetesError as error:
            raise ForwardFailed(str(error)) from error
        if pod is None:
            raise ForwardFailed("the gateway has no ready pod")
        self._first = self._first or pod
        if pod != self._first:  # the new pod does not know the session; ``gone`` reports how the first one ended
            raise ForwardFailed("another gateway pod has replaced the one that held this session")
        return pod

    async def gone(self) -> str | None:
        try:
            return await call_in_thread(gateway_gone_reason, self._api, self._job, self._namespace, self._first)
        except KubernetesError:
            return None  # unknown while the API server does not answer

    def __str__(self) -> str:
        return f"the gateway of job {self._job!r} (namespace {self._namespace})"


class PodDialer:
    """Connects to the pod directly, from inside the cluster."""

    def __init__(self, api: Api, job: str, namespace: str, token: str) -> None:
        self._api = api
        self._namespace = namespace
        self._gateway = _WatchedGateway(api, job, namespace)
        self._headers = {"Authorization": f"Bearer {token}"}

    async def dial(self) -> Route:
        pod = await self._gateway.find()
        host = f"[{pod.host}]" if ":" in pod.host else pod.host
        return Route(f"ws://{host}:{pod.port}", headers=self._headers, through_proxy=False)

    async def gone(self) -> str | None:
        return await self._gateway.gone()

    def __str__(self) -> str:
        return str(self._gateway)


class PortForwardDialer(PodDialer):
    """Connects to the pod by a port-forward through the API server, a new one for each connection."""

    async def dial(self) -> Route:
        pod = await self._gateway.find()
        request = await call_in_thread(self._api.port_forward, pod.name, self._namespace, pod.port)
        sock = await asyncio.wrap_future(open_forward(request))
        return Route("ws://gateway.meshgate", sock=sock, headers=self._headers, through_proxy=False)


class WatchedUrlDialer(UrlDialer):
    """Connects to the gateway by the URL of an ingress, if the API server reports a ready pod."""

    def __init__(
        self, api: Api, job: str, namespace: str, token: str, url: str, *, ca: str | Path | None = None
    ) -> None:
        super().__init__(url, token, ca=ca)
        self._gateway = _WatchedGateway(api, job, namespace)

    async def dial(self) -> Route:
        await self._gateway.find()
        return await super().dial()

    async def gone(self) -> str | None:
        return await self._gateway.gone()
