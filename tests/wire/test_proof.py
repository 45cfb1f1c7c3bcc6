"""Proofs of HTTP responses: what one covers, and what it does not reveal."""

from __future__ import annotations

import pytest

from meshgate_wire.proof import Prover, engines_key, gateway_name, new_nonce

NONCE = new_nonce()


def prover(nonce: str = NONCE, token: str = "the token") -> Prover:
    made = Prover.of_request(nonce, token)
    assert made is not None
    return made


def test_a_proof_names_the_gateway_that_made_the_response() -> None:
    proof = prover().prove("abc", 410, b"over")
    assert prover().prover_of(proof, 410, b"over") == "abc"


@pytest.mark.parametrize(
    ("checked_by", "gateway", "status", "body"),
    [
        (prover(nonce=new_nonce()), "abc", 410, b"over"),  # replayed
        (prover(token="another"), "abc", 410, b"over"),
        (prover(), "abd", 410, b"over"),
        (prover(), "abc", 401, b"over"),
        (prover(), "abc", 410, b"over!"),
    ],
    ids=["nonce", "token", "gateway", "status", "body"],
)
def test_a_proof_is_of_one_response_to_one_request(checked_by: Prover, gateway: str, status: int, body: bytes) -> None:
    mac = prover().prove("abc", 410, b"over").partition(" ")[2]
    assert checked_by.prover_of(f"{gateway} {mac}", status, body) is None


@pytest.mark.parametrize("header", [None, "", "abc", "abc ", " ", "*", "abc \xff"])
def test_a_response_without_a_proof_is_no_gateways(header: str | None) -> None:
    assert prover().prover_of(header, 200, b"") is None


@pytest.mark.parametrize("nonce", [None, "", "0" * 31, "0" * 33, "A" * 32, f"{'0' * 31}\n"])
def test_a_request_without_a_valid_nonce_gets_no_proof(nonce: str | None) -> None:
    assert Prover.of_request(nonce, "the token") is None


def test_the_name_of_a_gateway_is_that_of_its_token_and_too_short_to_test_guesses() -> None:
    assert gateway_name("the token") == gateway_name("the token") != gateway_name("another token")
    assert len(gateway_name("the token")) == 3


def test_the_key_of_the_engines_follows_from_the_token_but_not_the_token_from_it() -> None:
    assert engines_key("the token") == engines_key("the token")
    assert engines_key("the token") not in (engines_key("another"), "the token")
    assert gateway_name(engines_key("the token")) != gateway_name("the token")
