"""Dialers for a gateway in a cluster: through the API server to its pod, whichever pod that is at the moment."""

from __future__ import annotations

import asyncio

from meshgate.dialing import Route
from meshgate.kubernetes.forward import ForwardFailed, open_forward
from meshgate_kubernetes.api import Api, Tunnel
from meshgate_kubernetes.errors import KubernetesError, NotFound, Unreachable
from meshgate_kubernetes.gateway_pod import GatewayPod, find_gateway, why_gone

__all__ = ["PortForwardDialer"]


class PortForwardDialer:
    """Reaches the gateway of ``job`` by a port-forward, a new one for each connection.

    Each attempt asks the API server which pod the gateway is now, so that it is found again wherever it went.
    The session, though, is held by a process: once the one that was reached first has ended, the session is
    ``gone`` with it, and the API server says how it ended.
    """

    def __init__(self, api: Api, job: str, namespace: str, token: str) -> None:
        self._api = api
        self._job = job
        self._namespace = namespace
        self._token = token
        self._first: GatewayPod | None = None

    async def dial(self) -> Route:
        try:
            pod, tunnel = await asyncio.to_thread(self._find)
        except Unreachable as error:
            raise ForwardFailed(str(error)) from error
        except KubernetesError as error:
            raise ForwardFailed(f"the gateway of job {self._job!r} cannot be found: {error}") from error
        sock = await asyncio.wrap_future(open_forward(tunnel))
        self._first = self._first or pod
        headers = {"Authorization": f"Bearer {self._token}"}
        return Route("ws://gateway.meshgate", sock=sock, headers=headers, through_proxy=False)

    async def gone(self) -> str | None:
        try:
            return await asyncio.to_thread(why_gone, self._api, self._job, self._namespace, self._first)
        except KubernetesError:
            return None  # nobody knows

    def _find(self) -> tuple[GatewayPod, Tunnel]:
        pod = find_gateway(self._api, self._job, self._namespace)
        if pod is None:
            raise NotFound("its pod does not run")
        return pod, self._api.tunnel(pod.name, self._namespace, pod.port)

    def __str__(self) -> str:
        return f"the gateway of job {self._job!r} (namespace {self._namespace})"
