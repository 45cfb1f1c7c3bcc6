"""Requests to a gateway behind a URL: by GET, and by a websocket that may be cut."""

from __future__ import annotations

import json
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from meshgate.errors import ConnectionFailedError, JobError
from meshgate.session.dialing import UrlDialer, describe_response, error_of_response

__all__ = ["GatewayClient"]

REPLY_TIMEOUT = 30.0
RECONNECT_TIMEOUT = 60.0
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0

ReplyT = TypeVar("ReplyT")


class GatewayClient(Generic[ReplyT]):
    """One gateway and a token for it. ``parse`` reads its replies and raises ValidationError; ``creates_none`` says
    what to change if it creates no jobs."""

    def __init__(
        self, url: str, token: str, ca: str | None, parse: Callable[[str | bytes], ReplyT], creates_none: str
    ) -> None:
        self._dialer = UrlDialer(url, token, ca=ca)
        self._url, self._token, self._ca = self._dialer.url, token, ca
        self._parse, self._creates_none = parse, creates_none
        self._ssl = ssl.create_default_context(cafile=None) if self._url.startswith("wss:") else None
        if self._ssl is not None and ca is not None:
            self._ssl.load_verify_locations(ca)

    def _get(self, path: str, token: str | None = None) -> dict[str, Any]:
        """``token``: instead of this client's."""
        address = self._url.replace("ws", "http", 1) + path
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token or self._token}"})
        try:
            with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT, context=self._ssl) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise self._rejection(error.code, error.read()) from None
        except (OSError, ValueError) as error:
            raise ConnectionFailedError(f"cannot reach {self._dialer}: {error}") from error

    def _ask(self, request: BaseModel, timeout: float) -> Iterator[ReplyT]:
        """The gateway's replies until it closes the connection; each comes within ``timeout`` seconds."""
        with self._connected() as connection:
            connection.send(request.model_dump_json())
            while True:
                try:
                    yield self._parse(connection.recv(timeout))
                except WebSocketException:
                    return
                except TimeoutError:
                    raise ConnectionFailedError(f"{self._dialer} did not reply within {timeout:g} s") from None
                except ValidationError as error:
                    raise JobError(
                        f"{self._dialer} gave a reply that this version of meshgate cannot read "
                        f"({error.errors()[0]['msg']}); install the same version on both sides"
                    ) from None

    def _ask_with_retries(self, request: BaseModel, timeout: float | None = None) -> Generator[ReplyT, None, None]:
        """The gateway's replies across lost connections: the request is sent again, and the gateway continues with the
        job as it is then. Raises ConnectionFailedError if the gateway stays unreachable."""
        reached, last_reply, delay = False, time.monotonic(), FIRST_DELAY
        while True:
            reason: object = "it closes each connection"
            try:
                for reply in self._ask(request, timeout or REPLY_TIMEOUT):
                    reached, last_reply, delay = True, time.monotonic(), FIRST_DELAY
                    yield reply
            except ConnectionFailedError as error:
                if not reached:
                    raise
                reason = error
            if time.monotonic() - last_reply > RECONNECT_TIMEOUT:
                raise ConnectionFailedError(
                    f"lost the connection to {self._dialer} and could not reconnect within "
                    f"{RECONNECT_TIMEOUT:g} s: {reason}"
                )
            reached = True
            time.sleep(random.uniform(0, delay))
            delay = min(2 * delay, LONGEST_DELAY)

    @contextmanager
    def _connected(self) -> Iterator[ClientConnection]:
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            connection = connect(
                f"{self._url}/v1/jobs", ssl=self._ssl, additional_headers=headers, compression=None, close_timeout=2
            )
        except InvalidStatus as error:
            status, body = error.response.status_code, bytes(error.response.body or b"")
            if status == HTTPStatus.NOT_FOUND and ":" in describe_response(status, body):  # the gateway's own response
                raise JobError(f"{self._dialer} serves one job and creates none. {self._creates_none}") from None
            raise self._rejection(status, body) from None
        except (OSError, WebSocketException) as error:
            raise ConnectionFailedError(f"cannot reach {self._dialer}: {error}") from error
        with connection:
            yield connection

    def _rejection(self, status: int, body: bytes) -> Exception:
        error = error_of_response(status, body, str(self._dialer))
        return error or ConnectionFailedError(f"cannot reach {self._dialer}: {describe_response(status, body)}")
