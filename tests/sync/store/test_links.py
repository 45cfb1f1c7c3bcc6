from __future__ import annotations

import errno
import os

import pytest

from meshgate_sync.errors import ObjectsDamaged
from tests.sync.store.store_host import MODEL, Host, objects, raising
from tests.sync.trees import Content, on_disk, plain


def test_files_are_copied_if_they_cannot_be_linked(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", raising(errno.EMLINK))
    path = host.sync(content.tree(MODEL))
    assert on_disk(path) == plain(MODEL)
    assert os.stat(f"{path}/a.py").st_mode & 0o777 == 0o444


def test_a_deleted_object_is_fetched_again_for_the_next_version(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({**MODEL, b"new": b"1"})
    host.sync(first)
    next(path for path in objects(host) if path.read_bytes() == b"one").unlink()
    with pytest.raises(ObjectsDamaged, match="vanished"):
        host.sync(second, first)
    assert on_disk(host.sync(second, first)) == plain({**MODEL, b"new": b"1"})


def test_an_object_that_is_replaced_while_it_is_linked_is_linked_again(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failures = os.link, iter([True])

    def link(source: str, target: bytes) -> None:
        if next(failures, False):
            raise FileNotFoundError(errno.ENOENT, "its last name was taken from it just now")
        original(source, target)

    monkeypatch.setattr(os, "link", link)
    assert on_disk(host.sync(content.tree(MODEL))) == plain(MODEL)
