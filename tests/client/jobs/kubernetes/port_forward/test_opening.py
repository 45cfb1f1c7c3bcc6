"""Which way a port-forward takes, and how it fails to open."""

from __future__ import annotations

import pytest

from meshgate.jobs.kubernetes.port_forward import ForwardFailed, open_forward, opening
from meshgate_kubernetes.api.client import PortForwardRequest
from tests.client.jobs.kubernetes.port_forward.spdy_server import Node, spdy_server
from tests.ports import closed_port


def test_an_unreachable_server_raises_an_os_error() -> None:
    with closed_port() as port, pytest.raises(OSError, match="the port-forward failed"):
        open_forward(PortForwardRequest(f"ws://127.0.0.1:{port}/", 8650, {}, None, None, None)).result(10)


def test_a_request_through_a_proxy_is_for_a_websocket() -> None:
    requests = []

    def proxy(node: Node) -> None:
        requests.extend(node.request)

    with spdy_server(proxy) as request:
        address = request.url.removeprefix("ws://").partition("/")[0]
        through = PortForwardRequest("ws://api.example/", 8650, {}, None, None, f"http://{address}")
        with pytest.raises(ForwardFailed, match="the port-forward failed"):
            open_forward(through).result(10)
    assert requests[0] == "CONNECT api.example:80 HTTP/1.1"


def test_a_server_that_says_nothing_fails_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT", 0.2)

    def silent(node: Node) -> None:
        assert node.frame() is None

    with spdy_server(silent) as request, pytest.raises(ForwardFailed, match=r"failed: no answer within 0\.2 s"):
        open_forward(request).result(10)
