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
from kubernetes.config.kube_config import KubeConfigMerger

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

    ``context``: instead of the current one; ``server``: the address that it must have. If it is gone, or has another
    one, the current context is used if that has this address: the context may have been renamed. Otherwise OtherCluster
    is raised. Later loads stay with the context and the address of the first one by the same rule.
    """
    # The package reads the variable only on import, but a program may set it later.
    chosen = str(path) if path is not None else os.environ.get("KUBECONFIG") or "~/.kube/config"

    def load(configuration: Any) -> tuple[str, str]:
        nonlocal context, server
        if not any(Path(each).expanduser().exists() for each in filter(None, chosen.split(os.pathsep))):
            raise FileNotFoundError("no such file")
        contexts, servers, current = _read_contexts(chosen)
        name = context or current
        if server and servers.get(name) != server:
            if servers.get(current) != server:
                raise _other_cluster(name, chosen, server, servers, current)
            name = current
        with _plugin_errors() as errors:
            kubernetes.config.load_kube_config(chosen, name or None, configuration)  # type: ignore[no-untyped-call]
        context, server = name, str(configuration.host)
        if errors and not configuration.api_key and not configuration.cert_file:
            raise Unauthenticated(
                f"the credential plugin of the kubeconfig {chosen} (users[].user.exec) failed: {errors[0]}. "
                "Log in again; `kubectl get pods` runs the same plugin"
            )
        return name, str(contexts[name].get("namespace") or "")

    return load, f"the kubeconfig {chosen}"


def _read_contexts(path: str) -> tuple[dict[str, dict[str, Any]], dict[str, str], str]:
    """The contexts and the addresses of their API servers, by name, and the name of the current context. The package
    lists them only if the current one exists, which nothing needs that names another."""
    config = KubeConfigMerger(path).config.value  # type: ignore[no-untyped-call]
    contexts = {each.value["name"]: each.value.get("context") or {} for each in config["contexts"]}
    clusters = {each.value["name"]: each.value.get("cluster") or {} for each in config["clusters"]}
    servers = {
        name: str(clusters.get(context.get("cluster"), {}).get("server") or "").rstrip("/")  # as the package does
        for name, context in contexts.items()
    }
    return contexts, servers, config.get("current-context") or ""


def _other_cluster(context: str, path: str, server: str, servers: dict[str, str], current: str) -> OtherCluster:
    now = f"is the cluster at {servers[context]} now" if servers.get(context) else "is gone"
    if current not in servers:
        now += "; there is no current context"
    elif current != context:
        now += f"; the current context is {current!r}, of the cluster at {servers[current]}"
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
