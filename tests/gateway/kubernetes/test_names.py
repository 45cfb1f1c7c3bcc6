"""Names are refused here, by their fault, before a cluster sees them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_kubernetes.names import (
    Names,
    check_job_name,
    check_mesh_name,
    generate_job_name,
    is_label_key,
    is_label_value,
)

RFC_1123_THAT_STARTS_WITH_A_LETTER = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.mark.parametrize("name", ["trainer", "a", "trainer-2", "x" * 40])
def test_a_good_job_name_is_taken(name: str) -> None:
    assert check_job_name(name) == name


@pytest.mark.parametrize("name", ["", "Trainer", "2fast", "-a", "a-", "a_b", "a.b", "x" * 41, "ä"])
def test_a_bad_job_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        check_job_name(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "Empty"),
        ("x" * 64, "at most 63"),
        ("Workers", "lowercase alphanumeric"),
        ("work-ers", "lowercase alphanumeric"),
        ("2workers", "start with an alphabetic"),
        ("größe", "lowercase alphanumeric"),
    ],
)
def test_mesh_names_are_refused_in_monarchs_words(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_mesh_name(name)


@given(st.text(max_size=80))
def test_a_generated_name_is_valid_whatever_it_starts_from(stem: str) -> None:
    name = check_job_name(generate_job_name(stem))
    assert RFC_1123_THAT_STARTS_WITH_A_LETTER.fullmatch(name)
    assert name != generate_job_name(stem)


def test_a_job_and_a_mesh_whose_names_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="too long together"):
        Names("x" * 40).mesh("trainers12345")
    assert len(Names("x" * 40).mesh("trainers123")) == 52


def test_labels() -> None:
    assert is_label_value("")
    assert is_label_value("A-b_c.9")
    assert not is_label_value("a b")
    assert not is_label_value("-a")
    assert is_label_key("app")
    assert is_label_key("meshgate.dev/job")
    assert not is_label_key("/job")
    assert not is_label_key("Meshgate.dev/job")
    assert not is_label_key("")
