"""Decides which requests may see the job: those of the page in which the one-time link was opened.

Pure: request in, decision out. The page itself has no secrets. The link carries one behind ``#``, which browsers do not
send; the page sends it when it opens its websocket, where it works once and is exchanged for another. There are no
cookies, because a browser sends those to every port of this machine, behind which may be a server of another user.
Requests under another host name, which a hostile page could have bound to loopback, and websockets of other origins are
refused.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal, TypeAlias

LIVE_PATH = "/live"
SUBPROTOCOL = "meshgate-ui"
"""Pages offer it and, as a second one, their secret: scripts can set no other header of a websocket."""


@dataclass(frozen=True, slots=True)
class Refused:
    status: HTTPStatus
    reason: str


Decision: TypeAlias = Refused | Literal["page", "live"]


class Access:
    """``port`` is that of the server. ``secret`` is what a page that was let in sends from then on."""

    def __init__(self, port: int) -> None:
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._origins = {f"http://{host}" for host in self._hosts}
        self.secret = secrets.token_urlsafe(32)
        self._once: str | None = secrets.token_urlsafe(32)
        self.url = f"http://127.0.0.1:{port}/#{self._once}"

    def decide(self, path: str, *, host: str | None, origin: str | None, offered: str | None) -> Decision:
        """What to answer a GET of ``path`` with; the others are its headers, ``offered`` the subprotocols."""
        if host not in self._hosts:
            return Refused(HTTPStatus.FORBIDDEN, f"unknown host {host!r}: open the link that meshgate ui prints")
        found = path.partition("?")[0]
        if found != LIVE_PATH:
            return "page" if found == "/" else Refused(HTTPStatus.NOT_FOUND, "there is only one page, at /")
        if origin not in self._origins:
            return Refused(HTTPStatus.FORBIDDEN, "websockets of other pages are not accepted")
        presented = (offered or "").rpartition(",")[2].strip()
        if self._once is not None and _equal(presented, self._once):
            self._once = None
            return "live"
        if _equal(presented, self.secret):
            return "live"
        return Refused(HTTPStatus.FORBIDDEN, "this link has been used, or is not complete: run meshgate ui again")


def _equal(presented: str, expected: str) -> bool:
    return hmac.compare_digest(presented.encode("utf-8", "surrogateescape"), expected.encode())
