"""How two relays prove to each other that they belong to the same session, before any frame is decoded.

Both know the session's secret. The child opens::

    child  -> parent   "MGR1", nonce (16), name (length 2)
    parent -> child    nonce (16), HMAC-SHA256 over both nonces and the name, as the parent
    child  -> parent   HMAC-SHA256 over the same, as the child

Frames follow at once. They are not encrypted: code travels between pods of one cluster.

Imports nothing but the standard library.
"""

from __future__ import annotations

import hmac
import os

from ..errors import MalformedMessage, PeerRefused

_MAGIC = b"MGR1"
_NONCE = 16
_MAC = 32
_MAX_NAME = 1024


def _proof(secret: bytes, role: bytes, child_nonce: bytes, parent_nonce: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, role + child_nonce + parent_nonce + name, "sha256")


class ChildHandshake:
    """The child's side: send ``opening``, then pass received bytes to ``receive`` until it returns a reply."""

    def __init__(self, secret: bytes, name: str) -> None:
        self._secret = secret
        self._name = name.encode()
        self._nonce = os.urandom(_NONCE)
        self._buffer = b""
        self.opening = _MAGIC + self._nonce + len(self._name).to_bytes(2, "big") + self._name

    def receive(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Returns the reply and the bytes that already belong to frames; None if more bytes are needed. Raises
        PeerRefused."""
        self._buffer += data
        if len(self._buffer) < _NONCE + _MAC:
            return None
        nonce, proof, rest = self._buffer[:_NONCE], self._buffer[_NONCE:][:_MAC], self._buffer[_NONCE + _MAC :]
        if not hmac.compare_digest(proof, _proof(self._secret, b"parent", self._nonce, nonce, self._name)):
            raise PeerRefused("handshake failed: the parent does not have this session's secret")
        return _proof(self._secret, b"child", self._nonce, nonce, self._name), rest


class ParentHandshake:
    """The parent's side: ``receive`` returns what to send. Once the child is authenticated ``name`` is set, and
    ``rest`` holds the bytes that already belong to frames."""

    def __init__(self, secret: bytes) -> None:
        self.name: str | None = None
        self.rest = b""
        self._secret = secret
        self._buffer = b""
        self._child: tuple[bytes, bytes] | None = None
        self._nonce = os.urandom(_NONCE)

    def receive(self, data: bytes) -> bytes:
        """Raises MalformedMessage, PeerRefused."""
        self._buffer += data
        reply = b""
        if self._child is None:
            if not _MAGIC.startswith(self._buffer[: len(_MAGIC)]):
                raise MalformedMessage("handshake failed: the peer is not a meshgate relay of this protocol version")
            head = len(_MAGIC) + _NONCE + 2
            length = int.from_bytes(self._buffer[head - 2 : head], "big")
            if length > _MAX_NAME:
                raise MalformedMessage(f"handshake failed: host name of {length} bytes (at most {_MAX_NAME} allowed)")
            if len(self._buffer) < max(head + length, head):
                return b""
            nonce, name = self._buffer[len(_MAGIC) : head - 2], self._buffer[head : head + length]
            self._child = nonce, name
            self._buffer = self._buffer[head + length :]
            reply = self._nonce + _proof(self._secret, b"parent", nonce, self._nonce, name)
        nonce, name = self._child
        if len(self._buffer) >= _MAC:
            proof, self.rest = self._buffer[:_MAC], self._buffer[_MAC:]
            if not hmac.compare_digest(proof, _proof(self._secret, b"child", nonce, self._nonce, name)):
                raise PeerRefused("handshake failed: the child does not have this session's secret")
            self.name = name.decode(errors="replace")
        return reply
