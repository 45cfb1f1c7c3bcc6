"""Records of what actors print."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from meshgate_gateway.engine.output import output_log
from meshgate_gateway.engine.output.lines import PrintedLine
from meshgate_gateway.engine.output.output_log import MAX_RECORD, OutputLog


class Pipe:
    """A log that writes to a pipe."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.log = OutputLog(self.writing)
        self.log.session = "5f3c"

    def written(self) -> list[dict[str, Any]]:
        """Everything, once the log is closed."""
        received: list[bytes] = []
        reader = threading.Thread(target=lambda: received.append(self._read()))
        reader.start()
        self.log.close()
        os.close(self.writing)
        reader.join()
        lines = received[0].splitlines(keepends=True)
        assert all(len(line) <= MAX_RECORD for line in lines)
        return [json.loads(line) for line in lines]

    def _read(self) -> bytes:
        with open(self.reading, "rb", closefd=False) as file:
            return file.read()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.reading)


def printed(text: str, rank: int = 3, end: Literal["\n", "\r", ""] = "\n") -> PrintedLine:
    return PrintedLine("stderr", "trainers", rank, "trainer-workers-1", text, end)


def test_a_line_is_a_record_with_its_mesh_rank_pod_and_stream(pipe: Pipe) -> None:
    pipe.log.add([printed('a "step" \x1b[31m of 5 \u00b5s')])
    (record,) = pipe.written()
    assert record.pop("timestamp").endswith("Z")
    assert record == {
        "event": "output",
        "session": "5f3c",
        "mesh": "trainers",
        "rank": 3,
        "host": "trainer-workers-1",
        "stream": "stderr",
        "text": 'a "step" \x1b[31m of 5 \u00b5s',
    }


def test_equal_lines_of_several_ranks_are_several_records_in_order(pipe: Pipe) -> None:
    pipe.log.add([printed("x", 0), printed("x", 1)])
    pipe.log.add([printed("y", 0)])
    assert [(each["rank"], each["text"]) for each in pipe.written()] == [(0, "x"), (1, "x"), (0, "y")]
    assert pipe.log._size == 0  # there is room for as much again


def test_states_of_a_progress_bar_are_left_out(pipe: Pipe) -> None:
    pipe.log.add([printed("10 %", end="\r"), printed("100 %"), printed("no end", end="")])
    assert [each["text"] for each in pipe.written()] == ["100 %", "no end"]


@pytest.mark.parametrize("text", ["x" * 10_000, "\x01" * 5_000, "\U0001f600" * 3_000, "\ud800" * 9_000])
def test_a_long_line_is_split_into_records_that_a_pipe_keeps_together(pipe: Pipe, text: str) -> None:
    pipe.log.add([printed(text), printed("next")])
    *parts, last, following = pipe.written()
    assert parts
    assert all(each["partial"] for each in parts)
    assert "partial" not in last
    joined = "".join(each["text"] for each in (*parts, last))
    assert joined == text.encode("utf-8", "replace").decode()
    assert following["text"] == "next"


def test_what_cannot_be_written_in_time_is_dropped_and_counted(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "MAX_WAITING", 300_000)  # and a pipe holds 64 KiB
    pipe.log.add([printed("x" * 3_000) for _ in range(200)])
    records = pipe.written()
    assert records[-1]["event"] == "output dropped"
    assert records[-1]["records"] == 201 - len(records)
    assert len(records) < 200


def test_a_log_that_cannot_be_written_stops_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    log = OutputLog(writing)
    log.add([printed("lost")])
    log.close()
    log.close()
    os.close(writing)
    assert "stop trying: [Errno 32] Broken pipe" in caplog.text
