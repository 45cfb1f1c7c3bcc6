from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshgate_gateway.engine.output import MAX_LINE, LineSplitter, Printed, fold, in_messages
from meshgate_wire.messages import Output, dump_header


def printed(rank: int, text: str, host: str = "w-0", stream: str = "stdout") -> Printed:
    return Printed(stream, "trainers", rank, host, text, "\n")  # type: ignore[arg-type]


def test_a_line_ends_at_newline_carriage_return_or_both() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntwo\rthree\r\nfo") == [("one", "\n"), ("two", "\r"), ("three", "\n")]
    assert splitter.feed(b"ur\n") == [("four", "\n")]


def test_a_carriage_return_at_the_end_waits_for_its_newline() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"done\r") == []
    assert splitter.feed(b"\n") == [("done", "\n")]


def test_an_unfinished_line_is_told_when_flushed() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"loading 10%") == []
    assert splitter.pending
    assert splitter.flush() == [("loading 10%", "")]
    assert not splitter.pending


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * 200_000)
    assert sum(len(text) for text, _ in lines) + len(splitter.flush()[0][0]) == 200_000


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_cutting_the_bytes_elsewhere_changes_no_line(pieces: list[bytes]) -> None:
    whole, cut = LineSplitter(), LineSplitter()
    expected = whole.feed(b"".join(pieces)) + whole.flush()
    got = [line for piece in pieces for line in cut.feed(piece)] + cut.flush()
    assert got == expected


def test_equal_lines_of_many_ranks_are_one_line_with_a_count() -> None:
    (line,) = fold([printed(rank, "step 1", host=f"w-{rank}") for rank in (2, 0, 1)])
    assert (line.text, line.count, line.ranks, line.host) == ("step 1", 3, (0, 1, 2), "")


def test_the_lines_of_a_rank_keep_their_order() -> None:
    lines = fold([printed(0, "a"), printed(0, "b"), printed(1, "b"), printed(1, "a")])
    assert [(line.text, line.ranks) for line in lines] == [("a", (0,)), ("b", (0, 1)), ("a", (1,))]


def test_a_rank_that_repeats_a_line_is_told_each_time() -> None:
    lines = fold([printed(0, "tick"), printed(0, "tick"), printed(1, "tick"), printed(1, "tick")])
    assert [line.count for line in lines] == [2, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=30))
def test_folding_loses_no_line_and_keeps_each_ranks_order(events: list[tuple[int, str]]) -> None:
    lines = fold([printed(rank, text) for rank, text in events])
    for rank in range(4):
        told = [line.text for line in lines if rank in line.ranks]
        assert told == [text for each, text in events if each == rank]


@given(st.lists(st.text(max_size=300_000), max_size=8))
def test_output_of_any_length_fits_into_messages(texts: list[str]) -> None:
    lines = fold([printed(0, text[:MAX_LINE]) for text in texts])
    parts = list(in_messages(lines))
    assert [line for part in parts for line in part] == list(lines)
    assert all(len(dump_header(Output(lines=part))) < 2**20 for part in parts)
