"""What a host's results and errors mean to a pull."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshgate import PullFailed, SupervisionError
from meshgate.session.futures import FutureProxy
from meshgate.transfer.host_files import Entry, HostFiles, read_error, result_of


def host_files(listing: Any) -> HostFiles:
    call_one = lambda path: FutureProxy.resolved(listing)  # noqa: E731
    return HostFiles(SimpleNamespace(listing=SimpleNamespace(call_one=call_one)), "/remote")


def test_a_listing_names_its_host() -> None:
    files = host_files(("host-1", [("a", "file", 1, 5, 0o644, "")]))
    assert files.listing() == [Entry("a", "file", 1, 5, 0o644, "")]
    assert files.host == "host-1"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("absent", "/remote does not exist on host-1"),
        ("forbidden", r"the worker process on host-1 may not read /remote \(text\)"),
        ("changed", "/remote changed on host-1 while it was being read; pull it again once it is complete"),
        ("failed", "cannot read /remote on host-1: text"),
    ],
)
def test_an_error_of_a_host_names_host_and_path(kind: str, message: str) -> None:
    with pytest.raises(PullFailed, match=message) as raised:
        host_files(("host-1", (kind, "text"))).listing()
    assert (raised.value.host, raised.value.path) == ("host-1", "/remote")
    assert str(read_error((kind, "text"), "host-1", "/remote")) == str(raised.value)


def test_a_lost_host_is_a_failed_pull() -> None:
    class Lost:
        def get(self) -> None:
            raise SupervisionError("workers-1 died")

    with pytest.raises(PullFailed, match="cannot read /remote: workers-1 died"):
        result_of(Lost(), "host-1", "/remote")  # type: ignore[arg-type]
