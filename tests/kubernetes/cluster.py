"""kubectl for the cluster tests, and pods without meshgate."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

KINDS = "all,configmap,secret,serviceaccount,role,rolebinding,networkpolicy,poddisruptionbudget"


class Kubectl:
    """``kubectl`` in one namespace, as the user of KUBECONFIG or of another file."""

    def __init__(self, namespace: str, kubeconfig: str | Path | None = None) -> None:
        self.namespace = namespace
        self._arguments = ["kubectl", "--namespace", namespace]
        if kubeconfig is not None:
            self._arguments += ["--kubeconfig", str(kubeconfig)]

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 240) -> str:
        """Returns the output; fails with the error output."""
        done = subprocess.run(
            [*self._arguments, *arguments], input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    def knows_the_user(self) -> bool:
        """Whether the API server accepts the credentials."""
        command = [*self._arguments, "get", "--raw", "/version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return "Unauthorized" not in done.stderr

    def wait_for_account(self) -> None:
        """Waits for the default service account of the namespace, which pods need."""
        command = [*self._arguments, "get", "serviceaccount", "default"]
        while subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0:
            continue

    def token_of(self, account: str) -> str:
        """A token of a service account, valid until the account is deleted."""
        name = f"{account}-login-{secrets.token_hex(3)}"  # that of an earlier account may be there a moment longer
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/service-account-token",
            "metadata": {"name": name, "annotations": {"kubernetes.io/service-account.name": account}},
        }
        self.apply(secret)
        token = ""
        while not token:  # a controller sets it
            token = self("get", "secret", name, "-o", "jsonpath={.data.token}")
        return base64.b64decode(token).decode()

    def end_container(self, pod: str) -> None:
        """Sends SIGTERM to the first process of the pod. What sends it may be killed with the container."""
        command = [*self._arguments, "exec", pod, "--", "python", "-c", "import os; os.kill(1, 15)"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in (0, 137), done.stderr

    def wait_deleted(self, obj: str, *, limit: int = 180) -> None:
        """Waits until the object, such as ``configmap/name``, does not exist. The parent of a job goes last."""
        command = [*self._arguments, "wait", "--for=delete", obj, f"--timeout={limit}s"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit + 10, check=False)
        assert done.returncode == 0 or "NotFound" in done.stderr, done.stderr

    def wait_ended(self, pod: str) -> None:
        """Waits until the pod has succeeded or failed."""
        self.watch_pod(pod, "{.status.phase}", lambda phase: phase in ("Succeeded", "Failed"), limit=300)

    def watch_pod(self, pod: str, path: str, until: Callable[[str], bool], *, limit: int = 120) -> None:
        """Waits until ``until`` is true for the value of ``path`` (JSONPath) in the current pod of this name.

        Fails after ``limit`` seconds.
        """
        watching = [*self._arguments, "get", "pods", "--field-selector", f"metadata.name={pod}", "--watch"]
        watching += ["--request-timeout", f"{limit}s", "-o", f'jsonpath={path}{{"\\n"}}']
        last = "nothing"
        with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            for line in watch.stdout:
                last = line.strip()
                if until(last):
                    watch.terminate()
                    return
        raise AssertionError(f"pod {pod} was still {last!r} after {limit} s")

    def wait_ready(self) -> None:
        """Waits until the API server is ready."""
        command = [*self._arguments, "get", "--raw", "/readyz"]
        while subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0:
            continue

    def apply(self, *objects: dict[str, Any]) -> None:
        self("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    @contextmanager
    def applied(self, *objects: dict[str, Any]) -> Iterator[None]:
        """Creates the objects for the block and deletes them after it."""
        self.apply(*objects)
        try:
            yield
        finally:
            names = [f"{each['kind']}/{each['metadata']['name']}" for each in reversed(objects)]
            self("delete", "--ignore-not-found", "--grace-period=1", "--cascade=foreground", *names)


@contextmanager
def own_namespace(name: str) -> Iterator[Kubectl]:
    """A namespace for the block, for what would concern the pods of other tests as well: a quota, a limit."""
    kubectl = Kubectl(name)
    kubectl("create", "namespace", name)
    try:
        kubectl.wait_for_account()
        yield kubectl
    finally:
        kubectl("delete", "namespace", name)


@contextmanager
def tainted(kubectl: Kubectl, taint: str) -> Iterator[None]:
    """All nodes have the taint for the block. Such a test is ``disturbing``."""
    nodes = kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()
    kubectl("taint", "nodes", *nodes, taint)
    try:
        yield
    finally:
        kubectl("taint", "nodes", *nodes, f"{taint}-")


def kubeconfig_of(kubectl: Kubectl, account: str, directory: Path) -> Path:
    """A kubeconfig with the token of a service account."""
    token = kubectl.token_of(account)
    path = directory / "kubeconfig"
    path.write_text(kubectl("config", "view", "--raw", "--minify", "--flatten"))
    as_user = Kubectl(kubectl.namespace, path)
    user = as_user("config", "view", "-o", "jsonpath={.users[0].name}")
    as_user("config", "unset", f"users.{user}")
    as_user("config", "set-credentials", user, f"--token={token}")
    return path


WORKER_LOOP = (
    "import os; from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(address=f\"tcp://{os.environ['POD_IP']}:26600@tcp://0.0.0.0:26600\", "
    'ca="trust_all_connections")'
)


def bare_worker_pods(kubectl: Kubectl, image: str, name: str, count: int) -> AbstractContextManager[None]:
    """A StatefulSet of pods with torchmonarch but without meshgate."""
    container = {
        "name": "monarch",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", WORKER_LOOP],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "readinessProbe": {"tcpSocket": {"port": 26600}, "periodSeconds": 1},
    }
    labels = {"app": name}
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": count,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
            },
        },
    }
    return kubectl.applied(stateful_set)
