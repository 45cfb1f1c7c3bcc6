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
from urllib.parse import quote

from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException

from meshgate.errors import ConnectionFailedError, GatewayLostError, SessionExpiredError
from meshgate.session.dialing import Dialer, describe_response, error_of_response
from meshgate.session.settings import ClientSettings
from meshgate.session.transport.gateway_connection import GatewayConnection, Receiver, open_connection
from meshgate_wire import PROTOCOL_VERSION, SOFTWARE_VERSION, Limits

__all__ = ["Reconnector"]

log = logging.getLogger("meshgate.session.connection")


class Reconnector:
    """Connects a session as often as needed, with exponential back-off and full jitter.

    ``last_failure`` says why there is no connection, or why the last one ended. Set ``resuming`` once the session is
    established: before that ``connect_timeout`` is the deadline of ``connect``, afterwards the lease. With
    ``takes_over`` the first connection replaces the holder of a session that exists.
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
        self.resuming = False
        self._dialer = dialer
        self._settings = settings
        self._path = f"/v1/sessions/{session_id}"
        self._receiver = receiver
        self._limits = limits
        self._takes_over = takes_over
        self._holder = secrets.token_hex(16)
        self._attempts = 0  # since the last reset of the back-off
        self._stopped = False

    def stop(self) -> None:
        """Ends ``connect``. Its task must be cancelled as well."""
        self._stopped = True

    def reset_back_off(self) -> None:
        """Dials without delay after the next cut. To be called once a connection has proved to work."""
        self._attempts = 0

    async def connect(self) -> GatewayConnection:
        """Dials until a connection is up. Raises the GatewayError that ends the session."""
        down_since = asyncio.get_running_loop().time()
        gone_since: float | None = None
        logged = False
        while True:
            await self._back_off()
            connection = await self._attempt(gone=gone_since is not None)
            if self._stopped:  # before Python 3.12 wait_for may swallow a cancellation
                if connection is not None:
                    connection.abort()
                raise asyncio.CancelledError
            now = asyncio.get_running_loop().time()
            down_for = now - down_since
            if connection is not None:
                if logged:
                    log.info("reconnected to %s after %.0f s; nothing was lost", self._dialer, down_for)
                return connection
            gone_since = await self._check_gone(gone_since, now)
            self._check_deadline(down_for)
            if not logged and down_for > self._settings.quiet:
                logged = True
                log.info("no connection to %s for %.0f s, retrying: %s", self._dialer, down_for, self.last_failure)

    async def _back_off(self) -> None:
        if self._attempts:
            upper_bound = self._settings.retry_first * 2 ** min(self._attempts - 1, 30)
            await asyncio.sleep(random.uniform(0, min(self._settings.retry_most, upper_bound)))
        self._attempts += 1

    async def _check_gone(self, gone_since: float | None, now: float) -> float | None:
        """Returns since when the dialer has reported the gateway as gone. Raises once that is ``lost_after`` ago."""
        reason = await self._dialer.gone()
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

    async def _attempt(self, *, gone: bool) -> GatewayConnection | None:
        """Makes one attempt. Returns None if another may succeed, and raises if none will.

        ``gone``: the dialer reports the gateway as gone, so the attempt ends after ``lost_after`` at the latest.
        """
        settings = self._settings
        timeout = min(settings.attempt_timeout, settings.lost_after) if gone else settings.attempt_timeout
        try:
            return await asyncio.wait_for(self._dial(), timeout)
        except InvalidStatus as error:
            status, body = error.response.status_code, error.response.body or b""
            final = error_of_response(status, bytes(body), str(self._dialer), resuming=self.resuming)
            if final is not None:
                raise final from None
            self.last_failure = describe_response(status, bytes(body))
        except (InvalidURI, ssl.SSLCertVerificationError, socket.gaierror) as error:
            self.last_failure = str(error)
            if not self.resuming:
                raise ConnectionFailedError(f"cannot connect to {self._dialer}: {error}") from error
        except (asyncio.TimeoutError, TimeoutError):
            self.last_failure = f"no answer within {timeout:g} s"
        except (OSError, WebSocketException, EOFError) as error:
            self.last_failure = str(error) or type(error).__name__
        log.debug("no connection to %s: %s", self._dialer, self.last_failure)
        return None

    async def _dial(self) -> GatewayConnection:
        route = await self._dialer.dial()
        headers = {"Meshgate-Protocol": str(PROTOCOL_VERSION), "Meshgate-Version": SOFTWARE_VERSION}
        headers |= {"Meshgate-Holder": self._holder, "Meshgate-Holder-Name": _this_process()}
        if self.resuming or self._takes_over:
            headers["Meshgate-Resume"] = "1"
        if self._takes_over and not self.resuming:
            headers["Meshgate-Attach"] = "1"
        max_size = self._limits.max_websocket_message
        return await open_connection(route, self._path, headers, self._receiver, max_size=max_size)


def _this_process() -> str:
    """This process, as the holder of a session is shown to other people, in the characters of an HTTP header."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        user = f"uid-{os.getuid()}"
    return quote(f"{user}@{socket.gethostname()} (pid {os.getpid()})", safe="@() ")
