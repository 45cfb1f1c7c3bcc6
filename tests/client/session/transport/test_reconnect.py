from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus, InvalidURI
from websockets.http11 import Response

from meshgate.errors import (
    AuthenticationError,
    ConnectionFailedError,
    GatewayLostError,
    SessionExpiredError,
)
from meshgate.session.dialing import Route
from meshgate.session.settings import ClientSettings
from meshgate.session.transport import reconnect
from meshgate.session.transport.reconnect import Reconnector
from meshgate_wire import Limits

SETTINGS = ClientSettings(retry_first=1.0, retry_most=8.0, connect_timeout=30.0, lease=100.0, lost_after=5.0)
REFUSED = ConnectionRefusedError("connection refused")


class FakeDialer:
    """Dials once for each of ``outcomes``: an exception to raise, or None to connect."""

    def __init__(self, outcomes: Iterator[Exception | None]) -> None:
        self.outcomes = outcomes
        self.reason_gone: str | None = None

    async def dial(self) -> Route:
        outcome = next(self.outcomes)
        if outcome is not None:
            raise outcome
        return Route("ws://gateway")

    async def gone(self) -> str | None:
        return self.reason_gone

    def __str__(self) -> str:
        return "the gateway"


class FakeConnection:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time passes only when the loop has nothing else to do, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The upper bounds of the delays before attempts; each delay is its upper bound."""
    bounds: list[float] = []

    def uniform(low: float, high: float) -> float:
        assert low == 0
        bounds.append(high)
        return high

    monkeypatch.setattr(random, "uniform", uniform)
    return bounds


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The headers of each attempt that connects."""
    sent: list[dict[str, str]] = []

    async def open_connection(
        route: Route, path: str, headers: dict[str, str], receiver: object, *, max_size: int
    ) -> Any:
        assert (route.url, path) == ("ws://gateway", "/v1/sessions/abc")
        sent.append(headers)
        return FakeConnection()

    monkeypatch.setattr(reconnect, "open_connection", open_connection)
    return sent


def reconnector(*outcomes: Exception | None, forever: Exception | None = REFUSED) -> Reconnector:
    dialer = FakeDialer(itertools.chain(outcomes, itertools.repeat(forever)))
    return Reconnector(dialer, SETTINGS, "abc", receiver=None, limits=Limits())  # type: ignore[arg-type]


def connect(reconnector: Reconnector, during: Callable[[], object] = lambda: None) -> float:
    """Runs ``connect`` in virtual time. Returns the seconds that it took."""
    loop = VirtualTimeLoop()
    try:
        loop.call_soon(during)
        loop.run_until_complete(reconnector.connect())
        return loop.time()
    finally:
        loop.close()


def test_the_first_attempt_is_made_at_once(delays: list[float], headers: list[dict[str, str]]) -> None:
    assert connect(reconnector(None)) == 0
    assert delays == []


def test_delays_double_up_to_the_limit(delays: list[float], headers: list[dict[str, str]]) -> None:
    assert connect(reconnector(*[REFUSED] * 6, None)) == 1 + 2 + 4 + 8 + 8 + 8
    assert delays == [1, 2, 4, 8, 8, 8]


def test_the_back_off_goes_on_after_a_connection_that_did_not_work(
    delays: list[float], headers: list[dict[str, str]]
) -> None:
    tried = reconnector(REFUSED, None, None)
    connect(tried)
    connect(tried)
    assert delays == [1, 2]


def test_the_back_off_is_reset_after_a_connection_that_worked(
    delays: list[float], headers: list[dict[str, str]]
) -> None:
    tried = reconnector(REFUSED, REFUSED, None, REFUSED, None)
    connect(tried)
    tried.reset_back_off()
    connect(tried)
    assert delays == [1, 2, 1]


def test_only_a_resumed_session_says_so(delays: list[float], headers: list[dict[str, str]]) -> None:
    tried = reconnector(forever=None)
    connect(tried)
    tried.resuming = True
    connect(tried)
    assert ["Meshgate-Resume" in each for each in headers] == [False, True]


def test_the_first_connection_has_a_deadline(delays: list[float]) -> None:
    with pytest.raises(ConnectionFailedError, match="could not connect to the gateway within 30 s: connection refused"):
        connect(reconnector())
    assert sum(delays) == 1 + 2 + 4 + 8 + 8 + 8


def test_the_lease_is_the_deadline_of_a_resumed_session(delays: list[float]) -> None:
    tried = reconnector()
    tried.resuming = True
    with pytest.raises(SessionExpiredError, match="longer than the session's lease of 100 s: connection refused"):
        connect(tried)
    assert sum(delays) > 100


def test_a_gateway_that_is_gone_ends_the_session_after_a_while(delays: list[float]) -> None:
    tried = reconnector()
    tried.resuming = True
    tried._dialer.reason_gone = "its process has exited"  # type: ignore[attr-defined]
    with pytest.raises(GatewayLostError, match="the gateway is gone: its process has exited"):
        connect(tried)
    assert SETTINGS.lost_after <= sum(delays) < 3 * SETTINGS.lost_after


class SilentDialer(FakeDialer):
    """Leads to a machine without power, which does not even refuse connections."""

    async def dial(self) -> Route:
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")


def test_a_silent_machine_is_not_waited_for_once_the_gateway_is_known_to_be_gone(delays: list[float]) -> None:
    settings = SETTINGS.model_copy(update={"attempt_timeout": 60.0})
    silent = SilentDialer(iter(()))
    silent.reason_gone = "its node failed"
    tried = Reconnector(silent, settings, "abc", receiver=None, limits=Limits())  # type: ignore[arg-type]
    tried.resuming = True
    with contextlib.closing(VirtualTimeLoop()) as loop:
        with pytest.raises(GatewayLostError, match="its node failed"):
            loop.run_until_complete(tried.connect())
        assert 60 + settings.lost_after <= loop.time() <= 60 + settings.lost_after + sum(delays)


def invalid_status(status: int, **body: str) -> InvalidStatus:
    return InvalidStatus(Response(status, "", Headers(), json.dumps(body).encode()))


def test_a_final_response_ends_the_attempts(delays: list[float]) -> None:
    with pytest.raises(AuthenticationError, match="no token"):
        connect(reconnector(REFUSED, invalid_status(401, error="no token")))


@pytest.mark.parametrize(
    ("failure", "described"),
    [
        (invalid_status(503, error="draining"), "HTTP 503: draining"),
        (asyncio.TimeoutError(), "no answer within 10 s"),
        (EOFError(), "EOFError"),
        (OSError("no route to host"), "no route to host"),
    ],
)
def test_a_failure_that_may_pass_is_retried(
    delays: list[float], headers: list[dict[str, str]], failure: Exception, described: str
) -> None:
    tried = reconnector(failure, None)
    connect(tried)
    assert len(delays) == 1
    assert tried.last_failure == described


def test_an_invalid_address_is_final_only_for_the_first_connection(
    delays: list[float], headers: list[dict[str, str]]
) -> None:
    invalid = InvalidURI("ws://", "no host")
    with pytest.raises(ConnectionFailedError, match="cannot connect to the gateway"):
        connect(reconnector(invalid))
    tried = reconnector(invalid, None)
    tried.resuming = True
    connect(tried)
    assert len(headers) == 1


def test_stopping_ends_the_attempts(delays: list[float], headers: list[dict[str, str]]) -> None:
    tried = reconnector(forever=None)
    with pytest.raises(asyncio.CancelledError):
        connect(tried, during=tried.stop)
