"""Dialers for a gateway in a cluster: to its pod, whichever that is at the moment, or by the URL of an ingress.

All of them ask the API server what became of the gateway when it does not answer. A session is held by one process;
once the one that was reached first has ended, the session is gone with it, and the API server says how it ended.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshgate.dialing import Route, UrlDialer
from meshgate.kubernetes.forward import ForwardFailed, open_forward
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.gateway_pod import GatewayPod, find_gateway, why_gone

__all__ = ["PodDialer", "PortForwardDialer", "WatchedUrlDialer"]


class _Watched:
    """The gateway of ``job``, as the API server sees it."""

    def __init__(self, api: Api, job: str, namespace: str) -> None:
        self._api = api
        self._job = job
        self._namespace = namespace
        self._first: GatewayPod | None = None

    async def find(self) -> GatewayPod:
        """The pod to dial now. Raises ForwardFailed while there is none."""
        try:
            pod = await asyncio.to_thread(find_gateway, self._api, self._job, self._namespace)
        except KubernetesError as error:
            raise ForwardFailed(str(error)) from error
        if pod is None:
            raise ForwardFailed("no pod of it is ready")
        self._first = self._first or pod
        if pod != self._first:  # it would only say that it knows nothing of the session; ``gone`` knows why
            raise ForwardFailed("another gateway has taken its place")
        return pod

    async def gone(self) -> str | None:
        try:
            return await asyncio.to_thread(why_gone, self._api, self._job, self._namespace, self._first)
        except KubernetesError:
            return None  # nobody knows

    def __str__(self) -> str:
        return f"the gateway of job {self._job!r} (namespace {self._namespace})"


class PodDialer:
    """Reaches the pod itself: from inside the cluster."""

    def __init__(self, api: Api, job: str, namespace: str, token: str) -> None:
        self._api = api
        self._namespace = namespace
        self._gateway = _Watched(api, job, namespace)
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
    """Reaches the pod by a port-forward through the API server, a new one for each connection."""

    async def dial(self) -> Route:
        pod = await self._gateway.find()
        tunnel = await asyncio.to_thread(self._api.tunnel, pod.name, self._namespace, pod.port)
        sock = await asyncio.wrap_future(open_forward(tunnel))
        return Route("ws://gateway.meshgate", sock=sock, headers=self._headers, through_proxy=False)


class WatchedUrlDialer(UrlDialer):
    """Reaches the gateway by the URL of an ingress."""

    def __init__(
        self, api: Api, job: str, namespace: str, token: str, url: str, *, ca: str | Path | None = None
    ) -> None:
        super().__init__(url, token, ca=ca)
        self._gateway = _Watched(api, job, namespace)

    async def dial(self) -> Route:
        await self._gateway.find()
        return await super().dial()

    async def gone(self) -> str | None:
        return await self._gateway.gone()
