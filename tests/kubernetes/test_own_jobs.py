"""Users of one provisioning gateway, with its URL, a token of their own and no kubeconfig: they come back to their own
jobs, and to those of a group that the policy names, and to no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate import Client, Compute, KubernetesJob, UrlDialer
from meshgate.cli.app import COMMANDS, app
from meshgate.cli.console import NO_JOB
from meshgate.errors import AuthenticationError, JobError, JobNotRunning, JobStartFailed
from meshgate.session.gateway_client import request_json
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl, own_namespace
from tests.kubernetes.network import local_port
from tests.kubernetes.test_provisioning import TOKEN, deployed
from tests.waiting import wait_for

STARTS = """
import sys
from meshgate import Actor, Compute, KubernetesJob, endpoint

class Counter(Actor):
    def __init__(self):
        self.total = 0

    @endpoint
    def add(self, number):
        self.total += number
        print("the total is", self.total)
        return self.total

job = KubernetesJob(compute=Compute(memory="500Mi"), name=sys.argv[1], namespace=sys.argv[2], detached="train")
counters = job.state(cached_path=None).workers.spawn_procs(name="procs").spawn("counters", Counter)
print(counters.add.call_one(1).get(timeout=60))
"""

COMES_BACK = """
import sys
from meshgate import KubernetesJob

def find():
    return KubernetesJob(name=sys.argv[1], namespace=sys.argv[2])

print(find().state(cached_path=None).workers.sizes["hosts"])
print([session.name for session in find().sessions() if session.detached])
job = find()
session = job.attach("train")
print(session.actors["counters"].add.call_one(10).get(timeout=60))
"""


PRINTED = "[alices-workers-0 counters rank 0] the total is"


@dataclass
class User:
    """A service account, which knows the gateway's URL."""

    name: str
    home: Kubectl
    namespace: str  # of jobs
    url: str
    directory: Path

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        self.home("create", "serviceaccount", self.name)
        self.token = self.home.token_of(self.name)

    @property
    def identity(self) -> str:
        return f"kubernetes:system:serviceaccount:{self.home.namespace}:{self.name}"

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "MESHGATE_URL": self.url,
            "MESHGATE_TOKEN": self.token,
            "KUBECONFIG": str(self.directory / "no-kubeconfig"),
            "HOME": str(self.directory),
            "MESHGATE_PROGRESS": "off",
        }

    def sets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes this process act for the user. The token takes precedence over the kubeconfig, which kubectl needs."""
        monkeypatch.setenv("MESHGATE_URL", self.url)
        monkeypatch.setenv("MESHGATE_TOKEN", self.token)

    def runs(self, program: str, *arguments: str) -> str:
        """The output of a program of this user's."""
        file = self.directory / "program.py"
        file.write_text(program)
        command = [sys.executable, "-W", "error", str(file), *arguments]
        environment = {**os.environ, **self.environment}
        ran = subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def command(self, *arguments: str) -> tuple[int, str]:
        """The exit code and the output of ``meshgate``."""
        done = CliRunner().invoke(app, arguments, env=dict(self.environment))
        return done.exit_code, done.output

    def dialer(self, job: str) -> UrlDialer:
        """The way to a job's gateway that a client with this user's token has."""
        return UrlDialer(f"{self.url}/v1/jobs/{self.namespace}/{job}", self.token)


@pytest.fixture(scope="module")
def users(
    kubectl: Kubectl, images: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, User]]:
    """Alice and Bob share nothing; Carol and Dave are in a group that the policy names, in a namespace of their own."""
    directory = tmp_path_factory.mktemp("overlay")
    groups = [f"system:serviceaccounts:{name}" for name in (kubectl.namespace, f"{kubectl.namespace}-shared")]
    with own_namespace(f"{kubectl.namespace}-shared") as shared, ExitStack() as open_:
        alice = f"system:serviceaccount:{kubectl.namespace}:alice"
        policy = {"callers": groups, "sharing_groups": groups[1:], "submitters": [alice]}
        open_.enter_context(deployed(kubectl, images, directory, **policy))
        url = f"ws://127.0.0.1:{open_.enter_context(local_port(kubectl, 'service/meshgate'))}"
        people = {"alice": kubectl, "bob": kubectl, "carol": shared, "dave": shared}
        yield {
            name: User(name, home, kubectl.namespace, url, tmp_path_factory.mktemp(name))
            for name, home in people.items()
        }
        for name in ("alice", "bob"):
            kubectl("delete", "serviceaccount", name, "--ignore-not-found")


@pytest.fixture(scope="module")
def job(users: dict[str, User], kubectl: Kubectl) -> Iterator[str]:
    """Alice's job, with a detached session that her program has left."""
    alice = users["alice"]
    assert sorted(alice.runs(STARTS, "alices", alice.namespace).splitlines()) == ["1", f"{PRINTED} 1"]
    yield "alices"
    assert alice.command("kill", "-n", alice.namespace, "alices") == (0, f"ended {alice.namespace}/alices\n")


def test_a_user_comes_back_to_a_job_with_a_token_alone(users: dict[str, User], job: str) -> None:
    alice = users["alice"]
    came_back = alice.runs(COMES_BACK, job, alice.namespace).splitlines()
    assert sorted(came_back) == sorted(["1", "['train']", f"{PRINTED} 11", "11"])
    code, output = alice.command("ls", "-n", alice.namespace, "--json")
    (row,) = json.loads(output)["jobs"]
    assert (code, row["id"], row["owner"], row["meshes"]) == (0, job, alice.identity, {"workers": 1})
    assert [each["id"] for each in json.loads(alice.command("ls", "--json")[1])["jobs"]] == [job]
    code, output = alice.command("status", "-n", alice.namespace, job)
    assert (code, "counters" in output) == (0, True), output
    code, output = alice.command("logs", "-n", alice.namespace, job)
    assert (code, f"{PRINTED} 1\n" in output) == (0, True), output
    assert alice.command("describe", "-n", alice.namespace, job)[0] == 0
    assert "train" in alice.command("sessions", "-n", alice.namespace, job)[1]
    code, output = alice.command("doctor")
    assert (code, f"which may use these: {alice.namespace}/{job}\n" in output) == (0, True), output
    ran = alice.runs("import meshgate.__main__", "exec", "-n", alice.namespace, job, "--", "hostname")
    assert "alices-workers-0" in ran


JOB_COMMANDS = [
    "status JOB", "sessions JOB", "describe JOB", "logs JOB", "sync JOB", "exec JOB -- true", "shell JOB", "debug JOB",
    "forward 8000 -j JOB", "pull file here -j JOB", "stacks JOB", "why JOB", "top JOB --once", "ui JOB --no-browser",
    "doctor JOB", "kill JOB", "kill JOB --session train", "scale JOB workers 2", "submit JOB -- true", "runs JOB",
    "stop JOB --run night", "call counters.add 1 -j JOB",
]  # fmt: skip


def test_these_are_all_commands_that_take_a_job() -> None:
    taking = {
        name for name, place in COMMANDS.items() if "namespace" in {each.name for each in place.load(name).params}
    }
    assert {command.split()[0] for command in JOB_COMMANDS} == taking - {"ls"}


@pytest.mark.parametrize("command", JOB_COMMANDS)
def test_another_user_is_refused_every_command_and_reads_whose_the_job_is(
    users: dict[str, User], job: str, command: str
) -> None:
    bob = users["bob"]
    verb, *options = command.replace("JOB", job).split()
    code, output = bob.command(verb, "-n", bob.namespace, *options)
    assert code == 1
    assert f"job 'alices' in namespace {bob.namespace!r} belongs to {users['alice'].identity}, and " in output
    verb, *options = command.replace("JOB", "missing").split()
    code, output = bob.command(verb, "-n", bob.namespace, *options)
    assert code == NO_JOB
    assert f"there is no job 'missing' in namespace {bob.namespace!r}" in output


def test_another_user_gets_nowhere_with_the_library(
    users: dict[str, User], job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = users["bob"]
    bob.sets(monkeypatch)

    def theirs() -> KubernetesJob:
        return KubernetesJob(name=job, namespace=bob.namespace)

    for call in (
        lambda: theirs().state(cached_path=None),
        lambda: theirs().sessions(cached_path=None),
        lambda: theirs().attach("train", cached_path=None),
    ):
        with pytest.raises(JobError, match=f"belongs to {users['alice'].identity}"):
            call()
    with pytest.raises(JobNotRunning, match="there is no job 'missing'"):
        KubernetesJob(name="missing", namespace=bob.namespace).state(cached_path=None)
    assert json.loads(bob.command("ls", "-n", bob.namespace, "--json")[1])["jobs"] == []
    assert json.loads(bob.command("ls", "-A", "--json")[1])["jobs"] == []
    with pytest.raises(JobStartFailed, match=f"a job 'alices' of {users['alice'].identity} is already running"):
        KubernetesJob(compute=Compute(memory="500Mi"), name=job, namespace=bob.namespace).apply()


@pytest.mark.parametrize(
    "path", ["/v1/job", "/v1/hosts?mesh=workers", "/v1/sessions", "/v1/status", "/v1/output", "/v1/runs"]
)
def test_another_user_gets_no_answer_of_the_jobs_gateway(users: dict[str, User], job: str, path: str) -> None:
    """Without the library, which would ask whether it may first."""
    with pytest.raises(AuthenticationError, match=f"belongs to {users['alice'].identity}"):
        request_json(users["bob"].dialer(job), path)
    assert request_json(users["alice"].dialer(job), path)


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/runs/night/stop", f"/v1/sessions/{'0' * 32}/end"])
def test_another_user_changes_nothing_through_the_jobs_gateway(users: dict[str, User], job: str, path: str) -> None:
    with pytest.raises(AuthenticationError, match=f"belongs to {users['alice'].identity}"):
        request_json(users["bob"].dialer(job), path, b"{}")


def test_another_user_gets_no_session(users: dict[str, User], job: str) -> None:
    sessions = request_json(users["alice"].dialer(job), "/v1/sessions")["sessions"]
    for session_id in (sessions[0]["id"], None):
        with pytest.raises(AuthenticationError, match=f"belongs to {users['alice'].identity}"):
            Client.connect(users["bob"].dialer(job), session_id=session_id)


def audited(kubectl: Kubectl, deployment: str) -> list[dict[str, Any]]:
    """The audit log of a gateway."""
    lines = kubectl("logs", f"deployment/{deployment}").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event for event in events if event.get("event") == "audit"]


def test_the_audit_logs_of_both_gateways_name_the_user_the_verb_the_job_and_the_decision(
    users: dict[str, User], job: str, kubectl: Kubectl
) -> None:
    alice, bob = users["alice"], users["bob"]
    alice.command("status", "-n", alice.namespace, job)
    bob.command("status", "-n", bob.namespace, job)
    with pytest.raises(AuthenticationError):
        request_json(bob.dialer(job), "/v1/output")

    def found(deployment: str, *names: str) -> set[tuple[str, ...]]:
        return {tuple(event.get(name, "") for name in names) for event in audited(kubectl, deployment)}

    names = ("caller", "action", "verb", "job", "namespace", "outcome")
    here = (job, kubectl.namespace)
    wanted = {
        (alice.identity, "start job", "", *here, "allowed"),
        (alice.identity, "find job", "", *here, "allowed"),
        (alice.identity, "forward", "session", *here, "allowed"),
        (alice.identity, "forward", "read status", *here, "allowed"),
        (bob.identity, "find job", "", *here, "refused"),
        (bob.identity, "forward", "read output", *here, "refused"),
    }
    wait_for(lambda: found("meshgate", *names) >= wanted, "the audit log of the provisioning gateway")

    def in_the_job() -> set[tuple[str, ...]]:
        return found(f"{job}-gateway", "caller", "action", "job", "namespace", "outcome")

    wanted = {
        (alice.identity, "session", *here, "allowed"),
        (alice.identity, "read status", *here, "allowed"),
    }
    wait_for(lambda: in_the_job() >= wanted, "the audit log of the job's gateway")
    assert {caller for caller, *_ in in_the_job()} == {alice.identity}


def test_a_user_scales_a_job_within_the_policy_while_its_session_continues(
    users: dict[str, User], job: str, kubectl: Kubectl
) -> None:
    alice = users["alice"]
    scale = ("scale", "-n", alice.namespace, job, "workers")
    assert alice.command(*scale, "2") == (0, "mesh workers has 2 hosts\n")
    (row,) = json.loads(alice.command("ls", "-n", alice.namespace, "--json")[1])["jobs"]
    assert row["meshes"] == {"workers": 2}
    code, output = alice.command(*scale, "99")
    assert (code, "from 2 to 99 hosts: " in output, "99 pods exceed the limit of " in output) == (1, True, True), output
    assert alice.command(*scale, "1") == (0, "mesh workers has 1 hosts\n")
    assert "train" in alice.command("sessions", "-n", alice.namespace, job)[1]

    def decisions() -> list[tuple[str, str, str]]:
        events = [event for event in audited(kubectl, "meshgate") if event["action"] == "scale job"]
        return [(event["caller"], event["job"], event["outcome"]) for event in events]

    allowed = (alice.identity, job, "allowed")
    wait_for(lambda: decisions() == [allowed, (*allowed[:2], "refused"), allowed], "the audit log")


def submit(user: User, job: str) -> tuple[int, str]:
    """Submits a program that prints its credentials, and follows it. Returns the exit code and the output of the
    command, which is a process of its own, as the session that it opens ends with it."""
    project = user.directory / "project"
    project.mkdir()
    (project / "prints.py").write_text(
        "import os\nprint('secret', os.environ['MESHGATE_RUN_TOKEN'], 'MESHGATE_TOKEN' in os.environ)\n"
    )
    arguments = ["--name", "night", "--dir", ".", "-f", "--", "python", "prints.py"]
    done = subprocess.run(
        [sys.executable, "-m", "meshgate", "submit", "-n", user.namespace, job, *arguments],
        cwd=project, env={**os.environ, **user.environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_run_has_a_secret_that_opens_nothing_at_the_provisioning_gateway(
    users: dict[str, User], job: str, kubectl: Kubectl
) -> None:
    alice = users["alice"]
    code, output = submit(alice, job)
    assert code == 0, output
    secret, has_token = output.partition("secret ")[2].split()
    assert has_token == "False"
    token = kubectl("get", "secret", f"{job}-token", "-o", "go-template={{.data.token | base64decode}}")
    for presented in (secret, token):
        assert presented not in (alice.token, TOKEN)
        with pytest.raises(AuthenticationError, match="accepts these credentials"):
            request_json(UrlDialer(f"{alice.url}/v1/jobs/{alice.namespace}/{job}", presented), "/v1/job")
    (event,) = [each for each in audited(kubectl, f"{job}-gateway") if each["action"] == "submit run"]
    assert (event["caller"], event["run"], event["outcome"]) == (alice.identity, "night", "allowed")


@pytest.mark.slow
def test_members_of_a_group_that_the_policy_names_share_their_jobs(users: dict[str, User]) -> None:
    carol, dave, alice = users["carol"], users["dave"], users["alice"]
    carol.runs(STARTS, "shared", carol.namespace)
    assert json.loads(dave.command("ls", "--json")[1])["jobs"][0]["owner"] == carol.identity
    assert "11" in dave.runs(COMES_BACK, "shared", dave.namespace).splitlines()
    code, output = submit(dave, "shared")
    assert (code, "dave to submit programs (submitters: " in output) == (1, True), output
    assert "belongs to" in alice.command("kill", "-n", alice.namespace, "shared")[1]
    assert dave.command("kill", "-n", dave.namespace, "shared") == (0, f"ended {dave.namespace}/shared\n")


def _call_for_ever(trainers: Any) -> None:
    while True:
        trainers.pod.call_one().get(timeout=90)


@pytest.mark.slow
def test_a_user_whose_account_is_deleted_is_out_within_a_minute(
    users: dict[str, User], kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leaver = User("leaver", kubectl, kubectl.namespace, users["alice"].url, tmp_path / "leaver")
    leaver.sets(monkeypatch)
    compute = Compute(memory="500Mi")
    with KubernetesJob(compute=compute, name="left", namespace=leaver.namespace, detached="open") as job:
        trainers = job.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
        assert trainers.pod.call_one().get(timeout=60) == "left-workers-0"
        kubectl("delete", "serviceaccount", "leaver")
        deleted = time.monotonic()
        with pytest.raises(AuthenticationError):
            _call_for_ever(trainers)
        lasted = time.monotonic() - deleted
    assert leaver.command("status", "-n", leaver.namespace, "left")[0] == 1
    print(f"an open session lasted {lasted:.0f} s")
    assert lasted < 60
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)  # the operator's
    KubernetesJob(name="left", namespace=leaver.namespace).kill()
