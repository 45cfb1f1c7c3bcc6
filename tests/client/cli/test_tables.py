from __future__ import annotations

import pytest

from meshgate.cli.tables import age_text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59, "59s"), (60, "1m"), (3599, "60m"), (7200, "2h"), (86400 * 3, "3d")]
)
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
