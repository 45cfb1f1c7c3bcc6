"""Images without torchmonarch and meshgate: the pods install them themselves."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from meshgate import Compute, KubernetesJob
from meshgate.errors import JobStartFailed
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl

# Stands in for the wheel of torchmonarch, which is large: it leads to the one that is in the worker image, outside of
# the paths of the image's system Python.
MONARCH = """
import sys
site = "/opt/meshgate/lib/python%d.%d/site-packages" % sys.version_info[:2]
sys.path.append(site)
__path__ = [site + "/monarch"]
exec(compile(open(__path__[0] + "/__init__.py").read(), __path__[0] + "/__init__.py", "exec"))
"""


# The same for what a gateway needs besides. Python imports this module before all others.
OTHERS = "import sys; sys.path.append('/opt/meshgate/lib/python%d.%d/site-packages' % sys.version_info[:2])"


def wheels() -> dict[str, bytes]:
    """Stand-ins for torchmonarch and for all that meshgate requires of it and for a gateway, by their file names."""
    made = {"torchmonarch-0.7.99-py3-none-any.whl": wheel("torchmonarch", "0.7.99", {"monarch/__init__.py": MONARCH})}
    for line in importlib.metadata.requires("meshgate") or []:
        name = re.split(r"[^\w-]", line)[0]
        if name != "torchmonarch" and ("extra ==" not in line or "extra == 'gateway'" in line):
            version = importlib.metadata.version(name)
            modules = {"sitecustomize.py": OTHERS} if name == "prometheus-client" else {}  # workers need it not
            made[f"{name.replace('-', '_')}-{version}-py3-none-any.whl"] = wheel(name, version, modules)
    return made


def wheel(name: str, version: str, modules: dict[str, str]) -> bytes:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in modules.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return content.getvalue()


@contextmanager
def index_of_packages(kubectl: Kubectl, image: str) -> Iterator[str]:
    """The URL, in the cluster, of a page of wheels."""
    data = {name: base64.b64encode(content).decode() for name, content in wheels().items()}
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "wheels"}, "binaryData": data}
    container = {
        "name": "index",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "http.server", "8000", "--directory", "/wheels"],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        "volumeMounts": [{"name": "wheels", "mountPath": "/wheels"}],
    }
    volumes = [{"name": "wheels", "configMap": {"name": "wheels"}}]
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "index"}, "spec": spec}
    with kubectl.applied(files, pod):
        kubectl("wait", "--for=condition=Ready", "pod/index", "--timeout=120s", timeout=130)
        yield kubectl("get", "pod", "index", "-o", "jsonpath=http://{.status.podIP}:8000/")


def without_monarch(image: str | None = None, **variables: str) -> Compute:
    """Pods whose Python has no torchmonarch, as those of a plain Python image."""
    return Compute(image=image, install_monarch=True, env_vars={"PATH": "/usr/local/bin:/usr/bin:/bin", **variables})


def index(url: str) -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": url, "PIP_TRUSTED_HOST": url.split("/")[2]}


def test_a_plain_image_gets_torchmonarch_from_an_index(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with index_of_packages(kubectl, images[1]) as url:
        compute = without_monarch(**index(url))
        with KubernetesJob(compute=compute, name="plain", namespace=namespace) as job:
            trainers = job.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
            assert trainers.pod.call_one().get(timeout=60) == "plain-workers-0"
            assert "/opt/monarch/packages-0" in str(trainers.variable.call_one("PYTHONPATH").get(timeout=60))
    assert "install-monarch" not in capfd.readouterr().err  # a container that has done its work is no problem


def test_no_image_needs_to_be_built(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHGATE_GATEWAY_IMAGE")
    with index_of_packages(kubectl, images[1]) as url:
        compute = without_monarch(images[0], **index(url))
        with KubernetesJob(compute=compute, name="bare", namespace=namespace) as job:
            trainers = job.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
            assert trainers.pod.call_one().get(timeout=60) == "bare-workers-0"
            program = "import meshgate_gateway; print(meshgate_gateway.__file__)"
            found = kubectl("exec", "deployment/bare-gateway", "-c", "gateway", "--", "python", "-c", program)
            assert found.startswith("/opt/monarch/packages-0/")


def test_an_index_that_pods_do_not_reach_is_reported(namespace: str) -> None:
    job = KubernetesJob(
        compute=without_monarch(PIP_INDEX_URL="http://127.0.0.1:9/", PIP_RETRIES="0"), name="nopip", namespace=namespace
    )
    with pytest.raises(JobStartFailed) as caught:
        job.apply()
    assert "cannot install torchmonarch==0.7.* in this image" in str(caught.value)
