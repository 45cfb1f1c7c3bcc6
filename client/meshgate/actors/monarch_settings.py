"""Monarch's settings (``monarch.config``) that this program has changed, which its sessions apply to their engines.

Monarch reads a setting of the process that it runs in, so on the laptop it would have no effect. An engine applies it
to itself and to the processes that it spawns from then on. Settings that would have no effect there, or would affect
other sessions on the same hosts, are refused with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from meshgate.actors.api import inside_actor, local_client
from meshgate.errors import InvalidRequestError
from meshgate.suggestions import did_you_mean

Setting: TypeAlias = "bool | int | float | str | None"

_AT_START = "Monarch reads it when its process starts: set its environment variable for the gateway or in the image"
_HOST = "it is a setting of the hosts' own processes, which the job starts"
_SHARED = "a host that uses it would end processes of other sessions, so the gateway sets it"
_ADMIN = "there is no mesh admin server: use meshgate stacks and meshgate why"

REFUSED: Mapping[str, str] = {
    "default_encoding": "the engine forwards pickled messages, without an encoding",
    "default_transport": "the job chooses how engine and workers reach each other, so no enable_transport() is needed",
    "enable_log_forwarding": "meshgate always forwards what processes print: hide it with logging_option()",
    "enable_otel_metrics": _AT_START,
    "enable_otel_tracing": _AT_START,
    "enable_recorder_tracing": _AT_START,
    "enable_sqlite_tracing": _AT_START,
    "file_log_level": _AT_START,
    "force_file_log": _AT_START,
    "host_spawn_ready_timeout": _HOST,
    "mesh_admin_addr": _ADMIN,
    "mesh_admin_config_dump_bridge_timeout": _ADMIN,
    "mesh_admin_max_concurrent_resolves": _ADMIN,
    "mesh_admin_pyspy_bridge_timeout": _ADMIN,
    "mesh_admin_pyspy_client_timeout": _ADMIN,
    "mesh_admin_pyspy_max_profile_duration": _ADMIN,
    "mesh_admin_pyspy_timeout": _ADMIN,
    "mesh_admin_query_child_timeout": _ADMIN,
    "mesh_admin_resolve_actor_timeout": _ADMIN,
    "mesh_admin_single_host_timeout": _ADMIN,
    "mesh_admin_tree_timeout": _ADMIN,
    "mesh_orphan_timeout": _SHARED,
    "monarch_log_suffix": _AT_START,
    "otel_metric_export_interval": _AT_START,
    "perfetto_trace_mode": _AT_START,
    "proc_launcher_kind": _HOST,
    "process_memory_metric_interval": _AT_START,
    "pyspy_bin": _ADMIN,
    "remote_alloc_allowed_port_range": _HOST,
    "remote_alloc_bind_to_inaddr_any": _HOST,
    "remote_alloc_bootstrap_addr": _HOST,
    "scuba_log_enter_exit": _AT_START,
    "tokio_worker_threads": _AT_START,
}
_PLAIN = (bool, int, float, str, type(None))
_WITHOUT_EFFECT: Mapping[str, Setting] = {"enable_log_forwarding": True}  # what these ask for is so in any case


def check_settings(settings: Mapping[str, object]) -> dict[str, Setting]:
    """``settings`` without those that ask for what is so in any case.

    Raises InvalidRequestError, which names every setting that a session cannot apply and the reason.
    """
    wanted = {name: value for name, value in settings.items() if not _is_so(name, value)}
    problems = [f"{name}: {REFUSED[name]}" for name in wanted if name in REFUSED]
    problems += [
        f"{name}: {value!r} is not a boolean, a number or a string"
        for name, value in wanted.items()
        if name not in REFUSED and not isinstance(value, _PLAIN)
    ]
    if problems:
        raise InvalidRequestError("a session cannot apply these settings of Monarch: " + "; ".join(sorted(problems)))
    return cast("dict[str, Setting]", wanted)


def _is_so(name: str, value: object) -> bool:
    return name in _WITHOUT_EFFECT and _WITHOUT_EFFECT[name] == value


class MonarchSettings:
    """What this program has changed: through ``meshgate.config``, and through ``monarch.config`` where it is installed.

    One per process, as Monarch's own settings.
    """

    def __init__(self) -> None:
        self.own: dict[str, Setting] = {}
        self._follower: SettingsFollower | None = None

    def follow(self, changed: Callable[[], object], session_open: Callable[[], bool]) -> None:
        """Calls ``changed`` after each change through ``monarch.config`` while a session is open.

        Does nothing without torchmonarch, and while a Monarch runs in this process, which is then what it configures.
        """
        module = sys.modules.get("monarch.config")
        if module is not None and self._follower is None and not inside_actor() and local_client() is None:
            self._follower = SettingsFollower(module, changed, lambda: session_open() and local_client() is None)

    def wanted(self) -> dict[str, Setting]:
        """The settings for the engines. Raises InvalidRequestError if a session cannot apply one of them."""
        if self._follower is None or local_client() is not None:
            return dict(self.own)
        return {**check_settings(self._follower.differences()), **self.own}

    def without_session(self) -> dict[str, Setting] | None:
        """The settings of this machine's Monarch with those that the program has changed. None without torchmonarch.

        Raises InvalidRequestError for a name that this Monarch does not have and for a value that it rejects; for one
        of the wrong type, the error is a TypeError, too, as Monarch's.
        """
        module = sys.modules.get("monarch.config")
        if module is None:
            return None
        known = module.get_global_config()
        if unknown := sorted(self.own.keys() - known.keys()):
            advice = ". A setting of the gateway's release alone can be changed after state()"
            meant = did_you_mean(unknown[0], known) or advice
            raise InvalidRequestError(f"this machine's Monarch has no setting {unknown[0]!r}{meant}")
        try:
            with module.configured(**self.own) as present:
                return {name: value if isinstance(value, _PLAIN) else str(value) for name, value in present.items()}
        except TypeError as error:
            raise _WrongType(str(error)) from error
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error


class _WrongType(InvalidRequestError, TypeError):
    pass


class SettingsFollower:
    """Replaces the functions through which ``monarch.config``, ``module``, reaches Monarch, to see the changes.

    While ``following()``, settings that a session cannot apply are refused, and ``changed`` is called after each
    change; if it raises, the change is undone.
    """

    def __init__(self, module: Any, changed: Callable[[], object], following: Callable[[], bool]) -> None:
        self._module, self._changed, self._following = module, changed, following
        self._configure: Callable[..., None] = module._configure
        self._clear: Callable[[], None] = module._clear_runtime_config
        present = self._present()
        self._clear()
        self._initial = self._present()
        self._configure(**present)
        module._configure, module._clear_runtime_config = self._configure_and_report, self._clear_and_report
        actors: Any = sys.modules.get("monarch._src.actor.actor_mesh")
        if getattr(actors, "configure", None) is self._configure:  # enable_transport() calls it
            actors.configure = self._configure_and_report

    def _present(self) -> Mapping[str, object]:
        settings: Mapping[str, object] = self._module.get_global_config()
        return settings

    def differences(self) -> dict[str, object]:
        """The settings that the program has changed."""
        return {name: value for name, value in self._present().items() if value != self._initial.get(name)}

    def _configure_and_report(self, **settings: object) -> None:
        before = self._present()
        if self._following():
            check_settings({name: value for name, value in settings.items() if before.get(name, self) != value})
        self._configure(**settings)
        self._report(before)

    def _clear_and_report(self) -> None:
        before = self._present()
        self._clear()
        self._report(before)

    def _report(self, before: Mapping[str, object]) -> None:
        if self._following() and self._present() != before:
            try:
                self._changed()
            except BaseException:
                self._configure(**before)
                raise


monarch_settings = MonarchSettings()
