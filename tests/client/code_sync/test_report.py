from __future__ import annotations

import pytest

from meshgate.code_sync.report import SyncReport


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (SyncReport("ab", 3, 12_345, 16, 16, 0.0842), "synced 3 files, 12 kB → 16/16 hosts in 84 ms"),
        (SyncReport("ab", 1, 7, 2, 2, 1.25), "synced 1 file, 7 B → 2/2 hosts in 1.2 s"),
        (SyncReport("ab", 2, 1_500, 2, 2, 1.0), "synced 2 files, 1.5 kB → 2/2 hosts in 1.0 s"),
        (SyncReport("ab", 2, 2_000_000_000_000, 2, 2, 1.0), "synced 2 files, 2000 GB → 2/2 hosts in 1.0 s"),
    ],
)
def test_a_report_is_one_line(report: SyncReport, line: str) -> None:
    assert str(report) == line
