"""Which meshes a mount is for."""

from __future__ import annotations

import pytest

from meshgate.mounts.targets import meshes_of


def test_without_names_a_mount_is_for_all_meshes() -> None:
    assert meshes_of("remote_mount", None, {"a": 1, "b": 1}) == ["a", "b"]
    assert meshes_of("remote_mount", ["b"], {"a": 1, "b": 1}) == ["b"]


def test_an_unknown_mesh_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gather_mount\(meshes=\['c'\]\): unknown mesh 'c'; the job has a, b"):
        meshes_of("gather_mount", ["c"], {"b": 1, "a": 1})
