"""Headers are immutable; regions and streams are consistent."""

from __future__ import annotations

import typing

import pytest
from pydantic import BaseModel, ValidationError

from meshgate_wire import messages as m
from tests.wire.example_messages import EXAMPLES


def test_there_is_an_example_of_every_message() -> None:
    union = typing.get_args(typing.get_args(m.Header)[0])
    assert {type(example) for example in EXAMPLES} == set(union)


def test_headers_are_immutable() -> None:
    for example in EXAMPLES:
        assert isinstance(example, BaseModel)
        with pytest.raises(ValidationError, match="frozen"):
            example.type = "done"


def test_objects_of_both_sides_have_distinct_streams() -> None:
    numbers = [*range(1, 5), *range(-4, 0)]
    streams = [m.stream_of(number) for number in numbers]
    assert len(set(streams)) == len(streams)
    assert streams[:4] == numbers[:4]
    assert all(stream > 2**31 for stream in streams[4:])
