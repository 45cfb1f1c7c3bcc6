"""Regions that fit the wire format but no mesh, and a fixture that fails a test that allocates memory for them."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest

from meshgate_wire.messages import Region

OVERSIZED = [
    Region(labels=("hosts",), offset=0, sizes=(2**40,), strides=(1,)),
    Region(labels=("hosts",), offset=0, sizes=(2**40,), strides=(0,)),
    Region(labels=tuple(map(str, range(64))), offset=0, sizes=(2**53,) * 64, strides=(0,) * 64),
    Region(labels=("hosts",), offset=2**53, sizes=(1,), strides=(1,)),
    Region(labels=("hosts",), offset=0, sizes=(2,), strides=(2**53,)),
]


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """Allocating gigabytes fails here instead of ending the machine, and so does taking long."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, before[1]))
    started = time.process_time()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - started < 10
