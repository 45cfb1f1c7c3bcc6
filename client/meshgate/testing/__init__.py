"""Fakes for testing drivers without a cluster and without Monarch, in the manner of ``trio.testing``.

``import meshgate`` never imports this folder, and nothing else in meshgate depends on it.
"""

from __future__ import annotations

from .fake_cluster import FakeGateway
from .fake_job import FakeJob
from .network_proxy import NetworkProxy

__all__ = ["FakeGateway", "FakeJob", "NetworkProxy"]
