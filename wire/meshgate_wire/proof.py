"""The proof that an HTTP response is the gateway's, and not that of an ingress or a proxy in its place.

A client sends a nonce with each request. The gateway answers with a MAC of the response whose key is made of the nonce
and of the token that came with the request. So a proof cannot be replayed for another request or moved to another
response, and who does not know the token cannot make one. It names the gateway, so that the answer of another one, to
which an ingress sent the request by mistake, does not count either. These rules are the same in every protocol version.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

NONCE_HEADER = "Meshgate-Nonce"
PROOF_HEADER = "Meshgate-Proof"
ANY_GATEWAY = "*"
"""The name under which a provisioning gateway answers in place of the gateway of one of its jobs."""

_NONCE = re.compile(r"[0-9a-f]{32}")
# An answer to a stranger has it as well. So few digits do not let the stranger test guesses of the token.
_NAME_DIGITS = 3


def new_nonce() -> str:
    return secrets.token_hex(16)


def gateway_name(token: str) -> str:
    """A name that distinguishes the gateway with this token from others. A restart does not change it."""
    return hashlib.sha256(b"meshgate gateway " + _encoded(token)).hexdigest()[:_NAME_DIGITS]


def engines_key(token: str) -> str:
    """What the server beside the engines accepts from the gateways of the job with this token. User code that reads it
    there can open sessions of the job inside the cluster, but does not learn the token, which does so from anywhere."""
    return hmac.new(_encoded(token), b"meshgate engines", hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Prover:
    """Makes and checks the proofs of one request's response. ``key`` serves that request alone."""

    key: str

    @classmethod
    def of_request(cls, nonce: str | None, token: str | None) -> Prover | None:
        """None if the request has no valid nonce, as those of older clients and of other programs."""
        if nonce is None or not _NONCE.fullmatch(nonce):
            return None
        return cls(hmac.new(_encoded(token or ""), f"meshgate proof {nonce}".encode(), hashlib.sha256).hexdigest())

    def prove(self, gateway: str, status: int, body: bytes = b"") -> str:
        """The header of the response with ``status`` and ``body`` of the gateway of this name."""
        said = f"{gateway} {status} ".encode("latin-1") + body
        return f"{gateway} {hmac.new(self.key.encode(), said, hashlib.sha256).hexdigest()}"

    def prover_of(self, header: str | None, status: int, body: bytes = b"") -> str | None:
        """The name of the gateway that made the response with this header; None if no gateway did."""
        gateway = (header or "").partition(" ")[0]
        proven = hmac.compare_digest((header or "").encode(), self.prove(gateway, status, body).encode())
        return gateway if proven else None


def _encoded(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")
