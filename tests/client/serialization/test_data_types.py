"""Which names a result may contain if the laptop reads data only."""

from __future__ import annotations

import pytest

from meshgate.serialization.data_types import is_data_type


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "set"),
        ("builtins", "ValueError"),
        ("collections", "OrderedDict"),
        ("datetime", "timedelta"),
        ("numpy", "dtype"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("torch._utils", "_rebuild_tensor_v2"),
    ],
)
def test_types_that_hold_data_are_accepted(module: str, name: str) -> None:
    assert is_data_type(module, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("builtins", "open"),
        ("builtins", "type"),
        ("builtins", "KeyboardInterrupt"),  # raised at get(), it would end the program
        ("builtins", "set.add"),
        ("collections", "abc"),
        ("numpy", "load"),
        ("os", "system"),
        ("torch", "load"),
        ("no.such.module", "Name"),
    ],
)
def test_other_names_are_not(module: str, name: str) -> None:
    assert not is_data_type(module, name)
