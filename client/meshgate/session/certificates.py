"""Certificates on the way to a gateway behind an ingress: whom this client trusts, and what it presents.

The files are read for each connection, so a certificate that is renewed is used without a restart. An ingress that
rejects a certificate often just closes the connection, and an error of TLS names neither a certificate nor a setting:
``explain`` finds out both.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, InvalidMessage

from meshgate.errors import ConnectionFailedError

CA, CERT, KEY = "MESHGATE_CA", "MESHGATE_CLIENT_CERT", "MESHGATE_CLIENT_KEY"
SET_CLIENT_CERT = f"set {CERT} and {KEY} to the files of a certificate that it accepts and of its key"
PROBE_TIMEOUT = 3.0  # seconds: much less than an attempt of a session may take

_CUT = (
    *(ssl.SSLError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError, EOFError),
    *(http.client.HTTPException, InvalidMessage, ConnectionClosed),  # in place of a response
)
_UNKNOWN_ISSUER = frozenset({18, 19, 20, 21})  # OpenSSL's codes for a chain that leads to no trusted CA
_STRICT = range(80, 95)  # what only VERIFY_X509_STRICT demands, the default of Python 3.13 and later
_OTHER_NAME = frozenset({62, 64})  # the certificate is for another host name or address
_REFUSED = re.compile("ALERT_(?:.*CERTIFICATE.*|UNKNOWN_CA|ACCESS_DENIED)")  # the alerts of RFC 8446, 6.2, about ours
_PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_NAMES = {b"\x55\x04\x03": "CN", b"\x55\x04\x0a": "O", b"\x55\x04\x0b": "OU"}
_UTC_TIME, _VERSION = 0x17, 0xA0


class CertificateError(ConnectionFailedError):
    """A certificate is rejected, by this client or by the ingress: another attempt fails as well."""


@dataclass(frozen=True)
class _File:
    path: Path
    setting: str

    def __str__(self) -> str:
        return f"{self.setting}={self.path}"


class Certificates:
    """Those of one ingress. ``ca``: a file of certificates to trust besides the system's; ``cert`` and ``key``: the
    client certificate and its key, which may also be in the same file. The default of each is its variable."""

    def __init__(
        self, ca: str | Path | None = None, cert: str | Path | None = None, key: str | Path | None = None
    ) -> None:
        """Raises ConnectionFailedError, which names the file, if one cannot be used."""
        given = cert is not None  # then the variable's key is that of another certificate
        self._ca = _find(ca, "ca", CA)
        self._cert = _find(cert, "cert", CERT)
        self._key = _find(key, "key", "" if given else KEY)
        if self._key is not None and self._cert is None:
            raise ConnectionFailedError(f"{self._key} has no certificate: set {CERT} as well")
        self._contents: list[bytes] | None = None
        self._context: ssl.SSLContext
        self._issued: _Issued | None = None
        self.context()

    def context(self) -> ssl.SSLContext:
        """For the next connection. Raises ConnectionFailedError if a file cannot be used, or the client certificate
        has expired."""
        contents = [_read(file) for file in (self._ca, self._cert, self._key) if file is not None]
        if contents != self._contents:
            self._context = self._load()
            self._contents = contents
        if self._issued is not None and self._issued.expires <= datetime.now(timezone.utc):
            raise ConnectionFailedError(f"the client certificate {self._cert} ({self._issued}) has expired: renew it")
        return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca.path)
            except ssl.SSLError as error:
                raise ConnectionFailedError(f"{self._ca} has no certificate in PEM format: {error}") from error
            # Python 3.13 and later reject CAs without a key usage extension, as many private ones are. The user has
            # chosen this very CA.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self._cert is not None:
            self._issued = self._load_client_certificate(context, self._cert)
        return context

    def _load_client_certificate(self, context: ssl.SSLContext, cert: _File) -> _Issued:
        key = self._key or cert

        def no_password() -> str:
            raise ConnectionFailedError(f"the key {key} is encrypted: write it without a password (openssl pkey)")

        try:
            context.load_cert_chain(cert.path, key.path, no_password)
            return _Issued.of(cert.path.read_text(errors="replace"))
        except (ssl.SSLError, ValueError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                raise ConnectionFailedError(f"the key {key} is not that of the certificate {cert}") from error
            raise ConnectionFailedError(
                f"cannot use the client certificate {cert} with the key {key}: both must be in PEM format ({error})"
            ) from error

    def explain(self, url: str, error: Exception, *, through_proxy: bool, resuming: bool = False) -> str | None:
        """Why this client and the server at ``url`` reject each other's certificates, if that has caused ``error``.

        Blocks if it connects again, as ``error`` may be no more than a cut. It does so neither if the connection went
        ``through_proxy`` and the environment names one, since the direct way may be closed, nor to delay a session that
        is ``resuming``, unless there is a client certificate, which may have expired meanwhile.
        """
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or 443
        cause = error.reason if isinstance(error, URLError) else error
        direct = not (through_proxy and find_proxy(url))
        if isinstance(cause, ssl.SSLCertVerificationError):
            return self._untrusted(cause, address, ask=direct and not resuming)
        if isinstance(cause, ssl.SSLError) and (why := self._refused(cause)):
            return why
        if not direct or not isinstance(cause, _CUT) or (resuming and self._cert is None):
            return None
        return self._probe(address)

    def _probe(self, address: tuple[str, int]) -> str | None:
        request = f"GET /healthz HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\n\r\n"
        try:
            with (
                socket.create_connection(address, PROBE_TIMEOUT) as plain,
                self.context().wrap_socket(plain, server_hostname=address[0]) as encrypted,
            ):
                with suppress(OSError):  # a server that refuses may have closed the connection: it has sent why
                    encrypted.sendall(request.encode())
                encrypted.recv(1)
        except ssl.SSLCertVerificationError as rejected:
            return self._untrusted(rejected, address, ask=True)
        except ssl.SSLError as rejected:
            return self._refused(rejected)
        except OSError:
            pass  # the caller reports its own error
        return None

    def _untrusted(self, error: ssl.SSLCertVerificationError, address: tuple[str, int], *, ask: bool) -> str:
        """With ``ask`` it connects again, to name who signed the certificate."""
        text = f"the certificate of {address[0]} is not trusted: {error.verify_message.rstrip('.')}"
        if error.verify_code in _OTHER_NAME:
            return f"{text}. Use a name that the certificate has in the URL"
        if error.verify_code in _STRICT:
            return (
                f"{text}. If you trust its CA, set {CA} to a file with that CA's certificate, which relaxes this check"
            )
        if error.verify_code not in _UNKNOWN_ISSUER:
            return f"{text}. The ingress needs another certificate"
        issuer = "a CA that"
        if ask:
            with suppress(OSError, ValueError):  # it speaks to clients with a certificate only, or has gone meanwhile
                issuer = f"{_Issued.of(ssl.get_server_certificate(address, timeout=PROBE_TIMEOUT)).issuer!r}, which"
        trusted = f"neither this machine nor {self._ca} trusts" if self._ca else "this machine does not trust"
        return (
            f"{text}. It is signed by {issuer} {trusted}. If you trust that CA, set {CA} to a file with its "
            "certificate (or SSL_CERT_FILE, instead of the system's CAs)"
        )

    def _refused(self, error: ssl.SSLError) -> str | None:
        alert = _REFUSED.search(error.reason or "")
        if alert is None:
            return None
        text = alert[0].removeprefix("ALERT_").replace("_", " ").lower()
        if self._cert is None:
            return f"the ingress requires a client certificate ({text}): {SET_CLIENT_CERT}"
        return f"the ingress refused the client certificate {self._cert} ({self._issued}): {text}. {SET_CLIENT_CERT}"


def find_proxy(url: str) -> str | None:
    """The proxy that the environment names for connections to the gateway at ``url``. Sessions and requests choose
    alike: this is the order of the websockets library."""
    parts = urlsplit(url)
    secure = parts.scheme == "wss"
    if urllib.request.proxy_bypass(f"{parts.hostname}:{parts.port or (443 if secure else 80)}"):
        return None
    proxies = urllib.request.getproxies()
    schemes = ("wss", "socks", "https") if secure else ("ws", "socks", "https", "http")
    return next((proxies[scheme] for scheme in schemes if proxies.get(scheme)), None)


def _find(value: str | Path | None, argument: str, variable: str) -> _File | None:
    if value is not None:
        return _File(Path(value).expanduser(), argument)
    path = os.environ.get(variable)
    return _File(Path(path).expanduser(), variable) if path else None


def _read(file: _File) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise ConnectionFailedError(f"cannot read {file}: {error.strerror}") from error


@dataclass(frozen=True)
class _Issued:
    """What people need to recognize a certificate. ``ssl`` shows it for trusted certificates only."""

    subject: str
    issuer: str
    expires: datetime

    @classmethod
    def of(cls, pem: str) -> _Issued:
        """The first certificate in ``pem``. Raises ValueError if there is none."""
        found = _PEM.search(pem)
        if found is None:
            raise ValueError("there is no certificate")
        ((_, certificate),) = _elements(ssl.PEM_cert_to_DER_cert(found[0]))
        _, signed = next(_elements(certificate))
        fields = [field for field in _elements(signed) if field[0] != _VERSION]  # RFC 5280, 4.1
        issuer, validity, subject = (content for _, content in fields[2:5])
        _, (tag, expires) = _elements(validity)
        year = "%y" if tag == _UTC_TIME else "%Y"
        time = datetime.strptime(expires.decode(), f"{year}%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
        return cls(_name(subject), _name(issuer), time)

    def __str__(self) -> str:
        return f"{self.subject!r}, signed by {self.issuer!r}, valid until {self.expires:%Y-%m-%d %H:%M} UTC"


def _name(content: bytes) -> str:
    """A distinguished name: a sequence of sets of pairs, each of the type of a value and the value."""
    pairs = [[part for _, part in _elements(pair)] for _, group in _elements(content) for _, pair in _elements(group)]
    known = [f"{_NAMES[kind]}={value.decode(errors='replace')}" for kind, value in pairs if kind in _NAMES]
    return ", ".join(known)


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The tags and contents of the elements that follow each other in DER."""
    at = 0
    while at < len(content):
        tag, length = content[at], content[at + 1]
        at += 2
        if length > 0x7F:
            size = length & 0x7F
            length = int.from_bytes(content[at : at + size], "big")
            at += size
        yield tag, content[at : at + length]
        at += length
