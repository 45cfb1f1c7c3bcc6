"""The protocol document describes this version."""

from __future__ import annotations

import re
import typing
from importlib import metadata
from pathlib import Path

from meshgate_wire import PROTOCOL_VERSION, SOFTWARE_VERSION, Limits
from meshgate_wire.limits import MIN_LIMITS
from meshgate_wire.messages import Header

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_the_software_version_is_the_distributions() -> None:
    assert metadata.version("meshgate") == SOFTWARE_VERSION


def test_the_document_names_this_protocol_version() -> None:
    assert f"meshgate protocol version {PROTOCOL_VERSION}." in DOCUMENT


def test_the_document_lists_every_message() -> None:
    union = typing.get_args(typing.get_args(Header)[0])
    types = {model.model_fields["type"].default for model in union}
    assert [name for name in sorted(types) if f"| `{name}` |" not in DOCUMENT] == []


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
