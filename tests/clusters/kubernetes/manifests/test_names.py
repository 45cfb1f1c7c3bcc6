"""Invalid names raise before anything is created."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_kubernetes.manifests.names import (
    Names,
    check_job_name,
    check_mesh_name,
    generate_job_name,
    is_label_key,
    is_label_value,
    parse_selector,
    selector_object,
)
from tests.clusters.kubernetes.objects import Object

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.mark.parametrize("name", ["trainer", "a", "trainer-2", "x" * 40])
def test_a_valid_job_name_is_accepted(name: str) -> None:
    assert check_job_name(name) == name


@pytest.mark.parametrize("name", ["", "Trainer", "2fast", "-a", "a-", "a_b", "a.b", "x" * 41, "ä"])
def test_an_invalid_job_name_raises(name: str) -> None:
    with pytest.raises(ValueError, match="invalid job name"):
        check_job_name(name)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("", "Empty"),
        ("x" * 64, "at most 63"),
        ("Workers", "lowercase alphanumeric"),
        ("work-ers", "lowercase alphanumeric"),
        ("2workers", "start with an alphabetic"),
        ("größe", "lowercase alphanumeric"),
    ],
)
def test_an_invalid_mesh_name_raises_with_monarchs_text(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check_mesh_name(name)


@given(st.text(max_size=80))
def test_a_generated_name_is_valid_for_any_stem(stem: str) -> None:
    name = check_job_name(generate_job_name(stem))
    assert DNS_LABEL.fullmatch(name)
    assert name != generate_job_name(stem)


def test_a_combined_name_that_is_too_long_raises() -> None:
    with pytest.raises(ValueError, match=r"the combined name of job .* is too long"):
        Names("x" * 40).mesh("trainers12345")
    assert len(Names("x" * 40).mesh("trainers123")) == 52


def test_label_keys_and_values_are_validated() -> None:
    assert is_label_value("")
    assert is_label_value("A-b_c.9")
    assert not is_label_value("a b")
    assert not is_label_value("-a")
    assert is_label_key("app")
    assert is_label_key("meshgate.dev/job")
    assert not is_label_key("/job")
    assert not is_label_key("Meshgate.dev/job")
    assert not is_label_key("")


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
