from __future__ import annotations

import importlib
import inspect

import pytest

from meshgate_gateway.engine.monarch import interface
from meshgate_gateway.engine.monarch.interface import (
    SUPPORTED,
    Monarch,
    UnsupportedMonarch,
    error_text,
    exit_code,
    explain_fault,
    installed_version,
    module_for,
    refusing_address,
    reports_a_stop,
    running_positions,
    silent_position,
    transport_at,
    unreachable_addresses,
)

ADDRESSES = ["tcp://10.0.0.1:26600", "tcp://10.0.0.11:26600"]
ATTACH_FAILED = """attach failed: config push failed during attach on 1 host(s):
  - tcp:10.0.0.1:26600: reply timed out after MESH_ATTACH_CONFIG_TIMEOUT"""

RETURNED = """The actor <monarch._src.actor.actor_mesh.RootClientActor client> and all its descendants have failed:
  undeliverable message to host_agent.service:<gmkDYMTEV4b>@tcp://10.0.0.1:26600:
  \tdescription: delivery of message from sender to dest failed
  \tmessage type: hyperactor_mesh::host_mesh::host_agent::SetClientConfig
  \tdata_len: 5594
  \terror: delivery failure: ttl expired for host_agent.service:<gmkDYMTEV4b>@tcp://10.0.0.1:26600
"""


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.7", "0.7"),
        ("0.7.0", "0.7"),
        ("0.7.3", "0.7"),
        ("0.7.1rc2", "0.7"),
        ("0.7.0+cu128", "0.7"),
        ("0.8.0.dev20261027", "0.8"),
        ("0.8.1", "0.8"),
    ],
)
def test_every_version_of_a_supported_release_uses_its_module(version: str, release: str) -> None:
    assert module_for(version) == SUPPORTED[release]


@pytest.mark.parametrize("version", ["0.6.2", "0.70.0", "0.9.0.dev1", "1.7.0", "7"])
def test_an_unsupported_release_is_refused_with_the_supported_ones(version: str) -> None:
    with pytest.raises(UnsupportedMonarch, match=rf"torchmonarch {version} is not supported.*0\.7\.\*, 0\.8\.\*"):
        module_for(version)


def test_a_missing_installation_is_refused_with_how_to_install_it() -> None:
    with pytest.raises(UnsupportedMonarch, match=r"torchmonarch is not installed.*pip install 'meshgate\[gateway\]'"):
        module_for(None)


def test_connecting_refuses_an_unsupported_release_before_monarch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "installed_version", lambda: "0.6.0")
    with pytest.raises(UnsupportedMonarch, match=r"torchmonarch 0\.6\.0 is not supported"):
        interface.connect(None, lambda fault: None)


def test_the_installed_release_is_supported() -> None:
    assert module_for(installed_version()) in SUPPORTED.values()


@pytest.mark.parametrize("module", SUPPORTED.values())
def test_each_release_implements_the_whole_interface(module: str) -> None:
    client = importlib.import_module(module).Client
    for name, method in inspect.getmembers(Monarch, inspect.isfunction):
        if not name.startswith("_"):
            implemented = inspect.signature(getattr(client, name))
            assert list(implemented.parameters) == list(inspect.signature(method).parameters), name
    assert client.sync_context


def test_the_backtrace_that_monarch_appends_is_left_out() -> None:
    assert error_text(RuntimeError("actor died\n\nStack backtrace:\n   0: std::backtrace")) == "actor died"
    assert error_text(RuntimeError("actor died \n")) == "actor died"
    late = error_text(RuntimeError("error spawning proc mesh: statuses: Timeout(30.001473067s)=0..16"))
    assert "=0..16: the processes did not start within 30 s. Busy hosts" in late


def test_of_a_version_check_only_its_own_error_is_reported() -> None:
    problem = (
        "worker w-0 has Python 3.12.1 and torchmonarch 0.7.0, the gateway has Python 3.11.7 and torchmonarch 0.7.0"
    )
    report = f"actor failed:\n    check_versions(*(...))\n  RuntimeError: {problem}\n\nother actors"
    assert error_text(ValueError(report)) == explain_fault(report) == problem


def test_the_addresses_in_a_failed_attach_did_not_answer() -> None:
    assert unreachable_addresses(ATTACH_FAILED, ADDRESSES) == ADDRESSES[:1]


def test_an_address_in_another_error_may_have_answered() -> None:
    assert unreachable_addresses("bootstrap failed at tcp:10.0.0.1:26600", ADDRESSES) == []


@pytest.mark.parametrize(
    ("status", "size", "position"),
    [
        ("stopped: no status received from process", 8, 6),
        ("stopped: no status received from process", 4, None),  # it is not about this mesh
        ("stopped: enough", 8, None),
    ],
)
def test_a_process_that_does_not_answer_has_a_position(status: str, size: int, position: int | None) -> None:
    report = f"Supervision event: actor <root>.<train.A a{{'hosts': 1/2, 'gpus': 2/4}}> has status:\n  {status}"
    assert silent_position(report, size) == position
    assert error_text(RuntimeError(report)).endswith(status) == (status == "stopped: enough")


def test_a_single_process_that_does_not_answer_has_the_first_position() -> None:
    report = "Supervision event: actor <root>.<train.A a> has status:\n  stopped: no status received from process"
    assert silent_position(report, 1) == 0
    assert silent_position(report, 2) is None


def test_an_actor_that_monarch_stops_because_its_mesh_has_lost_a_rank_is_reported_with_what_to_do() -> None:
    report = "Supervision event: actor <root>.<train.A a{'hosts': 0/2}> has status:\n  stopped: orphaned"
    assert error_text(RuntimeError(report)).startswith(f"{report} (Monarch stops the actors that are left of a mesh ")
    assert error_text(RuntimeError("stopped: orphaned")) == "stopped: orphaned"


def test_a_kill_is_reported_with_its_likely_cause() -> None:
    assert explain_fault("process exited: Killed(sig=9)").endswith("the machine or the pod ran out of memory)")
    assert explain_fault("process exited: Stopped(0)") == "process exited: Stopped(0)"


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("process this actor was running on exited with non-zero code 7", 7),
        ("process this actor was running on failed: Killed(sig=11)", -11),
        ("process this actor was running on failed: Killed(sig=6, core)", -6),
        ("process this actor was running on failed: Timeout", None),
        ("actor explicitly aborted due to: the process this actor was running on exited with non-zero code 7", None),
    ],
)
def test_the_exit_code_of_a_process_is_read_from_the_report_of_its_own_actor(what: str, code: int | None) -> None:
    for actor in ("<root>.<train.Trainer a{'gpus': 1/2}>", "<root>.<train.f.<locals>.Trainer a>"):
        assert exit_code(f"The actor {actor} and all its descendants have failed:\n  the {what} (a hint)") == code
    for other in ("<root>.<train.Trainer a{'gpus': 1/2}>.<train.Trainer inner{}>", "logger-rTQM{'gpus': 1/2}"):
        assert exit_code(f"The actor {other} and all its descendants have failed:\n  the {what}") is None


def test_a_worker_that_forwards_the_first_message_to_itself_refuses() -> None:
    assert refusing_address(RETURNED) == "tcp://10.0.0.1:26600"
    with_identity = RETURNED.replace("agent.service:", "agent.service<sie6HtiPoap>:")
    assert refusing_address(with_identity) == "tcp://10.0.0.1:26600"
    assert refusing_address(RETURNED.replace("SetClientConfig", "GetHostProcStates")) == ""
    assert refusing_address(RETURNED.replace("ttl expired", "broken link")) == ""


def test_a_stop_is_not_a_failure() -> None:
    assert reports_a_stop(
        "Endpoint call a.step() failed, Supervision event: actor <root>.<__main__.A a{'gpus': 1/2}> has status:\n"
        "  stopped: enough"
    )
    assert not reports_a_stop("The actor a and all its descendants have failed:\n  this actor has stopped: not really")


def test_the_processes_that_run_are_read_from_a_report_that_others_do_not_answer() -> None:
    statuses = "error spawning actor mesh: statuses: "
    assert running_positions(f"{statuses}Running=0..1,2..4;Timeout(40.080858021s)=1..2") == {0, 2, 3}
    assert running_positions(f"{statuses}Timeout(30.060961796s)=1..2;Running=0..1") == {0}
    assert running_positions(f"{statuses}Timeout(30.003304593s)=0..3") == set()
    assert running_positions("error spawning proc mesh: statuses: Running=0..1") == set()


def test_an_address_of_ipv6_is_in_brackets() -> None:
    assert [transport_at(host) for host in ("10.0.0.3", "fd00::3")] == ["tcp://10.0.0.3:0", "tcp://[fd00::3]:0"]
