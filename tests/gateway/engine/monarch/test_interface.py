from __future__ import annotations

import importlib
import inspect

import pytest

from meshgate_gateway.engine.monarch import interface
from meshgate_gateway.engine.monarch.interface import (
    SUPPORTED,
    Monarch,
    UnsupportedMonarch,
    installed_version,
    module_for,
)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.7", "0.7"),
        ("0.7.0", "0.7"),
        ("0.7.3", "0.7"),
        ("0.7.1rc2", "0.7"),
        ("0.7.0+cu128", "0.7"),
        ("0.8.0.dev20261027", "0.8"),
        ("0.8.1", "0.8"),
    ],
)
def test_every_version_of_a_supported_release_uses_its_module(version: str, release: str) -> None:
    assert module_for(version) == SUPPORTED[release]


@pytest.mark.parametrize("version", ["0.6.2", "0.70.0", "0.9.0.dev1", "1.7.0", "7"])
def test_an_unsupported_release_is_refused_with_the_supported_ones(version: str) -> None:
    with pytest.raises(UnsupportedMonarch, match=rf"torchmonarch {version} is not supported.*0\.7\.\*, 0\.8\.\*"):
        module_for(version)


def test_a_missing_installation_is_refused_with_how_to_install_it() -> None:
    with pytest.raises(UnsupportedMonarch, match=r"torchmonarch is not installed.*pip install 'meshgate\[gateway\]'"):
        module_for(None)


def test_connecting_refuses_an_unsupported_release_before_monarch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "installed_version", lambda: "0.6.0")
    with pytest.raises(UnsupportedMonarch, match=r"torchmonarch 0\.6\.0 is not supported"):
        interface.connect(None, lambda fault: None)


def test_the_installed_release_is_supported() -> None:
    assert module_for(installed_version()) in SUPPORTED.values()


@pytest.mark.parametrize("module", SUPPORTED.values())
def test_each_release_implements_the_whole_interface(module: str) -> None:
    client = importlib.import_module(module).Client
    for name, method in inspect.getmembers(Monarch, inspect.isfunction):
        if not name.startswith("_"):
            implemented = inspect.signature(getattr(client, name))
            assert list(implemented.parameters) == list(inspect.signature(method).parameters), name
    assert client.sync_context
