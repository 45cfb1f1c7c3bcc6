"""Quotes and variables are expanded as Docker does."""

from __future__ import annotations

import pytest

from meshgate.images.expansion import expand


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("plain", "plain"),
        ("$A", "one"),
        ("${A}b", "oneb"),
        ("$Ab", ""),
        ("${NONE:-other}", "other"),
        ("${NONE:-$A}", "one"),
        ("${A:-other}", "one"),
        ("${A:+yes}", "yes"),
        ("${NONE:+yes}", ""),
        ("\\$A", "$A"),
        ("'$A'", "$A"),
        ('"$A b"', "one b"),
        ('"a\\"b"', 'a"b'),
        ("a\\ b", "a b"),
        ("5$", "5$"),
    ],
)
def test_quotes_and_variables_are_expanded(word: str, value: str) -> None:
    assert expand(word, {"A": "one"}.get) == value


@pytest.mark.parametrize(
    ("word", "message"),
    [("'a", "unclosed quote: 'a"), ("${A%%.*}", r"\$\{A%%\.\*\} is not supported: use \$\{A\}, \$\{A:-b\} or")],
)
def test_other_forms_are_rejected(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(word, {}.get)
