from __future__ import annotations

import platform
from importlib.metadata import version

import pytest

from meshgate_gateway.engine.on_worker.versions import check_versions

MONARCH = version("torchmonarch")
PYTHON = platform.python_version()
LAPTOP = "the laptop has Python 3.10.4 and no torchmonarch"


def test_patch_releases_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.1")
    check_versions("3.12.9", f"{'.'.join(MONARCH.split('.')[:2])}.99", LAPTOP)


@pytest.mark.parametrize(("python", "monarch"), [("3.9.1", MONARCH), (PYTHON, "0.6.2")])
def test_an_error_names_the_versions_of_all_sides(python: str, monarch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_HOST_NAME", "workers-3")
    with pytest.raises(RuntimeError) as raised:
        check_versions(python, monarch, LAPTOP)
    assert str(raised.value).startswith(
        f"worker workers-3 has Python {PYTHON} and torchmonarch {MONARCH}, the gateway has Python {python} and "
        f"torchmonarch {monarch}, and {LAPTOP}. Workers need"
    )
