"""Finds and refreshes the credentials of the API's users: the only module that imports the ``kubernetes`` package."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import kubernetes.client
import kubernetes.config
import urllib3
import yaml

from meshgate_kubernetes.errors import NoCluster, OtherCluster, Unauthenticated

log = logging.getLogger("meshgate.jobs.kubernetes")

Load: TypeAlias = Callable[[Any], tuple[str, str]]
"""Completes a ``kubernetes.client.Configuration`` and returns the names of the context and of its default namespace, or
empty strings."""

# The package raises these for a file that is not a kubeconfig.
_INVALID_CONFIG = (yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError)


def connect(load: Load, source: str) -> tuple[Any, urllib3.PoolManager, str, str]:
    """The configuration, a connection pool, the context and the default namespace. Raises NoCluster, which names
    ``source``."""
    configuration = kubernetes.client.Configuration()
    try:
        context, namespace = load(configuration)
    except (kubernetes.config.ConfigException, *_INVALID_CONFIG) as error:
        raise NoCluster(f"cannot use {source}: {error or type(error).__name__}") from error
    pool: urllib3.PoolManager = kubernetes.client.ApiClient(configuration).rest_client.pool_manager
    return configuration, pool, context, namespace or "default"


def from_kubeconfig(path: str | Path | None, context: str = "", server: str = "") -> tuple[Load, str]:
    """``path``, ``$KUBECONFIG`` or ``~/.kube/config``, as kubectl does, and what to call it in errors.

    ``context``: instead of the current one; ``server``: the address that it must have. Later loads stay with the
    cluster of the first one, whichever context is the current one by then. They raise OtherCluster if they cannot.
    """
    # The package reads the variable only on import, but a program may set it later.
    chosen = str(path) if path is not None else os.environ.get("KUBECONFIG") or "~/.kube/config"

    def load(configuration: Any) -> tuple[str, str]:
        nonlocal context, server
        if not any(Path(each).expanduser().exists() for each in filter(None, chosen.split(os.pathsep))):
            raise FileNotFoundError("no such file")
        contexts, current = kubernetes.config.list_kube_config_contexts(chosen)  # type: ignore[no-untyped-call]
        name = context or current["name"]
        found = [each["context"] for each in contexts if each["name"] == name]
        if server and not found:
            now = f"is gone; the current context is {current['name']!r}, of cluster {current['context']['cluster']!r}"
            raise _other_cluster(name, chosen, server, now)
        with _plugin_errors() as errors:
            kubernetes.config.load_kube_config(chosen, name, configuration)  # type: ignore[no-untyped-call]
        if server not in ("", configuration.host):
            raise _other_cluster(name, chosen, server, f"is the cluster at {configuration.host} now")
        context, server = name, str(configuration.host)
        if errors and not configuration.api_key and not configuration.cert_file:
            raise Unauthenticated(
                f"the credential plugin of the kubeconfig {chosen} (users[].user.exec) failed: {errors[0]}. "
                "Log in again; `kubectl get pods` runs the same plugin"
            )
        return name, str(found[0].get("namespace") or "")

    return load, f"the kubeconfig {chosen}"


def _other_cluster(context: str, path: str, server: str, now: str) -> OtherCluster:
    return OtherCluster(
        f"context {context!r} of the kubeconfig {path} was the cluster at {server}, and {now}. Restore the context, or "
        "set KUBECONFIG to a file that has it"
    )


def bearer(configuration: Any) -> str | None:
    """The value of the ``Authorization`` header now.

    A credential plugin runs again if its token expires within five minutes. If it fails, the previous token is used: it
    may still be valid, and when the API server rejects it, the plugin runs again and its error is raised.
    """
    with _plugin_errors() as errors:
        value: str | None = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    for error in errors:
        log.info("the credential plugin of the kubeconfig failed, and the previous token is used: %s", error)
    return value


def from_service_account() -> tuple[Load, str]:
    """The service account of the pod that this process runs in, and what to call it in errors."""

    def load(configuration: Any) -> tuple[str, str]:
        kubernetes.config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        return "", Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text()

    return load, "the pod's service account"


@contextmanager
def _plugin_errors() -> Iterator[list[str]]:
    """The errors of credential plugins in the block: the package logs them, and continues without credentials."""
    errors: list[str] = []
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        from_plugin = record.module == "kube_config" and record.thread == thread
        if from_plugin:
            errors.append(record.getMessage())
        return not from_plugin

    root = logging.getLogger()
    root.addFilter(keep)
    try:
        yield errors
    finally:
        root.removeFilter(keep)
