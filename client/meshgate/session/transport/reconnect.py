"""Dials until a connection is up: how long to wait between attempts, and when to give up."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import random
import secrets
import socket
import ssl
import time
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from websockets.exceptions import InvalidMessage, InvalidStatus, InvalidURI, WebSocketException
from websockets.http11 import Response

from meshgate.errors import ConnectionFailedError, GatewayLostError, SessionExpiredError
from meshgate.session.certificates import CertificateError
from meshgate.session.dialing import Dialer, call_in_thread, describe_response, error_of_response
from meshgate.session.settings import ClientSettings
from meshgate.session.transport.gateway_connection import GatewayConnection, Receiver, open_connection
from meshgate_wire import PROTOCOL_VERSION, SOFTWARE_VERSION, Limits
from meshgate_wire.proof import ANY_GATEWAY, NONCE_HEADER, PROOF_HEADER, Prover, new_nonce

log = logging.getLogger("meshgate.session.connection")

GONE_INTERVAL = 2.0  # seconds between two questions to the dialer, during an attempt, whether the gateway is gone
# A gateway does not remember rejected tokens, and asks the Kubernetes API each time: such attempts are rarer.
REJECTED_DELAY = 5.0  # seconds, besides the usual delay
# Whatever renews a file does so before the token in it expires. The next token may be late, but after this long nothing
# renews the file any more, and the user has to know.
REJECTED_MOST = 15 * 60.0


class _Gone(Exception):
    """The dialer reports the gateway as gone."""


class Reconnector:
    """Connects a session as often as needed, with exponential back-off and full jitter.

    An attempt may take ``attempt_timeout``: twice as long after each that timed out, up to ``attempt_timeout_most``,
    and three times as long as the last one that succeeded, so that a slow path is not too slow for ever. Every second
    one of a session that resumes may take as long as the very first: an attempt that began on a dead path does not end
    before its limit, although there may be a better path by then.
    ``last_failure`` says why there is no connection, or why the last one ended. Call ``established`` once the session
    is: before the first time ``connect_timeout`` is the deadline, afterwards the lease, also for connections that were
    accepted and never established. With ``takes_over`` the first connection replaces the holder of a session that
    exists.
    """

    def __init__(
        self,
        dialer: Dialer,
        settings: ClientSettings,
        session_id: str,
        receiver: Receiver,
        limits: Limits,
        *,
        takes_over: bool = False,
    ) -> None:
        self.last_failure = ""
        self.gone: str | None = None  # why the gateway will never answer again, as the dialer has said last
        self.attempt_timeout = settings.attempt_timeout
        self.resuming = False
        self._dialer = dialer
        self._settings = settings
        self._path = f"/v1/sessions/{session_id}"
        self._receiver = receiver
        self._limits = limits
        self._takes_over = takes_over
        self._holder = secrets.token_hex(16)
        self._gateway: str | None = None  # the name, in its proofs, of the gateway that holds the session
        self._prover: Prover | None = None  # of the attempt under way
        self._renews_token = False  # of that attempt's route
        self._rejected_since: float | None = None  # if the last attempt's token was; of the first in a row
        self.attempts = 0  # since a connection has proved to work, which resets it: without delay after the next cut
        self._stopped = False
        self._accepted = False  # whether the last attempt led to a connection that is not established
        self._down_since: float | None = None  # on the loop's clock; None while the session is established
        self._dialing_since: float | None = None  # of the attempt under way, on the monotonic clock

    def stop(self) -> None:
        """Ends ``connect``. Its task must be cancelled as well."""
        self._stopped = True

    def established(self) -> None:
        """The session is established on the connection that ``connect`` returned last."""
        self.resuming = True
        self._accepted = False
        self._down_since = None

    def why(self) -> str:
        """Why the session is not connected, for people. From any thread."""
        since = self._dialing_since
        lasts = 0.0 if since is None else time.monotonic() - since
        waiting = f"no answer to this attempt for {lasts:.0f} s" if lasts >= 1 else ""
        if self._accepted:
            return "the gateway accepted, but the session has not answered yet"
        return "; ".join(filter(None, (self.last_failure, waiting))) or "connecting"

    async def connect(self) -> GatewayConnection:
        """Dials until a connection is up. Raises the GatewayError that ends the session."""
        now = asyncio.get_running_loop().time()
        down_since = self._down_since = now if self._down_since is None else self._down_since
        gone_since: float | None = None
        self._accepted = False
        self.gone = None
        while True:
            self._check_deadline(now - down_since)
            await self._back_off(self._patience(gone_since))
            self._dialing_since = time.monotonic()
            try:
                connection = await self._attempt(self._patience(gone_since))
            finally:
                self._dialing_since = None
            self._accepted = connection is not None
            if self._stopped:  # a dialer may swallow a cancellation, as wait_for does before Python 3.12
                if connection is not None:
                    connection.abort()
                raise asyncio.CancelledError
            if connection is not None:
                return connection
            now = asyncio.get_running_loop().time()
            gone_since = await self._check_gone(gone_since, now)

    def _patience(self, gone_since: float | None) -> float | None:
        """For how many seconds the session waits for a gateway that the dialer reports as gone; None if it does not."""
        if gone_since is None:
            return None
        return max(0.0, gone_since + self._settings.lost_after - asyncio.get_running_loop().time())

    async def _back_off(self, patience: float | None) -> None:
        if self.attempts:
            upper_bound = self._settings.retry_first * 2 ** min(self.attempts - 1, 30)
            delay = random.uniform(0, min(self._settings.retry_most, upper_bound))
            delay += 0.0 if self._rejected_since is None else REJECTED_DELAY
            await asyncio.sleep(delay if patience is None else min(delay, patience))
        self.attempts += 1

    async def _check_gone(self, gone_since: float | None, now: float) -> float | None:
        """Returns since when the dialer has reported the gateway as gone. Raises once that is ``lost_after`` ago."""
        self.gone = reason = await self._dialer.gone()
        if reason is None:
            return None
        gone_since = now if gone_since is None else gone_since
        if now - gone_since >= self._settings.lost_after:
            raise GatewayLostError(
                f"{self._dialer} is gone: {reason}. The session's meshes are lost; apply the job again."
            )
        return gone_since

    def _check_deadline(self, down_for: float) -> None:
        settings = self._settings
        if not self.resuming:
            if down_for > settings.connect_timeout:
                raise ConnectionFailedError(
                    f"could not connect to {self._dialer} within {settings.connect_timeout:g} s: {self.last_failure}"
                )
        elif down_for > settings.lease:
            raise SessionExpiredError(
                f"no connection to {self._dialer} for {down_for:.0f} s, longer than the session's lease of "
                f"{settings.lease:g} s: {self.last_failure}"
            )

    async def _attempt(self, patience: float | None) -> GatewayConnection | None:
        """Makes one attempt. Returns None if another may succeed, and raises if none will.

        With ``patience``, the dialer reports the gateway as gone. The attempt then ends with the patience, but has at
        least half of ``lost_after``: a gateway that took the place of the other says why that one ended.
        """
        settings = self._settings
        short = self.resuming and self.attempts % 2 == 0
        timeout = settings.attempt_timeout if short else self.attempt_timeout
        if patience is not None:
            timeout = min(timeout, max(patience, settings.lost_after / 2))
        started = asyncio.get_running_loop().time()
        rejected_since, self._rejected_since = self._rejected_since, None
        try:
            connection = await self._dial_within(timeout, ask=patience is None)
            self._allow(3 * (asyncio.get_running_loop().time() - started))
            return connection
        except _Gone as error:
            self.last_failure = str(error)
        except InvalidStatus as error:
            self.last_failure = self._refused(error.response, rejected_since)
        except (InvalidURI, CertificateError, ssl.SSLCertVerificationError, socket.gaierror) as error:
            self.last_failure = _describe(error)
            if not self.resuming:
                raise ConnectionFailedError(f"cannot connect to {self._dialer}: {error}") from error
        except (asyncio.TimeoutError, TimeoutError):
            self.last_failure = f"no answer within {timeout:g} s"
            if not short:
                self.timed_out(self.last_failure)
        except (OSError, WebSocketException, EOFError) as error:
            self.last_failure = _describe(error)
        log.debug("no connection to %s: %s", self._dialer, self.last_failure)
        return None

    def _refused(self, response: Response, rejected_since: float | None) -> str:
        """What the response says, if another attempt may succeed. Raises what it means if none will."""
        status, body = response.status_code, bytes(response.body or b"")
        proven = self._is_gateways(response)
        final = error_of_response(status, body, str(self._dialer), proven=proven, resuming=self.resuming)
        if final is not None:
            # Of a token that expires, the next one may be late.
            if not (status == HTTPStatus.UNAUTHORIZED and self.resuming and self._renews_token):
                raise final from None
            now = asyncio.get_running_loop().time()
            self._rejected_since = now if rejected_since is None else rejected_since
            if now - self._rejected_since >= REJECTED_MOST:
                raise final from None
        return describe_response(status, body, proven=proven)

    def timed_out(self, failure: str) -> None:
        """The attempt has taken as long as it may. The next may take twice as long: the path may be that slow."""
        self.last_failure = failure
        self._allow(2 * self.attempt_timeout)

    def _allow(self, timeout: float) -> None:
        settings = self._settings
        self.attempt_timeout = max(settings.attempt_timeout, min(timeout, settings.attempt_timeout_most))

    async def _dial_within(self, timeout: float, *, ask: bool) -> GatewayConnection:
        dialing = asyncio.get_running_loop().create_task(self._dial())
        try:
            await self._wait_for(dialing, timeout, ask=ask)
            return dialing.result()
        except BaseException:
            dialing.cancel()
            await asyncio.wait({dialing})
            if not dialing.cancelled() and dialing.exception() is None:
                dialing.result().abort()  # it connected in the same moment
            raise

    async def _wait_for(self, dialing: asyncio.Task[GatewayConnection], timeout: float, *, ask: bool) -> None:
        """Raises TimeoutError, and _Gone if, with ``ask``, the dialer reports the gateway as gone meanwhile: a long
        attempt must not delay that."""
        loop = asyncio.get_running_loop()
        going: asyncio.Future[str] = loop.create_task(self._wait_gone()) if ask else loop.create_future()
        both: set[asyncio.Future[Any]] = {dialing, going}
        try:
            await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
        if dialing.done():
            return
        if going.cancelled():
            raise asyncio.TimeoutError
        raise _Gone(f"no answer: {going.result()}")

    async def _wait_gone(self) -> str:
        """Waits until the dialer reports the gateway as gone, and returns why. The dialer may take long to answer."""
        while True:
            await asyncio.sleep(GONE_INTERVAL)
            if (reason := await self._dialer.gone()) is not None:
                return reason

    async def _dial(self) -> GatewayConnection:
        route = await self._dialer.dial()
        headers = {"Meshgate-Protocol": str(PROTOCOL_VERSION), "Meshgate-Version": SOFTWARE_VERSION}
        headers |= {"Meshgate-Holder": self._holder, "Meshgate-Holder-Name": _this_process()}
        if self.resuming or self._takes_over:
            headers["Meshgate-Resume"] = "1"
        if self._takes_over and not self.resuming:
            headers["Meshgate-Attach"] = "1"
        headers[NONCE_HEADER] = nonce = new_nonce()
        self._prover, self._renews_token = Prover.of_request(nonce, route.token), route.renews_token
        max_size = self._limits.max_websocket_message
        try:
            return await open_connection(
                route, self._path, headers, self._receiver, max_size=max_size, is_gateways=self._is_gateways
            )
        except (ssl.SSLError, ConnectionResetError, InvalidMessage) as error:
            if route.certificates is None:
                raise
            explain = partial(route.certificates.explain, through_proxy=route.through_proxy, resuming=self.resuming)
            why = await call_in_thread(explain, route.url, error)
            if why is None:
                raise
            raise CertificateError(why) from error

    def _is_gateways(self, response: Response) -> bool:
        """Whether the gateway that holds the session has made this response to the attempt under way."""
        if self._prover is None:
            return False
        body = bytes(response.body or b"")
        gateway = self._prover.prover_of(response.headers.get(PROOF_HEADER), response.status_code, body)
        if gateway is None or (self._gateway is not None and gateway not in (self._gateway, ANY_GATEWAY)):
            return False
        if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self._gateway = gateway
        return True


def _describe(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved (DNS): {error.strerror or error}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error}"
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused ({error})"
    return str(error) or type(error).__name__


def _this_process() -> str:
    """This process, as the holder of a session is shown to other people, in the characters of an HTTP header."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        user = f"uid-{os.getuid()}"
    return quote(f"{user}@{socket.gethostname()} (pid {os.getpid()})", safe="@() ")
