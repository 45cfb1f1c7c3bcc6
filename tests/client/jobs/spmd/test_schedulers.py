"""Each scheduler of torchx has a job, with what it takes of an AppDef; the rest is refused by name."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import pytest
from torchx import specs

from meshgate import KubernetesJob, ProcessJob, SlurmJob
from meshgate.errors import JobStartFailed
from meshgate.jobs import process, registry
from meshgate.jobs.local_gateway import LocalGateway
from meshgate.jobs.spmd import schedulers
from meshgate.jobs.spmd.schedulers import SCHEDULERS, TorchXApp, TorchXJob, job_of, read_appdef, refuse_unmapped
from meshgate.jobs.spmd.torchrun import parse_command
from meshgate.jobs.trait import JobTrait
from tests.ports import free_port

COMMAND = ["torchrun", "--nproc-per-node=2", "train.py"]
ARGS = ["torchrun", "--nnodes=2", "--nproc-per-node=8", "-m", "train"]


def job(scheduler: str, config: Mapping[str, Any] | None = None, command: list[str] = COMMAND) -> JobTrait:
    return job_of(scheduler, config or {}, parse_command(command), None, None, None)


def job_of_app(scheduler: str, config: Mapping[str, Any] | None = None, **fields: Any) -> JobTrait:
    role = specs.Role(**{"name": "trainer", "image": "img:1", "entrypoint": "env", "args": COMMAND, **fields})
    appdef = specs.AppDef(name="app", roles=[role])
    return job_of(scheduler, config or {}, parse_command(COMMAND), appdef, read_appdef(appdef), None)


def test_an_unknown_scheduler_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="unknown scheduler 'mast_conda': the schedulers are k8s, kubernetes, "):
        job("mast_conda")
    assert "local_docker" in SCHEDULERS


def test_a_command_on_local_cwd_is_one_process_host() -> None:
    found = job("local_cwd")
    assert isinstance(found, ProcessJob)
    assert found._request.meshes == {"workers": 1}


def test_a_command_on_local_docker_lacks_an_image() -> None:
    with pytest.raises(ValueError, match="local_docker needs an AppDef"):
        job("local_docker")


@pytest.mark.parametrize("scheduler", ["local_cwd", "local_docker"])
def test_the_replicas_of_an_app_are_hosts(scheduler: str) -> None:
    found = job_of_app(scheduler, num_replicas=2)
    assert isinstance(found, TorchXJob)
    assert found._request.meshes == {"workers": 2}
    assert not found.can_run(found)


class RunningApp:
    """An app whose replicas run until ``end``."""

    running_apps: ClassVar[list[RunningApp]] = []

    def __init__(self, *arguments: object) -> None:
        self.running_apps.append(self)

    def wait_addresses(self) -> list[str]:
        return ["tcp://127.0.0.1:1"]

    def engine_host(self) -> None:
        return None

    def end(self) -> None:
        self.running_apps.remove(self)


@pytest.fixture
def running_apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunningApp]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(schedulers, "TorchXApp", RunningApp)
    monkeypatch.setattr(RunningApp, "running_apps", [])
    return RunningApp.running_apps


@pytest.mark.parametrize("error", [JobStartFailed("it exited with code 2"), KeyboardInterrupt()])
def test_the_replicas_end_if_the_gateway_does_not_start(
    running_apps: list[RunningApp], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(options: object) -> NoReturn:
        assert running_apps
        raise error

    monkeypatch.setattr(LocalGateway, "start", fail)
    found = job_of_app("local_cwd")
    with pytest.raises(type(error)):
        found.apply()
    assert running_apps == []
    assert not found.active
    assert list(registry._directory().iterdir()) == []


def test_no_replica_is_started_if_a_gateway_cannot_be(
    running_apps: list[RunningApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> NoReturn:
        assert not running_apps
        raise JobStartFailed("monarch is not installed")

    monkeypatch.setattr(process, "require_gateway_packages", refuse)
    with pytest.raises(JobStartFailed, match="monarch is not installed"):
        job_of_app("local_cwd").apply()


class Runner:
    """A torchx, and its runner: what all of them have in common."""

    def get_runner(self) -> Runner:
        return self

    def name(self) -> str:
        return "session"

    def dryrun(self, app: specs.AppDef, scheduler: str, cfg: object) -> SimpleNamespace:
        return SimpleNamespace(request=SimpleNamespace(app_id="app-1"))


class InterruptedRunner(Runner):
    """A torchx runner whose ``schedule`` starts an app and does not return."""

    def __init__(self, error: BaseException, cancels: Exception | None = None) -> None:
        self.apps: list[str] = []
        self.error, self.cancels = error, cancels

    def schedule(self, start: SimpleNamespace) -> NoReturn:
        self.apps.append(f"local_cwd://session/{start.request.app_id}")
        raise self.error

    def cancel(self, handle: str) -> None:
        if self.cancels is not None:
            raise self.cancels
        self.apps.remove(handle)


def app_on(scheduler: str) -> TorchXApp:
    role = specs.Role(name="trainer", image="img:1", entrypoint="env", args=COMMAND)
    return TorchXApp(specs.AppDef(name="app", roles=[role]), scheduler, {}, {})


def torchx_app(monkeypatch: pytest.MonkeyPatch, directory: Path, runner: InterruptedRunner) -> TorchXApp:
    monkeypatch.setattr(schedulers.tempfile, "tempdir", str(directory))
    monkeypatch.setattr(schedulers, "require_torchx", lambda: runner)
    return app_on("local_cwd")


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError("no memory"), JobStartFailed)]
)
def test_an_app_that_torchx_has_started_when_the_start_fails_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, raised: type[BaseException]
) -> None:
    runner = InterruptedRunner(error)
    with pytest.raises(raised):
        torchx_app(monkeypatch, tmp_path, runner)
    assert runner.apps == []
    assert list(tmp_path.iterdir()) == []


def test_an_app_that_torchx_can_neither_start_nor_end_is_reported_with_both_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = InterruptedRunner(OSError("no memory"), cancels=OSError("no daemon"))
    with pytest.raises(JobStartFailed, match=r"did not start 'app' on local_cwd: no memory\. .*local_cwd.*: no daemon"):
        torchx_app(monkeypatch, tmp_path, runner)
    assert list(tmp_path.iterdir()) == []


class Containers(Runner):
    """A Docker, and a torchx runner, whose containers run for a moment and fail: their image lacks Monarch."""

    def __init__(self, address: str, log: str) -> None:
        self.networks = {"torchx": SimpleNamespace(attrs={"IPAM": {"Config": [{"Gateway": "127.0.0.1"}]}})}
        network = {"NetworkSettings": {"Networks": {"torchx": {"IPAddress": address}}}}
        found = SimpleNamespace(attrs=network, labels={"torchx.pytorch.org/replica-id": "0"})
        self.containers = SimpleNamespace(list=lambda filters: [found])
        self.log, self.looks = log, 0

    def schedule(self, start: SimpleNamespace) -> None:
        pass

    def status(self, handle: str) -> SimpleNamespace:
        self.looks += 1
        return SimpleNamespace(state=SimpleNamespace(name="RUNNING" if self.looks < 3 else "FAILED"))

    def log_lines(self, handle: str, role: str, replica: int) -> list[str]:
        return [self.log]

    def cancel(self, handle: str) -> None:
        pass


def docker_app(monkeypatch: pytest.MonkeyPatch, docker: Containers) -> TorchXApp:
    monkeypatch.setattr(schedulers, "require_torchx", lambda: docker)
    monkeypatch.setattr(schedulers, "_docker", lambda: docker)
    monkeypatch.setattr(schedulers, "POLL", 0.0)
    return app_on("local_docker")


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("ModuleNotFoundError: No module named 'monarch'", ": its image img:1 lacks torchmonarch"),
        ("Killed", "\n"),
    ],
)
def test_containers_that_fail_before_their_hosts_listen_are_reported_with_the_reason(
    log: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedulers, "PORT", free_port())
    app = docker_app(monkeypatch, Containers("127.0.0.1", log))
    with pytest.raises(JobStartFailed, match=f"is FAILED{why}") as caught:
        app.wait_addresses()
    app.end()
    assert log in str(caught.value)


def test_a_container_whose_host_listens_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(schedulers, "PORT", port)
        app = docker_app(monkeypatch, Containers("127.0.0.1", ""))
        assert app.wait_addresses() == [f"tcp://127.0.0.1:{port}"]
        app.end()


def test_only_processes_of_this_machine_see_its_files() -> None:
    local, docker = job_of_app("local_cwd"), job_of_app("local_docker")
    assert isinstance(local, TorchXJob)
    assert isinstance(docker, TorchXJob)
    assert (local.shares_files, docker.shares_files) == (True, False)


@pytest.mark.parametrize("scheduler", ["k8s", "kubernetes"])
def test_an_app_on_kubernetes_is_a_kubernetes_job(scheduler: str) -> None:
    config = {"namespace": "team", "service_account": "runner", "priority_class": "high", "queue": "q"}
    resource = specs.Resource(cpu=4, gpu=2, memMB=2048)
    found = job_of_app(scheduler, config, num_replicas=3, env={"A": "1"}, resource=resource)
    assert isinstance(found, KubernetesJob)
    mesh = found._request.meshes[0]
    assert (mesh.name, mesh.replicas, found._request.namespace) == ("workers", 3, "team")
    text = repr(found._request)
    for expected in ("img:1", "'4'", "2048Mi", "gpus=2", "runner", "high", "'A': '1'"):
        assert expected in text


def test_a_command_on_kubernetes_has_as_many_pods_as_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_WORKER_IMAGE", "worker:1")
    found = job("kubernetes", command=["torchrun", "--nnodes=1:4", "train.py"])
    assert isinstance(found, KubernetesJob)
    assert found._request.meshes[0].replicas == 4


def test_an_app_on_slurm_is_a_slurm_job() -> None:
    config = {"partition": "gpu", "time": "10", "constraint": "a100", "login": "me@login", "qos": None}
    resource = specs.Resource(cpu=3, gpu=2, memMB=2048)
    found = job_of_app("slurm", config, image="", num_replicas=2, env={"A": "1"}, resource=resource)
    assert isinstance(found, SlurmJob)
    expected = {
        "meshes": {"workers": 2},
        "partition": "gpu",
        "time_limit": "10",
        "slurm_args": ["--constraint=a100"],
        "exclusive": False,
        "cpus_per_task": 3,
        "gpus_per_node": 2,
        "mem": "2048M",
        "env": {"A": "1"},
    }
    assert {name: found._arguments[name] for name in expected} == expected
    assert found._login_name == "me@login"


def test_a_command_on_slurm_has_as_many_nodes_as_it_asks_for() -> None:
    found = job("slurm", command=["torchrun", "--nnodes=3", "train.py"])
    assert isinstance(found, SlurmJob)
    assert (found._arguments["meshes"], found._arguments["exclusive"]) == ({"workers": 3}, True)


def test_slurm_has_no_images() -> None:
    with pytest.raises(ValueError, match=r"role 'trainer': image='img:1' is not supported with the scheduler slurm"):
        job_of_app("slurm")


def test_configuration_that_a_job_does_not_take_is_named() -> None:
    with pytest.raises(
        ValueError, match="scheduler_cfg of kubernetes: reserved_memmb is not supported; supported: name"
    ):
        job_of_app("kubernetes", {"reserved_memmb": 5})
    with pytest.raises(ValueError, match="max_retries is not supported with the scheduler kubernetes"):
        job_of_app("kubernetes", max_retries=1)


def app(*more: specs.Role, **fields: Any) -> specs.AppDef:
    role = specs.Role(**{"name": "trainer", "image": "img", "entrypoint": "run.sh", "args": ARGS, **fields})
    return specs.AppDef(name="my-training", roles=[role, *more])


def test_an_entrypoint_that_runs_its_arguments_is_a_wrapper() -> None:
    role = read_appdef(app(num_replicas=2, env={"A": "1"}, resource=specs.Resource(cpu=4, gpu=8, memMB=1024)))
    assert (role.command, role.wrapper, role.replicas) == (tuple(ARGS), ("run.sh",), 2)
    assert (role.image, role.environment, role.cpus, role.gpus, role.memory_mb) == ("img", {"A": "1"}, 4, 8, 1024)


def test_an_entrypoint_may_be_the_command_itself() -> None:
    role = read_appdef(app(entrypoint="/usr/bin/python", args=["-m", "torchrun", "train.py"]))
    assert role.command == ("/usr/bin/python", "-m", "torchrun", "train.py")
    assert role.wrapper == ()


def test_resources_that_are_not_given_are_left_to_the_job() -> None:
    role = read_appdef(app())
    assert (role.cpus, role.gpus, role.memory_mb) == (None, None, None)


@pytest.mark.parametrize(
    ("appdef", "message"),
    [
        (specs.AppDef(name="x", roles=[]), "the AppDef 'x' has 0 roles"),
        (app(specs.Role(name="other", image="")), "has 2 roles: SPMD jobs have one"),
        (app(args=["bash", "x"]), r"role 'trainer' runs 'run.sh bash x': expected torchrun"),
        (app(num_replicas=0), "num_replicas=0: expected at least 1"),
    ],
)
def test_what_is_not_one_role_with_torchrun_is_refused(appdef: specs.AppDef, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_appdef(appdef)


def test_what_is_not_an_appdef_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a command as a list of strings, or a torchx AppDef, not 3"):
        read_appdef(3)


def test_the_first_project_of_the_workspace_is_the_directory(tmp_path: Path) -> None:
    assert read_appdef(app(workspace=specs.Workspace({str(tmp_path): ""}))).workspace == str(tmp_path)
    with pytest.raises(ValueError, match=r"its workspace .*/nowhere is not a directory"):
        read_appdef(app(workspace=specs.Workspace({str(tmp_path / "nowhere"): ""})))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_replicas", 1),
        ("max_retries", 2),
        ("port_map", {"http": 80}),
        ("mounts", [specs.BindMount("/a", "/b")]),
    ],
)
def test_fields_that_a_job_does_not_take_are_named(field: str, value: Any) -> None:
    refuse_unmapped(app(), "kubernetes")
    with pytest.raises(ValueError, match=f"role 'trainer': {field} is not supported with the scheduler kubernetes"):
        refuse_unmapped(app(**{field: value}), "kubernetes")


@pytest.mark.parametrize("field", ["capabilities", "devices"])
def test_resources_that_a_job_does_not_take_are_named(field: str) -> None:
    resource = specs.Resource(cpu=1, gpu=0, memMB=1, **{field: {"x": 1}})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"resource\.{field} is not supported"):
        refuse_unmapped(app(resource=resource), "kubernetes")
