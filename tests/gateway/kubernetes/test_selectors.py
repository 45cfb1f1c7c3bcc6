"""Label selectors are read as kubectl reads them; what cannot be read is refused before anything is made."""

from __future__ import annotations

import pytest

from meshgate_kubernetes.selectors import parse_selector, selector_object
from tests.gateway.kubernetes.objects import Object


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
        ("!a", {"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}),
    ],
)
def test_selectors_in_words_become_selectors_as_objects(text: str, expected: Object) -> None:
    assert selector_object(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "every pod of the namespace"),
        (",,", "'' is none of key=value"),
        ("a in (b", "'a in (b' is none of key=value"),
        ("a > 5", "'a > 5' is none of key=value"),
        ("=b", "'=b' is none of key=value"),
        ("a=b=c", "'b=c', of 'a', is not a label value"),
        ("a in (b c)", "'b c', of 'a', is not a label value"),
    ],
)
def test_what_is_no_selector_is_refused_with_the_forms_there_are(text: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_selector(text)
    assert told in str(caught.value)


def test_only_equalities_are_labels_that_a_pod_must_have() -> None:
    assert parse_selector("a=b, c==d,e!=f,g in (h,i),!j") == {"a": "b", "c": "d"}
