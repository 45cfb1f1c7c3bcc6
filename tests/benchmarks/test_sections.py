from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sections import section, write_section

TEXT = "# Page\n\n<!-- begin one -->\nfirst\n<!-- end one -->\n\n<!-- begin two -->\n<!-- end two -->\n"


def test_a_section_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    assert section(page, "one") == "first"
    write_section(page, "one", "a table\nof two lines")
    assert page.read_text() == TEXT.replace("first", "a table\nof two lines")
    assert section(page, "two") == ""


@pytest.mark.parametrize("name", ["three", "on"])
def test_a_document_without_the_markers_is_rejected(tmp_path: Path, name: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    with pytest.raises(ValueError, match=f"lacks the markers of section '{name}'"):
        write_section(page, name, "")
    assert page.read_text() == TEXT
