from __future__ import annotations

import contextlib
import importlib.metadata

import pytest

from meshgate_worker.identity import service_address

UUID = "5b1c3f60-7a52-4c1e-9d38-2f6f0e7b9a41"
ADDRESS = "tcp://10.0.0.1:26600@tcp://0.0.0.0:26600"
needs_identities = importlib.metadata.version("torchmonarch") >= "0.8"


def test_a_host_without_an_identity_serves_its_address() -> None:
    assert service_address(ADDRESS, None) == service_address(ADDRESS, "") == ADDRESS


def test_the_identity_comes_before_the_address_if_monarch_attaches_by_it() -> None:
    identity, _, rest = service_address(ADDRESS, UUID).partition("@")
    if needs_identities:
        assert identity.startswith("service<")
        assert rest == ADDRESS
    else:
        assert f"{identity}@{rest}" == ADDRESS


def test_equal_uuids_give_equal_identities() -> None:
    other = UUID.replace("9a41", "9a42")
    assert service_address(ADDRESS, UUID) == service_address(ADDRESS, UUID)
    assert (service_address(ADDRESS, UUID) != service_address(ADDRESS, other)) == needs_identities


def test_an_identity_that_is_not_a_uuid_is_rejected_if_it_is_used() -> None:
    refused = pytest.raises(ValueError, match="badly formed") if needs_identities else contextlib.nullcontext()
    with refused:
        service_address(ADDRESS, "workers-0")
