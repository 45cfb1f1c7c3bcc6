"""What the documents say of the tree is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_THE_TREE = re.compile(r"`((?:client|gateway|sync|worker_image|tests|benchmarks|examples|docs|\.ci)/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    missing = [name for name in IN_THE_TREE.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in LINK.findall(text) if not (document.parent / name).exists()]
    assert missing == []
