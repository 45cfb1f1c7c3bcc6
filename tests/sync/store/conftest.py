from __future__ import annotations

from pathlib import Path

import pytest

from tests.sync.store.store_host import Host
from tests.sync.trees import Content


@pytest.fixture
def content() -> Content:
    return Content()


@pytest.fixture
def host(tmp_path: Path, content: Content) -> Host:
    return Host(tmp_path / "home", content)
