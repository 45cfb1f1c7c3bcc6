"""The output of actors reaches the driver's terminal with labels."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import meshgate as kt
from meshgate import ProcessJob, job_loads
from meshgate.session.output import printer
from meshgate.spmd import serve
from meshgate.testing import NetworkProxy
from tests.end_to_end.actors import Worker
from tests.waiting import Printed, wait_for


@pytest.fixture(autouse=True)
def _results_wait_for_printing_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer, "PRINT_TIMEOUT", 30)


def read_output(workers: Any, printed: Printed, until: str) -> tuple[str, str]:
    out = err = ""
    for _ in range(2_000):
        workers.rank.call().get(timeout=60)
        more = printed.take()
        out, err = out + more[0], err + more[1]
        if until in out + err:
            return out, err
    raise AssertionError(f"{until!r} did not arrive: {out!r}, {err!r}")


def test_a_line_is_labelled_with_its_rank_and_host(workers: Any, printed: Printed) -> None:
    workers.slice(hosts=1, gpus=1).say.call_one("only me").get()
    out, _ = read_output(workers, printed, "only me")
    (line,) = [line for line in out.splitlines() if "only me" in line]
    assert "workers-1" in line
    assert "rank 3" in line


def test_the_same_line_of_all_ranks_is_printed_once(workers: Any, printed: Printed) -> None:
    lines: list[str] = []
    for attempt in range(20):  # a rank that is late on a busy machine gets a line of its own
        workers.say.call(f"all of us, {attempt}").get()
        workers.say.call(f"the end, {attempt}").get()
        out, _ = read_output(workers, printed, f"the end, {attempt}")
        lines = [line for line in out.splitlines() if f"all of us, {attempt}" in line]
        if len(lines) == 1:
            break
    assert len(lines) == 1
    assert "ranks" in lines[0]


def test_what_was_printed_before_a_result_is_shown_before_it(workers: Any, printed: Printed) -> None:
    for number in range(30):
        workers.say.call(f"line {number} of them").get()
        assert f"line {number} of them" in printed.take()[0]


def test_native_output_is_shown_before_the_result(workers: Any, printed: Printed) -> None:
    for number in range(10):
        workers.say_natively.call(f"line {number}").get()
        out, err = printed.take()
        assert f"line {number}" in out
        assert f"line {number} of a child" in err


def test_log_messages_are_as_the_program_wrote_them_and_fold(workers: Any, printed: Printed) -> None:
    lines: list[str] = []
    for attempt in range(20):  # a rank that is late on a busy machine gets a line of its own
        workers.log.call(f"loss of step {attempt}").get()
        lines = [line for line in printed.take()[1].splitlines() if f"loss of step {attempt}" in line]
        if len(lines) == 1:
            break
    (line,) = lines
    assert re.fullmatch(r"\[workers \d ranks\] (WARNING:trainer:)?loss of step \d+", line)


def test_errors_go_to_stderr(workers: Any, printed: Printed) -> None:
    workers.slice(hosts=0, gpus=0).say.call_one("a warning", error=True).get()
    out, err = read_output(workers, printed, "a warning")
    assert "a warning" in err
    assert "a warning" not in out


def test_a_progress_bar_that_begins_its_refreshes_with_a_carriage_return_is_one_line(
    workers: Any, printed: Printed
) -> None:
    one = workers.slice(hosts=0, gpus=0)
    for percent in (10, 20, 30):
        one.say.call_one(f"\r {percent}%", end="").get()  # as tqdm does
    one.say.call_one("").get()
    lines = [line for line in printed.take()[0].splitlines() if "%" in line]
    assert [line.partition("] ")[2] for line in lines] == [" 30%"]


def test_output_can_be_turned_off(job: Any, printed: Printed) -> None:
    with kt.Client(kt.UrlDialer(job.gateway_url, job._gateway.record.token), stream_output=False) as client:
        workers = client.attach_hosts("workers", 2).spawn_procs().spawn("quiet", Worker)
        workers.say.call("hidden").get()
        for _ in range(20):
            workers.rank.call().get()
    assert "hidden" not in printed.take()[0]


@pytest.fixture
def log_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where sessions that the test opens write what ranks print."""
    monkeypatch.setenv("MESHGATE_LOG_DIR", str(tmp_path / "logs"))
    return tmp_path / "logs"


@pytest.fixture
def find(log_dir: Path, job: ProcessJob) -> Iterator[Callable[[], Any]]:
    """The shared job as another program finds it, that is, with another session."""
    found: list[Any] = []

    def find() -> Any:
        found.append(job_loads(job.dumps()))
        return found[-1]

    yield find
    for each in found:
        if each._client is not None:
            each._client.close()


def logged(log_dir: Path) -> dict[str, str]:
    return {str(path.relative_to(log_dir)): path.read_text() for path in log_dir.rglob("*.log")}


def wait_until_logged(log_dir: Path, expected: dict[str, str]) -> None:
    """A result waits for what was printed before it, but on a machine that is busy for no more than half a second."""
    wait_for(lambda: sum(map(len, logged(log_dir).values())) >= sum(map(len, expected.values())), "the output")
    assert logged(log_dir) == expected


def test_each_rank_prints_to_a_file_of_its_own(find: Callable[[], Any], log_dir: Path, printed: Printed) -> None:
    procs = find().state(cached_path=None).workers.spawn_procs(per_host={"gpus": 2})
    speakers = procs.spawn("speakers", Worker)
    speakers.say.call("all of us").get()
    speakers.slice(hosts=1, gpus=1).say.call_one("only me", error=True).get()
    files = {f"speakers/{rank}.log": "all of us\n" for rank in range(3)}
    wait_until_logged(log_dir, {**files, "speakers/3.log": "all of us\nonly me\n"})
    wait_for(lambda: "all of us" in printed.out, "the line")  # files are written before


def test_what_is_not_printed_is_in_the_files(
    find: Callable[[], Any], log_dir: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setenv("MESHGATE_OUTPUT", "off")
    hosts = find().state(cached_path=None).workers
    procs = hosts.spawn_procs(name="quiet")
    procs.spawn("workers", Worker).say.call("of a quiet program").get()
    monkeypatch.delenv("MESHGATE_OUTPUT")
    loud = find().state(cached_path=None).workers.spawn_procs(name="hidden")
    asyncio.run(loud.logging_option(stream_to_client=False))
    loud.spawn("workers", Worker).say.call("of a quiet mesh").get()
    files = {f"quiet/{rank}.log": "of a quiet program\n" for rank in range(2)}
    wait_until_logged(log_dir, {**files, **{f"hidden/{rank}.log": "of a quiet mesh\n" for rank in range(2)}})
    assert "quiet" not in printed.take()[0]


def test_cuts_neither_lose_nor_double_a_line_of_a_file(job: Any, log_dir: Path) -> None:
    lines = "".join(f"line {number}\n" for number in range(20))
    expected = {f"cut/{rank}.log": lines for rank in range(2)}
    with NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port) as proxy:
        dialer = kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", job._gateway.record.token)
        with kt.Client(dialer) as client:
            workers = client.attach_hosts("workers", 2).spawn_procs().spawn("cut", Worker)
            for number in range(20):
                future = workers.say.call(f"line {number}")
                proxy.cut()
                future.get(timeout=60)
            wait_until_logged(log_dir, expected)
    assert logged(log_dir) == expected


def test_a_takeover_and_a_mesh_that_is_spawned_again_continue_the_files(find: Callable[[], Any], log_dir: Path) -> None:
    first = find()
    hosts = first.state(cached_path=None).workers
    hosts.spawn_procs(name="trainers").spawn("actors", Worker).say.call("first").get()
    hosts.spawn_procs(name="trainers").spawn("again", Worker).say.call("second").get()
    first.detach("logged", cached_path=None)
    session = find().attach("logged", cached_path=None)
    session["again"].say.call("third").get()
    wait_until_logged(log_dir, {f"trainers/{rank}.log": "first\nsecond\nthird\n" for rank in range(2)})


def test_a_takeover_from_a_quiet_program_prints(
    find: Callable[[], Any], log_dir: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.delenv("MESHGATE_LOG_DIR")
    monkeypatch.setenv("MESHGATE_OUTPUT", "off")
    quiet = find()
    workers = quiet.state(cached_path=None).workers.spawn_procs().spawn("taken_over", Worker)
    workers.say.call("not shown").get()
    quiet.detach("quiet", cached_path=None)
    monkeypatch.delenv("MESHGATE_OUTPUT")
    taken_over = find().attach("quiet", cached_path=None)["taken_over"]
    taken_over.say.call("shown").get()
    out, _ = read_output(taken_over, printed, "shown")
    assert "not shown" not in out
    assert not log_dir.exists()


def test_the_ranks_of_a_training_script_have_files_which_a_restart_continues(
    find: Callable[[], Any], log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('rank', os.environ['RANK'], 'attempt', attempt, flush=True)\n"
        "sys.exit(1 - attempt if os.environ['RANK'] == '0' else 0)\n"
    )
    command = ["torchrun", "--nproc-per-node=2", "--max-restarts=1", "train.py"]
    serve(command, job=find()).run_spmd()
    ended = [f"rank {rank} attempt 1\n" for rank in range(4)]
    wait_for(lambda: all(line in "".join(logged(log_dir).values()) for line in ended), "the output")
    found = logged(log_dir)
    assert found["spmd/0.log"] == "rank 0 attempt 0\nrank 0 attempt 1\n"
    assert set(found) == {f"spmd/{rank}.log" for rank in range(4)}
    assert all(found[f"spmd/{rank}.log"].endswith(line) for rank, line in enumerate(ended))
