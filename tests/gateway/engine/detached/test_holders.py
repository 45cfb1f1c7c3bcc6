from __future__ import annotations

import pytest
from websockets.datastructures import Headers

from meshgate_gateway.engine.detached.holders import Applicant, Holders, Refusal

FIRST, SECOND, THIRD = (Applicant(name, f"{name}@laptop", takes_over=True) for name in ("first", "second", "third"))


def redial(applicant: Applicant) -> Applicant:
    return Applicant(applicant.identity, applicant.name, takes_over=False)


def test_the_first_client_holds_the_session_and_reconnects() -> None:
    holders = Holders()
    assert holders.decide(redial(FIRST), detached=False) == "resume"
    assert holders.decide(redial(FIRST), detached=True) == "resume"
    assert (holders.identity, holders.takeovers) == ("first", 0)


def test_another_client_takes_over_and_the_previous_one_never_returns() -> None:
    holders = Holders()
    holders.decide(redial(FIRST), detached=True)
    assert holders.decide(SECOND, detached=True) == "take over"
    assert holders.decide(SECOND, detached=True) == "resume"  # its first connection was cut
    for late in (redial(FIRST), FIRST):
        refusal = holders.decide(late, detached=True)
        assert isinstance(refusal, Refusal)
        assert refusal.kind == "taken_over"
        assert "another process (second@laptop) has" in refusal.reason
    assert (holders.takeovers, holders.previous) == (1, "first@laptop")


def test_of_two_that_take_over_at_once_one_wins() -> None:
    holders = Holders()
    holders.decide(redial(FIRST), detached=True)
    assert holders.decide(SECOND, detached=True) == "take over"
    assert holders.decide(THIRD, detached=True) == "take over"
    assert isinstance(holders.decide(SECOND, detached=True), Refusal)
    assert holders.identity == "third"


def test_a_takeover_that_was_begun_earlier_does_not_displace_a_later_one() -> None:
    holders = Holders()
    holders.decide(redial(FIRST), detached=True)
    assert holders.claim(SECOND, detached=True) is None  # and it is killed: its first message is still on the way
    assert holders.claim(THIRD, detached=True) is None
    assert holders.decide(THIRD, detached=True) == "take over"
    for late in (holders.decide(SECOND, detached=True), holders.claim(SECOND, detached=True)):
        assert isinstance(late, Refusal)
        assert late.kind == "taken_over"
    assert holders.identity == "third"
    assert holders.decide(THIRD, detached=True) == "resume"


def test_a_client_that_connects_again_while_it_takes_over_keeps_its_place() -> None:
    holders = Holders()
    holders.decide(redial(FIRST), detached=True)
    for applicant in (SECOND, THIRD, SECOND):
        assert holders.claim(applicant, detached=True) is None
    assert holders.decide(SECOND, detached=True) == "take over"
    assert holders.decide(THIRD, detached=True) == "take over"


def test_a_holder_that_was_replaced_can_take_over_as_another_client() -> None:
    holders = Holders()
    holders.decide(redial(FIRST), detached=True)
    again = Applicant("first again", "first@laptop", takes_over=True)
    for applicant in (SECOND, again):
        assert holders.claim(applicant, detached=True) is None
        assert holders.decide(applicant, detached=True) == "take over"
    assert holders.identity == "first again"


def test_claims_beyond_the_limit_void_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_gateway.engine.detached.holders.MAX_CLAIMS", 1)
    holders = Holders()
    holders.decide(redial(FIRST), detached=True)
    assert holders.claim(SECOND, detached=True) is None
    assert holders.claim(THIRD, detached=True) is None
    assert isinstance(holders.decide(SECOND, detached=True), Refusal)
    assert holders.decide(THIRD, detached=True) == "take over"


@pytest.mark.parametrize(("applicant", "kind"), [(SECOND, "not_detached"), (redial(SECOND), "taken_over")])
def test_no_client_takes_over_a_session_that_is_not_detached(applicant: Applicant, kind: str) -> None:
    holders = Holders()
    holders.decide(redial(FIRST), detached=False)
    refusal = holders.decide(applicant, detached=False)
    assert isinstance(refusal, Refusal)
    assert refusal.kind == kind
    assert holders.identity == "first"


def test_an_applicant_is_read_from_its_headers() -> None:
    headers = Headers({"Meshgate-Holder": "ab12", "Meshgate-Holder-Name": "m%C3%BC@h (pid 1)", "Meshgate-Attach": "1"})
    assert Applicant.of(headers) == Applicant("ab12", "mü@h (pid 1)", takes_over=True)
    assert Applicant.of(Headers()) == Applicant("", "", takes_over=False)
