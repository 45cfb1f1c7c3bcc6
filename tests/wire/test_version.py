"""The protocol document describes this version."""

from __future__ import annotations

import re
import typing
from importlib import metadata
from pathlib import Path

from pydantic import TypeAdapter

from meshgate_wire import PROTOCOL_VERSION, SOFTWARE_VERSION, Limits
from meshgate_wire.limits import MIN_LIMITS
from meshgate_wire.messages import Header

MONARCHS_OWN = {"ConfigureMonarch.settings"}  # Monarch refuses a number that is too large for a setting
DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_the_software_version_is_the_distributions() -> None:
    assert metadata.version("meshgate") == SOFTWARE_VERSION


def test_the_document_names_this_protocol_version() -> None:
    assert f"meshgate protocol version {PROTOCOL_VERSION}." in DOCUMENT


def test_the_document_lists_every_message() -> None:
    union = typing.get_args(typing.get_args(Header)[0])
    types = {model.model_fields["type"].default for model in union}
    assert [name for name in sorted(types) if f"| `{name}` |" not in DOCUMENT] == []


def test_the_document_has_every_field_of_every_message() -> None:
    section = DOCUMENT.partition("### Fields")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    for model in typing.get_args(typing.get_args(Header)[0]):
        name, fields = model.model_fields["type"].default, set(model.model_fields) - {"type"}
        missing = sorted(fields - set(re.findall(r"`(\w+)`", rows.get(name, ""))))
        assert not missing, f"docs/protocol.md, section Fields: the row of {name!r} does not describe {missing}"
    union = typing.get_args(typing.get_args(Header)[0])
    assert set(rows) == {model.model_fields["type"].default for model in union}


def test_every_text_and_number_in_a_message_has_a_limit() -> None:
    """Collections end with the header, which has one: see ``max_header``."""
    schema = TypeAdapter(Header).json_schema()
    unlimited = []

    def visit(found: object, where: str) -> None:
        if isinstance(found, dict):
            kind = found.get("type")
            texts = kind == "string" and not found.keys() & {"maxLength", "enum", "const"}
            numbers = kind == "integer" and not found.keys() & {"maximum", "enum"} and where not in MONARCHS_OWN
            if texts or numbers:
                unlimited.append(where)
            for key, value in found.items():
                nested = f"{where}.{key}" if where.count(".") < 1 else where
                visit(value, where if key in ("properties", "anyOf", "items", "additionalProperties") else nested)
        elif isinstance(found, list):
            for value in found:
                visit(value, where)

    for name, model in schema["$defs"].items():
        visit(model, name)
    assert not unlimited, f"give these fields of messages a limit, as in models/fields.py: {unlimited}"


def test_the_document_lists_every_limit_with_minimum_and_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", DOCUMENT, re.MULTILINE))
    for name, minimum in MIN_LIMITS.items():
        assert rows[name] == f"{amount(name, minimum)} | {amount(name, getattr(Limits(), name))}"


def amount(name: str, value: int) -> str:
    if name in ("max_buffers", "max_partial_messages"):
        return f"{value:,}"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= size:
            return f"{value // size} {unit}"
    return f"{value // 1024} KiB"
