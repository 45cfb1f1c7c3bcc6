from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import cast

import pytest

from meshgate.caller import warn_caller

WARN = "def warn(depth):\n    warn_caller('careless', category) if not depth else warn(depth - 1)\n"


def inside(module: str, category: type[Warning]) -> Callable[[int], None]:
    """A function of ``module`` that calls itself a number of times, then warns."""
    namespace = {"__name__": module, "warn_caller": warn_caller, "category": category}
    exec(compile(WARN, f"/{module}.py", "exec"), namespace)
    return cast(FunctionType, namespace["warn"])


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_a_warning_names_the_line_that_called_meshgate(depth: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside("meshgate.jobs.trait", DeprecationWarning)(depth)
    (warning,) = caught
    assert (warning.filename, warning.category) == (__file__, DeprecationWarning)
    assert str(warning.message) == "careless"


def test_packages_with_similar_names_are_the_programs() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside("meshgates", UserWarning)(0)
    assert caught[0].filename == "/meshgates.py"
