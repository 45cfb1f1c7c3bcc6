"""The result of a pull."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pulled:
    """The number and total ``size`` of the pulled files, the bytes that were transferred, and the names that were left
    out: special files, links that lead out of the directory, and files that were removed meanwhile."""

    files: int = 0
    size: int = 0
    travelled: int = 0
    left_out: tuple[str, ...] = ()

    def __add__(self, other: Pulled) -> Pulled:
        return Pulled(
            self.files + other.files,
            self.size + other.size,
            self.travelled + other.travelled,
            self.left_out + other.left_out,
        )
