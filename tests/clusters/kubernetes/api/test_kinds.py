"""The API paths of kinds."""

from __future__ import annotations

import pytest

from meshgate_kubernetes.api.kinds import KINDS


@pytest.mark.parametrize(
    ("kind", "path", "resource"),
    [
        ("Pod", "/api/v1/namespaces/team/pods/a", "pods"),
        ("StatefulSet", "/apis/apps/v1/namespaces/team/statefulsets/a", "statefulsets.apps"),
        ("Node", "/api/v1/nodes/a", "nodes"),
    ],
)
def test_the_path_of_an_object(kind: str, path: str, resource: str) -> None:
    assert KINDS[kind].path("team", "a") == path
    assert KINDS[kind].resource == resource


def test_the_path_of_the_objects_of_all_namespaces() -> None:
    assert KINDS["StatefulSet"].path("") == "/apis/apps/v1/statefulsets"


def test_names_cannot_change_the_path() -> None:
    assert KINDS["Pod"].path("a/b", "../c") == "/api/v1/namespaces/a%2Fb/pods/..%2Fc"
