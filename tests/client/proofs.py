"""Proofs that scripted servers add to their responses."""

from __future__ import annotations

from collections.abc import Mapping

from meshgate_wire.proof import NONCE_HEADER, PROOF_HEADER, Prover


def proof_for(headers: Mapping[str, str], status: int, body: bytes) -> dict[str, str]:
    """The header that makes the response to a request with these headers a gateway's."""
    prover = Prover.of_request(headers[NONCE_HEADER], headers["Authorization"].partition(" ")[2])
    assert prover is not None
    return {PROOF_HEADER: prover.prove("abc", status, body)}
