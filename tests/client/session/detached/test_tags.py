from __future__ import annotations

import pytest

import meshgate as kt
from meshgate.session.detached.tags import current_tag


def test_the_innermost_block_counts() -> None:
    assert current_tag() == ""
    with kt.tag("outer"):
        with kt.tag("inner"):
            assert current_tag() == "inner"
        assert current_tag() == "outer"
    assert current_tag() == ""


@pytest.mark.parametrize(
    ("text", "error"), [(1, TypeError), ("", ValueError), ("x" * 257, ValueError), ("\udcff", ValueError)]
)
def test_an_invalid_tag_is_refused_before_the_block(text: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="a tag must be"), kt.tag(text):  # type: ignore[arg-type]
        raise AssertionError("the block ran")
