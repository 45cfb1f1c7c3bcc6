from __future__ import annotations

import os

from meshgate_sync.tree.delta import full_delta
from meshgate_sync.tree.digest import NOTHING
from tests.sync.store.store_host import MODEL, Host, partials
from tests.sync.trees import Content, on_disk, plain


def test_only_new_pieces_are_fetched(host: Host, content: Content) -> None:
    first = content.tree(MODEL)
    host.sync(first)
    fetched = host.fetched
    data = bytearray(range(100))
    data[50] = 255
    renamed = {**MODEL, b"moved": MODEL[b"a.py"], b"large": bytes(data), b"plain": b"#!"}
    del renamed[b"a.py"]
    path = host.sync(content.tree(renamed), first)
    assert host.fetched == fetched + 1
    assert on_disk(path) == plain(renamed)


def test_two_versions_that_are_being_fetched_share_a_large_file(host: Host, content: Content) -> None:
    large = bytes(range(100))
    first, second = content.tree({b"f": large}), content.tree({b"g": large})
    one, two = host.store.prepare(full_delta(first)), host.store.prepare(full_delta(second))
    for digest in list(one.missing):
        host.store.add(digest, content.pieces[digest])
    assert one.complete
    assert two.complete
    assert on_disk(host.store.finish(first.digest, base=NOTHING)) == {b"f": large}
    assert on_disk(host.store.finish(second.digest, base=NOTHING)) == {b"g": large}


def test_pieces_of_an_abandoned_version_are_kept(host: Host, content: Content) -> None:
    tree = content.tree({b"f": bytes(range(100))})
    fetch = host.store.prepare(full_delta(tree))
    first = next(iter(fetch.missing))
    host.store.add(first, content.pieces[first])
    host.store.abandon(tree.digest)
    host.reopen()
    assert first not in host.store.prepare(full_delta(tree)).missing


def abandon(host: Host, content: Content, count: int) -> None:
    """So many versions given up, a piece of the large file of each having come."""
    for number in range(count):
        tree = content.tree({b"f": bytes([number]) + bytes(range(100))})
        fetch = host.store.prepare(full_delta(tree))
        first = next(iter(fetch.missing))
        host.store.add(first, content.pieces[first])
        host.store.abandon(tree.digest)


def test_abandoned_versions_keep_no_files_open(host: Host, content: Content) -> None:
    abandon(host, content, 1)
    before = len(os.listdir("/dev/fd"))
    abandon(host, content, 20)
    assert len(os.listdir("/dev/fd")) == before
    assert len(partials(host)) == 20
