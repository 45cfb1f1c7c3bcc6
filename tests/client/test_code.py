from __future__ import annotations

from meshgate.code import SyncReport


def test_a_report_reads_as_a_line() -> None:
    assert str(SyncReport("ab", 3, 12_345, 16, 16, 0.0842)) == "synced 3 files, 12 kB → 16/16 hosts in 84 ms"
    assert str(SyncReport("ab", 1, 7, 2, 2, 1.25)) == "synced 1 file, 7 B → 2/2 hosts in 1.2 s"
