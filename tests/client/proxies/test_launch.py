from __future__ import annotations

import sys
from typing import Any

import monarch.actor
import pytest

from meshgate.proxies import HostMeshProxy
from meshgate.proxies.launch import BootstrapCommand, default_bootstrap_cmd, launch_of
from meshgate.shapes.shape import Extent, Point
from meshgate_wire.messages import SpawnProcs
from tests.client.scripted_gateway import ScriptedGateway

EXTENT = Extent(("hosts", "gpus"), (2, 2))
PER_HOST = {"gpus": 2}


def test_by_default_nothing_is_sent() -> None:
    assert launch_of(EXTENT, PER_HOST, None, None) is None


def test_the_drivers_python_stands_for_that_of_the_hosts() -> None:
    launch = launch_of(EXTENT, PER_HOST, None, default_bootstrap_cmd().with_env({"A": "1", "B": None}))
    assert launch is not None
    (command,) = launch.commands
    assert (command.program, command.args, command.env) == (None, None, {"A": "1", "B": None})
    assert launch.command_of == ()


def test_monarchs_commands_are_accepted() -> None:
    theirs = monarch.actor.default_bootstrap_cmd().with_env({"A": "1"})
    launch = launch_of(EXTENT, PER_HOST, None, theirs)  # type: ignore[arg-type]
    assert launch is not None
    (command,) = launch.commands
    assert (command.program, command.env, command.inherit_env) == (None, {"A": "1"}, True)
    assert command.args == ("-m", "monarch._src.actor.bootstrap_main")


def test_equal_commands_are_sent_once() -> None:
    def command(point: Point) -> BootstrapCommand:
        return BootstrapCommand(f"/python{point['gpus']}", args=["-m", "worker"], inherit_env=False)

    launch = launch_of(EXTENT, PER_HOST, None, command)
    assert launch is not None
    assert [each.program for each in launch.commands] == ["/python0", "/python1"]
    assert launch.command_of == (0, 1, 0, 1)
    assert not launch.commands[0].inherit_env


def test_variables_of_a_command_are_strings() -> None:
    with pytest.raises(TypeError, match="'A': 1 is not a string"):
        BootstrapCommand("/python", env={"A": 1})  # type: ignore[dict-item]
    assert BootstrapCommand("/python", env={"A": None}).with_env({"B": "1"}).env == {"A": None, "B": "1"}


def test_bindings_are_one_for_each_process_of_a_host() -> None:
    launch = launch_of(EXTENT, PER_HOST, [{"cpus": "0"}, {"cpus": "1"}], None)
    assert launch is not None
    assert launch.binding == ({"cpus": "0"}, {"cpus": "1"})
    with pytest.raises(ValueError, match=r"proc_bind length \(1\) must equal procs_per_host \(2\)"):
        launch_of(EXTENT, PER_HOST, [{"cpus": "0"}], None)


@pytest.mark.parametrize("command", ["python", 3, lambda point: None])
def test_what_is_not_a_command_is_rejected_before_anything_is_sent(
    gateway: ScriptedGateway, hosts: HostMeshProxy, command: Any
) -> None:
    with pytest.raises(TypeError, match="must be a BootstrapCommand"):
        hosts.spawn_procs(per_host=PER_HOST, bootstrap_command=command)
    hosts.initialized.get(timeout=20)
    assert gateway.got(SpawnProcs) == []


def test_hosts_with_another_python_keep_it_in_slices_and_are_named_with_it(hosts: HostMeshProxy) -> None:
    other = hosts.with_python_executable("/other/python")
    assert (hosts._ref.python, other._ref.python) == (None, "/other/python")
    assert other.slice(hosts=1)._ref.python == "/other/python"
    assert other.with_python_executable(sys.executable)._ref.python == sys.executable
    with pytest.raises(TypeError, match="the path of a Python executable must be a string"):
        hosts.with_python_executable(None)  # type: ignore[arg-type]
