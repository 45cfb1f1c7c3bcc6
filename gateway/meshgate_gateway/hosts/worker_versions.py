"""Asks a pod for the versions of its worker: a Monarch of another release does not answer, and so names none.

The pods that meshgate creates answer on a port of their own (``WORKER_BOOTSTRAP`` of ``meshgate_kubernetes``).
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from meshgate_kubernetes.manifests.pods import VERSIONS_PORT_OFFSET
from meshgate_wire.messages import Host

TIMEOUT = 1.0  # seconds


class _Versions(BaseModel):
    python: str = Field(max_length=64)
    monarch: str = Field(max_length=64)


async def with_versions(host: Host) -> Host:
    """``host`` with the versions that it reports. If it reports none, as with an older client, they stay unknown."""
    try:
        versions = await asyncio.wait_for(_ask(host), TIMEOUT)
    except (OSError, ValueError, asyncio.TimeoutError):
        return host
    return host.model_copy(update=versions.model_dump())


async def _ask(host: Host) -> _Versions:
    place = urlsplit(host.address)
    reader, writer = await asyncio.open_connection(place.hostname, (place.port or 0) + VERSIONS_PORT_OFFSET)
    try:
        return _Versions.model_validate_json(await reader.readline())
    finally:
        writer.close()
