"""The installation of torchmonarch in worker pods whose image does not contain it, before their worker starts.

An init container of the worker's own image installs it, with what it depends on and the image lacks, into a volume of
the pod. Packages of the image are neither repeated nor replaced, whether they are in the system's directories, in a
virtual environment or in conda's.
"""

from __future__ import annotations

from meshgate_kubernetes.manifests.spec import Object

MONARCH_REQUIREMENT = "torchmonarch==0.7.*"  # as in the gateway's image: both ends of a connection need one release
_TARGET = "/opt/monarch"
# Some systems have a second directory for packages with machine code.
PYTHONPATH = f"{_TARGET}/packages-0:{_TARGET}/packages-1"

# pip has no option to install into a given directory what is missing only (--target repeats what the image has), and
# the layout below --prefix depends on the distribution, so the directories are found afterwards.
_INSTALL = """\
import glob, os, subprocess, sys
target, requirement = sys.argv[1:]
options = ["--no-cache-dir", "--disable-pip-version-check", "--no-warn-script-location", "--prefix", target]
if subprocess.run([sys.executable, "-m", "pip", "install", *options, requirement]).returncode:
    sys.exit(f"cannot install {requirement} in this image: if pods do not reach PyPI, name an index that they reach "
             "with Compute(env_vars={'PIP_INDEX_URL': ...}), or use an image that contains torchmonarch")
for index, found in enumerate(sorted(glob.glob(f"{target}/**/*-packages", recursive=True))):
    link = f"{target}/packages-{index}"
    if not os.path.islink(link):
        os.symlink(found, link)
"""


def install_volume(disk_size: str | None) -> Object:
    return {"name": "monarch", "emptyDir": {"sizeLimit": disk_size} if disk_size else {}}


def install_mount() -> Object:
    return {"name": "monarch", "mountPath": _TARGET}


def install_container(worker: Object) -> Object:
    """The init container for the container ``worker``, with the same image, environment, volumes and rights."""
    same = ("image", "imagePullPolicy", "envFrom", "volumeMounts", "securityContext")
    environment = [variable for variable in worker["env"] if variable["name"] != "PYTHONPATH"]
    resources = worker.get("resources", {})
    return {
        "name": "install-monarch",
        **{key: worker[key] for key in same if key in worker},
        "command": ["python", "-u", "-c", _INSTALL, _TARGET, MONARCH_REQUIREMENT],
        "env": environment,
        # Quotas may require them; devices are for the worker alone.
        "resources": {kind: _without_devices(amounts) for kind, amounts in resources.items()},
    }


def _without_devices(amounts: dict[str, str]) -> dict[str, str]:
    return {name: amount for name, amount in amounts.items() if "/" not in name}
