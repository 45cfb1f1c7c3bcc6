from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_gateway.engine.output.lines import MAX_LINE, LineSplitter, PrintedLine, fold, split_into_messages
from meshgate_wire.message_codec import dump_header
from meshgate_wire.messages import Output, OutputLine

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


def states(*pieces: bytes | None) -> list[tuple[str, str]]:
    """What is returned for the pieces; None: nothing follows for a while."""
    splitter = LineSplitter()
    returned: list[tuple[str, str]] = []
    for piece in pieces:
        returned += splitter.flush() if piece is None else splitter.feed(piece)
        assert piece is not None or not splitter.pending
    return returned


def test_a_bar_whose_refresh_begins_with_a_carriage_return_has_states_and_one_line() -> None:
    refreshed = states(b"\r 10%", None, b"\r 20%", None, None, b"\r 30%", b"\r100%", None, b"\n", None)
    assert refreshed == [(" 10%", "\r"), (" 20%", "\r"), (" 30%", "\r"), ("100%", "\r"), ("100%", "\n")]


def test_a_line_below_a_bar_ends_it_at_once() -> None:
    assert states(b"\r 10%\nnext\n") == [(" 10%", "\n"), ("next", "\n")]


def test_a_message_above_a_bar_is_a_line() -> None:
    returned = states(b"\r 45%", None, b"\r      \r", b"message\n", b"\r 46%", None)
    assert [(text, end) for text, end in returned if end == "\n"] == [("message", "\n")]
    assert returned[-1] == (" 46%", "\r")


def test_bars_below_one_another_are_rows_of_one_state() -> None:
    returned = states(
        *(b"\r 0% outer", None, b"\n\r 0% inner\x1b", b"[A", None, b"\n\r50% inner\x1b[A", None),
        *(b"\r10% outer", None, b"\n\r         \r\x1b[A", None, b"\r100% outer\n", None, b"end\n", None),
    )
    assert returned == [
        (" 0% outer", "\r"),
        (" 0% outer\n 0% inner", "\r"),
        (" 0% outer\n50% inner", "\r"),
        ("10% outer\n50% inner", "\r"),
        ("10% outer", "\r"),
        ("100% outer", "\n"),
        ("end", "\n"),
    ]


def test_a_bar_whose_refreshes_end_in_a_carriage_return_ends_as_a_line() -> None:
    returned = states(b"1/2\r", None, b"2/2\r", None, b"\n", None, b"done\n")
    assert returned == [("1/2", "\r"), ("2/2", "\r"), ("2/2", "\n"), ("done", "\n")]
    assert states(b"1/2\r2/2\r", None, b"\ndone\n")[-2:] == [("2/2", "\n"), ("done", "\n")]
    assert states(b"abc\r", None, b"\n", None)[-1] == ("abc", "\n")


def test_a_row_below_is_overwritten_as_such_when_the_one_above_has_ended() -> None:
    returned = states(b"\r 1 outer\n\r 1 inner\r", None, b" 2 inner\n", None)
    assert [text for text, end in returned if end == "\n"] == [" 1 outer", " 2 inner"]


@pytest.mark.parametrize("character", ["é", "進", "😀"])
def test_a_line_is_never_cut_within_a_character(character: str) -> None:
    text = "x" + character * 60_000
    splitter = LineSplitter()
    lines = [*splitter.feed(text.encode()), *splitter.flush()]
    assert len(lines) > 1
    assert "".join(part for part, _ in lines) == text
    first, rest = character.encode()[:1], character.encode()[1:]
    assert splitter.feed(b"a" + first) == []
    assert splitter.flush() == [("a", "")]
    assert not splitter.pending
    assert splitter.flush() == []
    assert splitter.feed(rest + b"\n") == [(character, "\n")]


def test_bytes_that_are_not_text_are_shown_at_the_end_at_the_latest() -> None:
    splitter = LineSplitter()
    splitter.feed(b"\x80" * 10)
    assert splitter.flush() == [("\ufffd" * 10, "")]
    splitter.feed(b"caf\xe9")
    assert [*splitter.flush(), *splitter.end()] == [("caf", ""), ("\ufffd", "")]


def test_a_bar_that_is_erased_leaves_no_line() -> None:
    erased = [(" 10%", "\r"), (" ", "\r")]
    assert states(b"\r 10%", None, b"\r    \r", None) == erased
    assert states(b"\r 10%\r    \r\nnext\n") == [*erased, ("next", "\n")]


def test_the_end_of_the_stream_ends_bars() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10% outer\n\r 20% inner\x1b[A") == [(" 10% outer", "\r")]
    assert splitter.end() == [(" 10% outer\n 20% inner", "\r"), (" 10% outer", "\n"), (" 20% inner", "")]
    assert splitter.end() == []


def test_more_bars_than_a_screen_has_do_not_grow_without_limit() -> None:
    ended = [text for text, end in states(b"\r 10%\n" * 1000) if end == "\n"]
    assert len(ended) > 900


def test_a_line_without_an_end_does_not_grow_without_limit() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * 200_000)
    assert sum(len(text) for text, _ in lines) + len(splitter.flush()[0][0]) == 200_000


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"\r", b"\n", b"\x1b[A", b"\x1b", b"[A", b"a"]), max_size=20))
def test_lines_do_not_depend_on_where_the_stream_is_cut(pieces: list[bytes]) -> None:
    whole, cut = LineSplitter(), LineSplitter()
    expected = whole.feed(b"".join(pieces)) + whole.end()
    got = [line for piece in pieces for line in cut.feed(piece)] + cut.end()
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
    assert LineSplitter().feed(b"\r" * 400_000 + b"x") == []
    assert len(LineSplitter().feed(b"x" * 60_000 + b"\r" * 400_000 + b"x")) == 1
    assert len(LineSplitter().feed(b"1\r2\r" * 200_000 + b"x")) == 400_000
    assert time.process_time() - started < LINEAR


@given(st.sets(st.integers(0, 400)))
def test_every_rank_of_a_line_is_named_within_the_limits_of_a_message(ranks: set[int]) -> None:
    lines = fold([printed(rank, "step 1") for rank in ranks])
    assert [rank for line in lines for rank in line.every_rank()] == sorted(ranks)
    assert all(line.count == len(list(line.every_rank())) for line in lines)
    assert all(OutputLine.model_validate_json(line.model_dump_json()) == line for line in lines)


def test_ranks_that_take_too_many_spans_are_named_in_several_lines() -> None:
    (whole,) = fold([printed(rank, "a") for rank in range(1024)])
    gaps = fold([printed(2 * rank, "a") for rank in range(1024)])
    assert (len(whole.ranks), whole.more_ranks, whole.count) == (64, ((64, 1023),), 1024)
    assert [line.count for line in gaps] == [128] * 8


def test_lines_of_meshes_with_the_same_name_are_not_folded() -> None:
    lines = fold([replace(printed(rank, "step 1"), procs=rank) for rank in (3, 4)])
    assert [(line.procs, line.ranks) for line in lines] == [(3, (3,)), (4, (4,))]
