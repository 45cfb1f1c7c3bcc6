"""Quantities have the same values as in Kubernetes."""

from __future__ import annotations

from decimal import Decimal

import pytest

from meshgate_kubernetes.manifests.quantity import format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", "2"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        (".5", "0.5"),
        ("64Gi", str(64 * 2**30)),
        ("1k", "1000"),
        ("1e3", "1000"),
        ("12E", "12000000000000000000"),
        (3, "3"),
        (0.25, "0.25"),
    ],
)
def test_a_valid_quantity_is_parsed(text: str | float, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "lots", "1GB", "1 Gi", "1Gi2", "0x10", "nan", "1mm"])
def test_an_invalid_quantity_raises(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "resource", "text"),
    [
        ("8", "nvidia.com/gpu", "8"),
        ("0.25", "cpu", "250m"),
        ("4", "cpu", "4"),
        (str(64 * 2**30), "memory", "64Gi"),
        (str(1536 * 2**20), "memory", "1.5Gi"),
        ("100", "memory", "100"),
        (str(2**31), "ephemeral-storage", "2Gi"),
    ],
)
def test_quantities_are_formatted_for_people(value: str, resource: str, text: str) -> None:
    assert format_quantity(Decimal(value), resource) == text
