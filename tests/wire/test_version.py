from __future__ import annotations

from importlib import metadata

from meshgate_wire import PROTOCOL_VERSION, SOFTWARE_VERSION


def test_the_software_version_is_that_of_the_distribution() -> None:
    assert metadata.version("meshgate") == SOFTWARE_VERSION


def test_the_protocol_version_is_documented() -> None:
    assert PROTOCOL_VERSION == 1
