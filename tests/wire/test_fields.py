from __future__ import annotations

import pytest
from pydantic import ValidationError

from meshgate_wire.fields import MAX_SENT, Region, exception_line, first_problem, shorten, spans_of
from meshgate_wire.limits import Limits
from meshgate_wire.message_codec import dump_header, load_header
from meshgate_wire.messages import Failed, Failure, Fault, OutputLine


def test_a_region_has_a_size_and_a_stride_for_each_label() -> None:
    with pytest.raises(ValidationError, match="as many sizes and strides as labels"):
        Region(labels=("hosts",), offset=0, sizes=(1, 2), strides=(1,))
    assert Region(labels=(), offset=0, sizes=(), strides=()).labels == ()


@pytest.mark.parametrize(
    ("ranks", "spans"), [((), []), ((3,), [(3, 3)]), ((0, 1, 2, 5, 7, 8), [(0, 2), (5, 5), (7, 8)])]
)
def test_ranks_that_follow_one_another_are_a_span(ranks: tuple[int, ...], spans: list[tuple[int, int]]) -> None:
    assert list(spans_of(ranks)) == spans


@pytest.mark.parametrize(
    ("report", "line"),
    [
        ("The actor failed:\n  ValueError: no\n", ""),
        (
            """The actor failed:
  Traceback (most recent call last):
    File "a.py", line 1, in f
      g()
    File "a.py", line 2, in g
      h()

  RuntimeError: CUDA error: device-side assert triggered
  Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
""",
            "RuntimeError: CUDA error: device-side assert triggered",
        ),
        (
            """The actor failed:
    + Exception Group Traceback (most recent call last):
    |   File "a.py", line 1, in f
    |     raise group
    | ExceptionGroup: many (2 sub-exceptions)
    +-+---------------- 1 ----------------
      | Traceback (most recent call last):
      |   File "a.py", line 2, in g
      |     raise inner
      | ValueError: inner
      +---------------- 2 ----------------
      | KeyError: 'b'
      +------------------------------------
""",
            "ExceptionGroup: many (2 sub-exceptions)",
        ),
        ('Traceback:\n  File "a.py", line 1, in f\n    g()', ""),
    ],
)
def test_the_exception_of_a_report_is_the_first_line_after_its_traceback(report: str, line: str) -> None:
    assert exception_line(report) == line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"labels": [], "sizes": ["a secret"], "strides": []}', "offset: Field required"),
        (
            '{"labels": [], "offset": 0, "sizes": ["a secret"], "strides": []}',
            "sizes.0: Input should be a valid integer",
        ),
        ("{", "Invalid JSON: "),
    ],
)
def test_the_first_problem_names_the_field_but_not_its_value(text: str, problem: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Region.model_validate_json(text)
    assert first_problem(raised.value).startswith(problem)
    assert "secret" not in first_problem(raised.value)


LONG = "first line\n" + "x" * 1_000_000 + "\nlast line"


def test_a_long_text_keeps_its_start_and_its_end_and_says_how_much_was_cut() -> None:
    short = shorten(LONG, 1000)
    assert len(short) <= 1000
    assert short.startswith("first line\nxxx")
    assert short.endswith("xxx\nlast line")
    head, notice, tail = short.split("\n[")[0], short.split("[")[1].split("]")[0], short.split("]\n")[1]
    assert notice == f"{len(LONG) - len(head) - len(tail)} characters cut"


@pytest.mark.parametrize("text", ["", "short", "x" * 1000, "snow \u2603"])
def test_a_text_within_the_limit_stays_as_it_is(text: str) -> None:
    assert shorten(text, 1000) is text or shorten(text, 1000) == text


def test_a_text_that_utf_8_cannot_encode_is_made_encodable() -> None:
    assert shorten("a\udcffb", 10) == "a?b"


@pytest.mark.parametrize("character", ["x", "\x01", "\u2603", "\U0001f600", "\udcff"])
def test_the_longest_failure_fits_into_a_header(character: str) -> None:
    text = character * 1_000_000
    names = {rank: character.encode(errors="replace").decode() * 256 for rank in range(64)}
    failure = Failure(kind="supervision", message=text, step=text, ranks=tuple(range(64)), hosts=names)
    assert len(dump_header(Failed(call=1, failure=failure))) < Limits().max_header


def test_a_failure_names_the_first_of_thousands_of_hosts() -> None:
    hosts = {rank: f"workers-{rank:0>200}" for rank in range(10_000)}
    failure = Failure(kind="stale_code", message="behind", hosts=hosts)
    assert 100 < len(failure.hosts) < 10_000
    assert failure.hosts == {rank: hosts[rank] for rank in range(len(failure.hosts))}
    assert len(dump_header(Failed(call=1, failure=failure))) < Limits().max_header


def test_a_receiver_rejects_what_a_sender_must_shorten() -> None:
    header = Fault(object=1, mesh="actors", ranks=(0,), report="text")
    sent = dump_header(header)
    assert load_header(sent) == header
    assert len(Fault(object=1, mesh="actors", ranks=(0,), report=LONG).report) <= MAX_SENT
    with pytest.raises(ValidationError, match="at most 262144 characters"):
        load_header(sent.replace(b'"text"', b'"' + b"x" * 262_145 + b'"'))


@pytest.mark.parametrize(
    "spans", [((5, 2),), ((0, 9), (3, 12)), ((0, 2**18),), tuple((2 * n, 2 * n) for n in range(65))]
)
def test_spans_name_no_more_ranks_than_a_mesh_has(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValidationError):
        OutputLine(stream="stdout", more_ranks=spans, text="a")
