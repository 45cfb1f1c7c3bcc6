"""The gateway as a process: what it announces, logs and removes, and when it shuts down."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from meshgate_gateway.gateway import (
    AFTER_JOB_END,
    HOSTS_TIMEOUT,
    JOB_END_GRACE,
    NOT_AWAITED,
    Shutdown,
    _place_of_runs,
    wait_for_shutdown,
    wait_idle,
)
from meshgate_gateway.hosts.provider import CombinedHosts
from meshgate_gateway.settings import load_settings
from meshgate_slurm.spec import SlurmSpec
from tests.gateway.server_process import STUBS, TOKEN, ServerProcess, request, wait_gone
from tests.gateway.virtual_time import run_in_virtual_time
from tests.waiting import DEADLINE, wait_for

IDLE_TIMEOUT = 60.0


def test_the_token_is_never_logged() -> None:
    with ServerProcess() as server:
        server.ask("/v1/job", token=TOKEN)
        server.ask(f"/v1/job?token={TOKEN}", token="another-secret")
        with server.connect() as connection:
            connection.send(b"GET / HTTP/1.1\r\nAuthorization Bearer " + TOKEN.encode() + b"\r\n\r\n")
            assert connection.http().status == 400
        with server.join() as session:
            session.command(f"print Authorization: Bearer {TOKEN} another-secret")
            session.command(f"print {TOKEN}")
            session.command("print done")
            server.wait_logged("engine output", line="done")
        assert TOKEN not in server.log
        assert "Bearer another-secret" not in server.log
        assert "[redacted]" in server.log


def test_the_gateway_announces_its_url() -> None:
    with ServerProcess() as server:
        assert server.announcement == {"url": f"ws://127.0.0.1:{server.port}", "pid": server.process.pid}


def test_the_local_socket_is_private_and_removed_on_shutdown() -> None:
    with ServerProcess("--local-socket") as server:
        path = Path(server.announcement["socket"])
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(request("/healthz"))
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not path.parent.exists()


def test_a_port_in_use_is_one_readable_error() -> None:
    with ServerProcess() as server:
        with pytest.raises(RuntimeError) as error:
            ServerProcess("--port", str(server.port))
        assert f"cannot listen on 127.0.0.1:{server.port}: Address already in use" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "refuses"), [([], False), (["--provision-policy", "p"], True), (["--slurm-policy", "p"], True)]
)
def test_a_gateway_that_starts_jobs_for_others_runs_no_programs_itself(
    arguments: list[str], refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program would have the rights of the gateway's operator."""
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = _place_of_runs(load_settings(arguments), {}, listener, None, CombinedHosts([]))
    assert ("starts jobs for others" in place.refusal) is refuses


class Activity:
    """A stand-in for the session manager."""

    def __init__(self) -> None:
        self.idle_since: float | None = 0.0
        self.changed = asyncio.Event()

    def set_idle_since(self, time: float | None) -> None:
        self.idle_since = time
        self.changed.set()


class LateHosts:
    """Hosts that are ready at ``ready_at``."""

    def __init__(self, ready_at: float) -> None:
        self._ready_at = ready_at

    async def wait_ready(self) -> None:
        await asyncio.sleep(self._ready_at)


async def idle_shutdown(
    activity: Activity, *, hosts_ready_at: float, first_session: float = 0
) -> tuple[Shutdown, float]:
    """The shutdown, and when it comes."""
    shutdown = await wait_idle(activity, LateHosts(hosts_ready_at), IDLE_TIMEOUT, first_session)
    return shutdown, asyncio.get_running_loop().time()


def test_idle_time_counts_from_when_all_hosts_are_ready() -> None:
    async def test() -> None:
        shutdown, at = await idle_shutdown(Activity(), hosts_ready_at=100)
        assert shutdown == Shutdown("it had no session for 60 s", idle=True)
        assert at == pytest.approx(100 + IDLE_TIMEOUT)

    run_in_virtual_time(test())


def test_hosts_that_never_become_ready_postpone_the_shutdown_for_a_limited_time() -> None:
    async def test() -> None:
        _, at = await idle_shutdown(Activity(), hosts_ready_at=1e9)
        assert at == pytest.approx(HOSTS_TIMEOUT)

    run_in_virtual_time(test())


def test_a_session_restarts_the_idle_time() -> None:
    async def test() -> None:
        activity, loop = Activity(), asyncio.get_running_loop()
        loop.call_at(50, activity.set_idle_since, None)
        loop.call_at(500, activity.set_idle_since, 500.0)
        _, at = await idle_shutdown(activity, hosts_ready_at=0)
        assert at == pytest.approx(500 + IDLE_TIMEOUT)

    run_in_virtual_time(test())


@pytest.mark.parametrize(("first_session", "idle_for"), [(10, IDLE_TIMEOUT), (300, 300)])
def test_a_gateway_waits_longer_for_its_first_session(first_session: float, idle_for: float) -> None:
    async def test() -> None:
        shutdown, at = await idle_shutdown(Activity(), hosts_ready_at=100, first_session=first_session)
        assert shutdown == Shutdown(f"it had no session for {idle_for:g} s", idle=True)
        assert at == pytest.approx(100 + idle_for)

    run_in_virtual_time(test())


def test_a_gateway_that_had_a_session_waits_for_the_idle_time_only() -> None:
    async def test() -> None:
        activity, loop = Activity(), asyncio.get_running_loop()
        loop.call_at(50, activity.set_idle_since, 50.0)  # one that began and ended between two looks
        _, at = await idle_shutdown(activity, hosts_ready_at=0, first_session=300)
        assert at == pytest.approx(50 + IDLE_TIMEOUT)

    run_in_virtual_time(test())


async def job_end() -> str:
    await asyncio.sleep(5)
    return "Slurm ended job 7: TIMEOUT"


def test_a_gateway_outlives_its_job_for_a_limited_time() -> None:
    async def test() -> None:
        loop, activity = asyncio.get_running_loop(), Activity()
        activity.set_idle_since(None)
        loop.call_at(500, activity.set_idle_since, 500.0)
        options = {"lifetime_fd": None, "on_detach": lambda: None, "idle_timeout": 0, "job_end": job_end}
        hosts, requested = LateHosts(0), loop.create_future()
        shutdown = await wait_for_shutdown(activity, hosts, requested, **options, outlives_job=True)  # type: ignore[arg-type]
        assert shutdown == Shutdown("Slurm ended job 7: TIMEOUT")
        assert loop.time() == pytest.approx(500 + AFTER_JOB_END)

    run_in_virtual_time(test())


def test_the_end_of_the_surrounding_job_leaves_time_to_report_it() -> None:
    async def test() -> None:
        requested: asyncio.Future[Shutdown] = asyncio.get_running_loop().create_future()
        options = {"lifetime_fd": None, "on_detach": lambda: None, "idle_timeout": 0, "job_end": job_end}
        shutdown = await wait_for_shutdown(Activity(), LateHosts(0), requested, **options)  # type: ignore[arg-type]
        assert shutdown == Shutdown("Slurm ended job 7: TIMEOUT")
        assert asyncio.get_running_loop().time() == pytest.approx(5 + JOB_END_GRACE)

    run_in_virtual_time(test())


# --- the gateway as a process -----------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_shuts_the_gateway_down_in_order(signum: signal.Signals) -> None:
    with ServerProcess() as server, server.join() as connection:
        pid = connection.command("describe")["pid"]
        server.process.send_signal(signum)
        assert connection.closed_by_peer()
        assert server.wait() == 0
        wait_gone(pid)
        server.wait_logged("session ended", kind="ended")
        server.wait_logged("shut down", reason=f"it received {signum.name}")


def test_a_gateway_that_no_program_waits_for_ends() -> None:
    waiting, announcement = os.pipe()
    os.close(waiting)
    command = [sys.executable, str(STUBS), "--announce-fd", str(announcement), "--log-format", "json"]
    environment = {**os.environ, "MESHGATE_TOKEN": TOKEN}
    ran = subprocess.run(
        command, pass_fds=[announcement], env=environment, stderr=subprocess.PIPE, text=True, timeout=100, check=True
    )
    os.close(announcement)
    assert f'"reason": "{NOT_AWAITED}"' in ran.stderr


SBATCH = """#!/bin/sh
cat > {directory}/script
while [ ! -e {directory}/go ]; do sleep 0.02; done
echo 7
"""


def test_a_gateway_that_is_ended_while_sbatch_runs_cancels_the_job(tmp_path: Path) -> None:
    programs = {"sbatch": SBATCH, "sinfo": "#!/bin/sh\necho 127.0.0.1\n"}
    programs |= {"squeue": "#!/bin/sh\nexit 1\n", "scancel": "#!/bin/sh\necho $1 > {directory}/cancelled\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text.format(directory=tmp_path))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job").write_text(SlurmSpec(meshes={"a": 1}, log_dir=str(tmp_path)).model_dump_json())
    command = [sys.executable, str(STUBS), "--slurm-job", str(tmp_path / "job"), "--warm-engines", "0"]
    environment = {**os.environ, "MESHGATE_TOKEN": TOKEN, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    try:
        wait_for((tmp_path / "script").exists, "sbatch")
        process.send_signal(signal.SIGTERM)
    finally:
        (tmp_path / "go").touch()
        _, words = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, words
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_a_second_signal_kills_an_engine_that_does_not_stop() -> None:
    with ServerProcess(environment={"STUB_ENGINE": "deaf"}) as server, server.join() as connection:
        pid = connection.command("describe")["pid"]
        server.process.send_signal(signal.SIGTERM)
        server.wait_logged("shutting down")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM
        wait_gone(pid)


def test_a_killed_gateway_leaves_no_engine() -> None:
    with ServerProcess() as server, server.join() as connection:
        pid = connection.command("describe")["pid"]
        server.process.kill()
        wait_gone(pid)


def test_requests_during_shutdown_are_rejected() -> None:
    session = uuid.uuid4().hex
    with ServerProcess(environment={"STUB_ENGINE": "deaf"}) as server, server.join(session):
        with server.connect() as late:
            server.ask("/healthz")  # the server has accepted ``late`` before this
            server.process.send_signal(signal.SIGTERM)
            server.wait_logged("shutting down")
            late.send(b"GET /readyz HTTP/1.1\r\n\r\n")
            answer = late.http()
        assert answer.status == 503
        assert "SIGTERM" in answer.error
        server.process.send_signal(signal.SIGTERM)
        server.wait()


def test_the_gateway_exits_with_the_process_that_started_it() -> None:
    with ServerProcess() as server, server.join() as connection:
        pid = connection.command("describe")["pid"]
        os.close(server.lifetime)
        server.lifetime = -1
        assert server.wait() == 0
        wait_gone(pid)


def test_after_detaching_the_gateway_continues_and_shuts_down_when_idle() -> None:
    with ServerProcess("--idle-timeout", "0.3") as server:
        connection = server.join()
        os.write(server.lifetime, b"\n")
        os.close(server.lifetime)
        server.lifetime = -1
        assert connection.command("describe")
        connection.send(b"goodbye\n")
        assert server.wait() == 0
        server.wait_logged("shut down", reason="it had no session for 0.3 s")
        connection.close()


def test_a_detached_gateway_starts_another_engine_once_a_session_has_taken_one() -> None:  # after 3 s
    with ServerProcess() as server:
        os.write(server.lifetime, b"\n")
        with server.join() as connection:
            used = connection.command("describe")["pid"]
            wait_for(lambda: engines_of(server) - {used}, "another engine")


def engines_of(server: ServerProcess) -> set[int]:
    """The children of ``server``'s supervisor that are engines."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return {int(pid) for pid in children if b"stub_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_a_gateway_without_sessions_shuts_down_when_idle() -> None:
    with ServerProcess("--idle-timeout", "0.1", "--first-session", "0") as server:
        assert server.wait() == 0
