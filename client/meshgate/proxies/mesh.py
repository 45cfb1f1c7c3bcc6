"""The base of all mesh proxies: an object of the session, a shape, and how a mesh travels as an argument."""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshgate.actors.monarch_surface import missing_attribute
from meshgate.errors import InvalidRequestError
from meshgate.html import MOST_RANKS, Rank, card, rank_grid
from meshgate.session.futures import FutureProxy
from meshgate.session.objects import Kind, RemoteObject
from meshgate.session.pending_calls import PendingAck
from meshgate.session.session import ClientSession, RemoteReference
from meshgate.shapes.mesh_trait import ShapedMesh
from meshgate.shapes.shape import Shape
from meshgate_wire.fields import MAX_LABEL
from meshgate_wire.messages import Argument, MeshRef, Stop, stream_of

if TYPE_CHECKING:
    from typing_extensions import Self


def require_string(text: object, description: str) -> str:
    """Returns ``text``. Raises ``TypeError`` if it is not a string."""
    if not isinstance(text, str):
        raise TypeError(f"{description} must be a string, not {text!r}")
    return text


def require_name(name: object, description: str = "the name of a mesh") -> None:
    """Raises ``TypeError`` or ``ValueError`` if ``name`` cannot be the name of a mesh, or what ``description`` says."""
    if isinstance(name, type):
        raise TypeError(f"{description} must be a string, not {name!r}: the order is spawn(name, Class, ...)")
    text = require_string(name, description)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{description} must be valid text, but {name!r:.300} contains surrogate characters")
    if len(text) > MAX_LABEL:
        raise ValueError(f"{description} may have {MAX_LABEL} characters, but {name!r:.80}… has {len(text)}")


class OwnedObject:
    """One remote object of a session, shared by the proxies of all its slices. ``shape`` is that of the whole mesh.

    When the last proxy is gone, an object that failed or was stopped is released. With ``release``, any object is: the
    gateway keeps those that an endpoint returned for this session only.
    """

    __slots__ = ("__weakref__", "finalizer", "parts", "remote", "session", "shape")

    def __init__(self, session: ClientSession, remote: RemoteObject, shape: Shape, *, release: bool = False) -> None:
        self.session = session
        self.remote = remote
        self.shape = shape
        self.parts: tuple[Any, ...] = ()  # what else its proxies are made of, once one of them was pickled
        self.finalizer = weakref.finalize(self, session.release if release else session.unreference, remote.number)
        self.finalizer.atexit = False


_pickled: weakref.WeakValueDictionary[tuple[str, int], OwnedObject] = weakref.WeakValueDictionary()  # with the session


class _NotASequence(TypeError, KeyError):
    """numpy takes an object with a length whose items raise KeyError for a scalar, as it took a mesh before."""

    __str__ = Exception.__str__


class MeshProxy(ShapedMesh, RemoteReference):
    """A mesh on the cluster, or a slice of one. Two proxies are equal if they name the same ranks of one object."""

    _kind: Kind
    _is_reference = False  # unpickled: as in Monarch, it cannot stop what it names
    _not_for_workers = "a mesh can be sent to workers only as an argument of an endpoint or of an actor's constructor"

    def __init__(self, owned: OwnedObject, shape: Shape) -> None:
        self._owned = owned
        self._shape = shape

    @property
    def _client(self) -> ClientSession:
        return self._owned.session

    @property
    def _object(self) -> int:
        return self._owned.remote.number

    @property
    def _name(self) -> str:
        return self._owned.remote.name

    @cached_property
    def _stream(self) -> int:
        return stream_of(self._object)

    @cached_property
    def _ref(self) -> MeshRef:
        """This mesh in a message. ``region`` is set only if the shape differs from that of the whole mesh."""
        return MeshRef(object=self._object, region=None if self._is_whole else self._shape.to_wire())

    @property
    def _is_whole(self) -> bool:
        return self._shape == self._owned.shape

    @property
    def _can_stop(self) -> bool:
        return self._is_whole and not self._is_reference

    def _request_stop(self, operation: str, reason: str, *, mark: str, shutdown: bool = False) -> FutureProxy[None]:
        """``mark``: why the mesh cannot be used from now on; empty if it can."""
        ack = PendingAck(self._object, f"{self._name}.{operation}", ends=self._kind == "procs")
        self._client.request(
            ack,
            lambda call: Stop(call=call, target=self._ref, reason=reason, shutdown=shutdown),
            stream=self._stream,
            even_if_failed=True,
        )
        if mark:  # only now: a program whose Ctrl-C has interrupted the request can make it again
            self._client.mark_stopped(self._object, mark)
        return ack.future

    def _as_argument(self, session: ClientSession) -> Argument:
        if session is not self._client:
            raise InvalidRequestError(
                f"{self!r} belongs to another session, whose processes cannot be reached from here. Nothing was sent. "
                "Call it from the program, and pass the result"
            )
        return Argument(kind=self._kind, ref=self._ref)

    def _new_with_shape(self, shape: Shape) -> Self:
        return self if shape == self._shape else self._with_shape(shape)

    @abstractmethod
    def _with_shape(self, shape: Shape) -> Self:
        """The proxy of other ranks of the same object."""

    def _host_name(self, rank: int) -> str:
        """The host of ``rank`` of the whole mesh, as far as it is known."""
        return ""

    def _html_facts(self) -> dict[str, str]:
        """What a notebook shows about the mesh, besides its state and ranks."""
        return {}

    def _repr_html_(self) -> str:
        """For notebooks: the state, as far as the gateway has reported it, and a grid of ranks with their hosts."""
        objects = self._client.objects
        lost = objects.lost_ranks(self._object)
        found = objects.failure_of(self._object)
        problem = found[1].message if found is not None else ""
        here = sum(rank in lost for rank in self._ndslice) if lost else 0
        state = problem or (f"{here} of {len(self)} ranks are lost" if here else "")
        ranks = [self._rank(rank, lost, problem) for rank in itertools.islice(self._ndslice, MOST_RANKS)]
        grid = rank_grid(self._ndslice.sizes, ranks, len(self))
        sizes = ", ".join(f"{label}={size}" for label, size in self.sizes.items())
        return card(f"{self._title}: {sizes or 'one rank'}", {**self._html_facts(), "state": state}, [grid])

    @property
    def _title(self) -> str:
        return f"{self._kind} {self._name!r}"

    def _rank(self, rank: int, lost: dict[int, str], problem: str) -> Rank:
        at = ", ".join(f"{label}={index}" for label, index in self._shape.coordinates(rank).items())
        host = self._host_name(rank)
        about = " · ".join(filter(None, (f"rank {rank}", at, host, lost.get(rank))))
        if rank in lost:
            return Rank(rank, about, "lost")
        return Rank(rank, about, "up" if host and not problem else "unknown")

    def __getattr__(self, attr: str) -> Any:
        if attr.startswith("_"):  # libraries ask for such names, and expect a quick answer
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attr!r}")
        hint = ". Endpoints are called on the actors that spawn() returns"
        text = missing_attribute(type(self).__name__, attr, dir(type(self)), otherwise=hint)
        raise AttributeError(text, name=attr)  # with obj=self, Python would append a suggestion of its own

    if not TYPE_CHECKING:  # which reports this mistake itself

        def __getitem__(self, key):
            raise _NotASequence(
                f"{self!r} is neither subscriptable nor iterable: select a part with {self._example('slice')}, and "
                "call all actors of a mesh at once with call()"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshProxy):
            return NotImplemented
        return (self._client, self._object, self._shape) == (other._client, other._object, other._shape)

    def __hash__(self) -> int:
        return hash((self._object, self._shape))

    def _parts(self) -> tuple[Any, ...]:
        """The arguments of the constructor after the shape."""
        return ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Unpickles, in this process, as a reference to the mesh, which it does not keep alive."""
        key = (self._client.session_id, self._object)
        self._owned.parts = self._parts()
        _pickled[key] = self._owned
        return _unpickled, (type(self), key, self._shape, repr(self)), {"_is_reference": True}

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def _unpickled(kind: type[MeshProxy], key: tuple[str, int], shape: Shape, text: str) -> MeshProxy:
    owned = _pickled.get(key)
    if owned is None:
        raise InvalidRequestError(
            f"cannot unpickle {text}: only the process that holds its session can, while it holds the mesh. Pass the "
            "mesh as an argument of an endpoint; in another process, load the job that job.dump() saved here"
        )
    return kind(owned, shape, *owned.parts)
