from __future__ import annotations

from pathlib import Path

from meshgate.doctor.laptop import check_file_watches


def test_a_low_limit_is_named_with_the_command_that_raises_it(tmp_path: Path) -> None:
    (tmp_path / "max_user_watches").write_text("8192\n")
    (tmp_path / "max_user_instances").write_text("128\n")
    low, enough = check_file_watches(tmp_path)
    assert (low.outcome, "max_user_watches is 8192" in low.text) == ("problem", True)
    assert "sysctl fs.inotify.max_user_watches=65536" in low.remedy
    assert enough.outcome == "ok"


def test_other_kernels_have_no_limits(tmp_path: Path) -> None:
    assert list(check_file_watches(tmp_path)) == []
