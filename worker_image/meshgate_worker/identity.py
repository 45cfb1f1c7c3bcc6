"""The identity under which a host's Monarch service is known.

From Monarch 0.8 on, a client attaches to ``<identity>@<address>`` and must know the identity in advance. Both sides
derive it from a UUID that the gateway knows: that of the pod, or one that the gateway passes to a local host.
"""

from __future__ import annotations

import importlib
from typing import Any


def service_address(address: str, identity: str | None) -> str:
    """The address to serve: ``address`` with the identity derived from the UUID ``identity``.

    Returns ``address`` alone without an identity, and for Monarch 0.7, whose clients attach without one. Raises
    ValueError if ``identity`` is not a UUID.
    """
    service: Any = importlib.import_module("monarch._src.job.service_identity")
    if not identity or not hasattr(service, "service_proc_id_from_uuid"):
        return address
    return str(service.service_proc_addr(address, service.service_proc_id_from_uuid(identity)))
