"""A port-forward through the API server as a connected socket, without kubectl and without a local port."""

from meshgate.jobs.kubernetes.port_forward.local_end import ForwardFailed
from meshgate.jobs.kubernetes.port_forward.opening import open_forward

__all__ = ["ForwardFailed", "open_forward"]
