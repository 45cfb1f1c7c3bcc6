"""Tests against the cluster of KUBECONFIG, with the images that ``tests/kubernetes/images`` prints.

Each worker process of a run has its own namespace, in which no object of a job may remain after a test. Tests that
disturb the whole cluster (they restart its API server, or let its node take no pods) run alone: ``disturbing``. Those
that count on the node's GPUs take turns: ``four_gpus`` and ``no_gpus``.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.manifests.names import JOB_LABEL
from tests.kubernetes.cluster import KINDS, Kubectl


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:  # all of the run: as text, because a comparison of paths takes 0.4 s for them
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.kubernetes)
            item.add_marker(pytest.mark.timeout(900))  # includes waiting for the cluster


@pytest.fixture(scope="session")
def api() -> Api:
    return Api.from_kubeconfig()


@pytest.fixture(scope="session")
def images() -> tuple[str, str]:
    """The images of the gateway and the worker."""
    names = ("MESHGATE_GATEWAY_IMAGE", "MESHGATE_WORKER_IMAGE")
    missing = [name for name in names if not os.environ.get(name)]
    assert not missing, f'{", ".join(missing)} not set: run eval "$(tests/kubernetes/images)" first'
    return os.environ[names[0]], os.environ[names[1]]


@pytest.fixture(scope="session")
def namespace(images: tuple[str, str]) -> Iterator[str]:
    kubectl = Kubectl("default")
    name = f"meshgate-test-{secrets.token_hex(3)}"
    kubectl("create", "namespace", name)
    Kubectl(name).wait_for_account()
    yield name
    kubectl("delete", "namespace", name, "--wait=true", timeout=240)


@pytest.fixture(scope="session")
def kubectl(namespace: str) -> Kubectl:
    return Kubectl(namespace)


@contextmanager
def locked(name: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / f"meshgate-cluster-{name}.lock", "w") as lock:
        fcntl.flock(lock, how)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Holds a lock that disturbing tests have for themselves and other tests share, with the fixtures of their module.

    The time limit of a test begins after it.
    """
    with ExitStack() as held:
        if Path(__file__).parent in item.path.parents:
            disturbing = item.get_closest_marker("disturbing") is not None
            with locked("next"):  # else tests that share the lock would overtake one that waits for them
                held.enter_context(locked("tests", fcntl.LOCK_EX if disturbing else fcntl.LOCK_SH))
        return (yield)


@pytest.fixture(autouse=True)
def _nothing_left(kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MESHGATE_PROGRESS", "plain")
    before = _objects(kubectl)  # jobs that other tests of the module also use outlive the test
    yield
    assert _objects(kubectl) - before == set(), "the test left objects of a job behind"


@pytest.fixture
def four_gpus(api: Api) -> Iterator[None]:
    """Makes the scheduler believe that a node has four GPUs."""
    nodes, _ = api.list_objects("Node", "")
    path = f"/api/v1/nodes/{nodes[0]['metadata']['name']}/status"

    def patch(op: str, **value: str) -> None:  # old versions of kubectl cannot patch a status
        # The kubelet would update what can be allocated 10 s later, and until then tests would meet the old number.
        change = [{"op": op, "path": f"/status/{of}/nvidia.com~1gpu", **value} for of in ("capacity", "allocatable")]
        api._request("PATCH", path, change, content_type="application/json-patch+json")  # type: ignore[arg-type]

    with locked("gpus"):
        patch("add", value="4")
        yield
        patch("remove")


@pytest.fixture
def no_gpus() -> Iterator[None]:
    """No node has GPUs meanwhile."""
    with locked("gpus"):
        yield


def _objects(kubectl: Kubectl) -> set[str]:
    return set(kubectl("get", KINDS, "-l", JOB_LABEL, "-o", "name").split())
