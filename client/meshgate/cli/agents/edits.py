"""Edits of files: each replaces a text that occurs once, or the whole file. Either all are made, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class Edit(BaseModel):
    """``old`` is replaced by ``new`` in ``file``; without ``old``, ``new`` is the file's content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(min_length=1, description="relative to the directory of the command")
    old: str | None = Field(default=None, min_length=1, description="occurs exactly once; absent: the file is written")
    new: str


def apply_edits(edits: Sequence[Edit], directory: Path) -> None:
    """Writes the files below ``directory``. Raises ValueError, before anything is written, if an edit does not fit."""
    contents: dict[Path, str] = {}
    for edit in edits:
        path = (directory / edit.file).resolve()
        if not path.is_relative_to(directory.resolve()):
            raise ValueError(f"{edit.file} is outside {directory}")
        contents[path] = edit.new if edit.old is None else _replaced(edit, edit.old, path, contents)
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(content)


def _replaced(edit: Edit, old: str, path: Path, contents: dict[Path, str]) -> str:
    if path in contents:
        content = contents[path]
    else:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                content = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {edit.file}: {error}") from error
    if (count := content.count(old)) != 1:
        raise ValueError(
            f"the text to replace occurs {count} times in {edit.file}; it must occur once. No file was changed"
        )
    return content.replace(old, edit.new)
