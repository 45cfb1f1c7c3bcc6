from __future__ import annotations

import pytest

from meshgate_gateway.engine.detached import spool as spool_module
from meshgate_gateway.engine.detached.spool import OVERHEAD, Spool


def test_data_goes_to_disk_when_the_memory_is_full_and_comes_back_unchanged() -> None:
    spool = Spool(memory=OVERHEAD + 10, disk=1000)
    first, second = spool.put((b"0123456789",)), spool.put((b"abc", memoryview(b"defg"), b""))
    assert first is not None
    assert first.pieces is not None
    assert second is not None
    assert second.segment is not None
    assert spool.get(first) == (b"0123456789",)
    assert spool.get(second) == (b"abc", b"defg", b"")


def test_nothing_is_kept_beyond_both_limits() -> None:
    spool = Spool(memory=0, disk=10)
    assert spool.put((bytes(11),)) is None
    kept = spool.put((bytes(10),))
    assert kept is not None
    assert spool.put((b"x",)) is None
    spool.drop(kept)
    spool.drop(kept)
    assert spool.nbytes == 0
    assert spool.put((bytes(10),)) is not None


def test_a_segment_is_freed_once_all_its_data_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", 10)
    spool = Spool(memory=0, disk=1000)
    blobs = [spool.put((bytes(5),)) for _ in range(6)]
    assert len(spool._segments) == 3
    for blob in blobs[:2]:
        assert blob is not None
        spool.drop(blob)
    assert len(spool._segments) == 2
    assert spool.nbytes == 20


def test_a_full_disk_is_the_same_as_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert Spool(memory=0, disk=100).put((b"x",)) is None


def test_small_data_on_disk_is_bounded_by_its_memory() -> None:
    spool = Spool(memory=0, disk=1000, index=2 * OVERHEAD)
    kept = [spool.put((b"x",)) for _ in range(3)]
    assert [blob is not None for blob in kept] == [True, True, False]
    assert kept[0] is not None
    spool.drop(kept[0])
    spool.drop(kept[0])
    assert [spool.put((b"x",)) is not None for _ in range(2)] == [True, False]
