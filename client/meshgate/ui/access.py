"""Decides which requests may see the page: those of the browser in which the one-time link was opened.

Pure: request in, decision out. The link carries a token that works once and is exchanged for a cookie. Requests under
another host name, which a hostile page could have bound to loopback, and websockets of other origins are refused.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Literal, TypeAlias
from urllib.parse import parse_qs, urlsplit

__all__ = ["Access", "Decision", "Refused", "SignedIn"]

LIVE_PATH = "/live"


@dataclass(frozen=True, slots=True)
class Refused:
    status: HTTPStatus
    reason: str


@dataclass(frozen=True, slots=True)
class SignedIn:
    """The link was used: the browser gets ``cookie`` and goes to the page."""

    cookie: str


Decision: TypeAlias = Refused | SignedIn | Literal["page", "live"]


class Access:
    """``port`` is that of the server."""

    def __init__(self, port: int) -> None:
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._cookie = f"meshgate-ui-{port}"  # cookies do not tell ports apart
        self._secret = secrets.token_urlsafe(32)
        self._token: str | None = secrets.token_urlsafe(32)
        self.url = f"http://127.0.0.1:{port}/?token={self._token}"

    def decide(self, path: str, *, host: str | None, origin: str | None, cookie: str | None) -> Decision:
        """What to answer a GET of ``path`` with; the others are its headers."""
        if host not in self._hosts:
            return Refused(HTTPStatus.FORBIDDEN, f"unknown host {host!r}: open the link that meshgate ui prints")
        parts = urlsplit(path)
        presented = parse_qs(parts.query).get("token", [""])[0]
        if parts.path == "/" and presented and self._token is not None and _equal(presented, self._token):
            self._token = None
            return SignedIn(f"{self._cookie}={self._secret}; HttpOnly; SameSite=Lax; Path=/")
        if not _equal(self._presented_secret(cookie), self._secret):
            reason = "this link has been used, or is not complete: run meshgate ui again"
            return Refused(HTTPStatus.FORBIDDEN, reason)
        if parts.path == LIVE_PATH:
            if origin is not None and urlsplit(origin).netloc in self._hosts:
                return "live"
            return Refused(HTTPStatus.FORBIDDEN, "websockets of other pages are not accepted")
        return "page" if parts.path == "/" else Refused(HTTPStatus.NOT_FOUND, "there is only one page, at /")

    def _presented_secret(self, cookie: str | None) -> str:
        try:
            found = SimpleCookie(cookie or "").get(self._cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""


def _equal(presented: str, expected: str) -> bool:
    return hmac.compare_digest(presented.encode("utf-8", "surrogateescape"), expected.encode())
