"""Failed calls that a program does not read, with a scripted gateway."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from meshgate import Actor, endpoint
from meshgate.errors import MeshgateError
from meshgate.proxies.client import Client
from meshgate.session.errors.unread import UnreadFailures
from meshgate_wire import Fragments
from meshgate_wire.messages import Call, Detach, Done, Failed, Failure, stream_of
from tests.client.scripted_gateway import ScriptedGateway, ScriptedSession, unpickle
from tests.waiting import Printed, wait_for

HEAD = "meshgate: a call of workers.fail failed, and the program has not read its result."


class Worker(Actor):
    @endpoint
    def fail(self, why: str) -> None: ...

    @endpoint
    def fine(self) -> int:
        return 0


def let_fail(gateway: ScriptedGateway) -> None:
    """Calls of ``fail`` fail with the text of their argument."""
    gateway.functions = {"fine": lambda rank: rank}
    otherwise = gateway.on[Call]

    def call(session: ScriptedSession, header: Call, buffers: Sequence[Fragments]) -> None:
        if header.endpoint != "fail":
            otherwise(session, header, buffers)
            return
        ((why,), _) = unpickle(header, buffers)
        kind: Literal["supervision", "internal"] = "supervision" if "died" in why else "internal"
        for rank in session.ranks_of(header.target) if header.adverb == "stream" else [None]:
            failure = Failure(kind=kind, message=why if rank is None else f"{why} of {rank}")
            session.send(Failed(call=header.call, rank=rank, failure=failure), stream=stream_of(header.target.object))

    gateway.on[Call] = call


@pytest.fixture
def workers(gateway: ScriptedGateway, client: Client) -> Any:
    let_fail(gateway)
    return client.attach_hosts("workers", 2).spawn_procs().spawn("workers", Worker)


def reported(client: Client, capsys: pytest.CaptureFixture[str]) -> str:
    """All that is reported of these workers until the session ends. Futures of earlier tests may be dropped now."""
    gc.collect()
    client.close()
    reports = re.split("(?m)^(?=meshgate: )", capsys.readouterr().err)
    return "".join(report for report in reports if re.search(r"workers\.f|other endpoints", report))


def test_a_failure_that_is_dropped_unread_is_reported(
    workers: Any, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.fail.call("disk full")
    workers.fine.call().get()  # by then the first one has failed
    err = reported(client, capsys)
    assert err.startswith(HEAD)
    assert err.endswith("GatewayFault: disk full\n")


def test_a_failure_is_reported_while_the_session_lasts(workers: Any, printed: Printed) -> None:
    workers.fail.call("disk full")
    wait_for(lambda: "disk full" in printed.err, "the report")


@pytest.mark.parametrize("read", ["get", "exception", "result"])
def test_a_failure_that_was_read_is_not_reported(
    workers: Any, client: Client, capsys: pytest.CaptureFixture[str], read: str
) -> None:
    future = workers.fail.call("disk full")
    with contextlib.suppress(MeshgateError):
        getattr(future, read)()
    del future
    assert reported(client, capsys) == ""


def test_a_failure_that_only_was_waited_for_is_reported(
    workers: Any, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    future = workers.fail.call("disk full")
    wait_for(future.done, "the failure")
    assert reported(client, capsys) == ""  # the program may still read it
    del future
    gc.collect()
    assert "disk full" in capsys.readouterr().err


def test_equal_failures_are_reported_once_and_counted(
    workers: Any, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        workers.fail.call("disk full")
    workers.fine.call().get()
    err = reported(client, capsys)
    assert err.count(HEAD) == 1
    assert "meshgate: 4 more calls of workers.fail failed in the same way, unread: " in err


def test_many_different_failures_are_counted(workers: Any, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(70):
        workers.fail.call(f"disk {number} full")
    workers.fine.call().get()
    err = reported(client, capsys)
    assert err.count(HEAD) == 64
    assert "meshgate: 6 more calls of other endpoints failed in the same way, unread: " in err


def test_a_stream_whose_first_failure_was_read_is_not_reported(
    workers: Any, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for future in workers.fail.stream("each disk"):
        with pytest.raises(MeshgateError):
            future.get()
        break
    del future
    assert reported(client, capsys) == ""


def test_a_stream_of_which_no_failure_was_read_is_reported_once(
    workers: Any, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.fail.stream("each disk")
    workers.fine.call().get()
    assert reported(client, capsys).count(HEAD) == 1


def test_calls_that_the_program_ended_by_closing_its_session_are_not_reported(
    gateway: ScriptedGateway, workers: Any, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.on[Call] = lambda session, header, _: None
    workers.fine.call()
    assert reported(client, capsys) == ""


def test_failures_of_a_detached_session_are_left_to_its_next_holder(
    gateway: ScriptedGateway, workers: Any, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    before = workers.fail.call("disk full")
    wait_for(before.done, "the failure")
    client.detach("train").get()
    workers.fail.call("disk full")
    workers.fine.call().get()
    del before
    assert reported(client, capsys) == ""


def test_failures_are_reported_if_the_first_attempt_to_detach_was_interrupted(
    workers: Any, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = workers.fail.call("disk full")
    wait_for(before.done, "the failure")
    with monkeypatch.context() as patched:
        patched.setattr(type(client), "_post_detach", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.detach("train")
    workers.fail.call("no space")
    workers.fine.call().get()
    del before
    text = reported(client, capsys)
    assert "disk full" in text
    assert "no space" in text


def test_what_meshgate_itself_does_not_read_is_not_reported(
    gateway: ScriptedGateway, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    let_fail(gateway)
    own = type("Own", (Worker,), {"__module__": "meshgate.ranks.something"})
    procs = client.attach_hosts("workers", 2).spawn_procs()
    workers: Any = procs.spawn("workers", own)
    workers.fail.call("disk full")
    workers.fine.call().get()
    assert reported(client, capsys) == ""


def test_a_death_is_left_to_the_fault_hook(workers: Any, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    workers.fail.call("rank 1 died")
    workers.fine.call().get()
    assert reported(client, capsys) == ""


PROGRAM = """
    import sys
    from meshgate import Actor, Client, UrlDialer, endpoint

    class Worker(Actor):
        @endpoint
        def fail(self, why: str) -> None: ...

    client = Client.connect(UrlDialer(*sys.argv[1:]))
    workers = client.attach_hosts("workers", 2).spawn_procs().spawn("workers", Worker)
    futures = [workers.fail.call("disk full") for _ in range(3)]
    futures[-1]._wait(20)
    {end}
"""


@pytest.mark.parametrize("end", ["", "client.close()"])
def test_a_failure_that_a_program_holds_unread_is_reported_when_it_ends(gateway: ScriptedGateway, end: str) -> None:
    let_fail(gateway)
    program = textwrap.dedent(PROGRAM).format(end=end)
    # A process of its own, because it must end.
    run = subprocess.run(
        check=False,
        args=[sys.executable, "-c", program, gateway.url, gateway.token],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0
    assert run.stderr.count(HEAD) == 1
    assert "meshgate: 2 more calls of workers.fail failed in the same way" in run.stderr


def test_the_report_survives_an_error_that_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    unread = UnreadFailures()
    unread.report("workers.fail", lambda: ValueError("disk full"))
    unread.close(10)
