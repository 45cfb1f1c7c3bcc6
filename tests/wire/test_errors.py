"""The texts and attributes of errors."""

from __future__ import annotations

import pytest

from meshgate_wire import (
    LimitExceeded,
    MessageTooLarge,
    ProtocolError,
    SessionEnded,
    SessionLost,
    VersionMismatch,
    WireError,
)


@pytest.mark.parametrize(("ours", "theirs", "behind"), [(1, 2, "client"), (2, 1, "gateway")])
def test_a_version_mismatch_names_both_versions_and_the_side_to_upgrade(ours: int, theirs: int, behind: str) -> None:
    error = VersionMismatch(
        ours=ours, our_software="0.1.0", our_role="client", theirs=theirs, their_software="0.9.0", their_role="gateway"
    )
    newer = "0.9.0" if behind == "client" else "0.1.0"
    assert error.upgrade == behind
    assert str(error) == (
        f"the client (meshgate 0.1.0) speaks protocol {ours}, the gateway (meshgate 0.9.0) speaks protocol {theirs}: "
        f"upgrade the {behind} to meshgate {newer} or later"
    )


def test_an_exceeded_limit_is_reported_with_both_numbers() -> None:
    error = LimitExceeded("header bytes in one message", 12, 10, resumable=True)
    assert (error.what, error.value, error.limit, error.resumable) == ("header bytes in one message", 12, 10, True)
    assert str(error).startswith("the peer sent 12 header bytes in one message, but this side's limit is 10")


def test_only_protocol_errors_are_resumable() -> None:
    assert ProtocolError("x", resumable=True).resumable
    assert not ProtocolError("x").resumable
    for error in (SessionLost("x"), SessionEnded("x"), MessageTooLarge("bytes", 2, 1)):
        assert isinstance(error, WireError)
        assert not error.resumable
