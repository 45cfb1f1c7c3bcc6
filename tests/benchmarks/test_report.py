from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import TABLES, write_into
from benchmarks.results import Case, Value

ABOUT = [("commit", "abc")]
IDLE = [0.0, 0.01, 0.6]
BUSY = [0.0, 0.06, 0.07]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- begin table: {name} -->\n<!-- end table: {name} -->\n" for name in TABLES))
    return page


def case(name: str, seconds: float = 1.0) -> Case:
    return Case(name, {"median": Value("s", (seconds,))}, table="live")


def test_a_table_is_written_from_an_idle_machine(page: Path) -> None:
    write_into(page, [case("two hosts")], ABOUT, IDLE)
    write_into(page, [case("two hosts", 2), case("one host")], ABOUT, IDLE)
    assert f"| two hosts | {Value('s', (2.0,))} |" in page.read_text()
    assert f"| one host | {Value('s', (1.0,))} |" in page.read_text()


@pytest.mark.parametrize("others", [BUSY, []], ids=["busy", "not measured"])
def test_no_figure_of_a_busy_machine_is_published(page: Path, others: list[float]) -> None:
    before = page.read_text()
    with pytest.raises(ValueError, match="was not changed: while this ran, other programs used CPU cores"):
        write_into(page, [case("two hosts")], ABOUT, others)
    assert page.read_text() == before


def test_no_row_is_lost_that_the_run_did_not_measure(page: Path) -> None:
    write_into(page, [case("two hosts"), case("one host")], ABOUT, IDLE)
    before = page.read_text()
    with pytest.raises(ValueError, match="did not measure two hosts, which the table 'live' has"):
        write_into(page, [case("one host", 3)], ABOUT, IDLE)
    assert page.read_text() == before
