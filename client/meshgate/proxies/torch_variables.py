"""What a rank of a torch process group needs: its variables, and the port on which rank 0 will serve.

Sent to workers as source text, so it imports nothing but the standard library.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any


def rank_variables(
    rank: int,
    world: int,
    local_world: int,
    master: Sequence[Any],
    environment: Mapping[str, str],
    *,
    run_id: str = "none",
    role: str = "default",
    restart: int = 0,
    max_restarts: int = 0,
    virtual_local_rank: bool = False,
) -> dict[str, str]:
    """The variables that torchrun sets for ``rank`` of ``world`` ranks, of which each host has ``local_world``.

    ``master`` is the address and the port of rank 0. ``environment`` is the process's environment: what it already sets
    of ``OMP_NUM_THREADS`` and ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` stays.
    """
    local_rank = rank % local_world
    variables: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": 0 if virtual_local_rank else local_rank,
        "LOCAL_WORLD_SIZE": local_world,
        "GROUP_RANK": rank // local_world,
        "GROUP_WORLD_SIZE": world // local_world,
        "ROLE_NAME": role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": restart,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 serves the store
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    if local_world > 1:
        variables["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", 1)
    if virtual_local_rank:  # the list of the host, if this process has a part of it
        listed = environment.get("MESHGATE_HOST_CUDA_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES", "")
        visible = [device for device in listed.split(",") if device]
        variables["CUDA_VISIBLE_DEVICES"] = visible[local_rank] if local_rank < len(visible) else local_rank
    else:  # LOCAL_RANK counts in the lists of the host
        for name, whole in environment.items():
            if name.startswith("MESHGATE_HOST_") and name.endswith("_VISIBLE_DEVICES"):
                variables[name.removeprefix("MESHGATE_HOST_")] = whole
    return {name: str(value) for name, value in variables.items()}


class HeldPort:
    """A port that no other program can take before rank 0 listens on it.

    The socket is bound and never listens. It allows the address to be reused, as torch's store does, so that the store
    can listen on the port and no other program can bind to it. Raises OSError with a message that names the port.
    """

    def __init__(self, port: int) -> None:
        self._socket = _bind_any(port)
        self.port = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def hold_master_port(address: str | None, port: int, hosts: int) -> tuple[HeldPort | None, tuple[str, int, str]]:
    """The port held for rank 0, and its address and number; or None, and why they cannot be used."""
    try:
        place = master_address(address, hosts)
        held = HeldPort(port)
    except OSError as error:
        return None, ("", 0, error.strerror or str(error))
    except ValueError as error:
        return None, ("", 0, str(error))
    return held, (place, held.port, "")


def _bind_any(port: int) -> socket.socket:
    last: OSError | None = None
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            held = socket.socket(family)
        except OSError as error:  # a system without IPv6
            last = error
            continue
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind((address, port))
            return held
        except OSError as error:
            held.close()
            last = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
                break
    assert last is not None
    raise OSError(last.errno, f"port {port} of {host_name()} cannot be used: {last.strerror}")


def master_address(wanted: str | None, hosts: int) -> str:
    """The address of this host for the other ranks, or ``wanted`` if that is an address of this host.

    Raises OSError if it is not, and ValueError if it is a loopback address that other machines cannot reach.
    """
    own = own_address()
    if wanted is None:
        return own
    try:
        found = socket.getaddrinfo(wanted, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"the address {wanted} of rank 0 is unknown on {host_name()}: {error}") from None
    place = found[0][4][0]
    if hosts > 1 and ipaddress.ip_address(str(place).partition("%")[0]).is_loopback and own != "127.0.0.1":
        raise ValueError(f"the address {wanted} of rank 0 is a loopback address, which the other hosts cannot reach")
    with socket.socket(found[0][0]) as probe:
        try:
            probe.bind((place, 0))
        except OSError as error:
            message = f"{wanted} is not an address of {host_name()}, the host of rank 0 ({own}): {error.strerror}"
            raise OSError(error.errno, message) from None
    return wanted


def own_address(descriptor: int = 1) -> str:
    """The address at which the other hosts reach this one.

    It is the local end of the connection to the engine, which every process of a session has as its standard output.
    If that is a unix socket, all hosts are on this machine.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family == socket.AF_UNIX:
            return "127.0.0.1"
        return str(connection.getsockname()[0])


def host_name() -> str:
    return os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()
