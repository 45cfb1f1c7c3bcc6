"""Dialers that ask the API server which pod to reach, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from meshgate.jobs.kubernetes import dialer
from meshgate.jobs.kubernetes.dialer import PodDialer, WatchedUrlDialer
from meshgate.jobs.kubernetes.port_forward import ForwardFailed
from meshgate_kubernetes.errors import KubernetesError, Unreachable
from meshgate_kubernetes.jobs.gateway_pod import GatewayPod

Replies = Callable[..., None]


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Replies:
    """Sets what the API server reports of the gateway pod, in order."""

    def set_replies(*pods: GatewayPod | KubernetesError | None) -> None:
        remaining = iter(pods)

        def find_gateway(*_: Any) -> GatewayPod | None:
            pod = next(remaining)
            if isinstance(pod, KubernetesError):
                raise pod
            return pod

        monkeypatch.setattr(dialer, "find_gateway", find_gateway)

    return set_replies


def pod(name: str, host: str = "10.0.0.1") -> GatewayPod:
    return GatewayPod(name=name, host=host, uid=name, container="c", port=8600)


API: Any = None


@pytest.mark.parametrize(("host", "url"), [("10.0.0.1", "ws://10.0.0.1:8600"), ("fd00::1", "ws://[fd00::1]:8600")])
def test_a_pod_is_dialed_at_its_address_with_the_token(replies: Replies, host: str, url: str) -> None:
    replies(pod("a", host))
    route = asyncio.run(PodDialer(API, "job", "team", "secret").dial())
    assert (route.url, route.headers, route.through_proxy) == (url, {"Authorization": "Bearer secret"}, False)


def test_a_gateway_without_a_ready_pod_cannot_be_dialed_now(replies: Replies) -> None:
    replies(None, Unreachable("the API server does not answer"))
    gateway = PodDialer(API, "job", "team", "secret")
    with pytest.raises(ForwardFailed, match="the gateway has no ready pod"):
        asyncio.run(gateway.dial())
    with pytest.raises(ForwardFailed, match="the API server does not answer"):
        asyncio.run(gateway.dial())


def test_a_replacement_pod_is_not_dialed_because_it_does_not_hold_the_session(replies: Replies) -> None:
    replies(pod("a"), pod("a"), pod("b"))
    gateway = WatchedUrlDialer(API, "job", "team", "secret", "wss://gateway.example:80")
    for _ in range(2):
        assert asyncio.run(gateway.dial()).url == "wss://gateway.example:80"
    with pytest.raises(ForwardFailed, match="another gateway pod has replaced"):
        asyncio.run(gateway.dial())


def test_an_unreachable_api_server_does_not_declare_a_gateway_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone_reason(*_: Any) -> str:
        raise Unreachable("the API server does not answer")

    gateway = PodDialer(API, "job", "team", "secret")
    monkeypatch.setattr(dialer, "gateway_gone_reason", gone_reason)
    assert asyncio.run(gateway.gone()) is None
    monkeypatch.setattr(dialer, "gateway_gone_reason", lambda *_: "the job was deleted")
    assert asyncio.run(gateway.gone()) == "the job was deleted"
    assert str(gateway) == "the gateway of job 'job' (namespace team)"
