"""The headers: what is let in, what is ignored, and what is refused before it costs anything."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from meshgate_wire import messages as m

REF = m.MeshRef(object=3, region=m.Region(labels=("hosts", "gpus"), offset=1, sizes=(2, 4), strides=(8, 1)))
FAILURE = m.Failure(
    kind="actor",
    message="it broke",
    mesh="trainers",
    ranks=(1, 2),
    hosts={1: "pod-1"},
    errors=(m.ErrorGroup(ranks=(1, 2), count=9, buffer=0),),
    total=16,
)
ARGUMENTS = (m.Argument(kind="procs", ref=REF),)

EXAMPLES: list[m.Header] = [
    m.AttachHosts(object=1, mesh="workers"),
    m.SpawnProcs(object=2, hosts=REF, per_host={"gpus": 8}, name="procs", version="abc"),
    m.SpawnActors(object=3, procs=REF, name="trainers", class_name="a.B", kind="async", arguments=ARGUMENTS),
    m.Call(call=1, target=REF, endpoint="step", adverb="choose", arguments=ARGUMENTS),
    m.SendTo(target=REF, endpoint="step", port=-9, selection="choose"),
    m.Sync(body='{"type": "have"}'),
    m.Reload(call=5, target=REF, version="abc", paths=("src",)),
    m.Stop(call=2, target=REF, shutdown=True),
    m.Initialized(call=3, target=REF),
    m.OpenChannel(object=4, once=True),
    m.PortSend(port=4, arguments=ARGUMENTS),
    m.Adopt(object=-1, kind="actors", name="x", region=REF.region, parent=REF),
    m.Release(objects=(4, -1)),
    m.Configure(stream_output=False),
    m.EndSession(call=4),
    m.HostsAttached(object=1, hosts=(m.Host(name="pod-0", address="tcp://10.0.0.1:26600"), m.Host(name="pod-1"))),
    m.Values(call=1, ranks=(5,), objects={0: m.Adopted(objects=(-1, -2))}),
    m.Item(call=1, rank=3, objects=m.Adopted(objects=(-3,))),
    m.Done(call=2),
    m.Failed(call=1, rank=2, failure=FAILURE),
    m.ObjectFailed(object=2, failure=FAILURE),
    m.Fault(object=None, mesh="trainers", ranks=(7,), hosts={7: "pod-3"}, report="killed"),
    m.Output(lines=(m.OutputLine(stream="stderr", ranks=(0, 1), count=2, text="50 %", end="\r"),)),
    m.PortMessage(port=4, rank=1, exception=True),
]


def test_the_examples_show_every_message() -> None:
    union = typing.get_args(typing.get_args(m.Header)[0])
    assert {type(example) for example in EXAMPLES} == set(union)


@pytest.mark.parametrize("header", EXAMPLES, ids=lambda header: header.type)
def test_a_header_is_read_as_it_was_written(header: m.Header) -> None:
    assert m.load_header(m.dump_header(header)) == header
    assert m.load_header(memoryview(m.dump_header(header))) == header


@pytest.mark.parametrize("header", EXAMPLES, ids=lambda header: header.type)
def test_a_field_that_a_later_version_adds_is_ignored(header: m.Header) -> None:
    data = m.dump_header(header)
    assert m.load_header(data[:-1] + b', "later": [1, {}]}') == header


def test_headers_cannot_be_changed() -> None:
    for example in EXAMPLES:
        assert isinstance(example, BaseModel)
        with pytest.raises(ValidationError, match="frozen"):
            example.type = "done"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"type": "unheard_of"}',
        b'{"type": "done"}',
        b'{"type": "done", "call": -1}',
        b'{"type": "done", "call": NaN}',
        b'{"type": "done", "call": 9007199254740993}',
        b'{"type": "done", "call": ' + b"9" * 100_000 + b"}",
        b'{"type": "done", "call": 1, "x": ' + b"[" * 100_000,
        b'{"type": "done", "call": 1, "x": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"type": "open_channel", "object": 1e99}',
        b'{"type": "attach_hosts", "object": 1, "mesh": "' + b"x" * 257 + b'"}',
    ],
    ids=lambda data: data[:40].decode("latin-1"),
)
def test_what_is_not_a_header_is_refused(data: bytes) -> None:
    with pytest.raises(ValidationError):
        m.load_header(data)


def test_a_region_has_a_size_and_a_stride_for_each_label() -> None:
    with pytest.raises(ValidationError, match="as many sizes and strides as labels"):
        m.Region(labels=("hosts",), offset=0, sizes=(1, 2), strides=(1,))
    assert m.Region(labels=(), offset=0, sizes=(), strides=()).labels == ()


def test_a_long_list_of_bad_elements_makes_one_error() -> None:
    data = b'{"type": "release", "objects": [' + b'"a",' * 100_000 + b'"a"]}'
    with pytest.raises(ValidationError) as caught:
        m.load_header(data)
    assert caught.value.error_count() == 1


def test_the_streams_of_both_sides_objects_never_meet() -> None:
    numbers = [*range(1, 5), *range(-4, 0)]
    streams = [m.stream_of(number) for number in numbers]
    assert len(set(streams)) == len(streams)
    assert streams[:4] == numbers[:4]
    assert all(stream > 2**31 for stream in streams[4:])


@given(calls=st.lists(st.integers(0, 2**53), min_size=2, max_size=5))
@pytest.mark.parametrize(
    "header",
    [
        m.Call(call=0, target=m.MeshRef(object=7), endpoint="echo", adverb="call"),
        m.Values(call=0, ranks=(3,), objects={0: m.Adopted(objects=(-1,))}),
        m.Values(call=0),
        m.Done(call=0),
    ],
    ids=repr,
)
def test_headers_that_differ_in_their_call_alone(header: m.Header, calls: list[int]) -> None:
    for call in calls:
        expected = header.model_copy(update={"call": call})
        other = m.numbered(header, call)
        loaded = m.load_header(m.dump_header(other))
        assert other == loaded == expected
        assert repr(other) == repr(loaded) == repr(expected)
        assert hash(other.model_dump_json()) == hash(loaded.model_dump_json())
        assert loaded.model_copy() == expected


@pytest.mark.parametrize("number", ["-1", "01", str(2**53 + 1), "1.5", "null", '"x"', "9" * 40])
def test_a_call_of_a_known_form_is_refused_where_its_number_is_none(number: str) -> None:
    assert m.load_header(b'{"type":"done","call":5}') == m.Done(call=5)
    data = f'{{"type":"done","call":{number}}}'.encode()
    with pytest.raises(ValidationError):
        m.load_header(data)
