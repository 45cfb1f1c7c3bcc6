"""DEBUG lines by which one version can be followed through the whole tree.

::

    version=d6982182d6f6 node=workers-0 requested peer=gateway pieces=2

Each line has the first 12 hex digits of the version's digest, the node that logs it, what happened, and with whom.

Imports nothing but the standard library.
"""

from __future__ import annotations

import logging

from ..tree.digest import short


def node_name(name: str) -> str:
    """A node's name as people read it: the gateway's own is empty."""
    return name or "gateway"


class VersionLog:
    """Logs through ``logger`` what happens to versions at ``node``."""

    def __init__(self, logger: logging.Logger, node: str) -> None:
        self._logger = logger
        self._node = node_name(node)

    @property
    def enabled(self) -> bool:
        return self._logger.isEnabledFor(logging.DEBUG)

    def __call__(self, root: bytes, event: str, peer: str | None = None, /, **facts: object) -> None:
        if not self.enabled:
            return
        peers = {} if peer is None else {"peer": node_name(peer)}
        details = "".join(f" {key}={value}" for key, value in {**peers, **facts}.items())
        self._logger.debug("version=%s node=%s %s%s", short(root), self._node, event, details)
