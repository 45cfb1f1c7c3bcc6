"""What all mesh proxies have in common: an object of the session, a shape, and how they travel."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from meshgate.errors import InvalidRequestError, UnpicklableArgument
from meshgate.objects import Kind
from meshgate.shape import MeshTrait, Shape, Slice
from meshgate_wire.messages import Argument, MeshRef, stream_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from meshgate.client import Client
    from meshgate.objects import RemoteObject

__all__ = ["MeshProxy", "Owned", "require_name"]


def require_name(name: object) -> None:
    """Raises ``TypeError`` or ``ValueError`` where ``name`` cannot be the name of a mesh."""
    if not isinstance(name, str):
        raise TypeError(f"a mesh's name is text, not {name!r}")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"a mesh's name is text, not {name!r}: it holds halves of surrogate pairs")


class Owned:
    """One object of a session, shared by every slice of its proxy.

    When nobody holds any of them any more, the session lets go of an object that was stopped or failed; with
    ``release`` of any object: of those that the gateway keeps for this session only, as one that an endpoint returned.
    """

    __slots__ = ("__weakref__", "client", "known", "root")

    def __init__(self, client: Client, known: RemoteObject, root: Shape, *, release: bool = False) -> None:
        self.client = client
        self.known = known
        self.root = root
        weakref.finalize(self, client.release if release else client.drop, known.number).atexit = False

    @property
    def number(self) -> int:
        return self.known.number


class MeshProxy(MeshTrait):
    """A mesh on the cluster, or a part of one. Two proxies are equal when they name the same ranks of one object."""

    _kind: Kind

    def __init__(self, owned: Owned, shape: Shape) -> None:
        self._owned = owned
        self._shape = shape

    @property
    def _client(self) -> Client:
        return self._owned.client

    @property
    def _object(self) -> int:
        return self._owned.known.number

    @cached_property
    def _stream(self) -> int:
        return stream_of(self._object)

    @cached_property
    def _ref(self) -> MeshRef:
        """This mesh in a message. ``region`` only where it is less than the whole, or another order or naming of it."""
        return MeshRef(object=self._object, region=None if self._whole else self._shape.to_wire())

    @property
    def _whole(self) -> bool:
        return self._shape == self._owned.root

    def _as_argument(self, client: Client) -> Argument:
        """What stands for this mesh in an argument of a call of ``client``."""
        if client is not self._client:
            raise InvalidRequestError(
                f"{self!r} belongs to another session: a mesh can be passed to meshes of its own job only"
            )
        return Argument(kind=self._kind, ref=self._ref)

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> Iterable[str]:
        return self._shape.labels

    def _new_with_shape(self, shape: Shape) -> Self:
        return self if shape == self._shape else self._part(shape)

    @abstractmethod
    def _part(self, shape: Shape) -> Self:
        """The proxy of these ranks of the same object."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshProxy):
            return NotImplemented
        return (self._client, self._object, self._shape) == (other._client, other._object, other._shape)

    def __hash__(self) -> int:
        return hash((self._object, self._shape))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableArgument(
            f"{self!r} belongs to this process's session with the gateway and cannot be pickled on its own. Pass it as "
            "an argument of an endpoint; to reach the mesh from another process, save the job (job.dump) there."
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
