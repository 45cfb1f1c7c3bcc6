from __future__ import annotations

import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from meshgate_gateway.engine.output.lines import MAX_LINE, LineSplitter, PrintedLine, fold, split_into_messages
from meshgate_wire.framing.header_codec import dump_header
from meshgate_wire.messages import Output

LINEAR = 40.0  # seconds of CPU time; it takes one or two, and quadratic time would be minutes


def printed(rank: int, text: str, host: str = "w-0", stream: str = "stdout") -> PrintedLine:
    return PrintedLine(stream, "trainers", rank, host, text, "\n")  # type: ignore[arg-type]


def test_a_line_ends_at_newline_carriage_return_or_both() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntwo\rthree\r\nfo") == [("one", "\n"), ("two", "\r"), ("three", "\n")]
    assert splitter.feed(b"ur\n") == [("four", "\n")]


def test_a_carriage_return_at_the_end_waits_for_its_newline() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"done\r") == []
    assert splitter.feed(b"\n") == [("done", "\n")]


def test_an_unfinished_line_is_returned_when_flushed() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"loading 10%") == []
    assert splitter.pending
    assert splitter.flush() == [("loading 10%", "")]
    assert not splitter.pending


def test_a_line_without_an_end_does_not_grow_without_limit() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * 200_000)
    assert sum(len(text) for text, _ in lines) + len(splitter.flush()[0][0]) == 200_000


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_lines_do_not_depend_on_where_the_stream_is_cut(pieces: list[bytes]) -> None:
    whole, cut = LineSplitter(), LineSplitter()
    expected = whole.feed(b"".join(pieces)) + whole.flush()
    got = [line for piece in pieces for line in cut.feed(piece)] + cut.flush()
    assert got == expected


def test_equal_lines_of_many_ranks_become_one_line_with_a_count() -> None:
    (line,) = fold([printed(rank, "step 1", host=f"w-{rank}") for rank in (2, 0, 1)])
    assert (line.text, line.count, line.ranks, line.host) == ("step 1", 3, (0, 1, 2), "")


def test_the_lines_of_a_rank_keep_their_order() -> None:
    lines = fold([printed(0, "a"), printed(0, "b"), printed(1, "b"), printed(1, "a")])
    assert [(line.text, line.ranks) for line in lines] == [("a", (0,)), ("b", (0, 1)), ("a", (1,))]


def test_a_line_that_a_rank_repeats_is_kept_each_time() -> None:
    lines = fold([printed(0, "tick"), printed(0, "tick"), printed(1, "tick"), printed(1, "tick")])
    assert [line.count for line in lines] == [2, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", "c", ""])), max_size=40))
def test_folding_loses_no_line_and_keeps_each_ranks_order(events: list[tuple[int, str]]) -> None:
    lines = fold([printed(rank, text) for rank, text in events])
    for rank in range(4):
        folded = [line.text for line in lines if rank in line.ranks]
        assert folded == [text for each, text in events if each == rank]
    assert sum(line.count for line in lines) == len(events)


@given(st.lists(st.text(max_size=300_000), max_size=8))
def test_output_of_any_length_is_split_to_fit_into_messages(texts: list[str]) -> None:
    lines = fold([printed(0, text[:MAX_LINE]) for text in texts])
    parts = list(split_into_messages(lines))
    assert [line for part in parts for line in part] == list(lines)
    assert all(len(dump_header(Output(lines=part))) < 2**20 for part in parts)


def test_a_flood_of_equal_lines_folds_in_linear_time() -> None:
    flood = [printed(0, "") for _ in range(200_000)]
    started = time.process_time()
    assert len(fold(flood)) == 200_000
    assert time.process_time() - started < LINEAR


def test_a_flood_of_lines_splits_in_linear_time() -> None:
    started = time.process_time()
    assert len(LineSplitter().feed(b"\n" * 400_000)) == 400_000
    assert len(LineSplitter().feed(b"\r" * 400_000 + b"x")) == 400_000
    assert time.process_time() - started < LINEAR


def test_lines_of_meshes_with_the_same_name_are_not_folded() -> None:
    lines = fold([replace(printed(rank, "step 1"), procs=rank) for rank in (3, 4)])
    assert [(line.procs, line.ranks) for line in lines] == [(3, (3,)), (4, (4,))]
