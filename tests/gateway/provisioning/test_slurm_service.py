"""Callers, requests and forwarded connections of a gateway that submits Slurm jobs. Slurm is the test's."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr
from websockets.exceptions import InvalidStatus

from meshgate_gateway.http.auth import TokenAuthenticator
from meshgate_gateway.provisioning import slurm_service
from meshgate_gateway.provisioning.slurm_policy import Caller, SlurmPolicy, why_not_use
from meshgate_gateway.provisioning.slurm_service import SlurmProvisioner
from meshgate_gateway.provisioning.slurm_submission import Account, Record, Submissions
from meshgate_slurm.commands import SlurmError, Unanswered
from meshgate_slurm.messages import (
    BatchRequest,
    EndJob,
    GatewayState,
    JobEnded,
    JobUp,
    ProvisioningReply,
    ProvisioningRequest,
    Rejected,
    RequestRejected,
    RunningSlurmJob,
    StartJob,
    StartRequest,
    parse_reply,
)
from meshgate_slurm.spec import SlurmSpec
from meshgate_wire.proof import ANY_GATEWAY, Prover, new_nonce
from tests.gateway.captured_logs import capture_logs
from tests.gateway.provisioning.provisioning_gateway import dial, run_at, served
from tests.waiting import DEADLINE

T = TypeVar("T")
OPERATOR = "correct-horse-battery-staple"
ID, OTHER_ID = "0123abcd", "4567abcd"
SPEC = SlurmSpec(meshes={"a": 1})
START = StartJob(apply_id=ID, spec=SPEC)


def caller(name: str) -> Caller:
    return Caller(name=name, token_sha256=hashlib.sha256(f"token of {name}".encode()).hexdigest(), user="daemon")


POLICY = SlurmPolicy(callers=(caller("alice"), caller("bob")), max_nodes=2, max_jobs_per_caller=1, python="/python")


class Slurm:
    """In place of ``Submissions``: jobs that run nowhere. ``go`` lets them start; they share one ``socket``."""

    def __init__(self, socket: str = "/nonexistent") -> None:
        self.records: dict[str, Record] = {}
        self.requests: list[StartRequest] = []
        self.refusal: Rejected | SlurmError | None = None
        self.socket, self.alive = socket, False
        self.go = threading.Event()
        self.go.set()
        self.started = threading.Event()

    def find(self, apply_id: str) -> Record | None:
        return self.records.get(apply_id)

    def running(self, owner: str) -> list[Record]:
        return [record for record in self.records.values() if record.owner == owner]

    def start(self, owner: str, account: Account, request: StartRequest) -> Record | Rejected:
        self.started.set()
        assert self.go.wait(DEADLINE)
        self.requests.append(request)
        if isinstance(self.refusal, SlurmError):
            raise self.refusal
        if self.refusal is not None:
            return self.refusal
        state = GatewayState(host="login", alive=self.alive, output="last words")

        class Stub(Record):
            def gateway_state(self) -> GatewayState:
                return state

        job = RunningSlurmJob(
            apply_id=request.apply_id, job_id=7, host="login", directory="", socket=self.socket, pid=1, started="1",
            token="token of the job", meshes={"a": 1}, log_dir="",
        )  # fmt: skip
        own = account.model_copy(update={"user": None})  # the user that runs the test
        self.records[request.apply_id] = Stub(owner=owner, account=own, job=job)
        return self.records[request.apply_id]

    def end(self, record: Record) -> str:
        del self.records[record.job.apply_id]
        return "CANCELLED"


def gateway(slurm: Slurm, policy: SlurmPolicy) -> AbstractAsyncContextManager[str]:
    token = TokenAuthenticator(SecretStr(OPERATOR))
    return served(SlurmProvisioner(policy, token, cast("Submissions", slurm)))


def with_gateway(slurm: Slurm, test: Callable[[str], Awaitable[T]], policy: SlurmPolicy = POLICY) -> T:
    return run_at(gateway(slurm, policy), test)


async def ask(url: str, message: ProvisioningRequest | str, token: str) -> ProvisioningReply:
    async with dial(url, token) as connection:
        await connection.send(message if isinstance(message, str) else message.model_dump_json())
        return parse_reply(await connection.recv())


def replies(
    slurm: Slurm, *messages: ProvisioningRequest | str, token: str = "token of alice", policy: SlurmPolicy = POLICY
) -> list[ProvisioningReply]:
    async def test(url: str) -> list[ProvisioningReply]:
        return [await ask(url, message, token) for message in messages]

    return with_gateway(slurm, test, policy)


def reason(reply: ProvisioningReply) -> str:
    assert isinstance(reply, RequestRejected), reply
    return reply.reason


def test_a_caller_starts_and_ends_a_job_as_its_user() -> None:
    slurm = Slurm()
    (up,) = replies(slurm, START)
    assert isinstance(up, JobUp)
    assert up.job.job_id == 7
    assert slurm.records[ID].owner == "caller:alice"
    assert slurm.records[ID].account.python == "/python"
    (ended,) = replies(slurm, EndJob(apply_id=ID))
    assert ended == JobEnded(state="CANCELLED")


def test_a_request_that_is_repeated_after_a_cut_waits_for_the_same_job() -> None:
    slurm = Slurm()
    slurm.go.clear()

    async def test(url: str) -> list[ProvisioningReply]:
        first = asyncio.create_task(ask(url, START, "token of alice"))
        async with dial(url, "token of alice") as cut:
            await cut.send(START.model_dump_json())
            cut.transport.abort()
        second = asyncio.create_task(ask(url, START, "token of alice"))
        slurm.go.set()
        return [await first, await second, await ask(url, START, "token of alice")]

    first, second, third = with_gateway(slurm, test)
    assert isinstance(first, JobUp)
    assert first == second == third
    assert len(slurm.requests) == 1


def test_the_end_of_a_job_that_is_starting_waits_for_the_start() -> None:
    slurm = Slurm()
    slurm.go.clear()

    async def test(url: str) -> list[ProvisioningReply]:
        start = asyncio.create_task(ask(url, START, "token of alice"))
        assert await asyncio.to_thread(slurm.started.wait, DEADLINE)
        end = asyncio.create_task(ask(url, EndJob(apply_id=ID), "token of alice"))
        done, _ = await asyncio.wait([end], timeout=0.05)
        assert not done
        slurm.go.set()
        return [await start, await end]

    started, ended = with_gateway(slurm, test)
    assert isinstance(started, JobUp)
    assert ended == JobEnded(state="CANCELLED")
    assert slurm.records == {}


def test_the_end_of_a_job_that_does_not_exist_waits_for_no_other() -> None:
    slurm = Slurm()
    slurm.go.clear()

    async def test(url: str) -> list[ProvisioningReply]:
        start = asyncio.create_task(ask(url, START, "token of alice"))
        assert await asyncio.to_thread(slurm.started.wait, DEADLINE)
        try:
            return [await asyncio.wait_for(ask(url, EndJob(apply_id=OTHER_ID), "token of alice"), DEADLINE / 2)]
        finally:
            slurm.go.set()
            await start

    (missing,) = with_gateway(slurm, test)
    assert isinstance(missing, RequestRejected)
    assert missing.missing


def test_a_job_that_was_ended_before_it_started_does_not_start() -> None:
    slurm = Slurm()
    ended, refused = replies(slurm, EndJob(apply_id=ID), START)
    assert isinstance(ended, RequestRejected)
    assert ended.missing
    assert "was ended before it started" in reason(refused)
    assert not slurm.requests


def test_a_batch_job_runs_in_the_home_of_its_user() -> None:
    slurm = Slurm()
    replies(slurm, StartJob(apply_id=ID, spec=SPEC, client="python train.py"))
    assert slurm.requests == [BatchRequest(apply_id=ID, spec=SPEC, client="python train.py", directory="~")]


def test_what_the_policy_forbids_and_what_slurm_refuses_is_the_reply() -> None:
    slurm = Slurm()
    large = StartJob(apply_id=ID, spec=SlurmSpec(meshes={"a": 3}))
    assert "does not allow this job: 3 nodes exceed the limit of 2" in reason(replies(slurm, large)[0])
    assert not slurm.requests
    slurm.refusal = Rejected(error="Slurm refused the job: invalid partition", output="the end of its log")
    (refused,) = replies(slurm, START)
    assert refused == RequestRejected(reason="Slurm refused the job: invalid partition", output="the end of its log")
    slurm.refusal = Rejected(error="sbatch failed: connect failure", silent=True)
    assert replies(slurm, START) == [RequestRejected(reason="sbatch failed: connect failure", silent=True)]
    slurm.refusal = Unanswered("squeue failed: connect failure")
    assert replies(slurm, START) == [RequestRejected(reason="squeue failed: connect failure", silent=True)]
    slurm.refusal = SlurmError("the login node did not answer")
    assert reason(replies(slurm, START)[0]) == "the login node did not answer"
    assert "same version of meshgate" in reason(replies(slurm, '{"ask": "find"}')[0])


def test_the_limit_of_jobs_counts_those_of_the_caller_alone() -> None:
    slurm = Slurm()
    other = StartJob(apply_id=OTHER_ID, spec=SPEC)
    _, refused = replies(slurm, START, other)
    assert (
        reason(refused)
        == "the limit of Slurm jobs per caller is 1, and these of caller:alice have not ended: 7. End one first"
    )
    (up,) = replies(slurm, other, token="token of bob")
    assert isinstance(up, JobUp)


def test_jobs_of_other_callers_look_as_if_they_did_not_exist() -> None:
    slurm = Slurm()
    replies(slurm, START)
    theirs, missing = replies(slurm, EndJob(apply_id=ID), EndJob(apply_id=OTHER_ID), token="token of bob")
    assert isinstance(theirs, RequestRejected)
    assert theirs.missing
    assert theirs.reason.replace(ID, OTHER_ID) == reason(missing)
    assert reason(replies(slurm, START, token="token of bob")[0]) == theirs.reason
    assert replies(slurm, EndJob(apply_id=ID), token=OPERATOR) == [JobEnded(state="CANCELLED")]


def test_the_gateways_own_token_starts_jobs_unless_it_is_root(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm()
    monkeypatch.setattr(slurm_service.os, "getuid", lambda: 0)
    assert "this gateway runs as root, and no job may" in reason(replies(slurm, START, token=OPERATOR)[0])
    assert not slurm.requests
    monkeypatch.setattr(slurm_service.os, "getuid", lambda: 1000)
    assert isinstance(replies(slurm, START, token=OPERATOR)[0], JobUp)
    assert slurm.records[ID].owner == "token"


@pytest.mark.parametrize("token", ["", "token of eve", "token of the job"])
def test_other_tokens_ask_for_nothing(token: str) -> None:
    slurm = Slurm()
    with pytest.raises(InvalidStatus) as refused:
        replies(slurm, START, token=token)
    assert refused.value.response.status_code == 401
    assert not slurm.requests


# --- the way to a job's gateway


async def get(url: str, path: str, token: str) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    nonce = new_nonce()
    headers = f"Host: gateway\r\nAuthorization: Bearer {token}\r\nMeshgate-Nonce: {nonce}"
    method = "POST" if "/v1/runs" in path else "GET"
    headers += "\r\nContent-Length: 0" if method == "POST" else ""
    writer.write(f"{method} {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, prover = int(head.split()[1]), Prover.of_request(nonce, token)
    assert prover is not None
    if status != HTTPStatus.OK:  # the gateway answers in place of the job's
        proof = next(line for line in head.decode().splitlines() if line.startswith("Meshgate-Proof: "))
        assert prover.prover_of(proof.partition(": ")[2], status, body) == ANY_GATEWAY
    return status, json.loads(body)


async def serve_job(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A job's gateway, which answers with the head that it received."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    body = json.dumps({"request": head[0], "token": next(line for line in head if line.startswith("Authorization"))})
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    await writer.drain()
    writer.close()


def forwarded(
    slurm: Slurm, token: str = "token of the job", apply_id: str = ID, rest: str = "job", policy: SlurmPolicy = POLICY
) -> tuple[int, dict[str, Any]]:
    async def test(url: str) -> tuple[int, dict[str, Any]]:
        await ask(url, START, "token of alice")
        server = await asyncio.start_unix_server(serve_job, slurm.socket) if slurm.alive else None
        try:
            return await get(url, f"/v1/jobs/{apply_id}/v1/{rest}", token)
        finally:
            if server is not None:
                server.close()

    return with_gateway(slurm, test, policy)


def running(directory: Path) -> Slurm:
    slurm = Slurm(str(directory / "gateway"))
    slurm.alive = True
    return slurm


def test_a_request_with_the_jobs_token_reaches_its_gateway(tmp_path: Path) -> None:
    status, answer = forwarded(running(tmp_path))
    assert (status, answer) == (
        200,
        {"request": "GET /v1/job HTTP/1.1", "token": "Authorization: Bearer token of the job"},
    )


SUBMITTERS = POLICY.model_copy(update={"submitters": ("bob",)})


def test_the_policy_says_who_may_submit_programs(tmp_path: Path) -> None:
    with capture_logs() as events:
        status, answer = forwarded(running(tmp_path), rest="runs", policy=SUBMITTERS)
    assert status == 409
    assert "does not allow caller:alice to submit programs (submitters: bob): ask its operator" in answer["error"]
    (audited,) = [each for each in events if each.get("action") == "forward"]
    assert (audited["caller"], audited["verb"], audited["outcome"]) == ("caller:alice", "submit run", "refused")
    for rest, policy in (("runs", POLICY), ("runs/night/stop", SUBMITTERS), ("job", SUBMITTERS)):
        assert forwarded(running(tmp_path), rest=rest, policy=policy)[0] == 200


def test_a_caller_that_was_taken_out_of_the_policy_loses_its_jobs(tmp_path: Path) -> None:
    assert why_not_use(POLICY, "token", submits=True) is None
    slurm = running(tmp_path)
    replies(slurm, START)
    later = POLICY.model_copy(update={"callers": (caller("bob"),)})
    status, answer = with_gateway(slurm, lambda url: get(url, f"/v1/jobs/{ID}/v1/job", "token of the job"), later)
    assert status == 403
    assert "caller:alice is not in the policy of this gateway any more" in answer["error"]


def test_other_tokens_do_not_reveal_which_jobs_exist(tmp_path: Path) -> None:
    status, answer = forwarded(running(tmp_path), token="token of alice")
    assert status == 401
    missing, other = forwarded(running(tmp_path), apply_id=OTHER_ID)
    assert missing == 401
    assert answer["error"].replace(ID, OTHER_ID) == other["error"]


def test_a_gateway_that_has_ended_ends_its_sessions() -> None:
    status, answer = forwarded(Slurm())
    assert (status, answer["kind"]) == (410, "unknown")
    assert answer["reason"] == "its process on login has ended. Its last output:\nlast words"


def test_a_socket_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Account(user=None, python="").entry()
    other = type(entry)((*entry[:2], os.getuid() + 1, *entry[3:]))
    monkeypatch.setattr(Account, "entry", lambda self: other)
    status, answer = forwarded(running(tmp_path))
    assert status == 503
    assert "its socket belongs to another user" in answer["error"]
