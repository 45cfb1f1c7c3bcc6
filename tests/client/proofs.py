"""Proofs that scripted servers add to their responses."""

from __future__ import annotations

from collections.abc import Mapping

from websockets.http11 import Request, Response

from meshgate_wire.proof import NONCE_HEADER, PROOF_HEADER, Prover


def proof_for(headers: Mapping[str, str], status: int, body: bytes) -> dict[str, str]:
    """The header that makes the response to a request with these headers a gateway's."""
    prover = Prover.of_request(headers[NONCE_HEADER], headers["Authorization"].partition(" ")[2])
    assert prover is not None
    return {PROOF_HEADER: prover.prove("abc", status, body)}


def prove_handshake(connection: object, request: Request, response: Response) -> None:
    """The ``process_response`` of a websocket server that is a gateway; it is called for other responses, too."""
    if response.status_code == 101:
        response.headers.update(proof_for(request.headers, 101, b""))
