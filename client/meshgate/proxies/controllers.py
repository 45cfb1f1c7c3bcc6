"""Controllers: actors of which a session has one for each name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from meshgate.actors import api, standins
from meshgate.actors.actor_class import endpoints_of
from meshgate.proxies.actor_mesh import ActorMeshProxy, actor_class_of
from meshgate.proxies.client import Client, current_client
from meshgate.proxies.mesh import OwnedObject
from meshgate.session.futures import FutureProxy
from meshgate.shapes.shape import Extent
from meshgate_wire.messages import GetControllers, stream_of

T = TypeVar("T")
P = ParamSpec("P")


class _Keeper(standins.Actor):
    """The endpoint of Monarch's actor that keeps controllers."""

    @standins.endpoint
    def get_or_spawn(self, keeper: Any, name: str, Class: type, *args: Any, **kwargs: Any) -> Any: ...


def get_or_spawn_controller(name: str, Class: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> FutureProxy[T]:
    """The session's actor called ``name``; if there is none, spawns ``Class(*args, **kwargs)`` on the first host.

    The program and all actors of its session get the same one. Raises ``ValueError`` if the class cannot be spawned.
    """
    cls = cast("type", Class)
    if api.inside_actor():
        inside: FutureProxy[T] = api.get_or_spawn_controller(name, cls, *args, **kwargs)
        return inside
    actor_class_of(cls)
    keeper: Any = _keeper_of(current_client())
    controller: FutureProxy[T] = keeper.get_or_spawn.call_one(keeper, name, cls, *args, **kwargs)
    return controller


def _keeper_of(client: Client) -> ActorMeshProxy:
    known: ActorMeshProxy | None = client.attached.get(_Keeper)
    if known is None or client.objects.failure_of(known._object) is not None:
        remote = client.objects.create("actors", "controllers", "get_or_spawn_controller()")
        header = GetControllers(
            object=remote.number,
            hosts=client.objects.newest_hosts(),
            version=client.code_version,
            paths=client.code_paths,
        )
        client.post(header, stream=stream_of(remote.number))
        shape = Extent((), ()).region.as_shape()
        known = ActorMeshProxy(OwnedObject(client, remote, shape), shape, endpoints_of(_Keeper), None)
        client.attached[_Keeper] = known
    return known
