"""Label selectors are parsed as in kubectl; an invalid one raises before anything is created."""

from __future__ import annotations

import pytest

from meshgate_kubernetes.manifests.selectors import parse_selector, selector_object
from tests.clusters.kubernetes.objects import Object


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b", {"matchLabels": {"a": "b"}}),
        ("a==b,c=d", {"matchLabels": {"a": "b", "c": "d"}}),
        ("a!=b", {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}),
        (
            "a in (b, c),d",
            {
                "matchExpressions": [
                    {"key": "a", "operator": "In", "values": ["b", "c"]},
                    {"key": "d", "operator": "Exists"},
                ]
            },
        ),
        ("a notin (b)", {"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}),
        ("!a", {"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}),
    ],
)
def test_a_selector_is_converted_to_its_object_form(text: str, expected: Object) -> None:
    assert selector_object(text) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "every pod of the namespace"),
        (",,", "'' must be key=value, key!=value"),
        ("a in (b", "'a in (b' must be key=value, key!=value"),
        ("a > 5", "'a > 5' must be key=value, key!=value"),
        ("=b", "'=b' must be key=value, key!=value"),
        ("a=b=c", "invalid value 'b=c' of label 'a'"),
        ("a in (b c)", "invalid value 'b c' of label 'a'"),
    ],
)
def test_an_invalid_selector_raises_with_the_valid_forms(text: str, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_selector(text)
    assert error in str(caught.value)


def test_parse_selector_returns_only_equalities() -> None:
    assert parse_selector("a=b, c==d,e!=f,g in (h,i),!j") == {"a": "b", "c": "d"}
