"""Generated parts of documents, each between two markers: ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""

from __future__ import annotations

from pathlib import Path


def section(document: Path, name: str) -> str:
    """The content of section ``name``. Raises ValueError if a marker is missing."""
    return _parts(document, name)[1].strip("\n")


def write_section(document: Path, name: str, content: str) -> None:
    """Replaces the content of section ``name``. Raises ValueError if a marker is missing."""
    before, _, after = _parts(document, name)
    document.write_text(f"{before}\n{content}\n{after}")


def _parts(document: Path, name: str) -> tuple[str, str, str]:
    """What is before, inside and after the section; the markers belong to the outer parts."""
    start, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found, rest = document.read_text().partition(start)
    content, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{document} lacks the markers of section {name!r}: {start} and {end}")
    return before + start, content, end + after
