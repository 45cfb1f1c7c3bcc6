"""Headers as JSON and back. Headers that differ in the call number only are parsed once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter

from ..messages import MAX_COUNT, Header

_ADAPTER: TypeAdapter[Header] = TypeAdapter(Header)
_parse: Callable[[bytes], Header] = _ADAPTER.validator.validate_json
_CALL_NUMBER = re.compile(rb'\{"type":"[a-z_]{1,32}","call":(0|[1-9][0-9]{0,15})(?=[,}])')
_CACHED_HEADERS = 512
_CACHED_HEADER_BYTES = 1024
_cache: dict[bytes, Header] = {}  # by the JSON without the call number
_set = object.__setattr__  # bypasses that the models are frozen
H = TypeVar("H", bound=BaseModel)


def dump_header(header: Header) -> bytes:
    """The JSON of ``header``. Raises ``ValueError`` for text that UTF-8 cannot encode (lone surrogates)."""
    return header.__pydantic_serializer__.to_json(header)  # takes a third of the time of the union's serializer


def load_header(data: bytes | memoryview) -> Header:
    """Parses a header. Raises ``pydantic.ValidationError`` if ``data`` is not a valid one."""
    if not isinstance(data, bytes):
        data = bytes(data)
    match = _CALL_NUMBER.match(data)
    if match is None or (call := int(match[1])) > MAX_COUNT:
        return _parse(data)
    # Calls of an endpoint differ in the number only, and so do their replies: the rest is parsed once.
    rest = data[: match.start(1)] + data[match.end(1) :]
    cached = _cache.get(rest)
    if cached is not None:
        return with_call_number(cached, call)
    header = _parse(data)
    if len(rest) <= _CACHED_HEADER_BYTES and not getattr(header, "trace", None):  # no two traces are equal
        if len(_cache) >= _CACHED_HEADERS:
            _cache.clear()
        _cache[rest] = header
    return header


def with_call_number(header: H, call: int) -> H:
    """A copy of ``header`` with another call number, made without validation."""
    new = object.__new__(type(header))
    _set(new, "__dict__", {**header.__dict__, "call": call})
    _set(new, "__pydantic_fields_set__", header.__pydantic_fields_set__)
    _set(new, "__pydantic_extra__", None)
    _set(new, "__pydantic_private__", None)
    return new
