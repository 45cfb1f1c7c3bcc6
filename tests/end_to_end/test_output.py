"""The output of actors reaches the driver's terminal with labels."""

from __future__ import annotations

import re
from typing import Any

import pytest

import meshgate as kt
from meshgate.session.output import printer
from tests.end_to_end.actors import Worker


@pytest.fixture(autouse=True)
def _results_wait_for_printing_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer, "PRINT_TIMEOUT", 30)


def read_output(workers: Any, capsys: pytest.CaptureFixture[str], until: str) -> tuple[str, str]:
    out = err = ""
    for _ in range(2_000):
        workers.rank.call().get(timeout=60)
        captured = capsys.readouterr()
        out, err = out + captured.out, err + captured.err
        if until in out + err:
            return out, err
    raise AssertionError(f"{until!r} did not arrive: {out!r}, {err!r}")


def test_a_line_is_labelled_with_its_rank_and_host(workers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workers.slice(hosts=1, gpus=1).say.call_one("only me").get()
    out, _ = read_output(workers, capsys, "only me")
    (line,) = [line for line in out.splitlines() if "only me" in line]
    assert "workers-1" in line
    assert "rank 3" in line


def test_the_same_line_of_all_ranks_is_printed_once(workers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    for attempt in range(20):  # a rank that is late on a busy machine gets a line of its own
        workers.say.call(f"all of us, {attempt}").get()
        workers.say.call(f"the end, {attempt}").get()
        out, _ = read_output(workers, capsys, f"the end, {attempt}")
        lines = [line for line in out.splitlines() if f"all of us, {attempt}" in line]
        if len(lines) == 1:
            break
    assert len(lines) == 1
    assert "ranks" in lines[0]


def test_what_was_printed_before_a_result_is_shown_before_it(workers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(30):
        workers.say.call(f"line {number} of them").get()
        assert f"line {number} of them" in capsys.readouterr().out


def test_native_output_is_shown_before_the_result(workers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10):
        workers.say_natively.call(f"line {number}").get()
        captured = capsys.readouterr()
        assert f"line {number}" in captured.out
        assert f"line {number} of a child" in captured.err


def test_log_messages_are_as_the_program_wrote_them_and_fold(workers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    for attempt in range(20):  # a rank that is late on a busy machine gets a line of its own
        workers.log.call(f"loss of step {attempt}").get()
        lines = [line for line in capsys.readouterr().err.splitlines() if f"loss of step {attempt}" in line]
        if len(lines) == 1:
            break
    (line,) = lines
    assert re.fullmatch(r"\[workers \d ranks\] (WARNING:trainer:)?loss of step \d+", line)


def test_errors_go_to_stderr(workers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workers.slice(hosts=0, gpus=0).say.call_one("a warning", error=True).get()
    out, err = read_output(workers, capsys, "a warning")
    assert "a warning" in err
    assert "a warning" not in out


def test_a_progress_bar_that_begins_its_refreshes_with_a_carriage_return_is_one_line(
    workers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one = workers.slice(hosts=0, gpus=0)
    for percent in (10, 20, 30):
        one.say.call_one(f"\r {percent}%", end="").get()  # as tqdm does
    one.say.call_one("").get()
    lines = [line for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [line.partition("] ")[2] for line in lines] == [" 30%"]


def test_output_can_be_turned_off(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with kt.Client(kt.UrlDialer(job.gateway_url, job._gateway.record.token), stream_output=False) as client:
        workers = client.attach_hosts("workers", 2).spawn_procs().spawn("quiet", Worker)
        workers.say.call("hidden").get()
        for _ in range(20):
            workers.rank.call().get()
    assert "hidden" not in capsys.readouterr().out
