from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import socket
import ssl
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
from meshgate.session.transport.reconnect import GONE_INTERVAL, REJECTED_DELAY, REJECTED_MOST, Reconnector
from meshgate_wire import Limits
from meshgate_wire.proof import ANY_GATEWAY, NONCE_HEADER, PROOF_HEADER, Prover

SETTINGS = ClientSettings(retry_first=1.0, retry_most=8.0, connect_timeout=30.0, lease=100.0, lost_after=5.0)
REFUSED = ConnectionRefusedError("connection refused")


class Answer(Exception):
    """An HTTP response to the handshake, with the proof of the gateway of this name unless that is empty."""

    def __init__(self, status: int, gateway: str = "abc", **body: str) -> None:
        self.status, self.gateway, self.body = status, gateway, json.dumps(body).encode()

    def response(self, headers: dict[str, str]) -> Response:
        """The response to a request with these headers."""
        proof = Headers()
        if self.gateway:
            prover = Prover.of_request(headers[NONCE_HEADER], "the-token")
            assert prover is not None
            proof[PROOF_HEADER] = prover.prove(self.gateway, self.status, self.body)
        return Response(self.status, "", proof, self.body)


class FakeDialer:
    """Dials once for each of ``outcomes``: an exception to raise, an answer to the handshake, or None to connect."""

    def __init__(self, outcomes: Iterator[Exception | None]) -> None:
        self.outcomes = outcomes
        self.reason_gone: str | None = None
        self.renews_token = False

    async def dial(self) -> Route:
        outcome = next(self.outcomes)
        if outcome is not None and not isinstance(outcome, Answer):
            raise outcome
        ANSWERS.append(outcome or Answer(101))
        headers = {"Authorization": "Bearer the-token"}
        return Route("ws://gateway", headers=headers, renews_token=self.renews_token)

    async def gone(self) -> str | None:
        return self.reason_gone

    def __str__(self) -> str:
        return "the gateway"


ANSWERS: list[Answer] = []


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


@pytest.fixture(autouse=True)
def headers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The headers of each attempt that connects."""
    sent: list[dict[str, str]] = []

    async def open_connection(
        route: Route,
        path: str,
        headers: dict[str, str],
        receiver: object,
        *,
        max_size: int,
        is_gateways: Callable[[Response], bool],
    ) -> Any:
        assert (route.url, path) == ("ws://gateway", "/v1/sessions/abc")
        response = ANSWERS.pop().response(headers)
        if response.status_code != 101 or not is_gateways(response):
            raise InvalidStatus(response)
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
    tried.attempts = 0
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


@pytest.mark.parametrize(
    ("resuming", "expected", "limit"), [(False, ConnectionFailedError, 30.0), (True, SessionExpiredError, 100.0)]
)
def test_connections_that_are_never_established_do_not_extend_the_deadline(
    delays: list[float], resuming: bool, expected: type[Exception], limit: float
) -> None:
    tried = reconnector(forever=None)

    async def connect_in_vain() -> None:
        if resuming:
            await tried.connect()
            tried.established()
            await asyncio.sleep(1000)  # which counts for neither deadline
        while True:
            await tried.connect()
            await asyncio.sleep(10)
            tried.timed_out("connected, but the session did not answer")

    with contextlib.closing(VirtualTimeLoop()) as loop:
        with pytest.raises(expected, match=f"{limit:g} s: connected, but the session did not answer"):
            loop.run_until_complete(connect_in_vain())
        assert limit < loop.time() - 1000 * resuming < limit + 20


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
        assert loop.time() == GONE_INTERVAL + settings.lost_after


def test_a_gateway_that_goes_while_a_long_attempt_runs_ends_the_session_soon(delays: list[float]) -> None:
    silent = SilentDialer(iter(()))
    tried = Reconnector(silent, SETTINGS, "abc", receiver=None, limits=Limits())  # type: ignore[arg-type]
    tried.resuming, tried.attempt_timeout = True, 80.0
    silent.reason_gone = "its pod was deleted"
    with contextlib.closing(VirtualTimeLoop()) as loop:
        with pytest.raises(GatewayLostError, match="its pod was deleted"):
            loop.run_until_complete(tried.connect())
        assert loop.time() == GONE_INTERVAL + SETTINGS.lost_after
    assert tried.attempt_timeout == 80.0  # not doubled: nothing timed out


def test_a_gateway_that_is_silently_gone_ends_the_session_within_ten_seconds(delays: list[float]) -> None:
    silent = SilentDialer(iter(()))
    tried = Reconnector(silent, ClientSettings(), "abc", receiver=None, limits=Limits())  # type: ignore[arg-type]
    tried.resuming, tried.attempts = True, 20  # the delays have grown to their limit
    silent.reason_gone = "its pod was deleted"
    with contextlib.closing(VirtualTimeLoop()) as loop:
        with pytest.raises(GatewayLostError, match="its pod was deleted"):
            loop.run_until_complete(tried.connect())
        assert loop.time() <= 10.0


class TimedDialer(FakeDialer):
    """Refuses at once, or connects after a second from ``connects_at`` on. ``goes(now)``: whether the gateway is gone
    at that time. It takes ``answer_delay`` to find out."""

    def __init__(self, connects_at: float, goes: Callable[[float], bool], answer_delay: float = 0.0) -> None:
        super().__init__(iter(()))
        self.connects_at, self.goes, self.answer_delay = connects_at, goes, answer_delay
        self.attempts = 0

    async def dial(self) -> Route:
        now = asyncio.get_running_loop().time()
        self.attempts += 1
        assert self.attempts < 100, "the session is never given up"
        if now >= self.connects_at:
            await asyncio.sleep(1.0)
        self.outcomes = iter([None if now >= self.connects_at else REFUSED])
        return await super().dial()

    async def gone(self) -> str | None:
        gone = self.goes(asyncio.get_running_loop().time())
        await asyncio.sleep(self.answer_delay)
        return "its pod was deleted" if gone else None


def test_a_gateway_that_is_not_gone_after_all_gets_the_whole_time_again(delays: list[float]) -> None:
    dialer = TimedDialer(math.inf, lambda now: not 2 < now < 20)
    tried = Reconnector(dialer, SETTINGS, "abc", receiver=None, limits=Limits())  # type: ignore[arg-type]
    tried.resuming = True
    with contextlib.closing(VirtualTimeLoop()) as loop:
        with pytest.raises(GatewayLostError):
            loop.run_until_complete(tried.connect())
        noticed = 1 + 2 + 4 + 8 + 8  # the delays until the first attempt after 20 s
        assert loop.time() == noticed + SETTINGS.lost_after


def test_the_last_attempt_has_time_to_learn_why_the_gateway_is_gone(delays: list[float]) -> None:
    dialer = TimedDialer(SETTINGS.lost_after, lambda now: True)
    tried = Reconnector(dialer, SETTINGS, "abc", receiver=None, limits=Limits())  # type: ignore[arg-type]
    tried.resuming = True
    assert connect(tried) == SETTINGS.lost_after + 1.0


def test_a_dialer_that_is_slow_to_find_the_gateway_gone_does_not_delay_a_connection(
    delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "GONE_INTERVAL", 0.5)
    dialer = TimedDialer(0.0, lambda now: True, answer_delay=60.0)
    tried = Reconnector(dialer, SETTINGS, "abc", receiver=None, limits=Limits())  # type: ignore[arg-type]
    assert connect(tried) == 1.0


def test_an_attempt_that_is_cancelled_as_it_connects_leaves_no_connection(
    delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = FakeConnection()

    async def open_although_cancelled(*arguments: object, **options: object) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(5)
        return opened

    monkeypatch.setattr(reconnect, "open_connection", open_although_cancelled)

    async def cancel() -> None:
        connecting = asyncio.ensure_future(reconnector(None).connect())
        await asyncio.sleep(1)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    with contextlib.closing(VirtualTimeLoop()) as loop:
        loop.run_until_complete(cancel())
    assert opened.aborted


def test_a_final_response_ends_the_attempts(delays: list[float]) -> None:
    with pytest.raises(AuthenticationError, match="no token"):
        connect(reconnector(REFUSED, Answer(401, error="no token")))


@pytest.mark.parametrize("resuming", [False, True])
@pytest.mark.parametrize("renews_token", [False, True])
@pytest.mark.parametrize("status", [401, 403])
def test_only_a_session_waits_for_a_token_and_only_for_one_that_is_renewed(
    delays: list[float], headers: list[dict[str, str]], resuming: bool, renews_token: bool, status: int
) -> None:
    tried = reconnector(Answer(status, error="the token has expired"), None)
    assert isinstance(tried._dialer, FakeDialer)
    tried.resuming, tried._dialer.renews_token = resuming, renews_token
    if resuming and renews_token and status == 401:
        connect(tried)
        assert tried.last_failure == "HTTP 401: the token has expired"
    else:
        with pytest.raises(AuthenticationError, match="the token has expired"):
            connect(tried)


EXPIRED = Answer(401, error="the token has expired")


def waiting_for_a_token(*outcomes: Exception | None, forever: Exception | None = REFUSED) -> Reconnector:
    tried = reconnector(*outcomes, forever=forever)
    assert isinstance(tried._dialer, FakeDialer)
    tried.resuming = tried._dialer.renews_token = True
    tried._settings = SETTINGS.model_copy(update={"lease": 3 * REJECTED_MOST})
    return tried


def test_attempts_with_a_rejected_token_are_rarer_than_others(
    delays: list[float], headers: list[dict[str, str]]
) -> None:
    usual = 1 + 2 + 4
    assert connect(waiting_for_a_token(EXPIRED, EXPIRED, REFUSED, None)) == usual + 2 * REJECTED_DELAY


def test_a_token_that_is_not_renewed_ends_the_session(delays: list[float], headers: list[dict[str, str]]) -> None:
    tried = waiting_for_a_token(forever=EXPIRED)
    with pytest.raises(AuthenticationError, match="the token has expired"):
        connect(tried)
    waited = sum(delays) + len(delays) * REJECTED_DELAY
    assert REJECTED_MOST <= waited < REJECTED_MOST + SETTINGS.retry_most + REJECTED_DELAY


def test_an_outage_between_two_rejections_does_not_count(delays: list[float], headers: list[dict[str, str]]) -> None:
    outage = [REFUSED] * int(REJECTED_MOST / SETTINGS.retry_most + 1)
    assert connect(waiting_for_a_token(EXPIRED, *outage, EXPIRED, None)) > REJECTED_MOST


STRAY_ANSWERS = [Answer(status, gateway="", error="not here") for status in (101, 302, 400, 401, 403, 404, 410, 426)]


@pytest.mark.parametrize("stray", [*STRAY_ANSWERS, Answer(410, gateway="def", error="over", kind="unknown")], ids=str)
def test_an_answer_of_another_server_never_ends_a_session(delays: list[float], stray: Answer) -> None:
    tried = reconnector(None, stray, None)
    connect(tried)
    tried.resuming = True
    connect(tried)
    assert tried.last_failure.startswith(f"HTTP {stray.status} from another server in its place")


@pytest.mark.parametrize("gateway", ["abc", ANY_GATEWAY])
def test_the_gateway_of_a_session_and_a_provisioning_gateway_in_its_place_end_it(
    delays: list[float], gateway: str
) -> None:
    tried = reconnector(None, Answer(410, gateway=gateway, error="over", kind="expired"))
    connect(tried)
    tried.resuming = True
    with pytest.raises(SessionExpiredError):
        connect(tried)


def test_the_first_connection_to_another_server_fails(delays: list[float]) -> None:
    with pytest.raises(ConnectionFailedError, match=r"HTTP 403 \(who are you\?\) and is not a meshgate gateway"):
        connect(reconnector(Answer(403, gateway="", error="who are you?")))
    with pytest.raises(ConnectionFailedError, match="HTTP 101 and is not a meshgate gateway"):
        connect(reconnector(Answer(101, gateway="")))


@pytest.mark.parametrize(
    ("failure", "described"),
    [
        (Answer(503, error="draining"), "HTTP 503: draining"),
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


class SlowDialer(FakeDialer):
    """Leads to a gateway that answers after ``seconds``."""

    seconds = 0.0

    async def dial(self) -> Route:
        await asyncio.sleep(self.seconds)
        return await super().dial()


def slow_reconnector(seconds: float) -> tuple[Reconnector, SlowDialer]:
    dialer = SlowDialer(itertools.repeat(None))
    dialer.seconds = seconds
    tried = Reconnector(dialer, SETTINGS.model_copy(update={"lease": 1e6}), "abc", None, Limits())  # type: ignore[arg-type]
    tried.resuming = True
    return tried, dialer


@pytest.mark.parametrize("seconds", [9.0, 11.0, 39.0, 79.0])
def test_a_slow_path_is_given_more_time_after_each_attempt_that_timed_out(delays: list[float], seconds: float) -> None:
    tried, _ = slow_reconnector(seconds)
    limits = [10 + limit for limit in (10, 20, 40) if limit < seconds]  # each is followed by a short attempt
    assert connect(tried) == pytest.approx(sum(limits) + sum(delays) + seconds)
    tried.attempts = 0
    assert connect(tried) == pytest.approx(seconds)  # now it is known


def test_an_attempt_without_an_answer_is_a_reason(delays: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    tried, dialer = slow_reconnector(1.0)
    assert tried.why() == "connecting"
    tried.last_failure = "the connection was cut"
    monkeypatch.setattr(reconnect.time, "monotonic", lambda: clock)
    clock = 100.0
    reasons: list[str] = []

    async def dial() -> Route:
        nonlocal clock
        clock += 7.0
        reasons.append(tried.why())
        raise ssl.SSLError(1, "wrong version number") if len(reasons) == 1 else StopAsyncIteration

    monkeypatch.setattr(dialer, "dial", dial)
    with pytest.raises(StopAsyncIteration):
        connect(tried)
    assert reasons[0] == "the connection was cut; no answer to this attempt for 7 s"
    assert reasons[1].startswith("TLS failed: ")
    assert tried.why() == tried.last_failure  # the attempt is over


def test_a_gateway_that_has_accepted_is_waited_for(delays: list[float], headers: list[dict[str, str]]) -> None:
    tried = reconnector(None, REFUSED, None)
    connect(tried)
    assert tried.why() == "the gateway accepted, but the session has not answered yet"
    with pytest.raises(asyncio.CancelledError):
        connect(tried, during=tried.stop)
    assert tried.why().startswith("connection refused")


@pytest.mark.parametrize(
    ("error", "described"),
    [
        (
            socket.gaierror(-2, "Name or service not known"),
            "its name cannot be resolved (DNS): Name or service not known",
        ),
        (ConnectionRefusedError(111, "Connect call failed"), "connection refused ([Errno 111] Connect call failed)"),
    ],
)
def test_the_kind_of_a_failure_is_named(
    delays: list[float], headers: list[dict[str, str]], error: OSError, described: str
) -> None:
    tried = reconnector(error, None)
    tried.resuming = True
    connect(tried)
    tried.established()
    assert tried.why() == described


def test_a_path_that_is_fast_again_is_given_as_little_time_as_before(delays: list[float]) -> None:
    tried, dialer = slow_reconnector(39.0)
    connect(tried)
    dialer.seconds = 0.1
    connect(tried)
    assert tried.attempt_timeout == SETTINGS.attempt_timeout


def test_every_second_attempt_is_short_as_the_path_may_be_a_better_one_by_then(delays: list[float]) -> None:
    tried, dialer = slow_reconnector(1e6)
    tried.attempt_timeout = 80.0

    def recover() -> None:
        asyncio.get_running_loop().call_later(82, setattr, dialer, "seconds", 0.5)  # in the second attempt

    assert connect(tried, during=recover) == 80 + 10 + sum(delays) + 0.5
    assert tried.attempt_timeout == SETTINGS.attempt_timeout


def test_every_attempt_of_a_first_connection_that_timed_out_allows_the_next_more(delays: list[float]) -> None:
    tried, _ = slow_reconnector(15.0)
    tried.resuming = False
    assert connect(tried) == 10 + sum(delays) + 15


def test_no_attempt_takes_longer_than_the_bound(delays: list[float]) -> None:
    tried, _ = slow_reconnector(81.0)
    tried._settings = tried._settings.model_copy(update={"lease": 1000.0})
    with pytest.raises(SessionExpiredError, match="no answer within 80 s"):
        connect(tried)


def test_stopping_ends_the_attempts(delays: list[float], headers: list[dict[str, str]]) -> None:
    tried = reconnector(forever=None)
    with pytest.raises(asyncio.CancelledError):
        connect(tried, during=tried.stop)
