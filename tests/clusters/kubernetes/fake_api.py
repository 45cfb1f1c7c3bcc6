"""A cluster in memory with the part of ``meshgate_kubernetes.api.client.Api`` that jobs use.

Creating a controller creates its pods, ready unless ``pods_come_up`` is false. Deleting an object deletes the objects
that it owns.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from meshgate_kubernetes.errors import Conflict, KubernetesError, NotFound
from tests.clusters.kubernetes.objects import Object, pod

Key = tuple[str, str, str]


class IgnoreProgress:
    def created(self, obj: object) -> None: ...
    def progress(self, progress: object) -> None: ...


class FakeApi:
    """``pods_come_up``: whether new pods are ready. ``users``: the users by token. ``permissions``: the granted (user,
    verb, resource). ``down``: the error of every review. ``made``: the created kinds, in order. ``reads`` and
    ``reviews`` count requests. ``impatient``: changes that would fail if the API server were busy."""

    namespace = "gateways"
    host = "https://cluster"

    def __init__(self) -> None:
        self.pods_come_up = True
        self.users: dict[str, Object] = {}
        self.permissions: set[tuple[str, str, str]] = set()
        self.down: KubernetesError | None = None
        self.reviews = 0
        self.reads = 0
        self.made: list[str] = []
        self.impatient: list[str] = []
        self._patience = threading.local()
        self._objects: dict[Key, Object] = {}
        self._changes: list[tuple[str, Object]] = []
        self._changed = threading.Condition(threading.RLock())

    # --- objects

    def create(self, obj: Object) -> Object:
        self._note_patience(f"create {obj['kind']}")
        with self._changed:
            key = _key(obj)
            if key in self._objects:
                raise Conflict(f"{key[0]} {key[2]!r} already exists")
            made = self._put(obj)
            self.made.append(key[0])
            if key[0] in ("Deployment", "StatefulSet"):
                self._make_pods(made)
            return made

    def _put(self, obj: Object) -> Object:
        kind, _, name = key = _key(obj)
        number = str(len(self._changes))
        metadata = {"uid": f"{kind}-{name}-{number}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        metadata["resourceVersion"] = number
        made = {**obj, "metadata": {**metadata, **obj["metadata"]}}
        for name, text in (made.pop("stringData", None) or {}).items():
            made["data"] = {**made.get("data", {}), name: base64.b64encode(text.encode()).decode()}
        self._objects[key] = made
        self._record("ADDED", made)
        return made

    def _make_pods(self, owner: Object) -> None:
        template = owner["spec"]["template"]
        names = [f"{owner['metadata']['name']}-{ordinal}" for ordinal in range(owner["spec"]["replicas"])]
        uid = owner["metadata"]["uid"]
        present = {each["metadata"]["name"]: each for each in self._objects.values() if uid in _owners(each)}
        for name in present.keys() - set(names):
            self._drop(present[name])
        for name in [each for each in names if each not in present]:
            made = pod(name, ready=self.pods_come_up, owner=owner["kind"])
            references = [{"kind": owner["kind"], "uid": uid}]
            head = {"namespace": owner["metadata"]["namespace"], "labels": template["metadata"]["labels"]}
            self._put({**made, "metadata": {**made["metadata"], **head, "ownerReferences": references}})

    def merge_patch(self, kind: str, name: str, namespace: str, patch: Object) -> Object:
        self._note_patience(f"patch {kind}")
        with self._changed:
            obj = self.get(kind, name, namespace)
            if (expected := patch.get("metadata", {}).get("resourceVersion")) not in (None, _version(obj)):
                raise Conflict(f"{kind} {name!r} has version {_version(obj)}, not {expected}")
            changed = _merged(_merged(obj, patch), {"metadata": {"resourceVersion": str(len(self._changes))}})
            self._objects[_key(obj)] = changed
            self._record("MODIFIED", changed)
            if kind == "StatefulSet":
                self._make_pods(changed)
            return changed

    def bring_up(self) -> None:
        """Makes all pods ready."""
        with self._changed:
            self.pods_come_up = True
            for key, obj in list(self._objects.items()):
                if key[0] == "Pod":
                    ready = {**obj, "status": pod(key[2])["status"]}
                    self._objects[key] = ready
                    self._record("MODIFIED", ready)

    def left(self) -> list[Key]:
        """All objects by kind, namespace and name."""
        with self._changed:
            return list(self._objects)

    def wait_for_kind(self, kind: str, timeout: float = 10.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(key[0] == kind for key in self._objects), timeout), kind

    def drop_alone(self, kind: str, name: str, namespace: str) -> None:
        """As ``kubectl delete --cascade=orphan`` does."""
        with self._changed:
            self._record("DELETED", self._objects.pop((kind, namespace, name)))

    def wait_empty(self, timeout: float = 10.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._objects, timeout), list(self._objects)

    def get(self, kind: str, name: str, namespace: str) -> Object:
        with self._changed:
            self.reads += 1
            try:
                return self._objects[kind, namespace, name]
            except KeyError:
                raise NotFound(f"{kind} {name!r} not found") from None

    def list_objects(self, kind: str, namespace: str, selector: str = "", fields: str = "") -> tuple[list[Object], str]:
        with self._changed:
            self.reads += 1
            found = [obj for obj in self._objects.values() if _matches(obj, kind, namespace, selector)]
            return found, str(len(self._changes))

    def delete(self, kind: str, name: str, namespace: str, *, uid: str | None = None, **how: Any) -> None:
        self._note_patience(f"delete {kind}")
        with self._changed:
            obj = self.get(kind, name, namespace)
            if uid not in (None, obj["metadata"]["uid"]):
                raise NotFound(f"{kind} {name!r} has another uid")
            self._drop(obj)

    def request_deletion(self, kind: str, name: str, namespace: str, seconds: int = 30, **status: Any) -> None:
        """As a request to delete an object, which stays for its grace period."""
        with self._changed:
            obj = self.get(kind, name, namespace)
            asked = {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": seconds}
            changed = {**obj, "metadata": {**obj["metadata"], **asked}, "status": {**obj.get("status", {}), **status}}
            self._objects[_key(obj)] = changed
            self._record("MODIFIED", changed)

    def _drop(self, obj: Object) -> None:
        del self._objects[_key(obj)]
        self._record("DELETED", obj)
        for each in list(self._objects.values()):
            if obj["metadata"]["uid"] in _owners(each) and _key(each) in self._objects:
                self._drop(each)

    def patiently(self) -> AbstractContextManager[None]:
        return self._with_patience(True)

    def impatiently(self) -> AbstractContextManager[None]:
        return self._with_patience(False)

    @contextmanager
    def _with_patience(self, lasts: bool) -> Iterator[None]:
        before, self._patience.lasts = getattr(self._patience, "lasts", False), lasts
        try:
            yield
        finally:
            self._patience.lasts = before

    def _note_patience(self, change: str) -> None:
        if not getattr(self._patience, "lasts", False):
            self.impatient.append(change)

    def serves(self, kind: str) -> bool:
        return kind != "MonarchMesh"

    def read_log(self, pod: str, namespace: str, container: str, *, lines: int, previous: bool = False) -> str:
        return ""

    def watch(self, kind: str, namespace: str, selector: str, resource_version: str, fields: str = "") -> FakeWatch:
        return FakeWatch(self, int(resource_version), kind, namespace, selector)

    def _record(self, change: str, obj: Object) -> None:
        self._changes.append((change, obj))
        self._changed.notify_all()

    # --- reviews

    def list_rules(self, namespace: str) -> list[Object]:
        return [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]

    def review_token(self, token: str) -> Object | None:
        self._review()
        return self.users.get(token)

    def is_user_allowed(self, user: Mapping[str, Any], attributes: Mapping[str, str]) -> bool:
        self._review()
        resource = "/".join(filter(None, (attributes["resource"], attributes.get("subresource"))))
        return (user["username"], attributes["verb"], resource) in self.permissions

    def _review(self) -> None:
        self.reviews += 1
        if self.down is not None:
            raise self.down


class FakeWatch(Iterator[tuple[str, Object]]):
    def __init__(self, api: FakeApi, version: int, kind: str, namespace: str, selector: str) -> None:
        self._api, self._version, self._wanted = api, version, (kind, namespace, selector)
        self._closed = False

    @property
    def resource_version(self) -> str:
        return str(self._version)

    def __next__(self) -> tuple[str, Object]:
        with self._api._changed:
            while not self._closed:
                while self._version < len(self._api._changes):
                    change, obj = self._api._changes[self._version]
                    self._version += 1
                    if _matches(obj, *self._wanted):
                        return change, obj
                self._api._changed.wait()
        raise StopIteration

    def close(self) -> None:
        with self._api._changed:
            self._closed = True
            self._api._changed.notify_all()


def _merged(obj: Object, patch: Object) -> Object:
    """As RFC 7396 merges them."""
    merged = {**obj, **{key: value for key, value in patch.items() if not isinstance(value, dict)}}
    merged.update({key: _merged(obj.get(key) or {}, value) for key, value in patch.items() if isinstance(value, dict)})
    return {key: value for key, value in merged.items() if value is not None}


def _version(obj: Object) -> str:
    return str(obj["metadata"]["resourceVersion"])


def _owners(obj: Object) -> set[str]:
    return {owner["uid"] for owner in obj["metadata"].get("ownerReferences", []) if "uid" in owner}


def _key(obj: Object) -> Key:
    return obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"]


def _matches(obj: Object, kind: str, namespace: str, selector: str) -> bool:
    labels = obj["metadata"].get("labels") or {}
    terms = [term.partition("=") for term in selector.split(",") if term]
    return (
        obj["kind"] == kind
        and namespace in ("", obj["metadata"]["namespace"])
        and all(
            key[1:] not in labels if key.startswith("!") else key in labels and (not equals or labels[key] == value)
            for key, equals, value in terms
        )
    )
