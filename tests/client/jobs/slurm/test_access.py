"""A gateway behind a URL that submits to Slurm, as the driver sees it."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pydantic import BaseModel
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from meshgate import SlurmJob
from meshgate.errors import AuthenticationError, ConnectionFailedError, GatewayLostError, JobError, JobStartFailed
from meshgate.jobs import tokens
from meshgate.jobs.slurm import access as access_module
from meshgate.jobs.slurm.access import LoginAccess, NodeAccess, SlurmSilent, UrlAccess
from meshgate.jobs.slurm.login_node import CommandOutput, ThisMachine
from meshgate.session import gateway_client
from meshgate_slurm.messages import (
    CONFIRMATION,
    MARK,
    BatchRequest,
    EndJob,
    GatewayState,
    JobEnded,
    JobReport,
    JobUp,
    ProvisioningRequest,
    Rejected,
    RequestRejected,
    RunningSlurmJob,
    StartJob,
    StartRequest,
    parse_request,
)
from meshgate_slurm.spec import SlurmSpec
from tests.client.proofs import proof_for, prove_handshake
from tests.ports import closed_port
from tests.waiting import wait_for

JOB = RunningSlurmJob(
    apply_id="0123abcd", job_id=7, host="login", directory="/d", socket="/s", pid=1, started="1", token="job's",
    meshes={"a": 1}, log_dir="/l",
)  # fmt: skip
START = StartRequest(apply_id="0123abcd", spec=SlurmSpec(meshes={"a": 1}))


class FakeGateway:
    """Sends ``scripts[n]`` on its n-th connection, and ``about`` with ``status`` to each GET."""

    def __init__(self, *scripts: tuple[BaseModel, ...], status: int = 200, about: dict[str, Any] | None = None) -> None:
        self.scripts = list(scripts)
        self.status, self.about = status, about or {}
        self.proves = True
        self.requests: list[ProvisioningRequest] = []
        self.paths: list[tuple[str, str]] = []
        self.tokens: list[str] = []  # of those that ask for a job

    def respond(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/v1/jobs":
            self.tokens.append(request.headers["Authorization"])
            return None
        self.paths.append((request.path, request.headers["Authorization"]))
        body = json.dumps(self.about).encode()
        proof = proof_for(request.headers, self.status, body) if self.proves else {}
        headers = Headers({"Content-Length": str(len(body)), **proof})
        return Response(self.status, http.HTTPStatus(self.status).phrase, headers, body)

    def serve(self, connection: ServerConnection) -> None:
        self.requests.append(parse_request(connection.recv()))
        for message in self.scripts.pop(0) if self.scripts else ():
            connection.send(message.model_dump_json())


@contextmanager
def running(gateway: FakeGateway) -> Iterator[UrlAccess]:
    prove = prove_handshake if gateway.proves else None
    server = serve(
        gateway.serve, "127.0.0.1", 0, process_request=gateway.respond, process_response=prove, close_timeout=1
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield UrlAccess(f"ws://127.0.0.1:{server.socket.getsockname()[1]}")
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", "mine")
    monkeypatch.setattr(gateway_client, "FIRST_DELAY", 0.01)


def started(access: UrlAccess, request: StartRequest = START) -> RunningSlurmJob:
    known: list[RunningSlurmJob] = []
    access.start(request, known.append)
    return known[0]


def test_a_job_is_submitted_once_though_the_connection_is_cut() -> None:
    gateway = FakeGateway((), (JobUp(job=JOB),))
    with running(gateway) as access:
        assert started(access) == JOB
    assert gateway.requests == [StartJob(apply_id="0123abcd", spec=START.spec)] * 2


def test_a_batch_job_carries_its_command() -> None:
    gateway = FakeGateway((JobUp(job=JOB),))
    request = BatchRequest(apply_id="0123abcd", spec=START.spec, client="python train.py", directory="~")
    with running(gateway) as access:
        assert started(access, request) == JOB
    assert gateway.requests == [StartJob(apply_id="0123abcd", spec=START.spec, client="python train.py")]


def test_a_refusal_carries_the_reason_and_the_last_output() -> None:
    refusal = RequestRejected(reason="3 nodes exceed the limit of 2", output="the end of a log")
    with running(FakeGateway((refusal,))) as access, pytest.raises(JobStartFailed) as failed:
        started(access)
    assert "3 nodes exceed the limit of 2" in str(failed.value)
    assert "the end of a log" in str(failed.value)
    silence = RequestRejected(reason="sbatch failed: connect failure", silent=True)
    with running(FakeGateway((silence,))) as access, pytest.raises(SlurmSilent, match="connect failure"):
        started(access)


class InterruptingGateway(FakeGateway):
    """Interrupts its client, as Ctrl-C does, which waits for the reply to its first request."""

    def serve(self, connection: ServerConnection) -> None:
        if self.requests:
            super().serve(connection)
            return
        self.requests.append(parse_request(connection.recv()))
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        with contextlib.suppress(ConnectionClosed):
            connection.recv()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (JobEnded(state="CANCELLED"), ""),
        (RequestRejected(reason="no job", missing=True), ""),
        (
            RequestRejected(reason="sbatch hangs"),
            "it is not known whether {access} has cancelled monarch_job (sbatch hangs). `squeue --name=monarch_job` on "
            "the cluster lists it if not, and `scancel` with its number ends it\n",
        ),
    ],
)
def test_a_submission_that_ctrl_c_interrupts_is_withdrawn(
    capsys: pytest.CaptureFixture[str], reply: BaseModel, said: str
) -> None:
    gateway = InterruptingGateway((reply,))
    known: list[RunningSlurmJob] = []
    with running(gateway) as access, pytest.raises(KeyboardInterrupt):
        access.start(START, known.append)
    assert not known
    assert [type(request) for request in gateway.requests] == [StartJob, EndJob]
    first, *others = capsys.readouterr().err.split("\nmeshgate: ")[1:]
    assert first == f"waiting until {access} has cancelled the submission of monarch_job. Ctrl-C again does not wait\n"
    assert others == ([said.format(access=access)] if said else [])


def test_a_job_of_which_only_an_unreadable_reply_came_is_withdrawn() -> None:
    gateway = FakeGateway((GatewayState(host="login", alive=True),), (JobEnded(state="CANCELLED"),))
    with running(gateway) as access, pytest.raises(JobError, match="cannot read"):
        started(access)
    assert [type(request) for request in gateway.requests] == [StartJob, EndJob]


class SilentGateway(FakeGateway):
    """Does not reply to its first request."""

    def serve(self, connection: ServerConnection) -> None:
        if self.requests:
            super().serve(connection)
            return
        self.requests.append(parse_request(connection.recv()))
        with contextlib.suppress(ConnectionClosed):
            connection.recv()


def test_a_submission_without_a_reply_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "ANSWER_TIMEOUT", 0.5)
    gateway = SilentGateway((JobEnded(state="CANCELLED"),))
    with running(gateway) as access, pytest.raises(ConnectionFailedError, match=r"did not reply within 0\.5 s"):
        started(access)
    assert [type(request) for request in gateway.requests] == [StartJob, EndJob]


def test_a_submission_that_no_gateway_has_received_is_not_withdrawn(capsys: pytest.CaptureFixture[str]) -> None:
    with closed_port() as port, pytest.raises(ConnectionFailedError, match="cannot reach"):
        started(UrlAccess(f"ws://127.0.0.1:{port}"))
    assert capsys.readouterr().err == ""


class RejectingGateway(FakeGateway):
    """Serves its first connection and answers ``rejections`` to the others: statuses, or None to serve them too."""

    def __init__(self, *rejections: int | None, scripts: tuple[tuple[BaseModel, ...], ...] = ()) -> None:
        super().__init__((), *scripts)
        self.rejections = [None, *rejections]

    def respond(self, connection: ServerConnection, request: Request) -> Response | None:
        rejection = self.rejections.pop(0)
        if rejection is None:
            return super().respond(connection, request)
        body = b'{"error": "expired"}'
        headers = Headers({"Content-Length": str(len(body)), **proof_for(request.headers, rejection, body)})
        return Response(rejection, http.HTTPStatus(rejection).phrase, headers, body)


UNKNOWN = "`squeue --name=monarch_job` on the cluster lists it if not, and `scancel` with its number ends it"


@pytest.mark.parametrize("status", [401, 404, 410, 426])
def test_a_submission_is_withdrawn_if_the_next_connection_is_rejected(
    capsys: pytest.CaptureFixture[str], status: int
) -> None:
    gateway = RejectingGateway(status, None, scripts=((JobEnded(state="CANCELLED"),),))
    with running(gateway) as access, pytest.raises(ConnectionFailedError, match=r"could not reconnect: .+"):
        started(access)
    assert [type(request) for request in gateway.requests] == [StartJob, EndJob]
    assert UNKNOWN not in capsys.readouterr().err


def test_a_submission_that_cannot_be_withdrawn_either_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = RejectingGateway(401, 401)
    with running(gateway) as access, pytest.raises(ConnectionFailedError, match="rejected this client: expired"):
        started(access)
    assert [type(request) for request in gateway.requests] == [StartJob]
    assert capsys.readouterr().err.endswith(f"{UNKNOWN}\n")


def test_a_submission_that_is_rejected_at_once_is_not_withdrawn(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = RejectingGateway()
    gateway.rejections = [401]
    with running(gateway) as access, pytest.raises(AuthenticationError, match="expired"):
        started(access)
    assert capsys.readouterr().err == ""


class Submitting(ThisMachine):
    """A login node whose program is a shell script, which records what it receives after its reply."""

    def __init__(self, directory: Path, code: int = 0) -> None:
        self.received, self.code = directory / "received", code

    def submit(self, command: str, request: str, confirm: Callable[[str], bool]) -> CommandOutput:
        assert "meshgate_slurm.login start" in command
        reply = shlex.quote(f"{MARK}{JOB.model_dump_json()}")
        received = shlex.quote(str(self.received))
        keep = f"cat > {received}.new; mv {received}.new {received}"
        return super().submit(f"read r; echo {reply}; {keep}; exit {self.code}", request, confirm)


def test_a_login_node_learns_that_its_client_knows_the_job(tmp_path: Path) -> None:
    login, known = Submitting(tmp_path), list[RunningSlurmJob]()
    LoginAccess(login, "python").start(START, known.append)
    assert known == [JOB]
    assert login.received.read_text() == CONFIRMATION


def test_a_login_node_learns_that_its_client_was_interrupted_as_the_reply_came(tmp_path: Path) -> None:
    def interrupt(job: RunningSlurmJob) -> NoReturn:
        raise KeyboardInterrupt

    login = Submitting(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        LoginAccess(login, "python").start(START, interrupt)
    wait_for(login.received.exists, "the end of the program's input")
    assert login.received.read_text() == ""


def test_a_job_that_the_login_node_has_ended_has_not_started(tmp_path: Path) -> None:
    with pytest.raises(JobStartFailed, match="failed with exit code 1"):
        LoginAccess(Submitting(tmp_path, code=1), "python").start(START, lambda job: None)


def test_a_job_that_is_gone_counts_as_ended() -> None:
    replies = (JobEnded(state="CANCELLED"),), (RequestRejected(reason="no job", missing=True),)
    gateway = FakeGateway(*replies, (RequestRejected(reason="the login node did not answer"),))
    with running(gateway) as access:
        access.end(JOB)
        access.end(JOB)
        with pytest.raises(JobError, match="the login node did not answer"):
            access.end(JOB)
    assert gateway.requests == [EndJob(apply_id="0123abcd")] * 3


def test_the_report_comes_from_the_jobs_own_gateway_with_its_token() -> None:
    report = JobReport(job_id=7, state="RUNNING", registered=1, ready=1, nodes=1)
    gateway = FakeGateway(about={"slurm": report.model_dump()})
    with running(gateway) as access:
        assert access.report(JOB) == report
        assert access.is_running(JOB)
        gateway.about = {"slurm": {**report.model_dump(), "ended": True}}
        assert not access.is_running(JOB)
    assert set(gateway.paths) == {("/v1/jobs/0123abcd/v1/job", "Bearer job's")}


@pytest.mark.parametrize(
    ("status", "about", "running_job"),
    [
        (401, {"error": "no job 0123abcd accepts these credentials"}, False),
        (410, {"error": "gone", "kind": "unknown", "reason": "its process has ended"}, False),
        (503, {"error": "retry later"}, None),
        (200, {"meshes": {}}, None),
    ],
)
def test_a_job_is_over_only_if_its_gateway_is_known_to_be(
    status: int, about: dict[str, Any], running_job: bool | None
) -> None:
    with running(FakeGateway(status=status, about=about)) as access:
        if running_job is None:
            with pytest.raises(ConnectionFailedError):
                access.is_running(JOB)
        else:
            assert access.is_running(JOB) is running_job


def test_a_url_needs_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MESHGATE_TOKEN")
    (tmp_path / "of-the-pod").write_text("secret")
    monkeypatch.setattr(tokens, "SERVICE_ACCOUNT_TOKEN", tmp_path / "of-the-pod")  # which is not for a Slurm cluster
    with pytest.raises(JobError, match="no token: set MESHGATE_TOKEN, MESHGATE_TOKEN_FILE or"):
        UrlAccess("wss://login.example.org")


def test_the_token_may_be_in_a_file_that_is_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MESHGATE_TOKEN")
    file = tmp_path / "token"
    monkeypatch.setenv("MESHGATE_TOKEN_FILE", str(file))
    file.write_text("first\n")
    gateway = FakeGateway((JobUp(job=JOB),), (JobUp(job=JOB),))
    with running(gateway) as access:
        started(access)
        file.write_text("second\n")
        started(access)
    assert gateway.tokens == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"login": "me@login"}, r"SlurmJob\(login='me@login', gateway_url=.*pass only one"),
        ({"gateway_on": "node"}, r"gateway_on='node'\): .*on its own machine; remove gateway_on"),
        ({"gateway_url": "login.example.org:8443"}, r"gateway_url='login.example.org:8443'\): expected ws://"),
        ({"python_exe": "~/venv/bin/python"}, "pass an absolute path that the gateway's policy allows"),
    ],
)
def test_arguments_that_contradict_the_url_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SlurmJob({"a": 1}, **{"gateway_url": "wss://login.example.org", **arguments})


def test_a_saved_job_keeps_the_url_and_not_the_callers_token() -> None:
    job = SlurmJob({"a": 1}, gateway_url="wss://login.example.org")
    spec = job._spec()
    assert SlurmJob._restore(spec, None)._gateway_url == "wss://login.example.org"
    assert "mine" not in json.dumps(spec)
    assert "gateway_url='wss://login.example.org'" in repr(job)


class LoginNodeOf:
    """A login node whose program gives ``reports`` one after the other, and then the last one again."""

    connection = None

    def __init__(self, *reports: JobReport, gateway: str = "127.0.0.1:1") -> None:
        self.reports, self.asked = list(reports), 0
        self.gateway = gateway

    def open(self) -> None: ...

    def close(self) -> None: ...

    def run(self, command: str, stdin: str) -> CommandOutput:
        assert "report" in command
        self.asked += 1
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        return CommandOutput(0, f"{MARK}{report.model_dump_json()}\n", "")

    def forward(self, remote: str) -> str:
        assert remote == "n1:4711"
        return self.gateway


ON_NODE = JOB.model_copy(update={"socket": "", "host": "", "pid": 0, "started": ""})
PENDING = JobReport(job_id=7, state="PENDING", why="Resources", pending=True)
STARTED = JobReport(job_id=7, state="RUNNING", gateway="n1:4711")
ENDED = JobReport(job_id=7, state="TIMEOUT", ended=True, failed="Slurm ended job 7: TIMEOUT")


def test_slurm_is_asked_until_the_gateway_on_the_node_answers() -> None:
    gateway = FakeGateway(about={"slurm": {"job_id": 7, "state": "RUNNING", "registered": 1}})
    with running(gateway) as at:
        login = LoginNodeOf(PENDING, STARTED, gateway=str(at).rpartition("/")[2])
        access = NodeAccess(login, "python")
        assert access.report(ON_NODE) == PENDING
        assert [access.report(ON_NODE).registered for _ in range(2)] == [1, 1]
    assert login.asked == 2
    assert gateway.paths == [("/v1/job", "Bearer job's")] * 2


@pytest.mark.parametrize(("silent", "error"), [(True, SlurmSilent), (False, JobError)])
def test_a_slurm_that_does_not_answer_is_another_error_than_one_that_refuses(
    silent: bool, error: type[Exception]
) -> None:
    class Silent(LoginNodeOf):
        def run(self, command: str, stdin: str) -> CommandOutput:
            rejected = Rejected(error="squeue failed: Socket timed out", silent=silent)
            return CommandOutput(0, f"{MARK}{rejected.model_dump_json()}\n", "")

        def submit(self, command: str, request: str, confirm: Callable[[str], bool]) -> CommandOutput:
            return self.run(command, request)

    access = NodeAccess(Silent(), "python")
    for ask in (lambda: access.report(ON_NODE), lambda: access.start(START, lambda job: None)):
        with pytest.raises(error, match="squeue failed: Socket timed out") as raised:
            ask()
        assert isinstance(raised.value, SlurmSilent) == silent


def never(remote: str) -> NoReturn:
    raise AssertionError(f"asked {remote}")


def test_a_gateway_on_a_node_is_gone_when_slurm_has_ended_the_job() -> None:
    login = LoginNodeOf(STARTED, STARTED, ENDED)
    access = NodeAccess(login, "python")
    with pytest.raises(OSError, match="refused"):  # it does not answer, and the job runs
        access.report(ON_NODE)
    assert access.report(ON_NODE) == ENDED
    assert not access.is_running(ON_NODE)
    access._login.forward = never  # type: ignore[method-assign] - a connection to a node without power takes long
    assert access.report(ON_NODE) == ENDED
    assert login.asked == 3
    del access._login.forward
    dialer = access.dialer(ON_NODE)
    assert asyncio.run(dialer.gone()) == "Slurm ended job 7: TIMEOUT"
    route = asyncio.run(dialer.dial())
    assert (route.url, route.ping_interval) == ("ws://127.0.0.1:1", 5.0)  # the end of a node closes no connection


def test_a_client_that_dials_before_there_is_a_gateway_gets_the_state() -> None:
    dialer = NodeAccess(LoginNodeOf(PENDING), "python").dialer(ON_NODE)
    with pytest.raises(ConnectionFailedError, match="job 7 is PENDING, and has no gateway yet"):
        asyncio.run(dialer.dial())
    assert asyncio.run(dialer.gone()) is None


class LoginNodeWith(LoginNodeOf):
    """A login node on which nothing listens at a gateway's socket, and whose program gives ``state`` and a report."""

    def __init__(self, state: GatewayState, report: JobReport) -> None:
        super().__init__(report)
        self.state = state

    def run(self, command: str, stdin: str) -> CommandOutput:
        reply = self.state if command.endswith("state") else self.reports[0]
        return CommandOutput(0, f"{MARK}{reply.model_dump_json()}\n", "")

    def forward(self, remote: str) -> str:
        return f"/nonexistent{remote}"


RUNNING_REPORT = JobReport(job_id=7, state="RUNNING")
KILLED = GatewayState(host="login", alive=False)
ELSEWHERE = GatewayState(host="login2", alive=False)


@pytest.mark.parametrize(("state", "report"), [(KILLED, RUNNING_REPORT), (ELSEWHERE, ENDED)])
def test_a_job_whose_gateway_was_killed_has_ended(state: GatewayState, report: JobReport) -> None:
    """Also if the login node's name leads to another machine now, which knows nothing but what Slurm says."""
    assert not LoginAccess(LoginNodeWith(state, report), "python").is_running(JOB)


def test_the_report_of_a_gateway_that_was_killed_says_so() -> None:
    access = LoginAccess(LoginNodeWith(KILLED, RUNNING_REPORT), "python")
    with pytest.raises(GatewayLostError, match="the gateway of Slurm job 7 on login is gone: its process on login has"):
        access.report(JOB)


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("ssh", 60.0), ConnectionFailedError("ssh cannot connect")])
def test_a_login_node_that_hangs_leaves_a_cut_a_cut(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def hang(command: str, stdin: str) -> NoReturn:
        raise error

    login = LoginNodeWith(KILLED, RUNNING_REPORT)
    monkeypatch.setattr(login, "run", hang)
    with pytest.raises(ConnectionFailedError, match="the gateway of Slurm job 7 does not answer: FileNotFoundError"):
        LoginAccess(login, "python").report(JOB)


def test_a_gateway_that_does_not_answer_is_named() -> None:
    access = LoginAccess(LoginNodeWith(ELSEWHERE, RUNNING_REPORT), "python")
    with pytest.raises(ConnectionFailedError, match="the gateway of Slurm job 7 does not answer: FileNotFoundError"):
        access.is_running(JOB)
