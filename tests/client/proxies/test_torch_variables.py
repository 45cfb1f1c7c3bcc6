"""The variables are torchrun's, and the port of rank 0 is held until rank 0 serves on it."""

from __future__ import annotations

import socket

import pytest

from meshgate.proxies import torch_variables
from meshgate.proxies.torch_variables import HeldPort, master_address, own_address, rank_variables


def test_the_variables_of_a_rank() -> None:
    variables = rank_variables(3, 4, 2, ("10.0.0.1", 29500), {}, run_id="r", role="trainer", restart=1, max_restarts=2)
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "r",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_what_the_environment_sets_stays() -> None:
    environment = {"OMP_NUM_THREADS": "4", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    variables = rank_variables(0, 2, 2, ("h", 1), environment)
    assert {name: variables[name] for name in environment} == environment


def test_one_process_on_a_host_may_use_all_processors() -> None:
    assert "OMP_NUM_THREADS" not in rank_variables(1, 2, 1, ("h", 1), {})


@pytest.mark.parametrize(("visible", "device"), [("4,5", "5"), ("", "1")])
def test_a_virtual_local_rank_sees_its_device_alone(visible: str, device: str) -> None:
    variables = rank_variables(3, 4, 2, ("h", 1), {"CUDA_VISIBLE_DEVICES": visible}, virtual_local_rank=True)
    assert (variables["LOCAL_RANK"], variables["CUDA_VISIBLE_DEVICES"]) == ("0", device)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OTHER_VISIBLE_DEVICES"])
def test_a_rank_sees_all_gpus_of_its_host_since_its_local_rank_counts_in_them(name: str) -> None:
    environment = {name: "5", f"MESHGATE_HOST_{name}": "4,5", "MESHGATE_HOST_NAME": "h"}
    variables = rank_variables(3, 4, 2, ("h", 1), environment)
    assert variables[name] == "4,5"
    assert "NAME" not in variables


def test_the_device_of_a_virtual_local_rank_is_the_only_one() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "5", "MESHGATE_HOST_CUDA_VISIBLE_DEVICES": "4,5"}
    virtual = rank_variables(2, 4, 2, ("h", 1), environment, virtual_local_rank=True)
    assert virtual["CUDA_VISIBLE_DEVICES"] == "4"


def test_a_held_port_can_be_served_by_torchs_store_and_by_no_other_program() -> None:
    held = HeldPort(0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", held.port))
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", held.port))
        store.listen()
    held.close()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of .* cannot be used"):
            HeldPort(port)


def test_the_address_of_a_host_is_that_of_its_connection_to_the_engine() -> None:
    with (
        socket.create_server(("127.0.0.2", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.3", 0)) as connection,
    ):
        assert own_address(connection.fileno()) == "127.0.0.3"


def test_hosts_of_one_machine_meet_at_loopback() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert own_address(near.fileno()) == "127.0.0.1"


def test_an_address_that_rank_0_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_variables, "own_address", lambda: "10.0.0.7")
    assert master_address(None, 2) == "10.0.0.7"
    assert master_address("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(OSError, match=r"192\.0\.2\.1 is not an address of .*, the host of rank 0"):
        master_address("192.0.2.1", 1)
    with pytest.raises(OSError, match=r"the address nowhere\.invalid of rank 0 is unknown"):
        master_address("nowhere.invalid", 1)
    with pytest.raises(ValueError, match="loopback address, which the other hosts cannot reach"):
        master_address("localhost", 2)


def test_hosts_of_one_machine_may_name_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_variables, "own_address", lambda: "127.0.0.1")
    assert master_address("127.0.0.1", 2) == "127.0.0.1"
