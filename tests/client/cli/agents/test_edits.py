from __future__ import annotations

from pathlib import Path

import pytest

from meshgate.cli.agents.edits import Edit, apply_edits


def test_edits_apply_in_order_and_keep_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    apply_edits(
        [
            Edit(file="a.py", old="x = 1", new="x = 3"),
            Edit(file="a.py", old="x = 3", new="x = 4"),
            Edit(file="new/b.py", new="z = 0\n"),
        ],
        tmp_path,
    )
    assert (tmp_path / "a.py").read_bytes() == b"x = 4\r\ny = 2\r\n"
    assert (tmp_path / "new" / "b.py").read_bytes() == b"z = 0\n"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit(file="a.py", old="x", new="z"), "occurs 2 times in a.py"),
        (Edit(file="a.py", old="q", new="z"), "occurs 0 times in a.py"),
        (Edit(file="b.py", old="x", new="z"), "cannot read b.py"),
        (Edit(file="../b.py", new="z"), "is outside"),
    ],
)
def test_no_file_changes_if_an_edit_does_not_fit(edit: Edit, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = x\n")
    with pytest.raises(ValueError, match=message):
        apply_edits([Edit(file="a.py", new="changed"), edit][edit.file == "a.py" :], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]
    assert (tmp_path / "a.py").read_text() == "x = x\n"
