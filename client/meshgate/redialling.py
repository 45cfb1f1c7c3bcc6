"""Dialling until there is a connection: how long to wait, what to say meanwhile, and when to give up."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl

from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException

from meshgate.dialing import Dialer, answered, refusal
from meshgate.errors import ConnectionFailedError, GatewayLostError, SessionExpiredError
from meshgate.link import Link, Receiver, open_link
from meshgate.settings import ClientSettings
from meshgate_wire import PROTOCOL_VERSION, SOFTWARE_VERSION, Limits

__all__ = ["Redialler"]

log = logging.getLogger("meshgate.connection")


class Redialler:
    """Connects a session again and again, with exponential back-off and full jitter.

    ``failure`` says why there is no connection, or why the last one ended. ``resuming`` is set once the session has
    been established: from then on the lease bounds an absence, before that the time to connect.
    """

    def __init__(
        self, dialer: Dialer, settings: ClientSettings, session_id: str, receiver: Receiver, limits: Limits
    ) -> None:
        self.failure = ""
        self.resuming = False
        self._dialer = dialer
        self._settings = settings
        self._path = f"/v1/sessions/{session_id}"
        self._receiver = receiver
        self._limits = limits
        self._attempts = 0
        self._stopped = False

    def stop(self) -> None:
        """Ends ``connect``, whose task is being cancelled as well."""
        self._stopped = True

    def progressed(self) -> None:
        """The connection has proved good: the next cut is mended without delay."""
        self._attempts = 0

    async def connect(self) -> Link:
        """Dials until a connection is up. Raises the GatewayError that ends the session."""
        down_since = asyncio.get_running_loop().time()
        gone_since: float | None = None
        told = False
        while True:
            await self._back_off()
            link = await self._attempt()
            if self._stopped:  # before Python 3.12 wait_for may swallow a cancellation
                if link is not None:
                    link.abandon()
                raise asyncio.CancelledError
            now = asyncio.get_running_loop().time()
            if link is not None:
                if told:
                    log.info("reconnected to %s after %.0f s; nothing was lost", self._dialer, now - down_since)
                return link
            gone_since = await self._check_gone(gone_since, now)
            self._check_patience(now - down_since)
            if not told and now - down_since > self._settings.quiet:
                told = True
                log.info("no connection to %s for %.0f s, redialling: %s", self._dialer, now - down_since, self.failure)

    async def _back_off(self) -> None:
        if self._attempts:
            doubled = self._settings.retry_first * 2 ** min(self._attempts - 1, 30)
            await asyncio.sleep(random.uniform(0, min(self._settings.retry_most, doubled)))
        self._attempts += 1

    async def _check_gone(self, gone_since: float | None, now: float) -> float | None:
        """Since when the dialer has known the gateway to be gone. Raises when that is long enough."""
        gone = await self._dialer.gone()
        if gone is None:
            return None
        gone_since = now if gone_since is None else gone_since
        if now - gone_since >= self._settings.lost_after:
            raise GatewayLostError(
                f"{self._dialer} is gone: {gone}. What this session held is lost; apply the job again."
            )
        return gone_since

    def _check_patience(self, down_for: float) -> None:
        settings = self._settings
        if not self.resuming:
            if down_for > settings.connect_timeout:
                raise ConnectionFailedError(
                    f"{self._dialer} could not be reached within {settings.connect_timeout:g} s: {self.failure}"
                )
        elif down_for > settings.lease:
            raise SessionExpiredError(
                f"no connection to {self._dialer} for {down_for:.0f} s, longer than the session's lease of "
                f"{settings.lease:g} s: {self.failure}"
            )

    async def _attempt(self) -> Link | None:
        """One attempt; None where another may succeed. Raises where none will."""
        timeout = self._settings.attempt_timeout
        try:
            return await asyncio.wait_for(self._dial(), timeout)
        except InvalidStatus as error:
            status, body = error.response.status_code, error.response.body or b""
            final = refusal(status, bytes(body), str(self._dialer), resuming=self.resuming)
            if final is not None:
                raise final from None
            self.failure = answered(status, bytes(body))
        except (InvalidURI, ssl.SSLCertVerificationError, socket.gaierror) as error:
            self.failure = str(error)
            if not self.resuming:
                raise ConnectionFailedError(f"{self._dialer} cannot be reached: {error}") from error
        except (asyncio.TimeoutError, TimeoutError):
            self.failure = f"no answer within {timeout:g} s"
        except (OSError, WebSocketException, EOFError) as error:
            self.failure = str(error) or type(error).__name__
        log.debug("no connection to %s: %s", self._dialer, self.failure)
        return None

    async def _dial(self) -> Link:
        route = await self._dialer.dial()
        headers = {"Meshgate-Protocol": str(PROTOCOL_VERSION), "Meshgate-Version": SOFTWARE_VERSION}
        if self.resuming:
            headers["Meshgate-Resume"] = "1"
        return await open_link(route, self._path, headers, self._receiver, max_size=self._limits.max_websocket_message)
