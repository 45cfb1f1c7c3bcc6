"""The documents of the repository and the code blocks in them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.programs import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")])
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code. ``line``: of its first line in the document."""

    document: Path
    line: int
    code: str

    @property
    def name(self) -> str:
        return f"{self.document.stem}_{self.line}"

    @property
    def is_program(self) -> bool:
        """Whether it can be run as a script."""
        return '__name__ == "__main__"' in self.code

    @property
    def is_complete(self) -> bool:
        """Whether it imports what it uses; others are fragments."""
        return self.code.startswith(("from ", "import "))

    @property
    def has_tests(self) -> bool:
        return "def test_" in self.code


def code_blocks(document: Path, language: str) -> list[Block]:
    text = document.read_text()
    return [
        Block(document, text.count("\n", 0, match.start(3)) + 1, textwrap.dedent(match[3]))
        for match in _BLOCK.finditer(text)
        if match[2] == language
    ]


def python_blocks(document: Path) -> list[Block]:
    return code_blocks(document, "python")


def programs_in(document: str) -> list[str]:
    """The blocks of a document, named from the root of the repository, that can be run as scripts."""
    return [block.code for block in python_blocks(ROOT / document) if block.is_program]
