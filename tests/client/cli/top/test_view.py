"""What fits the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from meshgate.cli.models import Top
from meshgate.cli.top.rates import compare
from meshgate.cli.top.view import Order, render
from meshgate.ranks.usage.meter import Gpu, Usage
from tests.client.cli.top.looks import GIB, process, status, top


def lines(shown: Top, width: int, height: int | None = None, order: Order = "rank") -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(shown, "the job", width=width, height=height, order=order))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_gpus_have_columns_if_a_host_has_any() -> None:
    gpus = [Gpu("workers-1", 0, 99, GIB, 8 * GIB)]
    usage = Usage([process(1, gpus=(0,), gpu_memory=5), process(2)], gpus)
    text = lines(compare(status(None), status(None), 1.0, usage), 120)
    assert text[-3:-1] == [
        "procs  workers-1     1  101  50%   3.0Gi     0  99%         0Ki",
        "procs  workers-2     2  102  50%   3.0Gi     -    -           -",
    ]


def test_a_wide_terminal_shows_everything() -> None:
    assert [line.rstrip() for line in lines(top(problems={"workers-9": "lost\nmore"}), 100)] == [
        "the job",
        "ACTORS    SESSION   CALLS/S  LATENCY  FAILED  IN FLIGHT  OLDEST",
        "trainers  abcdef01      7.0   25.0ms       4          3      3s",
        "",
        "PROCS  HOST       RANK  PID  CPU  MEMORY",
        "procs  workers-0     0  100  50%   3.0Gi",
        "procs  workers-1     1  101  50%   3.0Gi",
        "",
        "workers-9: lost",
    ]


@pytest.mark.parametrize("width", [40, 60, 79])
def test_a_narrow_terminal_keeps_the_numbers(width: int) -> None:
    text = lines(top(), width)
    assert max(map(len, text)) <= width
    assert "SESSION" not in text[1]
    assert "7.0" in text[2]
    assert text[5].split()[-3:] == ["0", "50%", "3.0Gi"]


def test_many_ranks_fit_the_screen_and_the_busiest_come_first_on_request() -> None:
    usage = Usage([process(rank, cpu=float(rank), memory=rank) for rank in range(1024)])
    shown = compare(status(None), status(None), 1.0, usage)
    text = lines(shown, 100, height=24, order="cpu")
    assert len(text) <= 24
    assert "1023%" in text[5]
    assert text[-1].strip() == "… and 1,008 more ranks"
    assert lines(shown, 100, height=24)[5].split()[2] == "0"
    assert len(lines(shown, 100)) > 1024
